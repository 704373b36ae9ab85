"""The folder that `tools.search` fills: successes as shards, and a line for each searched instance.

    000096.tfrecord   the successes of at most 32 instances, of which 96 has the lowest number
    000096.json       a line for each of these instances, solved or not

The lines say which instances were searched, whatever range a command asked for: another command
with the same folder plays the others. This module plays nothing and reads no flags.
"""

import collections
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from uirl_jax.actor.search import Found
from uirl_jax.console import Progress
from uirl_jax.errors import ConfigError
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import write_shard
from uirl_jax.store.files import write_atomically
from uirl_jax.types import Trajectory

SHARD_INSTANCES = 32  # at most so many are searched again after a kill
SHARD_BYTES = 2**28  # of screenshots


@dataclasses.dataclass(frozen=True)
class Instance:
    """What a search of one instance came to; a line of a .json file."""

    number: int
    task: str
    solved: bool
    by_branch: bool
    episodes: int  # without env_errors
    env_errors: int


async def fill(
    folder: Path,
    asked: Sequence[int],
    search: Callable[[Sequence[int]], Awaitable[Sequence[Found]]],
    task_of: Callable[[int], str],
    *,
    base_hash: str,
    layout: TokenLayout,
) -> tuple[dict[int, Instance], list[Instance]]:
    """Searches the instances that the folder lacks, some at a time, and writes what they came to.

    Args:
      asked: numbers of instances.
      search: of some of these numbers, in their order.
      task_of: the name of the task that a number is an instance of.
      base_hash, layout: of the model that samples, for the header of its records.
    Returns: all instances of the folder by number, also those of other commands; and those that
      this search gave up because of env_errors. The folder lacks them, so that they are searched
      again.
    Raises: ConfigError: a file of the folder cannot be read.
    """
    known = read(folder)
    missing = [number for number in asked if number not in known]
    given_up: list[Instance] = []
    progress = Progress("search", len(asked), first_step=len(asked) - len(missing))
    for start in range(0, len(missing), SHARD_INSTANCES):
        numbers = missing[start : start + SHARD_INSTANCES]
        found = await search(numbers)
        searched = [
            Instance(
                number,
                task_of(number),
                solved=one.shortest is not None,
                by_branch=one.by_branch,
                episodes=one.played,
                env_errors=one.env_errors,
            )
            for number, one in zip(numbers, found, strict=True)
        ]
        given_up += [one for one, its in zip(searched, found, strict=True) if its.gave_up]
        kept = [(one, its) for one, its in zip(searched, found, strict=True) if not its.gave_up]
        for part in _parts(kept):
            instances = [one for one, _ in part]
            successes = [its.shortest for _, its in part if its.shortest is not None]
            _write(folder, instances, successes, base_hash=base_hash, layout=layout)
            known |= {one.number: one for one in instances}
        done = [known[number] for number in asked if number in known]
        solved = sum(one.solved for one in done)
        progress.update(len(done) + len(given_up), success=solved / len(done) if done else None)
    progress.close()
    return known, given_up


def _parts(kept: Sequence[tuple[Instance, Found]]) -> list[list[tuple[Instance, Found]]]:
    """What goes into a shard each: readers refuse one of more than a GiB."""
    parts: list[list[tuple[Instance, Found]]] = []
    part_bytes = 0
    for one, its in kept:
        size_bytes = sum(map(len, its.shortest.images.values())) if its.shortest else 0
        if not parts or part_bytes + size_bytes > SHARD_BYTES:
            parts.append([])
            part_bytes = 0
        parts[-1].append((one, its))
        part_bytes += size_bytes
    return parts


def _write(
    folder: Path,
    instances: Sequence[Instance],
    successes: Sequence[Trajectory],
    *,
    base_hash: str,
    layout: TokenLayout,
) -> None:
    # A number is in one file only, so that the name of the first one is free.
    path = folder / f"{instances[0].number:06d}.json"
    lines = ",\n".join(json.dumps(dataclasses.asdict(one)) for one in instances)
    write_atomically(path, f"[\n{lines}\n]\n".encode())
    # The shard is last: lines without it, of a process that was killed here, do not count (`read`).
    if successes:
        write_shard(path.with_suffix(".tfrecord"), successes, base_hash=base_hash, layout=layout)


def read(folder: Path) -> dict[int, Instance]:
    """The instances that were searched, by number. Raises: ConfigError."""
    known: dict[int, Instance] = {}
    for path in sorted(folder.glob("[0-9]*.json")):
        try:
            lines = [Instance(**line) for line in json.loads(path.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}: no list of searched instances ({type(error).__name__}: {error}); remove "
                "it and its .tfrecord to search them again, or give another --out"
            ) from None
        if path.with_suffix(".tfrecord").exists() or not any(one.solved for one in lines):
            known |= {one.number: one for one in lines}
    return known


def count(instances: Iterable[Instance]) -> dict[str, dict[str, int]]:
    """By task: instances, solved ones, those that a branch solved, episodes and env_errors."""
    counts: dict[str, collections.Counter[str]] = {}
    for one in instances:
        counts.setdefault(one.task, collections.Counter()).update(
            instances=1,
            solved=one.solved,
            by_branch=one.by_branch,
            episodes=one.episodes,
            env_errors=one.env_errors,
        )
    return {task: dict(values) for task, values in sorted(counts.items())}


def format_counts(counts: Mapping[str, Mapping[str, int]]) -> str:
    width = max(len(name) for name in (*counts, "task"))
    lines = [f"{'task':{width}}  solved      by branch  episodes  env_errors"]
    for name, one in counts.items():
        solved = f"{one['solved']} of {one['instances']}"
        played = f"{one['episodes']:8}  {one['env_errors']:10}"
        lines.append(f"{name:{width}}  {solved:10}  {one['by_branch']:9}  {played}")
    return "\n".join(lines)
