"""Writes recorded episodes in formats that other programs read: Inspect AI's log, and ATIF.

    python -m tools.export_episodes inspect runs/quickstart/eval/after --out=logs
    python -m tools.export_episodes atif runs/quickstart --episode=3f2a --out=trajectories

`inspect`: one JSON log with a sample for every episode, its screenshots in it as attachments;
inspect_ai.log.read_eval_log and `inspect view` open it. Episodes of the same instance are epochs of
one sample. `atif`: for each episode a folder with trajectory.json in Harbor's Agent Trajectory
Interchange Format (v1.7), and its screenshots as files beside it. --out is made. Paths are shards
or directories with shards.
"""

import argparse
import base64
import collections
import dataclasses
import datetime
import importlib.metadata
import json
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.inspect_shards import find_episode, find_shards
from uirl_jax.errors import ConfigError, RecordError, ShardError, UirlError
from uirl_jax.evaluation.statistics import wilson_interval
from uirl_jax.shards.reader import read_shard
from uirl_jax.store.files import new_directory
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory, Turn
from uirl_jax.untrusted.json import printable

ATIF_VERSION = "ATIF-v1.7"
_MEDIA = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp"}
_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp"}
_SAFE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LIMITS = {StopReason.MAX_TURNS: "turn", StopReason.MAX_TOKENS: "token", StopReason.TIMEOUT: "time"}
_AGENT = "uirl_jax"

Read = Callable[[], Iterator[Trajectory]]  # the episodes, each time from the start


@dataclasses.dataclass(frozen=True)
class Source:
    """What is told of all episodes together."""

    name: str  # of the task
    model: str


def package_version() -> str:
    try:
        return importlib.metadata.version(_AGENT)
    except importlib.metadata.PackageNotFoundError:  # run from its folder, not installed
        return "unknown"


def media_type(trajectory: Trajectory, key: str) -> str:
    """Of a screenshot. Raises: RecordError: it is in none of the formats that a verifier sends."""
    data = trajectory.images[key]
    found = next((kind for start, kind in _MEDIA.items() if data.startswith(start)), None)
    if found is None:
        raise RecordError(
            f"episode {printable(trajectory.episode_id)}: screenshot {key[:16]} is not PNG, JPEG "
            "or WEBP"
        )
    return found


def shown_before(turn: Turn) -> str:
    """The key of the screenshot that the turn's action answers: the newest ends every context."""
    return turn.image_keys[-1]


def arguments_of(action: Action) -> dict[str, Any]:
    return {k: v for k, v in vars(action).items() if v is not None and k != "kind"}


def _time(unix_s: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):  # of a record that somebody wrote
        return "1970-01-01T00:00:00+00:00"


def _instance(task: TaskSpec) -> str:
    variant = f",{task.variant}" if task.variant else ""
    return f"{task.name}{variant},seed={task.seed}"


def _versions(trajectory: Trajectory) -> list[int]:
    return sorted({int(version) for turn in trajectory.turns for version in turn.policy_versions})


def _about(trajectory: Trajectory) -> dict[str, Any]:
    """What both formats keep in a free field."""
    return {
        "episode_id": trajectory.episode_id,
        "group_id": trajectory.group_id,
        "run_id": trajectory.run_id,
        "actor_id": trajectory.actor_id,
        "task": dataclasses.asdict(trajectory.task),
        "stop_reason": str(trajectory.stop_reason),
        "reward": trajectory.reward,
        "success": trajectory.success,
        "policy_versions": _versions(trajectory),
        "renderer": trajectory.renderer,
    }


def _sampled(turn: Turn) -> dict[str, Any]:
    return {
        "token_ids": turn.token_ids.tolist(),
        "logprobs": [round(float(value), 6) for value in turn.logprobs],
        "policy_versions": turn.policy_versions.tolist(),
    }


def _tokens(trajectory: Trajectory) -> tuple[int, int]:
    """Read and sampled, over all turns."""
    read = sum(len(turn.context_ids) for turn in trajectory.turns)
    return read, sum(len(turn.token_ids) for turn in trajectory.turns)


# --------------------------------------------------------------------------------- Inspect's log


