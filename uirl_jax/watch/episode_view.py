"""What the viewer's templates show of one episode, and of what it can be compared with.

Turns a record into frames, tokens and texts that are safe to show; the templates escape them. Reads
no file and knows no HTTP: `viewer` has the records.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from uirl_jax.types import Action, Trajectory, Turn
from uirl_jax.watch import frames
from uirl_jax.watch.charts import format_value
from uirl_jax.watch.episode_index import EpisodeIndex, Row
from uirl_jax.watch.frames import visible
from uirl_jax.watch.tokens import MAX_TOKENS, Advantages, Token, TokenTexts, tokens_of

TURNS_A_PAGE = 50
MAX_TURN_CHARS = 20_000
MAX_PROGRESS_CHARS = 4_000
MAX_CHOICES = 24  # of each kind of episode to compare with


@dataclasses.dataclass(frozen=True)
class TurnView:
    """Attributes:
    tokens: empty: the turn's text is shown in one piece.
    more_tokens: how many are not shown.
    """

    frame: frames.Frame
    action: str
    tokens: Sequence[Token]
    more_tokens: int
    mean_logprob: str
    reward: str
    progress: str
    versions: str


@dataclasses.dataclass(frozen=True)
class EpisodeView:
    row: Row
    key: str
    title: str  # the task
    instruction: str
    outcome: str
    good: bool
    facts: Mapping[str, str]
    turns: Sequence[TurnView]
    first: int  # number of the first turn shown
    count: int  # of all turns
    has_tokens: bool  # whether texts of single tokens are shown
    advantages: str  # how they were computed, or why they are unknown


@dataclasses.dataclass(frozen=True)
class Choice:
    """An episode to compare with, or a member of a group."""

    key: str
    text: str
    good: bool
    is_this: bool


def episode_view(
    row: Row,
    trajectory: Trajectory,
    advantages: Advantages,
    texts: TokenTexts,
    *,
    version: int | None,
    first: int = 1,
) -> EpisodeView:
    """Args:
    version: of the current policy; None: unknown.
    first: number of the first turn shown, of at most TURNS_A_PAGE.
    """
    lengths = [len(turn.token_ids) for turn in trajectory.turns]
    turns = []
    has_tokens = False
    for number, turn in enumerate(trajectory.turns, start=1):
        if not first <= number < first + TURNS_A_PAGE:
            continue
        start = sum(lengths[: number - 1])
        advantages_s = advantages.tokens_s
        if advantages_s is not None:
            advantages_s = advantages_s[start : start + lengths[number - 1]]
        pieces = texts.of_turn(turn)
        has_tokens |= pieces is not None
        address = f"/episode/{row.key}/screen/{number}"
        turns.append(_turn_view(number, turn, trajectory, address, pieces, advantages_s))
    summary = row.summary
    return EpisodeView(
        row=row,
        key=row.key,
        title=f"{summary.task} ({summary.variant})" if summary.variant else summary.task,
        instruction=visible(trajectory.instruction, MAX_TURN_CHARS),
        outcome=frames.outcome_text(trajectory.success, trajectory.stop_reason),
        good=trajectory.success,
        facts=_facts(row, trajectory, version),
        turns=turns,
        first=first,
        count=len(trajectory.turns),
        has_tokens=has_tokens,
        advantages=advantages.why,
    )


def _facts(row: Row, trajectory: Trajectory, version: int | None) -> dict[str, str]:
    summary = row.summary
    facts = {
        "reward": format_value(summary.reward),
        "policy version": versions_text(summary.lowest_version, summary.highest_version),
        "seed": str(summary.seed),
        "turns": str(summary.turns),
        "tokens": str(sum(len(turn.token_ids) for turn in trajectory.turns)),
        "seconds": format_value(trajectory.duration_s),
        "played in": row.place,
        "actor": summary.actor_id or "-",
        "group": summary.group_id,
        "episode": summary.episode_id,
        "shard": row.shard.name,
    }
    if version is not None and summary.lowest_version >= 0:
        behind = version - summary.lowest_version
        facts["behind the current policy"] = f"{behind} version{'' if behind == 1 else 's'}"
    if trajectory.renderer:
        facts["renderer"] = trajectory.renderer
    return {name: visible(text) for name, text in facts.items()}


def _turn_view(
    number: int,
    turn: Turn,
    trajectory: Trajectory,
    address: str,
    pieces: list[str] | None,
    advantages_s: Any,
) -> TurnView:
    versions = turn.policy_versions
    return TurnView(
        frame=frames.frame(
            number,
            turn,
            trajectory,
            address=lambda data, picture: address,
            max_text_chars=MAX_TURN_CHARS,
        ),
        action=visible(action_text(turn.action)),
        tokens=tokens_of(turn, pieces, advantages_s),
        more_tokens=max(0, len(turn.token_ids) - MAX_TOKENS),
        mean_logprob=format_value(float(turn.logprobs.mean())),
        reward=format_value(turn.reward),
        progress=visible(
            json.dumps(turn.progress, indent=1, ensure_ascii=False), MAX_PROGRESS_CHARS
        )
        if turn.progress
        else "",
        versions=versions_text(int(versions.min()), int(versions.max())),
    )


def action_text(action: Action | None) -> str:
    """`click x=30 y=40`: the fields that an action has."""
    if action is None:
        return "none"
    fields = dataclasses.asdict(action)
    kind = fields.pop("kind")
    shown = [
        f"{name}={json.dumps(value, ensure_ascii=False)}"
        for name, value in fields.items()
        if value is not None
    ]
    return " ".join((kind, *shown))


def versions_text(lowest: int, highest: int) -> str:
    if lowest < 0:
        return "not sampled by a policy"
    return str(lowest) if lowest == highest else f"{lowest} to {highest}"


def choices(index: EpisodeIndex, row: Row) -> dict[str, list[Choice]]:
    """Episodes to compare with, by how they are related; empty lists are left out."""
    group = [other for other in index.group_of(row) if other is not row]
    # First those that ended otherwise: they are why a group has a signal.
    group.sort(key=lambda other: other.summary.success == row.summary.success)
    same = [other for other in index.instance_of(row) if other is not row and other not in group]
    taken = {other.key for other in (row, *group, *same)}
    task = [other for other in index.versions_of(row) if other.key not in taken]
    by_relation = {
        "the same group": (group, _group_text),
        "the same instance": (same, _instance_text),
        "the same task at another version": (task, _instance_text),
    }
    return {
        name: [_choice(other, row, text) for other in found[:MAX_CHOICES]]
        for name, (found, text) in by_relation.items()
        if found
    }


def members(index: EpisodeIndex, row: Row) -> list[Choice]:
    return [_choice(other, row, _group_text) for other in index.group_of(row)[:MAX_CHOICES]]


def _choice(other: Row, row: Row, text: Callable[[Row], str]) -> Choice:
    return Choice(other.key, visible(text(other)), other.summary.success, other is row)


def _group_text(row: Row) -> str:
    outcome = frames.outcome_text(row.summary.success, row.summary.stop_reason)
    return f"{outcome}, reward {format_value(row.summary.reward)}"


def _instance_text(row: Row) -> str:
    version = versions_text(row.summary.lowest_version, row.summary.highest_version)
    return f"version {version}, {row.place}, seed {row.summary.seed}: {_group_text(row)}"
