"""Scores recorded episodes by another rule: what would have been a success, and what no longer is.

    python -m tools.score_again runs/entry --variant=wrong=0,duplicate=0
    python -m tools.score_again runs/entry --rule=examples.own_code.rules:first_rows --json=new
    python -m tools.score_again runs/recorded --rewards=gaussian=1,type=0.1

The progress after every turn is in the record, so nothing is played again. A rule may end an
episode earlier than it ended; it cannot make it longer. `--variant` changes values of the built-in
rule of simple_data_entry (uirl_jax/verifiers/client/rules.py), `--rule` names a function of your
own (docs/own_code.md), `--rewards` gives weights to the rules of recorded tasks (docs/recorded.md).
Paths are shards or directories with shards.
"""

import argparse
import collections
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tools import command_line
from tools.inspect_shards import find_shards_of_policies
from uirl_jax import user_code
from uirl_jax.errors import ConfigError, ShardError, VerifierError
from uirl_jax.evaluation import outcome_of
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import Judgement, Rule, StopReason, TaskSpec, Trajectory
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.client import rules
from uirl_jax.verifiers.recorded.rewards import read_weights, weighted_rule

FindRule = Callable[[TaskSpec], Rule]
_SHOWN = 20  # flips that are printed


@dataclasses.dataclass(frozen=True)
class Again:
    """One episode by both rules."""

    episode_id: str
    task: str
    seed: int
    success: tuple[bool, bool]  # as recorded, and by the other rule
    reward: tuple[float, float]
    turns: tuple[int, int]
    wrong_submissions: int
    duplicate_submissions: int
    claimed: bool  # the policy ended it as a success

    @property
    def flips(self) -> bool:
        return self.success[0] != self.success[1]


def changed_variant(variant: str, changes: str) -> str:
    """A variant with some of its values replaced: ("rows=2-5,count=1", "count=2")."""
    pairs = (part.partition("=") for part in f"{variant},{changes}".split(",") if part.strip())
    values = {key.strip(): value.strip() for key, _, value in pairs}
    return ",".join(f"{key}={value}" for key, value in values.items())


def rule_finder(reference: str, changes: str, weights: str = "") -> FindRule:
    """Raises: ConfigError: not exactly one of them is given, or there is no such function."""
    if sum(map(bool, (reference, changes, weights))) != 1:
        raise ConfigError("give one of --rule, --variant and --rewards")
    if weights:
        weighted = weighted_rule(read_weights(weights))
        return lambda task: weighted
    if changes:
        return lambda task: rules.find_rule(
            dataclasses.replace(task, variant=changed_variant(task.variant, changes))
        )
    function = user_code.load(reference, "--rule")
    return lambda task: rules.own_rule(task, reference, function)


def judge(trajectory: Trajectory, rule: Rule) -> tuple[Judgement, int]:
    """Of the first turn after which the rule ends the episode, else of the last; and its number.

    An invalid action forfeits what the turns before it were paid, as in the run (actor.rollout).

    Raises: VerifierError: the rule cannot judge what was recorded.
    """
    turns = len(trajectory.turns)
    judgement = Judgement(False, 0.0, False)
    for number, turn in enumerate(trajectory.turns, start=1):
        before, judgement = judgement, rule.judge(turn.progress, number)
        if number == turns and trajectory.stop_reason is StopReason.FORMAT_ERROR:
            return Judgement(False, min(0.0, before.reward), False), number
        if judgement.done:
            return judgement, number
    return judgement, turns


def score_again(
    trajectories: Iterable[Trajectory], find_rule: FindRule, not_judged: collections.Counter[str]
) -> Iterator[Again]:
    """Each episode by both rules.

    Args: not_judged: counts the reasons of episodes that the rule cannot judge.
    """
    for one in trajectories:
        try:
            judgement, turns = judge(one, find_rule(one.task))
        except VerifierError as error:
            not_judged[printable(str(error), 200)] += 1
            continue
        outcome = outcome_of(one)
        yield Again(
            one.episode_id,
            one.task.name,
            one.task.seed,
            (one.success, judgement.done and judgement.success),
            (one.reward, judgement.reward),
            (len(one.turns), turns),
            outcome.wrong_submissions,
            outcome.duplicate_submissions,
            outcome.claims_success,
        )


def _read(paths: Sequence[Path]) -> Iterator[Trajectory]:
    """Every episode once, though it may be in two shards."""
    seen: set[str] = set()
    for path in paths:
        try:
            trajectories = read_shard(path)[1]
        except ShardError as error:
            print(f"passed over: {error}", file=sys.stderr)
            continue
        for one in trajectories:
            if one.episode_id not in seen:
                seen.add(one.episode_id)
                yield one


def report(found: Sequence[Again], not_judged: collections.Counter[str]) -> str:
    """In words."""
    lines = []
    if found:
        flips = [one for one in found if one.flips]
        gained = sum(one.success[1] for one in flips)
        count, rewards = len(found), list(zip(*(one.reward for one in found), strict=True))
        successes = [sum(one.success[which] for one in found) for which in (0, 1)]
        lines = [
            f"{count} episodes: {successes[0]} successes as recorded, {successes[1]} by the other "
            f"rule ({gained} gained, {len(flips) - gained} lost)",
            f"mean reward {sum(rewards[0]) / count:.3f} as recorded, {sum(rewards[1]) / count:.3f} "
            "by the other rule",
            f"{sum(one.wrong_submissions for one in found)} wrong and "
            f"{sum(one.duplicate_submissions for one in found)} repeated submissions; "
            f"{sum(one.claimed and not one.success[1] for one in found)} claimed a success that "
            "the other rule does not see",
        ]
        lines += [
            f"  {one.episode_id}: {'lost' if one.success[0] else 'gained'}, reward "
            f"{one.reward[0]:.3f} to {one.reward[1]:.3f}, {printable(one.task)} seed {one.seed}"
            for one in flips[:_SHOWN]
        ]
        if len(flips) > _SHOWN:
            lines.append(f"  and {len(flips) - _SHOWN} more; --json has all")
    lines += [f"{count} not judged: {reason}" for reason, count in not_judged.most_common()]
    return "\n".join(lines)


@command_line.one_line_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.score_again",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", type=Path, help="a shard, or a directory with shards")
    parser.add_argument("--rule", default="", help="module:function of TaskSpec -> types.Rule")
    parser.add_argument("--variant", default="", help="values of the built-in rule, as wrong=0.5")
    parser.add_argument("--rewards", default="", help="weights of recorded tasks, as type=0.2")
    parser.add_argument("--json", type=Path, help="a file for a line about every episode")
    args = parser.parse_args(argv)
    not_judged: collections.Counter[str] = collections.Counter()
    command_line.check_file("--json", args.json)
    find_rule = rule_finder(args.rule, args.variant, args.rewards)
    trajectories = _read(find_shards_of_policies(args.path))
    found = list(score_again(trajectories, find_rule, not_judged))
    if args.json:
        text = "".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in found)
        command_line.write_text(args.json, text)
    print(report(found, not_judged))
    return 0


if __name__ == "__main__":
    sys.exit(main())
