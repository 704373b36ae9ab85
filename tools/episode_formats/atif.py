"""Episodes as ATIF, Harbor's Agent Trajectory Interchange Format: a folder for each of them."""

import json
import re
import uuid
from pathlib import Path
from typing import Any

from tools.episode_formats.parts import (
    AGENT,
    Read,
    Source,
    about,
    arguments_of,
    iso_time,
    media_type,
    package_version,
    sampled_of,
    shown_before,
    text_part,
    tokens_of,
)
from uirl_jax.types import Trajectory

VERSION = "ATIF-v1.7"
_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp"}
_SAFE = re.compile(r"[A-Za-z0-9_-]{1,64}")


def document_of(trajectory: Trajectory, model: str, names: dict[str, str]) -> dict[str, Any]:
    """One episode as an ATIF document. Args: names: of the screenshots' files, by key."""

    def image(key: str) -> dict[str, Any]:
        source = {"media_type": media_type(trajectory, key), "path": names[key]}
        return {"type": "image", "source": source}

    first: list[dict[str, Any]] = [text_part(trajectory.instruction)]
    if trajectory.turns:
        first.append(image(shown_before(trajectory.turns[0])))
    started = iso_time(trajectory.started_unix_s)
    steps: list[dict[str, Any]] = [
        {"step_id": 1, "source": "user", "timestamp": started, "message": first}
    ]
    for number, turn in enumerate(trajectory.turns):
        sampled = sampled_of(turn)
        step: dict[str, Any] = {
            "step_id": number + 2,
            "source": "agent",
            "message": turn.text,
            "llm_call_count": 1,
            "metrics": {
                "prompt_tokens": len(turn.context_ids),
                "completion_tokens": len(turn.token_ids),
                "completion_token_ids": sampled["token_ids"],
                "logprobs": sampled["logprobs"],
                "extra": {"policy_versions": sampled["policy_versions"]},
            },
            "extra": {"reward": turn.reward, "error": turn.error, "progress": turn.progress},
        }
        if turn.action is not None:
            call = f"call_{number + 1}"
            arguments = arguments_of(turn.action)
            step["tool_calls"] = [
                {"tool_call_id": call, "function_name": turn.action.kind, "arguments": arguments}
            ]
            content = [text_part(json.dumps(turn.progress))]
            if number + 1 < len(trajectory.turns):
                content.append(image(shown_before(trajectory.turns[number + 1])))
            step["observation"] = {"results": [{"source_call_id": call, "content": content}]}
        steps.append(step)
    read, sampled_tokens = tokens_of(trajectory)
    return {
        "schema_version": VERSION,
        "session_id": trajectory.episode_id,
        "trajectory_id": trajectory.episode_id,
        "agent": {"name": AGENT, "version": package_version(), "model_name": model},
        "steps": steps,
        "notes": "Every screenshot is kept, also those that later contexts no longer had.",
        "final_metrics": {
            "total_prompt_tokens": read,
            "total_completion_tokens": sampled_tokens,
            "total_steps": len(steps),
        },
        "extra": about(trajectory),
    }


def write(read: Read, source: Source, out: Path) -> int:
    """Writes a folder for every episode into `out`; returns how many."""
    count = 0
    for trajectory in read():
        safe = _SAFE.fullmatch(trajectory.episode_id)
        name = (
            trajectory.episode_id
            if safe
            else uuid.uuid5(uuid.NAMESPACE_URL, trajectory.episode_id).hex
        )
        folder = out / name
        (folder / "images").mkdir(parents=True)
        names = {
            key: f"images/{number:03d}{_SUFFIXES[media_type(trajectory, key)]}"
            for number, key in enumerate(trajectory.images)
        }
        for key, data in trajectory.images.items():
            (folder / names[key]).write_bytes(data)
        text = json.dumps(document_of(trajectory, source.model, names), indent=2, allow_nan=False)
        (folder / "trajectory.json").write_text(text + "\n", encoding="utf-8")
        count += 1
    return count
