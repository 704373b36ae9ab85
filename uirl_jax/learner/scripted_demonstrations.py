"""Scripted demonstrations for the supervised steps: new ones each step, or a fixed set in epochs.

Drawn screens cost little, so every step may play new episodes. A browser plays about one episode a
second: these are played once, stored in the workdir as shards and repeated in another order every
epoch. Of a recorded set every training row is demonstrated once before any is again.
verifiers.demonstrations plays them, cold_start trains on them.
"""

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from uirl_jax import seeds
from uirl_jax.console import Progress
from uirl_jax.demonstrations.recording import is_example
from uirl_jax.demonstrations.scripted import Demonstrator
from uirl_jax.errors import ConfigError, RestartError
from uirl_jax.families.chat import Chat
from uirl_jax.families.loading import PolicyModel
from uirl_jax.learner import recorded_demonstrations
from uirl_jax.shards.layout import layout_of
from uirl_jax.shards.reader import read_shard
from uirl_jax.shards.writer import write_shard
from uirl_jax.types import TaskSpec, Trajectory

SHARD_EPISODES = 50  # at most this many are played again after a kill
# Of a step whose demonstrations all failed: others are played in their place, of numbers far away.
_ATTEMPTS, _FAR = 5, 2**32


class ScriptedDemonstrations:
    """Demonstrations by number; the kinds of task alternate.

    Args:
      kinds: the tasks to demonstrate.
      episodes: size of the fixed set; 0: every number is a new episode.
      seed: of the instances, which come from the training range, and of their order.
      quality: 1 minus the probability of a mistake; each task type defines what a mistake is.
    """

    def __init__(
        self,
        demonstrator: Demonstrator,
        model: PolicyModel,
        chat: Chat,
        kinds: Sequence[TaskSpec],
        *,
        episodes: int,
        seed: int,
        quality: float,
    ) -> None:
        self._demonstrator = demonstrator
        self._model = model
        self._chat = chat
        self._kinds = tuple(kinds)
        self._episodes = episodes
        self._seed = seed
        self._quality = quality
        self._kept: list[Trajectory] = []
        self._orders: dict[tuple[str, int], np.ndarray] = {}  # by recorded set and epoch

    def keep(self, directory: Path, stop: threading.Event | None = None) -> None:
        """Plays the episodes of the fixed set that are not in `directory` yet, and reads the rest.

        Scripts can fail. With quality 1 demonstrations that are no example (`is_example`: they did
        not solve their task) are left out; below 1 failures are intended and are kept.

        Raises:
          ConfigError: no demonstration is an example.
          ShardError: a file in `directory` cannot be read or written.
          RestartError: `stop` was set; complete shards are kept.
        """
        if not self._episodes:
            return
        directory.mkdir(parents=True, exist_ok=True)
        layout = layout_of(self._model.cfg)
        paths = {
            n: directory / f"{n:06d}.tfrecord" for n in range(0, self._episodes, SHARD_EPISODES)
        }
        stored = SHARD_EPISODES * sum(path.exists() for path in paths.values())
        progress = Progress("demonstrations", self._episodes, first_step=stored)
        for first, path in paths.items():
            stored_before = path.exists()
            last = min(first + SHARD_EPISODES, self._episodes)
            if not stored_before:
                if stop is not None and stop.is_set():
                    raise RestartError(
                        f"stopped after {first} of {self._episodes} demonstrations; run the same "
                        "command again to continue"
                    )
                played = self._play(range(first, last))
                if played:  # a shard is never empty
                    write_shard(path, played, base_hash="", layout=layout)  # no model sampled them
            if path.exists():
                self._kept += read_shard(path)[1]
            if not stored_before:  # reading is no measure of how long the others will take
                progress.update(last)
        progress.close()
        if self._quality < 1.0 and self._kept:
            return
        self._kept = [demonstration for demonstration in self._kept if is_example(demonstration)]
        solved = sum(demonstration.success for demonstration in self._kept)
        aimed = (
            f", {len(self._kept) - solved} were paid the best" if solved < len(self._kept) else ""
        )
        print(f"demonstrations: {solved} of {self._episodes} solved their task{aimed}", flush=True)
        if not self._kept:
            names = ", ".join(sorted({kind.name for kind in self._kinds}))
            raise ConfigError(f"cold_start: no script solved {names} within max_turns")

    def take(self, first: int, count: int) -> list[Trajectory]:
        """Demonstrations first, first + 1, ...; a number always gives the same demonstration.

        Without a fixed set, fewer where scripts failed: as in `keep`, with quality 1 only examples.

        Raises: ConfigError: all of them did, and of the others that were played in their place.
        """
        numbers = range(first, first + count)
        if not self._episodes:
            for attempt in range(_ATTEMPTS):
                played = self._play([number + attempt * _FAR for number in numbers])
                if self._quality >= 1.0:
                    played = [one for one in played if is_example(one)]
                if played:
                    return played
            names = ", ".join(sorted({kind.name for kind in self._kinds}))
            raise ConfigError(
                f"cold_start: no script solved {names} within max_turns, {_ATTEMPTS * count} "
                "demonstrations in a row; stderr says where one failed"
            )
        return [recorded_demonstrations.pick(self._kept, number, self._seed) for number in numbers]

    def _play(self, numbers: Sequence[int]) -> list[Trajectory]:
        """Without episodes that have no turn, of scripts that failed at once."""
        tasks = [self._task(number) for number in numbers]
        rngs = [np.random.default_rng([self._seed, number]) for number in numbers]
        played = self._demonstrator.demonstrate_all(
            tasks, self._chat, self._model.inputs, rngs, quality=self._quality
        )
        return [episode for episode in played if episode.turns]

    def _task(self, number: int) -> TaskSpec:
        kind = self._kinds[number % len(self._kinds)]
        screens = self._demonstrator.training_screens(kind.name)
        if not screens:
            return dataclasses.replace(kind, seed=seeds.train_seed(self._seed, number))
        # Seeds drawn at random would never meet a third of the rows in as many demonstrations. The
        # next epoch's seeds are the next round over the steps of each row.
        rows = sum(map(len, screens))
        epoch, position = divmod(number // len(self._kinds), rows)
        place = epoch * rows + int(self._order(kind.name, epoch, screens)[position])
        return dataclasses.replace(kind, seed=seeds.TRAIN_SEEDS[place % len(seeds.TRAIN_SEEDS)])

    def _order(self, name: str, epoch: int, screens: Sequence[tuple[int, ...]]) -> np.ndarray:
        """int64[rows]: the rows of a recorded set, in another order each epoch.

        Rows about one screen stay together: a step computes the screen once for all of them. A
        fixed set, which `take` mixes again, has them apart, so that it shows more screens.
        """
        if (name, epoch) not in self._orders:
            rng = np.random.default_rng([self._seed, epoch])
            together = [(row,) for rows in screens for row in rows] if self._episodes else screens
            order = rng.permutation(len(together))
            self._orders[name, epoch] = np.concatenate(
                [rng.permutation(together[n]) for n in order]
            )
        return self._orders[name, epoch]
