"""Which task a group plays: kinds in turn, instances that come back, more of what fails.

Between the learner, which counts how episodes ended (`Tallies`, published with every policy), and
the actor, which asks for the task of a group (`Curriculum.task`). A pure choice: the same index and
the same tallies give the same task in any process. numpy only; nothing here plays or learns.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from uirl_jax import seeds
from uirl_jax.errors import PolicyError
from uirl_jax.types import TaskSpec, Trajectory

MAX_ENTRIES = 20_000  # of the pool: what is counted of each travels in the policy manifest


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """How the tasks of a run are drawn; held-out instances are never among them (`seeds`)."""

    # Instances of every kind that training knows; 0: every group gets one that was never seen.
    instances: int = dataclasses.field(default=0, metadata={"min": 0, "max": MAX_ENTRIES})
    # A task's share grows with the rate p at which it fails, or with p (1 - p): what always fails
    # or never teaches nothing to a group (Foster et al., arXiv:2502.12272).
    weight_by: Literal["none", "failure", "variance"] = "none"
    # Exponent of the weights: at 8 a task that always fails comes four times as often as one that
    # fails four times of five (alpha of prioritized replay, arXiv:1511.05952, eq. 1).
    sharpness: float = dataclasses.field(default=1.0, metadata={"above": 0.0})
    # Of a task of weight 0, beside one of the greatest: what is solved is not forgotten.
    min_share: float = dataclasses.field(default=0.1, metadata={"above": 0.0, "max": 1.0})
    window: int = dataclasses.field(default=64, metadata={"min": 1})  # episodes a rate remembers


class Tallies:
    """How many of the latest episodes of every entry of the pool failed. JSON in, JSON out."""

    def __init__(self, content: Any, entries: int, window: int) -> None:
        """Raises PolicyError for content that is not as `to_json` makes it."""
        self.failed_e = np.zeros(entries)
        self.played_e = np.zeros(entries)
        self._window = window
        try:
            for key, (failed, played) in (content or {}).items():
                entry = int(key)
                if not 0 <= entry < entries:
                    raise IndexError(key)
                self.failed_e[entry], self.played_e[entry] = float(failed), float(played)
        except (TypeError, ValueError, IndexError, AttributeError):
            self.failed_e[:] = np.nan
        with np.errstate(invalid="ignore"):
            whole = np.isfinite(self.played_e) & (self.failed_e >= 0)
            whole &= self.failed_e <= self.played_e
        if not whole.all():
            raise PolicyError(
                f"the policy's tallies of tasks are {str(content)[:80]}, expected failed and "
                f"played episodes of up to {entries} tasks; has the run another config?"
            )

    def add(self, entry: int, failed: int, played: int) -> None:
        """Older episodes fade, so that a rate is about the last `window` or so."""
        total = self.played_e[entry] + played
        fade = min(1.0, self._window / total) if total else 1.0
        # Rounded here: a run that carries on from the JSON must choose what this one would have.
        self.failed_e[entry] = round(fade * (self.failed_e[entry] + failed), 3)
        self.played_e[entry] = round(fade * total, 3)

    def failure_rates(self) -> np.ndarray:
        """float64[entries] in (0, 1]; a task that was never played counts as one that fails."""
        return (self.failed_e + 1.0) / (self.played_e + 1.0)

    def variances(self) -> np.ndarray:
        """float64[entries] in (0, 1]: of success, 1 where half fails, as if never played."""
        rates_e = (self.failed_e + 1.0) / (self.played_e + 2.0)
        return 4.0 * rates_e * (1.0 - rates_e)

    def to_json(self) -> dict[str, list[float]]:
        return {
            str(entry): [float(self.failed_e[entry]), float(played)]
            for entry, played in enumerate(self.played_e)
            if played
        }


class Curriculum:
    """The pool of a run's tasks: its kinds, or `instances` of each."""

    def __init__(self, cfg: CurriculumConfig, kinds: Sequence[TaskSpec], run_seed: int) -> None:
        self.cfg, self._kinds, self._run_seed = cfg, tuple(kinds), run_seed
        self.entries = len(kinds) * max(cfg.instances, 1)
        self._entry_of = {self._kind_key(kind): number for number, kind in enumerate(kinds)}
        if cfg.instances:
            self._entry_of = {self._instance(e): e for e in range(self.entries)}

    def task(self, index: int, tallies: Any = None) -> TaskSpec:
        """What the index-th group of the run plays.

        Args:
          index: >= 0.
          tallies: of the newest policy (`Tallies.to_json`); read where cfg.weight_by asks for it.
        Raises: PolicyError for tallies that are not this pool's.
        """
        if self.cfg.weight_by != "none":
            known = self.tallies(tallies)
            by_failure = self.cfg.weight_by == "failure"
            weights_e = known.failure_rates() if by_failure else known.variances()
            weights_e **= self.cfg.sharpness
            shares_e = self.cfg.min_share + (1.0 - self.cfg.min_share) * weights_e
            rng = np.random.default_rng([self._run_seed, index])
            entry = int(rng.choice(self.entries, p=shares_e / shares_e.sum()))
        elif self.cfg.instances:  # each once, in an order of its own, before any a second time
            epoch, place = divmod(index, self.entries)
            rng = np.random.default_rng([self._run_seed, epoch])
            entry = int(rng.permutation(self.entries)[place])
        else:
            entry = index % self.entries
        if self.cfg.instances:
            return self._instance(entry)
        seed = seeds.train_seed(self._run_seed, index)
        return dataclasses.replace(self._kinds[entry], seed=seed)

    def tallies(self, content: Any = None) -> Tallies:
        """Raises PolicyError for content that is not this pool's."""
        return Tallies(content, self.entries, self.cfg.window)

    def count(self, tallies: Tallies, group: Iterable[Trajectory]) -> None:
        """Adds how a group's episodes ended; tasks that are not in the pool are passed over."""
        outcomes: dict[int, list[bool]] = {}
        for record in group:
            key = record.task if self.cfg.instances else self._kind_key(record.task)
            if (entry := self._entry_of.get(key)) is not None:
                outcomes.setdefault(entry, []).append(record.success)
        for entry, successes in outcomes.items():
            tallies.add(entry, successes.count(False), len(successes))

    def describe(self, tallies: Tallies) -> Mapping[str, float]:
        """Metrics: the share of the pool that was played, and the mean rate of failure there."""
        played_e = tallies.played_e > 0
        failed, played = tallies.failed_e[played_e], tallies.played_e[played_e]
        return {
            "curriculum/played": float(played_e.mean()),
            "curriculum/failure_rate": float((failed / played).mean()) if len(played) else 0.0,
        }

    def _instance(self, entry: int) -> TaskSpec:
        kind = self._kinds[entry % len(self._kinds)]
        return dataclasses.replace(kind, seed=seeds.train_seed(self._run_seed, entry))

    @staticmethod
    def _kind_key(task: TaskSpec) -> TaskSpec:
        return dataclasses.replace(task, seed=0)
