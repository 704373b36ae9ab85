"""What every format says of an episode: the parts that its writers put together."""

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

from uirl_jax.errors import RecordError
from uirl_jax.types import Action, TaskSpec, Trajectory, Turn
from uirl_jax.untrusted.json import printable

AGENT = "uirl_jax"
_MEDIA = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp"}

Read = Callable[[], Iterator[Trajectory]]  # the episodes, each time from the start


@dataclasses.dataclass(frozen=True)
class Source:
    """What is told of all episodes together."""

    name: str  # of the task
    model: str


def package_version() -> str:
    try:
        return importlib.metadata.version(AGENT)
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


def iso_time(unix_s: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):  # of a record that somebody wrote
        return "1970-01-01T00:00:00+00:00"


def instance_of(task: TaskSpec) -> str:
    variant = f",{task.variant}" if task.variant else ""
    return f"{task.name}{variant},seed={task.seed}"


def versions_of(trajectory: Trajectory) -> list[int]:
    return sorted({int(version) for turn in trajectory.turns for version in turn.policy_versions})


def about(trajectory: Trajectory) -> dict[str, Any]:
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
        "policy_versions": versions_of(trajectory),
        "renderer": trajectory.renderer,
    }


def sampled_of(turn: Turn) -> dict[str, Any]:
    return {
        "token_ids": turn.token_ids.tolist(),
        "logprobs": [round(float(value), 6) for value in turn.logprobs],
        "policy_versions": turn.policy_versions.tolist(),
    }


def tokens_of(trajectory: Trajectory) -> tuple[int, int]:
    """Read and sampled, over all turns."""
    read = sum(len(turn.context_ids) for turn in trajectory.turns)
    return read, sum(len(turn.token_ids) for turn in trajectory.turns)


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