def _image(key: str) -> dict[str, Any]:
    return {"type": "image", "image": f"attachment://{key[:32]}"}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def inspect_messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The chat: instruction and first screenshot, then an action and what it led to, in turn.

    It has every screenshot, also those that the context policy dropped from later contexts.
    """
    prefix = trajectory.episode_id
    messages: list[dict[str, Any]] = []
    first = [_text(trajectory.instruction)]
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
            "metadata": _sampled(turn) | {"reward": turn.reward, "error": turn.error},
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
        content = [_text(json.dumps(turn.progress))]
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


def inspect_sample(trajectory: Trajectory, epoch: int, model: str) -> dict[str, Any]:
    """One episode. Args: epoch: which episode of its instance, from 1."""
    messages = inspect_messages(trajectory)
    read, sampled = _tokens(trajectory)
    usage = {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}
    ended = _time(trajectory.started_unix_s + trajectory.duration_s)
    answers = [message for message in messages if message["role"] == "assistant"]
    broken = trajectory.stop_reason is StopReason.ENV_ERROR
    sample: dict[str, Any] = {
        "id": _instance(trajectory.task),
        "epoch": epoch,
        "uuid": trajectory.episode_id,
        "input": trajectory.instruction,
        "target": "",
        "messages": messages,
        "metadata": _about(trajectory),
        "attachments": {
            key[:32]: f"data:{media_type(trajectory, key)};base64,{base64.b64encode(data).decode()}"
            for key, data in trajectory.images.items()
        },
        "started_at": _time(trajectory.started_unix_s),
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
        self.episodes[_instance(trajectory.task)] += 1
        if trajectory.stop_reason is not StopReason.ENV_ERROR:
            self.scored += 1
            self.successes += trajectory.success
            self.reward += trajectory.reward
        read, sampled = _tokens(trajectory)
        self.read, self.sampled = self.read + read, self.sampled + sampled
        self.started_unix_s = min(self.started_unix_s, trajectory.started_unix_s)
        ended_unix_s = trajectory.started_unix_s + trajectory.duration_s
        self.ended_unix_s = max(self.ended_unix_s, ended_unix_s)
        self.run_ids.add(trajectory.run_id)


def inspect_head(totals: _Totals, source: Source) -> dict[str, Any]:
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
            "created": _time(totals.started_unix_s),
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
            "packages": {_AGENT: package_version()},
            "scorers": [{"name": "success"}, {"name": "reward"}],
        },
        "plan": {"name": _AGENT, "steps": []},
        "results": {"total_samples": count, "completed_samples": scored, "scores": scores},
        "stats": {
            "started_at": _time(totals.started_unix_s),
            "completed_at": _time(totals.ended_unix_s),
            "model_usage": usage,
        },
    }


def write_inspect(read: Read, source: Source, out: Path) -> int:
    """Writes one log into `out`; returns the number of episodes. One episode is held at a time."""
    totals = _Totals()
    for trajectory in read():
        totals.add(trajectory)
    if not totals.episodes:
        return 0
    head = inspect_head(totals, source)
    stamp = head["eval"]["created"].replace(":", "-")
    task = re.sub(r"[^A-Za-z0-9-]+", "-", source.name)[:64]
    epochs: collections.Counter[str] = collections.Counter()
    path = out / f"{stamp}_{task}_{head['eval']['eval_id']}.json"
    with path.open("w", encoding="utf-8") as file:
        # The samples come last, so that a reader of the head alone stops before them.
        file.write(json.dumps(head, indent=1, allow_nan=False)[:-2] + ',\n "samples": [\n')
        for number, trajectory in enumerate(read()):
            instance = _instance(trajectory.task)
            epochs[instance] += 1
            sample = inspect_sample(trajectory, epochs[instance], source.model)
            file.write((",\n" if number else "") + json.dumps(sample, allow_nan=False))
        file.write("\n ]\n}\n")
    return sum(epochs.values())


# ------------------------------------------------------------------------------------------ ATIF


def atif(trajectory: Trajectory, model: str, names: dict[str, str]) -> dict[str, Any]:
    """One episode as an ATIF document. Args: names: of the screenshots' files, by key."""

    def image(key: str) -> dict[str, Any]:
        source = {"media_type": media_type(trajectory, key), "path": names[key]}
        return {"type": "image", "source": source}

    first: list[dict[str, Any]] = [_text(trajectory.instruction)]
    if trajectory.turns:
        first.append(image(shown_before(trajectory.turns[0])))
    started = _time(trajectory.started_unix_s)
    steps: list[dict[str, Any]] = [
        {"step_id": 1, "source": "user", "timestamp": started, "message": first}
    ]
    for number, turn in enumerate(trajectory.turns):
        sampled = _sampled(turn)
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
            content = [_text(json.dumps(turn.progress))]
            if number + 1 < len(trajectory.turns):
                content.append(image(shown_before(trajectory.turns[number + 1])))
            step["observation"] = {"results": [{"source_call_id": call, "content": content}]}
        steps.append(step)
    read, sampled_tokens = _tokens(trajectory)
    return {
        "schema_version": ATIF_VERSION,
        "session_id": trajectory.episode_id,
        "trajectory_id": trajectory.episode_id,
        "agent": {"name": _AGENT, "version": package_version(), "model_name": model},
        "steps": steps,
        "notes": "Every screenshot is kept, also those that later contexts no longer had.",
        "final_metrics": {
            "total_prompt_tokens": read,
            "total_completion_tokens": sampled_tokens,
            "total_steps": len(steps),
        },
        "extra": _about(trajectory),
    }


