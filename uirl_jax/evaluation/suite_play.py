"""Plays what is missing of a suite, records every episode, and counts.

    eval/suites/<suite>/suite.json                    what was asked
    eval/suites/<suite>/<contender>/contender.json    which policy it was
    eval/suites/<suite>/<contender>/<n>.tfrecord      its episodes, as they ended
    eval/suites/<suite>/<contender>/scores.json       when all are played
    eval/suites/<suite>/scores.json                   of the last command's, with comparisons

The number of an episode, instance x attempts + attempt, is in its record's group_id: an evaluation
that was interrupted plays the others, each with its own seed of sampling.
"""

import contextlib
import dataclasses
import itertools
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from uirl_jax.errors import ConfigError, UirlError
from uirl_jax.evaluation.outcome import Outcome, outcome_of
from uirl_jax.evaluation.paired import Comparison, compare, pairs_of
from uirl_jax.evaluation.results import EVAL_DIR, write_json
from uirl_jax.evaluation.scores import Played, Scores, score, score_by_task, successes
from uirl_jax.evaluation.suite import Suite
from uirl_jax.shards.reader import read_shard
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import write_shard
from uirl_jax.types import StopReason, TaskSpec, Trajectory

SUITES_DIR = f"{EVAL_DIR}/suites"
SCORES_FILE = "scores.json"
# What a killed evaluation loses at most. A shard has at most 1 GiB.
_FLUSH_EPISODES, _FLUSH_S, _FLUSH_BYTES = 64, 10.0, 256 << 20

# Numbers and instances of episodes, and what is called with each that ends.
PlayEpisodes = Callable[
    [Sequence[tuple[int, TaskSpec]], Callable[[Trajectory], None]], Awaitable[None]
]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A policy in an evaluation.

    Attributes:
      name: of its directory, and in tables.
      identity: what tells it from another policy of this name: hashes, version, server.
      base_hash, layout: of the model that samples, for the header of its records.
    """

    name: str
    identity: Mapping[str, Any]
    base_hash: str
    layout: TokenLayout


def open_suite(workdir: Path, suite: Suite) -> Path:
    """The directory of a suite's evaluation.

    Raises: ConfigError: it is of another suite of this name.
    """
    directory = workdir / SUITES_DIR / suite.name
    _claim(directory / "suite.json", dataclasses.asdict(suite), "another tasks.json")
    return directory


async def play_suite(
    play: PlayEpisodes,
    suite: Suite,
    directory: Path,
    contender: Contender,
    on_ended: Callable[[int, int], None] = lambda ended, right: None,
) -> Played:
    """Plays what is missing of one contender, and writes its scores.

    Args:
      directory: of `open_suite`.
      on_ended: called with the number of episodes that ended so far, and that succeeded.
    Raises:
      ConfigError: the directory is of another policy of this name.
      UirlError: a file cannot be read or written.
    """
    directory = directory / contender.name
    identity = {**contender.identity, "base_hash": contender.base_hash}
    _claim(directory / "contender.json", identity, "another policy")
    specs = suite.specs
    asked = len(specs) * suite.attempts
    ended = _read(directory, specs, suite.attempts)

    def tell() -> None:
        on_ended(len(ended), sum(one.success for one in ended.values()))

    tell()
    with _recording(directory, contender) as record:

        def on_done(trajectory: Trajectory) -> None:
            if trajectory.stop_reason is not StopReason.ENV_ERROR:
                record(trajectory)
                ended[int(trajectory.group_id)] = outcome_of(trajectory)
                tell()

        missing = [
            (number, specs[number // suite.attempts])
            for number in range(asked)
            if number not in ended
        ]
        if missing:
            await play(missing, on_done)
    played = {
        spec: [ended.get(index * suite.attempts + n) for n in range(suite.attempts)]
        for index, spec in enumerate(specs)
    }
    by_task = {label: dataclasses.asdict(one) for label, one in score_by_task(played).items()}
    content = {"contender": contender.name, "all": dataclasses.asdict(score(played))}
    write_json(directory / SCORES_FILE, {**content, "by_task": by_task})
    return played


def ended_episodes(directory: Path) -> Iterator[Trajectory]:
    """The recorded episodes of a contender's directory, each once; of a file at a time."""
    numbers: set[str] = set()
    for path in sorted(directory.glob("*.tfrecord")):
        for trajectory in read_shard(path)[1]:
            if trajectory.group_id not in numbers:
                numbers.add(trajectory.group_id)
                yield trajectory


