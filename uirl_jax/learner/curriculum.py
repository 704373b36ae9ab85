"""Which task a group plays: kinds in turn, repeated instances, more of the tasks that fail.

The learner counts how episodes ended (`Tallies`, published with every policy); the actor asks for
the task of a group (`Curriculum.task`). The choice is deterministic: the same index and the same
tallies give the same task in any process. No JAX.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from uirl_jax import seeds
from uirl_jax.errors import PolicyError
from uirl_jax.metrics import metric_name
from uirl_jax.types import TaskSpec, Trajectory

_MAX_REWARD = 1e300  # of a sum
MAX_ENTRIES = 20_000  # in the pool; the tallies of all entries are part of the policy manifest


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """How the tasks of a run are drawn; held-out instances are never drawn (`seeds`)."""

    # Training instances of each kind; 0: every group gets a new instance.
    instances: int = dataclasses.field(default=0, metadata={"min": 0, "max": MAX_ENTRIES})
    # A task's share grows with its failure rate p, or with p (1 - p): a group in which all members
    # fail or all succeed gives no advantage (Foster et al., arXiv:2502.12272).
    weight_by: Literal["none", "failure", "variance"] = "none"
    # Exponent of the weights: at 8 a task that always fails is drawn four times as often as one
    # that fails four times of five (alpha of prioritized replay, arXiv:1511.05952, eq. 1).
    sharpness: float = dataclasses.field(default=1.0, metadata={"above": 0.0, "max": 100.0})
    # Share of a task of weight 0, relative to one of weight 1: solved tasks are still practised.
    min_share: float = dataclasses.field(default=0.1, metadata={"above": 0.0, "max": 1.0})
    # Episodes a rate is over.
    window: int = dataclasses.field(default=64, metadata={"min": 1, "max": 1_000_000})


class Tallies:
    """Episodes of each entry of the pool, recent ones weighted more.

    Attributes:
      failed_e, played_e: float64[entries], episodes.
      varied_e: float64[entries], the episodes of groups whose rewards differ.
      reward_e: float64[entries], the sum of the episodes' rewards.
    """

    def __init__(self, content: Any, entries: int, window: int) -> None:
        """Args: content: what `to_json` returned, or None. Raises: PolicyError if it is invalid."""
        self.failed_e = np.zeros(entries)
        self.played_e = np.zeros(entries)
        self.varied_e = np.zeros(entries)
        self.reward_e = np.zeros(entries)
        self._window = window
        try:
            for key, (failed, played, *others) in (content or {}).items():
                entry = int(key)
                if not 0 <= entry < entries:
                    raise IndexError(key)
                self.failed_e[entry], self.played_e[entry] = float(failed), float(played)
                # A run that began before these were counted: as if every group had varied, and as
                # if a success paid 1 and a failure nothing.
                unknown = [played, float(played) - float(failed)]
                others += unknown[len(others) :]
                self.varied_e[entry], self.reward_e[entry] = map(float, others)
        except (TypeError, ValueError, IndexError, AttributeError):
            self.failed_e[:] = np.nan
        with np.errstate(invalid="ignore"):
            valid = np.isfinite(self.played_e) & (self.failed_e >= 0)
            valid &= (self.failed_e <= self.played_e) & (self.varied_e >= 0)
            valid &= (self.varied_e <= self.played_e) & np.isfinite(self.reward_e)
        if not valid.all():
            raise PolicyError(
                f"the policy's tallies of tasks are {str(content)[:80]}, expected "
                f"failed, played and varied episodes, and rewards, of up to {entries} tasks; does "
                "the learner use another config?"
            )

    def add(self, entry: int, failed: int, played: int, varied: int, reward: float) -> None:
        """Adds a group's episodes and the sum of their rewards.

        Older counts fade, so that they sum to at most `window` episodes.
        """
        total = self.played_e[entry] + played
        fade = min(1.0, self._window / total) if total else 1.0
        # Rounded here, so that a run restored from the JSON draws the same tasks as this one.
        self.failed_e[entry] = round(fade * (self.failed_e[entry] + failed), 3)
        self.played_e[entry] = round(fade * total, 3)
        self.varied_e[entry] = round(fade * (self.varied_e[entry] + varied), 3)
        # As it is: it draws no task. A sum of large rewards stays a number that JSON has.
        total_reward = fade * (float(self.reward_e[entry]) + reward)
        self.reward_e[entry] = np.clip(total_reward, -_MAX_REWARD, _MAX_REWARD)

    def failure_rates(self) -> np.ndarray:
        """float64[entries] in (0, 1]; 1 for a task that was never played."""
        return (self.failed_e + 1.0) / (self.played_e + 1.0)

    def variances(self) -> np.ndarray:
        """float64[entries] in (0, 1]: 4 p (1 - p), so 1 where half fail, and for unplayed tasks."""
        rates_e = (self.failed_e + 1.0) / (self.played_e + 2.0)
        return 4.0 * rates_e * (1.0 - rates_e)

    def to_json(self) -> dict[str, list[float]]:
        return {
            str(entry): [float(count) for count in counts]
            for entry, counts in enumerate(
                zip(self.failed_e, self.played_e, self.varied_e, self.reward_e, strict=True)
            )
            if counts[1]
        }


class Curriculum:
    """The pool of a run's tasks: its kinds, or `instances` of each kind."""

    def __init__(self, cfg: CurriculumConfig, kinds: Sequence[TaskSpec], run_seed: int) -> None:
        self.cfg, self._kinds, self._run_seed = cfg, tuple(kinds), run_seed
        self.entries = len(kinds) * max(cfg.instances, 1)
        self._entry_of = {self._kind_key(kind): number for number, kind in enumerate(kinds)}
        if cfg.instances:
            self._entry_of = {self._instance(e): e for e in range(self.entries)}

    def task(self, index: int, tallies: Any = None) -> TaskSpec:
        """The task of the index-th group of the run.

        Args:
          index: >= 0.
          tallies: of the newest policy (`Tallies.to_json`); used unless cfg.weight_by is "none".
        Raises: PolicyError for tallies that do not fit this pool.
        """
        if self.cfg.weight_by != "none":
            known = self.tallies(tallies)
            by_failure = self.cfg.weight_by == "failure"
            weights_e = known.failure_rates() if by_failure else known.variances()
            weights_e **= self.cfg.sharpness
            shares_e = self.cfg.min_share + (1.0 - self.cfg.min_share) * weights_e
            rng = np.random.default_rng([self._run_seed, index])
            entry = int(rng.choice(self.entries, p=shares_e / shares_e.sum()))
        elif self.cfg.instances:  # each entry once per epoch, every epoch in another order
            epoch, position = divmod(index, self.entries)
            rng = np.random.default_rng([self._run_seed, epoch])
            entry = int(rng.permutation(self.entries)[position])
        else:
            entry = index % self.entries
        if self.cfg.instances:
            return self._instance(entry)
        seed = seeds.train_seed(self._run_seed, index)
        return dataclasses.replace(self._kinds[entry], seed=seed)

    def tallies(self, content: Any = None) -> Tallies:
        """Tallies of this pool from JSON. Raises: PolicyError for content that does not fit."""
        return Tallies(content, self.entries, self.cfg.window)

    def count(self, tallies: Tallies, group: Iterable[Trajectory]) -> None:
        """Adds how a group's episodes ended; tasks that are not in the pool are ignored."""
        members: dict[int, list[Trajectory]] = {}
        for record in group:
            key = record.task if self.cfg.instances else self._kind_key(record.task)
            if (entry := self._entry_of.get(key)) is not None:
                members.setdefault(entry, []).append(record)
        for entry, records in members.items():
            failed, played = sum(not record.success for record in records), len(records)
            rewards = [record.reward for record in records]
            varied = played if len(set(rewards)) > 1 else 0
            tallies.add(entry, failed, played, varied, sum(rewards))

    @functools.cached_property
    def pool(self) -> str:
        """Tells this pool from others: tallies count its entries by their places."""
        kinds = [dataclasses.astuple(self._kind_key(kind)) for kind in self._kinds]
        instances = (self.cfg.instances, self._run_seed if self.cfg.instances else 0)
        content = json.dumps([kinds, instances]).encode()
        return hashlib.blake2b(content, digest_size=8).hexdigest()

    def describe(self, tallies: Tallies) -> Mapping[str, float]:
        """Metrics: the played share of the pool, its mean failure rate, and of several kinds each.

        `task/<task>/success`, `/reward` and `/signal` are over the latest `window` episodes of each
        of its entries: share of episodes, mean, and share of groups whose rewards differ.
        """
        played_e = tallies.played_e > 0
        failed, played = tallies.failed_e[played_e], tallies.played_e[played_e]
        return {
            "curriculum/played": float(played_e.mean()),
            "curriculum/failure_rate": float((failed / played).mean()) if len(played) else 0.0,
            **(self._describe_kinds(tallies) if len(self._kinds) > 1 else {}),
        }

    def _describe_kinds(self, tallies: Tallies) -> dict[str, float]:
        counts_4e = np.stack(
            [tallies.played_e, tallies.failed_e, tallies.varied_e, tallies.reward_e]
        )
        totals: dict[str, np.ndarray] = {}  # of equal names together: kinds may differ in max_turns
        for number, kind in enumerate(self._kinds):
            name = metric_name("task", kind.label)
            of_kind_4 = counts_4e[:, number :: len(self._kinds)].sum(1)
            totals[name] = totals.get(name, np.zeros(4)) + of_kind_4
        metrics = {}
        for name, (played, failed, varied, reward) in totals.items():
            if played:
                metrics[f"{name}/success"] = 1.0 - float(failed / played)
                metrics[f"{name}/reward"] = float(reward / played)
                metrics[f"{name}/signal"] = float(varied / played)
        return metrics

    def _instance(self, entry: int) -> TaskSpec:
        kind = self._kinds[entry % len(self._kinds)]
        return dataclasses.replace(kind, seed=seeds.train_seed(self._run_seed, entry))

    @staticmethod
    def _kind_key(task: TaskSpec) -> TaskSpec:
        return dataclasses.replace(task, seed=0)
