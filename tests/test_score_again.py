"""Recorded episodes by another rule: the built-in one with other costs, and one of the user's."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.sample_trajectories import LAYOUT, make_trajectory
from tools import score_again
from uirl_jax.shards.writer import write_shard
from uirl_jax.types import Action, Judgement, Rule, TaskSpec
from uirl_jax.verifiers.client.rules import find_rule

TASK = TaskSpec("simple_data_entry", 5, "rows=2-2,count=1,wrong=1", 12)  # row 2 is index 0


def episode(name: str, *progress: tuple[list[int], int], claims: bool = False, task=TASK):
    """An episode whose rows and wrong submissions after each turn are given, judged as recorded."""
    rule = find_rule(TASK)
    made = make_trajectory(name, versions=(0,) * len(progress))
    counts = [
        {"submitted_row_indices": rows, "num_incorrect_submissions": wrong}
        for rows, wrong in progress
    ]
    last = Action("terminate", text="success") if claims else Action("click", x=1, y=1)
    turns = [
        dataclasses.replace(turn, progress=dict(one), action=last, error="")
        for turn, one in zip(made.turns, counts, strict=True)
    ]
    judgement = rule.judge(counts[-1], len(turns))
    return dataclasses.replace(
        made,
        task=task,
        turns=tuple(turns),
        success=judgement.success,
        reward=judgement.reward,
    )


EPISODES = [
    episode("right", ([], 0), ([0], 0)),
    episode("wrong_first", ([], 2), ([0], 2)),
    episode("twice", ([0, 0], 0), claims=True),
    episode("nothing", ([], 0), claims=True),
    episode("other", ([], 0), task=dataclasses.replace(TASK, name="desktop/click_button")),
]


@pytest.fixture
def shards(tmp_path) -> Path:
    path = tmp_path / "shards" / "a0.tfrecord"
    path.parent.mkdir()
    write_shard(path, EPISODES, base_hash="b", layout=LAYOUT)
    return path.parent


def test_other_costs_change_rewards_and_say_what_is_not_judged(shards, tmp_path, capsys):
    file = tmp_path / "again.json"
    command = [str(shards), "--variant=wrong=0.1,duplicate=0", f"--json={file}"]
    assert score_again.main(command) == 0
    printed = capsys.readouterr().out
    assert "4 episodes: 1 successes as recorded, 1 by the other rule (0 gained, 0 lost)" in printed
    assert "2 wrong and 1 repeated submissions; 2 claimed a success" in printed
    assert "1 not judged: task 'desktop/click_button'" in printed
    rewards = {
        row["episode_id"]: row["reward"] for row in map(json.loads, file.read_text().splitlines())
    }
    # By hand: 1 - 2 x 1 as recorded, 1 - 2 x 0.1 by the other; 1 - 0.25 and 1 for the duplicate.
    assert rewards["wrong_first"] == pytest.approx([-1.0, 0.8])
    assert rewards["twice"] == pytest.approx([0.75, 1.0])


def test_run_is_scored_without_its_demonstrations_and_each_episode_once(tmp_path, capsys):
    for name in ("shards/a0", "kept", "cold_start/demonstrations", "quarantine"):
        path = tmp_path / name / "one.tfrecord"
        path.parent.mkdir(parents=True)
        trajectories = EPISODES[:1] if name in ("shards/a0", "kept") else EPISODES[1:3]
        write_shard(path, trajectories, base_hash="b", layout=LAYOUT)
    assert score_again.main([str(tmp_path), "--variant=wrong=0.1"]) == 0
    assert "1 episodes: 1 successes as recorded" in capsys.readouterr().out
    assert score_again.main([str(tmp_path / "cold_start"), "--variant=wrong=0.1"]) == 0
    assert "2 episodes: " in capsys.readouterr().out


def any_submission(task: TaskSpec) -> Rule:
    def judge(progress, turns):
        return Judgement(len(progress["submitted_row_indices"]) > 0, 1.0, True)

    return Rule("", judge)


def test_own_rule_flips_and_may_end_an_episode_earlier(shards, capsys):
    assert score_again.main([str(shards), "--rule=tests.test_score_again:any_submission"]) == 0
    printed = capsys.readouterr().out
    assert "5 episodes: 1 successes as recorded, 3 by the other rule (2 gained, 0 lost)" in printed
    assert "twice: gained, reward 0.750 to 1.000" in printed
    early = episode("early", ([0], 0), ([0, 0], 0))
    judgement, turns = score_again.judge(early, any_submission(TASK))
    assert judgement.success and turns == 1


def test_variant_replaces_values_and_keeps_the_others():
    assert score_again.changed_variant("rows=2-5, count=1", "count=2,turn=0.1") == (
        "rows=2-5,count=2,turn=0.1"
    )
    assert score_again.changed_variant("", "wrong=0") == "wrong=0"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "give one of --rule, --variant and --rewards"),
        (["--rule=a:b", "--variant=wrong=0"], "give one of --rule, --variant and --rewards"),
        (["--rule=tests.test_score_again:nothing"], "has no such name"),
        (["--rule=nowhere"], "expected 'module:name'"),
    ],
)
def test_what_cannot_be_scored_is_one_line(shards, capsys, flags, said):
    assert score_again.main([str(shards), *flags]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_value_of_no_rule_is_told_for_every_episode(shards, capsys):
    assert score_again.main([str(shards), "--variant=colour=red"]) == 0
    assert "4 not judged" in capsys.readouterr().out