def conclude(
    directory: Path, played: Mapping[str, Played]
) -> tuple[dict[str, Scores], list[Comparison]]:
    """Scores of these contenders and comparisons of every two, written to the suite's directory."""
    scores = {name: score(one) for name, one in played.items()}
    right = {name: successes(one) for name, one in played.items()}
    comparisons = [
        compare(first, second, right)
        for first, second in itertools.combinations(played, 2)
        if pairs_of(first, second, right)
    ]
    write_json(
        directory / SCORES_FILE,
        {
            "contenders": {name: dataclasses.asdict(one) for name, one in scores.items()},
            "comparisons": [dataclasses.asdict(one) for one in comparisons],
        },
    )
    return scores, comparisons


def _claim(path: Path, content: Mapping[str, Any], other: str) -> None:
    """Writes what a directory is of, once. Raises: ConfigError: it is of something else."""
    expected = json.loads(json.dumps(content))
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UirlError(f"{path.parent}: cannot be created ({error.strerror})") from error
        write_json(path, expected)
        return
    except ValueError as error:
        raise UirlError(f"{path}: is not JSON ({error}); remove {path.parent}") from None
    if found != expected:
        differs = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))
        raise ConfigError(
            f"{path.parent}: was made from {other} ({', '.join(differs)} differ); remove it, or "
            "give this one another name"
        )


def _read(directory: Path, specs: Sequence[TaskSpec], attempts: int) -> dict[int, Outcome]:
    """What was played before, by number."""
    ended: dict[int, Outcome] = {}
    for trajectory in ended_episodes(directory):
        number = int(trajectory.group_id) if trajectory.group_id.isdecimal() else -1
        if not 0 <= number < len(specs) * attempts or trajectory.task != specs[number // attempts]:
            raise UirlError(f"{directory}: holds episodes of another suite; remove it")
        ended[number] = outcome_of(trajectory)
    return ended


@contextlib.contextmanager
def _recording(directory: Path, contender: Contender) -> Iterator[Callable[[Trajectory], None]]:
    """A function that keeps a trajectory; all are written in the end, at an error too."""
    kept: list[Trajectory] = []
    kept_bytes = 0  # of their screenshots
    written_s = time.monotonic()
    # Not their count: the user may have removed a damaged file from among them.
    taken = [path.stem.partition("-")[0] for path in directory.glob("*.tfrecord")]
    numbers = itertools.count(max((int(n) for n in taken if n.isdecimal()), default=-1) + 1)
    mine = uuid.uuid4().hex[:8]  # another process may play the same contender, as `base`

    def write() -> None:
        nonlocal written_s, kept_bytes
        if kept:
            path = directory / f"{next(numbers):06d}-{mine}.tfrecord"
            write_shard(path, kept, base_hash=contender.base_hash, layout=contender.layout)
            kept.clear()
            kept_bytes = 0
        written_s = time.monotonic()

    def record(trajectory: Trajectory) -> None:
        nonlocal kept_bytes
        kept.append(trajectory)
        kept_bytes += sum(map(len, trajectory.images.values()))
        is_much = len(kept) >= _FLUSH_EPISODES or kept_bytes >= _FLUSH_BYTES
        if is_much or time.monotonic() - written_s >= _FLUSH_S:
            write()

    try:
        yield record
    finally:
        write()
