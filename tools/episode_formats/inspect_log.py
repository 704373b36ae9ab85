"""Episodes as a log of Inspect AI (inspect_ai.log.EvalLog, version 2), in its JSON form."""

import base64
import collections
import dataclasses
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
    instance_of,
    iso_time,
    media_type,
    package_version,
    sampled_of,
    shown_before,
    text_part,
    tokens_of,
)
from uirl_jax.evaluation import wilson_interval
from uirl_jax.types import StopReason, Trajectory

_LIMITS = {StopReason.MAX_TURNS: "turn", StopReason.MAX_TOKENS: "token", StopReason.TIMEOUT: "time"}


def _image(key: str) -> dict[str, Any]:
    return {"type": "image", "image": f"attachment://{key[:32]}"}


def messages_of(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The chat: instruction and first screenshot, then an action and what it led to, in turn.

    It has every screenshot, also those that the context policy dropped from later contexts.
    """
    prefix = trajectory.episode_id
    messages: list[dict[str, Any]] = []
    first = [text_part(trajectory.instruction)]
    if trajectory.turns:
        first.append(_image(shown_before(trajectory.turns[0])))
    messages.append({"id": f"{prefix}-0", "role": "user", "source": "input", "content": first})
    for number, turn in enumerate(trajectory.turns):
        call = f"{prefix}-call-{number}"
        answer: dict[str, Any] = {
            "id": f"{prefix}-{2 * number + 1}",
            "role": "assistant",
            "source": "generate",
            "content": turn.text,
            "metadata": sampled_of(turn) | {"reward": turn.reward, "error": turn.error},
        }
        if turn.action is not None:
            arguments = arguments_of(turn.action)
            answer["tool_calls"] = [
                {
                    "id": call,
                    "function": turn.action.kind,
                    "arguments": arguments,
                    "type": "function",
                }
            ]
        messages.append(answer)
        if turn.action is None:
            continue
        content = [text_part(json.dumps(turn.progress))]
        if number + 1 < len(trajectory.turns):
            content.append(_image(shown_before(trajectory.turns[number + 1])))
        messages.append(
            {
                "id": f"{prefix}-{2 * number + 2}",
                "role": "tool",
                "content": content,
                "tool_call_id": call,
                "function": turn.action.kind,
            }
        )
    return messages


def sample_of(trajectory: Trajectory, epoch: int, model: str) -> dict[str, Any]:
    """One episode. Args: epoch: which episode of its instance, from 1."""
    messages = messages_of(trajectory)
    read, sampled = tokens_of(trajectory)
    usage = {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}
    ended = iso_time(trajectory.started_unix_s + trajectory.duration_s)
    answers = [message for message in messages if message["role"] == "assistant"]
    broken = trajectory.stop_reason is StopReason.ENV_ERROR
    sample: dict[str, Any] = {
        "id": instance_of(trajectory.task),
        "epoch": epoch,
        "uuid": trajectory.episode_id,
        "input": trajectory.instruction,
        "target": "",
        "messages": messages,
        "metadata": about(trajectory),
        "attachments": {
            key[:32]: f"data:{media_type(trajectory, key)};base64,{base64.b64encode(data).decode()}"
            for key, data in trajectory.images.items()
        },
        "started_at": iso_time(trajectory.started_unix_s),
        "completed_at": ended,
        "total_time": max(trajectory.duration_s, 0.0),
        "turn_count": len(trajectory.turns),
        "model_usage": {model: usage},
        "output": {
            "model": model,
            "choices": [{"message": answers[-1], "stop_reason": "stop"}] if answers else [],
            "completion": answers[-1]["content"] if answers else "",
            "usage": usage,
        },
    }
    if broken:
        errors = [turn.error for turn in trajectory.turns if turn.error]
        message = errors[-1] if errors else "the environment failed before the first turn"
        sample["error"] = {"message": message, "traceback": "", "traceback_ansi": ""}
    else:
        why = f"{trajectory.stop_reason}, reward {trajectory.reward:g}"
        sample["scores"] = {
            "success": {"value": "C" if trajectory.success else "I", "explanation": why},
            "reward": {"value": trajectory.reward},
        }
    if (limit := _LIMITS.get(trajectory.stop_reason)) is not None:
        reached = {"turn": len(trajectory.turns), "token": read, "time": trajectory.duration_s}
        sample["limit"] = {"type": limit, "limit": reached[limit]}
    return sample


@dataclasses.dataclass
class _Totals:
    """What the head of a log says of its samples; written before them."""

    episodes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    scored: int = 0
    successes: int = 0
    reward: float = 0.0
    read: int = 0
    sampled: int = 0
    started_unix_s: float = float("inf")
    ended_unix_s: float = 0.0
    run_ids: set[str] = dataclasses.field(default_factory=set)

    def add(self, trajectory: Trajectory) -> None:
        self.episodes[instance_of(trajectory.task)] += 1
        if trajectory.stop_reason is not StopReason.ENV_ERROR:
            self.scored += 1
            self.successes += trajectory.success
            self.reward += trajectory.reward
        read, sampled = tokens_of(trajectory)
        self.read, self.sampled = self.read + read, self.sampled + sampled
        self.started_unix_s = min(self.started_unix_s, trajectory.started_unix_s)
        ended_unix_s = trajectory.started_unix_s + trajectory.duration_s
        self.ended_unix_s = max(self.ended_unix_s, ended_unix_s)
        self.run_ids.add(trajectory.run_id)


def head_of(totals: _Totals, source: Source) -> dict[str, Any]:
    """A log without its samples."""
    count, scored = sum(totals.episodes.values()), totals.scored
    tokens = {"input_tokens": totals.read, "output_tokens": totals.sampled}
    usage = {source.model: tokens | {"total_tokens": totals.read + totals.sampled}}
    scores = []
    if scored:
        low, high = wilson_interval(totals.successes, scored)
        rates = {
            "accuracy": totals.successes / scored,
            "wilson_low": low,
            "wilson_high": high,
        }
        means = {"success": rates, "reward": {"mean": totals.reward / scored}}
        scores = [
            {
                "name": name,
                "scorer": name,
                "scored_samples": scored,
                "unscored_samples": count - scored,
                "metrics": {metric: {"name": metric, "value": v} for metric, v in values.items()},
            }
            for name, values in means.items()
        ]
    identity = "-".join(sorted(totals.run_ids))
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": uuid.uuid5(uuid.NAMESPACE_URL, f"{identity}/{source.name}").hex,
            "run_id": identity,
            "created": iso_time(totals.started_unix_s),
            "task": source.name,
            "task_id": source.name,
            "dataset": {
                "name": source.name,
                "samples": len(totals.episodes),
                "sample_ids": list(totals.episodes),
                "shuffled": False,
            },
            "model": source.model,
            "config": {"epochs": max(totals.episodes.values()), "log_images": True},
            "packages": {AGENT: package_version()},
            "scorers": [{"name": "success"}, {"name": "reward"}],
        },
        "plan": {"name": AGENT, "steps": []},
        "results": {"total_samples": count, "completed_samples": scored, "scores": scores},
        "stats": {
            "started_at": iso_time(totals.started_unix_s),
            "completed_at": iso_time(totals.ended_unix_s),
            "model_usage": usage,
        },
    }


def write(read: Read, source: Source, out: Path) -> int:
    """Writes one log into `out`; returns the number of episodes. One episode is held at a time."""
    totals = _Totals()
    for trajectory in read():
        totals.add(trajectory)
    if not totals.episodes:
        return 0
    head = head_of(totals, source)
    stamp = head["eval"]["created"].replace(":", "-")
    task = re.sub(r"[^A-Za-z0-9-]+", "-", source.name)[:64]
    epochs: collections.Counter[str] = collections.Counter()
    path = out / f"{stamp}_{task}_{head['eval']['eval_id']}.json"
    with path.open("w", encoding="utf-8") as file:
        # The samples come last, so that a reader of the head alone stops before them.
        file.write(json.dumps(head, indent=1, allow_nan=False)[:-2] + ',\n "samples": [\n')
        for number, trajectory in enumerate(read()):
            instance = instance_of(trajectory.task)
            epochs[instance] += 1
            sample = sample_of(trajectory, epochs[instance], source.model)
            file.write((",\n" if number else "") + json.dumps(sample, allow_nan=False))
        file.write("\n ]\n}\n")
    return sum(epochs.values())
