"""Trajectories for the tests of the shards: small and valid, with something in every field."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import ShardWriter
from uirl_jax.store import open_store
from uirl_jax.types import Action, StopReason, TaskSpec, Trajectory, Turn

LAYOUT = TokenLayout(vocab_size=100, image_token_id=9)


def make_trajectory(
    episode_id: str = "e0",
    group_id: str = "g0",
    *,
    versions: tuple[int, ...] = (0, 0),
    reward: float = 0.5,
    image_bytes: int = 40,
) -> Trajectory:
    """Turn u reads u + 1 screenshots and samples u + 2 tokens; its context continues turn u - 1."""
    rng = np.random.default_rng(list(episode_id.encode()))
    images = {}
    turns: list[Turn] = []
    context_ids = np.array([1, 2], np.int32)
    for number, version in enumerate(versions):
        data = rng.bytes(image_bytes)
        images[hashlib.sha256(data).hexdigest()] = data
        context_ids = np.concatenate([context_ids, np.array([3, 9, 9, 4], np.int32)])
        token_ids = rng.integers(10, 100, number + 2).astype(np.int32)
        turns.append(
            Turn(
                context_ids=context_ids,
                token_ids=token_ids,
                logprobs=-rng.random(number + 2, np.float32),
                full_logprobs=-rng.random(number + 2, np.float32),
                policy_versions=np.full(number + 2, version, np.int32),
                image_keys=tuple(images),
                text=f"click({number}, 2) ü",
                action=Action("click", x=number, y=2) if number % 2 == 0 else None,
                error="" if number % 2 == 0 else "no action",
                reward=0.1 * number,
                progress={"done": False, "rows": [1, {"é": None}], "share": 1 / 3},
            )
        )
        context_ids = np.concatenate([context_ids, token_ids])
    return Trajectory(
        episode_id=episode_id,
        group_id=group_id,
        task=TaskSpec("desktop/click_button", seed=7, variant="popup", max_turns=3),
        instruction="Click the “red” button",
        turns=tuple(turns),
        images=images,
        image_tokens=dict.fromkeys(images, 2),
        stop_reason=StopReason.COMPLETED,
        reward=reward,
        success=True,
        started_unix_s=1.7e9 + 0.123,
        duration_s=2.5,
    )


def make_group(name: str, size: int = 2, version: int = 0) -> list[Trajectory]:
    return [
        make_trajectory(f"{name}-{number}", f"group-{name}", versions=(version,))
        for number in range(size)
    ]


class PathWriter(ShardWriter):
    """A writer that says where its shards are on the disk, for tests that look at or break them."""

    def __init__(self, workdir: Path, actor_id: str, run_id: str) -> None:
        super().__init__(open_store(workdir), actor_id, run_id, "base", layout=LAYOUT)
        self._workdir = workdir

    def publish(self, trajectories: Sequence[Trajectory]) -> Path:
        return self._workdir / super().publish(trajectories)


def make_writer(workdir: Path, actor_id: str = "a0", run_id: str = "run") -> PathWriter:
    return PathWriter(workdir, actor_id, run_id)


def assert_same(got: Trajectory, expected: Trajectory) -> None:
    """Equal in every field, arrays in dtype too."""
    for name in vars(expected).keys() - {"turns"}:
        assert getattr(got, name) == getattr(expected, name), name
    assert len(got.turns) == len(expected.turns)
    for got_turn, expected_turn in zip(got.turns, expected.turns, strict=True):
        for name, value in vars(expected_turn).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(got_turn, name), value)
                assert getattr(got_turn, name).dtype == value.dtype
            else:
                assert getattr(got_turn, name) == value, name