def write_atif(read: Read, source: Source, out: Path) -> int:
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
        text = json.dumps(atif(trajectory, source.model, names), indent=2, allow_nan=False)
        (folder / "trajectory.json").write_text(text + "\n", encoding="utf-8")
        count += 1
    return count


# ------------------------------------------------------------------------------------ the command

_WRITERS = {"inspect": write_inspect, "atif": write_atif}


def reader(paths: Sequence[Path], episode: str) -> Read:
    """Reads the episodes, each id once; damaged shards are passed over, and said so once.

    Raises: ConfigError: there is not exactly one episode of that id.
    """
    if episode:
        found = find_episode(paths, episode)
        return lambda: iter((found,))
    damaged: set[Path] = set()

    def read() -> Iterator[Trajectory]:
        seen: set[str] = set()
        for path in paths:
            if path in damaged:
                continue
            try:
                trajectories = read_shard(path)[1]
            except ShardError as error:
                print(f"passed over: {error}", file=sys.stderr)
                damaged.add(path)
                continue
            for trajectory in trajectories:
                if trajectory.episode_id not in seen:
                    seen.add(trajectory.episode_id)
                    yield trajectory

    return read


def export(kind: str, paths: Sequence[Path], episode: str, source: Source, out: Path) -> int:
    """Writes `out`, whole or not at all; returns the number of episodes.

    Raises: ConfigError: `out` is there already, or there is no episode. RecordError: a screenshot
      in another format.
    """
    if out.exists():
        raise ConfigError(f"--out={out}: is there already; give a new directory")
    with new_directory(out) as directory:
        count = _WRITERS[kind](reader(paths, episode), source, directory)
        if not count:
            raise ConfigError("no shard could be read: there is no episode")
    return count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.export_episodes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("format", choices=sorted(_WRITERS))
    parser.add_argument("path", type=Path, help="a shard, or a directory with shards")
    parser.add_argument("--out", type=Path, required=True, help="a directory that is made")
    parser.add_argument("--episode", default="", help="the start of an id; else all episodes")
    parser.add_argument("--name", default="", help="of the evaluation; else that of the path")
    parser.add_argument("--model", default=_AGENT, help="the policy's name, for the reader")
    parser.add_argument("--json", type=Path, help="a file for what was written, machine-readable")
    args = parser.parse_args(argv)
    try:
        paths = find_shards(args.path)
        name = args.name or args.path.resolve().name
        source = Source(printable(name, 200), printable(args.model, 200) or _AGENT)
        count = export(args.format, paths, args.episode, source, args.out)
        written = sorted(str(path) for path in args.out.rglob("*.json"))
        if args.json is not None:
            content = {"format": args.format, "episodes": count, "files": written}
            args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except (UirlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, UirlError) else 1
    print(f"{written[0] if len(written) == 1 else args.out}: {count} episodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
