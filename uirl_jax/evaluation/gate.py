"""Decides whether a policy may take the place of the last good one, and keeps the decisions.

    gate.json    {"good": {"version": 40, "rate": 0.91, ...}, "rejected": [{"version": 50, ...}],
                  "earlier": {"good": {"version": 30, ...}, "rejected": []}}

A policy is kept back if the lower bound of its success fell, or if it makes more mistakes that
nobody can take back. `roles.judge` evaluates and acts on it.
"""

import dataclasses
import json
from typing import Any, Literal, Self

from uirl_jax.errors import UirlError
from uirl_jax.evaluation.results import to_result
from uirl_jax.evaluation.statistics import EvalResult
from uirl_jax.store import Store

GATE_FILE = "gate.json"

Gate = Literal["none", "export", "actors"]


@dataclasses.dataclass(frozen=True)
class PublishConfig:
    """Which policies are kept back because an evaluation found them worse."""

    # From what: export: from best/ and tools.export; actors: from the actors too, which go on with
    # the last good policy. It needs evaluation.every.
    gate: Gate = "none"
    # How far the lower bound of the success may be below that of the last good policy, as a share.
    tolerance: float = dataclasses.field(default=0.0, metadata={"min": 0.0, "max": 1.0})
    # The run ends after so many policies in a row that were kept back; 0: it goes on.
    patience: int = dataclasses.field(default=0, metadata={"min": 0, "max": 1_000_000})


def objection(result: EvalResult, good: EvalResult | None, tolerance: float) -> str:
    """Why a policy may not take the place of the last good one; empty: it may.

    Args: good: None: there is no good one yet.
    """
    if result.attempts == 0:
        return "no episode of its evaluation ended"
    if good is None:
        return ""
    if result.low < good.low - tolerance:
        return (
            f"lower bound of its success {result.low:.3f} ({result.successes} of "
            f"{result.attempts}), the last good policy's {good.low:.3f} ({good.successes} of "
            f"{good.attempts})"
        )
    if result.mistakes > good.mistakes:
        return (
            f"{result.mistakes} mistakes that cannot be taken back, the last good policy's "
            f"{good.mistakes}"
        )
    return ""


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A policy that was kept back."""

    version: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Decisions:
    """All decisions of a run so far.

    Attributes:
      version: of the last good policy; -1: none was judged yet.
      rejected: the policies since then, in their order; earlier ones are forgotten.
      earlier: the decisions before the last good policy; their own earlier ones are forgotten. A
        policy is judged before its checkpoint is saved, so a killed run may go on before it.
    """

    version: int = -1
    good: EvalResult | None = None
    rejected: tuple[Rejected, ...] = ()
    earlier: Self | None = None

    def after(self, version: int, result: EvalResult, tolerance: float) -> Self:
        """With the decision on one more policy."""
        if reason := objection(result, self.good, tolerance):
            return dataclasses.replace(self, rejected=(*self.rejected, Rejected(version, reason)))
        earlier = dataclasses.replace(self, earlier=None) if self.good is not None else None
        return type(self)(version, result, earlier=earlier)

    def until(self, version: int) -> Self:
        """Without policies after this version, which a damaged checkpoint took back."""
        if self.version > version:
            return type(self)() if self.earlier is None else self.earlier.until(version)
        kept = tuple(each for each in self.rejected if each.version <= version)
        return dataclasses.replace(self, rejected=kept)


def read_decisions(store: Store) -> Decisions:
    """The decisions of a run; none if there is no file. Raises: UirlError: not such a file."""
    try:
        return _from_json(json.loads(store.read(GATE_FILE)))
    except FileNotFoundError:
        return Decisions()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UirlError(
            f"{store.location(GATE_FILE)}: not the decisions of a gate ({type(error).__name__}: "
            f"{error}); remove it: the next policy that is evaluated counts as good"
        ) from error


def write_decisions(store: Store, decisions: Decisions) -> None:
    """Args: decisions: with a good policy."""
    text = json.dumps(_to_json(decisions), indent=2, allow_nan=False)
    store.put(GATE_FILE, (text + "\n").encode())


def _from_json(content: Any) -> Decisions:
    good = dict(content["good"])
    version = good.pop("version")
    rejected = tuple(Rejected(**each) for each in content["rejected"])
    if type(version) is not int or any(type(each.version) is not int for each in rejected):
        raise ValueError("a version is not a whole number")
    earlier = content.get("earlier")
    return Decisions(
        version, to_result(good), rejected, None if earlier is None else _from_json(earlier)
    )


def _to_json(decisions: Decisions) -> dict[str, Any]:
    assert decisions.good is not None
    earlier = decisions.earlier
    return {
        "good": {"version": decisions.version, **dataclasses.asdict(decisions.good)},
        "rejected": [dataclasses.asdict(each) for each in decisions.rejected],
        **({} if earlier is None else {"earlier": _to_json(earlier)}),
    }
