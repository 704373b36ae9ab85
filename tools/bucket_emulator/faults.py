"""Faults of the emulated service: drawn from a seed, one draw a request."""

import dataclasses
import random
from typing import Literal

Kind = Literal["none", "429", "500", "503", "412", "lost", "hang", "slow"]


@dataclasses.dataclass(frozen=True)
class Faults:
    """Probability of each fault per request.

    Attributes:
        too_many, internal, unavailable: 429, 500 and 503, before anything is done.
        false_conflict: 412 to a conditional write that would have succeeded; nothing is written.
        lost_answer: a write is done, and its answer lost: every second time as a 503, else the
            connection breaks.
        hang: nothing is done, and the connection says nothing for `hang_s`, then breaks.
        slow_body: a read's body arrives in pieces over `slow_s`, and is cut every second time.
    """

    too_many: float = 0.0
    internal: float = 0.0
    unavailable: float = 0.0
    false_conflict: float = 0.0
    lost_answer: float = 0.0
    hang: float = 0.0
    slow_body: float = 0.0
    hang_s: float = 30.0
    slow_s: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "too_many",
            "internal",
            "unavailable",
            "false_conflict",
            "lost_answer",
            "hang",
            "slow_body",
        ):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)!r}, expected 0 to 1")


HARD = Faults(
    too_many=0.02,
    internal=0.02,
    unavailable=0.02,
    false_conflict=0.02,
    lost_answer=0.04,
    hang=0.002,
    slow_body=0.02,
    hang_s=20.0,
    slow_s=0.2,
)


class Draws:
    """The faults of one emulator, in the order of its requests."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._random = random.Random(faults.seed)
        self.injected: dict[str, int] = {}

    def draw(self, *, writes: bool, conditional: bool, reads: bool) -> Kind:
        """Args: what kind of request it is: others cannot have every fault."""
        faults = self.faults
        table: list[tuple[Kind, float]] = [
            ("429", faults.too_many),
            ("500", faults.internal),
            ("503", faults.unavailable),
            ("hang", faults.hang),
            ("412", faults.false_conflict if conditional and writes else 0.0),
            ("lost", faults.lost_answer if writes else 0.0),
            ("slow", faults.slow_body if reads else 0.0),
        ]
        at = self._random.random()
        for kind, probability in table:
            if at < probability:
                self.injected[kind] = self.injected.get(kind, 0) + 1
                return kind
            at -= probability
        return "none"

    def coin(self) -> bool:
        return self._random.random() < 0.5
