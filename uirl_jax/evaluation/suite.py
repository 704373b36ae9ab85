"""Which instances an evaluation plays: the content of a tasks.json (`config.suites` reads it).

    {
      "name": "buttons",
      "tasks": [
        {"name": "desktop/click_button", "instances": 100},
        {"name": "desktop/enter_text", "variant": "words=2", "max_turns": 6, "seeds": [7, 8]}
      ],
      "attempts": 4,
      "temperature": 1.0
    }

`instances` are held-out ones, the same for every run (`seeds.eval_seed`), or with `on_tuning` those
of `seeds.tune_seed`; `seeds` names instances one by one.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Self

from uirl_jax.engine.requests import MIN_TEMPERATURE
from uirl_jax.errors import ConfigError
from uirl_jax.seeds import EVAL_SEEDS, TUNE_SEEDS, eval_seed, tune_seed
from uirl_jax.types import TaskSpec

MAX_EPISODES = 100_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MAX_SEED = TUNE_SEEDS.stop - 1


@dataclasses.dataclass(frozen=True)
class SuiteTask:
    """One kind of task, and its instances."""

    name: str
    variant: str = ""
    max_turns: int = dataclasses.field(default=1, metadata={"min": 1, "max": 10_000})
    instances: int = dataclasses.field(default=0, metadata={"min": 0, "max": MAX_EPISODES})
    first: int = dataclasses.field(default=0, metadata={"min": 0, "max": len(EVAL_SEEDS) - 1})
    seeds: tuple[int, ...] = dataclasses.field(default=(), metadata={"min": 0, "max": _MAX_SEED})

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("name is empty, expected a task such as 'desktop/click_button'")
        if bool(self.instances) == bool(self.seeds):
            raise ConfigError(
                "expected either instances (held-out ones, counted) or seeds (a list), "
                f"got {'both' if self.seeds else 'neither'}"
            )
        if self.first and self.seeds:
            raise ConfigError("first goes with instances, not with seeds")
        if self.first + self.instances > len(EVAL_SEEDS):
            raise ConfigError(f"first + instances: at most {len(EVAL_SEEDS)}")
        for seed, times in collections.Counter(self.seeds).most_common(1):
            if times > 1:
                raise ConfigError(f"seeds: {seed} is there more than once; use attempts")

    @property
    def specs(self) -> list[TaskSpec]:
        held_out = (eval_seed(self.first + index) for index in range(self.instances))
        return [
            TaskSpec(self.name, seed, self.variant, self.max_turns)
            for seed in self.seeds or held_out
        ]


@dataclasses.dataclass(frozen=True)
class Suite:
    """The content of a tasks.json.

    Attributes:
      attempts: episodes of every instance.
      temperature: 0 takes the likeliest token.
    """

    name: str
    tasks: tuple[SuiteTask, ...]
    attempts: int = dataclasses.field(default=1, metadata={"min": 1, "max": 1000})
    temperature: float = dataclasses.field(default=0.0, metadata={"min": 0.0, "max": 100.0})

    def __post_init__(self) -> None:
        faults = []
        if not _NAME.fullmatch(self.name):
            faults.append(
                f"name={self.name[:80]!r}, expected 1 to 64 of A-Z a-z 0-9 _ . -, for a file name"
            )
        if not self.tasks:
            faults.append("tasks is empty, expected at least one")
        episodes = self.attempts * sum(task.instances or len(task.seeds) for task in self.tasks)
        if episodes > MAX_EPISODES:
            faults.append(f"{episodes} episodes, expected at most {MAX_EPISODES}")
        elif self.tasks:
            ((spec, times),) = collections.Counter(self.specs).most_common(1)
            if times > 1:
                faults.append(
                    f"tasks: {spec.name!r} with variant {spec.variant!r} and seed {spec.seed} is "
                    "there more than once; use attempts"
                )
        if self.attempts > 1 and self.temperature == 0:
            faults.append(
                f"attempts={self.attempts} with temperature=0 would play the same episode "
                "again; set a temperature such as 1.0"
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            faults.append(
                f"temperature={self.temperature:g}, expected 0 (greedy) or at least "
                f"{MIN_TEMPERATURE:g}"
            )
        if faults:
            raise ConfigError("; ".join(faults))

    def on_tuning(self) -> Self:
        """The suite <name>-tuning: for held-out instances as many tuning ones.

        Raises: ConfigError: its name would be too long.
        """
        tasks = [
            dataclasses.replace(
                task,
                instances=0,
                first=0,
                seeds=tuple(tune_seed(task.first + index) for index in range(task.instances)),
            )
            if task.instances
            else task
            for task in self.tasks
        ]
        return dataclasses.replace(self, name=f"{self.name}-tuning", tasks=tuple(tasks))

    def only(self, specs: Collection[TaskSpec]) -> Self:
        """The suite with these of its instances."""
        kept, tasks = set(specs), []
        for task in self.tasks:
            seeds = tuple(spec.seed for spec in task.specs if spec in kept)
            if len(seeds) == len(task.specs):
                tasks.append(task)
            elif seeds:
                tasks.append(dataclasses.replace(task, instances=0, first=0, seeds=seeds))
        return dataclasses.replace(self, tasks=tuple(tasks))

    @property
    def specs(self) -> list[TaskSpec]:
        """The instances, each once."""
        return [spec for task in self.tasks for spec in task.specs]


def distinct(
    specs: Iterable[TaskSpec], shown_by: Callable[[TaskSpec], Hashable | None]
) -> list[TaskSpec]:
    """The instances without those that would play what an earlier one plays.

    A recorded set has so many rows; its seeds go through them again and again, and an interval that
    counted a row twice would be too narrow.

    Args: shown_by: equal for two instances of a task that are the same; None: it is like no other.
    """
    kept = []
    seen: set[Hashable] = set()
    for spec in specs:
        shown = shown_by(spec)
        key = (spec.name, spec.variant, spec.max_turns, shown)
        if shown is None or key not in seen:
            seen.add(key)
            kept.append(spec)
    return kept
