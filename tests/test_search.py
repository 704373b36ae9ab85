"""Search by replay: branches of failed episodes, and the command that keeps successes."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from tests import actor_world as world
from tests.command_world import ROOT, SHIPPED_MODEL
from tests.sample_trajectories import LAYOUT, make_trajectory
from tests.test_rollout import TEXT, demonstrator
from tools import search_folder
from uirl_jax.actor.rollout import RolloutConfig, RolloutSetup, run_episode
from uirl_jax.actor.search import Found, SearchConfig, branch, search, surprise
from uirl_jax.errors import ConfigError
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.table import family_of
from uirl_jax.learner import recorded_demonstrations
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import StopReason


def play(engine, task=TEXT, repeat=()):
    async def run():
        async with contextlib.AsyncExitStack() as stack:
            url = await stack.enter_async_context(world.verifier())
            client = await stack.enter_async_context(world.client(url))
            setup = RolloutSetup(client, engine, world.chat(), world.inputs(), RolloutConfig())
            return await run_episode(task, setup, seed=1, group_id="g", repeat=repeat)

    return asyncio.run(run())


def failing(turns: int):
    """The demonstrator for some turns, then nonsense."""
    say = demonstrator(TEXT)
    return lambda turn: say(turn) if turn < turns else "nonsense"


def test_repeated_turns_cost_no_sampling_and_lead_to_the_same_screens():
    failure = play(world.ScriptedEngine(failing(2)))
    assert failure.stop_reason is StopReason.FORMAT_ERROR and len(failure.turns) == 3
    whole = demonstrator(TEXT)
    texts = [whole(turn) for turn in range(8)]
    engine = world.ScriptedEngine(lambda turn: texts[2 + turn], version=7)
    success = play(engine, repeat=failure.turns[:2])
    assert success.stop_reason is StopReason.COMPLETED
    assert len(engine.requests) == len(success.turns) - 2
    for before, after in zip(failure.turns[:2], success.turns, strict=False):
        assert before.action == after.action and before.progress == after.progress
        for name in ("context_ids", "token_ids", "logprobs", "full_logprobs", "policy_versions"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
        assert before.image_keys == after.image_keys
    np.testing.assert_array_equal(success.turns[2].context_ids, failure.turns[2].context_ids)
    assert success.policy_versions == (3, 7)
    assert success.images.keys() >= failure.images.keys()


def test_other_screen_ends_the_repetition():
    failure = play(world.ScriptedEngine(failing(2)))
    other = dataclasses.replace(TEXT, seed=TEXT.seed + 1)
    engine = world.ScriptedEngine(demonstrator(other))
    success = play(engine, other, repeat=failure.turns)
    assert success.stop_reason is StopReason.COMPLETED
    assert len(engine.requests) == len(success.turns)


def test_branches_begin_where_the_policy_was_unsure():
    failure = play(world.ScriptedEngine(failing(2)))

    def with_logprob(turn, nats):
        logprobs = np.full(len(turn.token_ids), -nats / len(turn.token_ids), np.float32)
        return dataclasses.replace(turn, full_logprobs=logprobs)

    turns = [with_logprob(turn, nats) for turn, nats in zip(failure.turns, (1, 6, 3), strict=True)]
    assert [surprise(turn) for turn in turns] == pytest.approx([1, 6, 3])
    failure = dataclasses.replace(failure, turns=tuple(turns))
    rng = np.random.default_rng(0)
    lengths = collections.Counter(len(branch([failure], rng)) for _ in range(1000))
    # Deviations of a share of 1000 draws are at most 16.
    assert [lengths[n] for n in range(3)] == pytest.approx([100, 600, 300], abs=60)
    start = branch([failure], rng)
    assert start == failure.turns[: len(start)]
    hidden = np.full_like(turns[0].logprobs, np.nan)  # of a server that does not tell
    logprobs = np.full_like(hidden, -6 / len(hidden))
    turn = dataclasses.replace(turns[0], full_logprobs=hidden, logprobs=logprobs)
    assert surprise(turn) == pytest.approx(6)
    sure = tuple(with_logprob(turn, 0) for turn in turns)
    lengths = {len(branch([dataclasses.replace(failure, turns=sure)], rng)) for _ in range(100)}
    assert lengths == {0, 1, 2}


LIMITS = SearchConfig(episodes=6, whole=2)


def searched(episodes, limits=LIMITS, seed=0):
    """What is found if the episodes end so, and the numbers of turns that were repeated."""
    asked = []

    async def play_all(starts):
        asked.extend(starts)
        return [episodes[number] for number, _ in starts]

    found = asyncio.run(search(play_all, limits, np.random.default_rng(seed)))
    return found, [len(turns) for _, turns in asked]


def test_search_takes_the_shortest_success_and_stops():
    failure = play(world.ScriptedEngine(failing(2)))
    success = play(world.ScriptedEngine(demonstrator(TEXT)))
    assert success.success
    longer = dataclasses.replace(success, turns=(success.turns[0], *success.turns))
    fault = dataclasses.replace(failure, stop_reason=StopReason.ENV_ERROR, turns=())

    found, repeated = searched([longer, success])
    assert found == (success, 2, False, 0, False) and repeated == [0, 0]
    found, repeated = searched([failure] * 6)
    assert found == (None, 6, False, 0, False) and len(repeated) == 6 and max(repeated[2:]) > 0
    by_branch = collections.Counter()
    for seed in range(20):
        found, repeated = searched([failure, failure, longer, failure], seed=seed)
        assert found == (longer, 4, repeated[2] > 0, 0, False) and max(repeated) <= 2
        by_branch[found.by_branch] += 1
    assert min(by_branch[True], by_branch[False]) > 0
    found, repeated = searched([failure] * 5, SearchConfig(episodes=5, whole=3))
    assert found.played == 5
    # An env_error takes no episode from the others, and what follows it is no branch of it.
    found, repeated = searched([fault, fault, longer, failure])
    assert found == (longer, 2, False, 2, False) and repeated == [0] * 4
    found, repeated = searched([failure, fault, fault, *[failure] * 5])
    assert found == (None, 6, False, 2, False) and len(repeated) == 8
    found, repeated = searched([fault] * 6)
    assert found == (None, 0, False, 6, True) and repeated == [0] * 6
    found, repeated = searched([failure, *[fault] * 6, longer])
    assert found == (longer, 2, repeated[7] > 0, 6, False)
    with pytest.raises(ValueError, match="whole=3, expected 1 to episodes=2"):
        SearchConfig(episodes=2, whole=3)


def fill(folder, asked, solved=lambda number: number % 2 == 0, broken=()) -> list[int]:
    """Fills the folder with instances of which some are solved; returns the numbers searched.

    Args: broken: numbers that are given up after 8 env_errors.
    """
    searched = []

    async def search_some(numbers):
        assert len(numbers) <= search_folder.SHARD_INSTANCES
        searched.extend(numbers)
        return [
            Found(None, 0, False, 8, gave_up=True)
            if n in broken
            else Found(make_trajectory(f"e{n}", f"{n:08d}") if solved(n) else None, 2, False, 1)
            for n in numbers
        ]

    known, given_up = asyncio.run(
        search_folder.fill(
            folder, asked, search_some, lambda number: "task", base_hash="b", layout=LAYOUT
        )
    )
    assert known == search_folder.read(folder)
    assert [(one.number, one.env_errors) for one in given_up] == [
        (n, 8) for n in searched if n in broken
    ]
    return searched


def successes_of(folder) -> list[int]:
    paths = folder.glob("*.tfrecord")
    return sorted(int(one.group_id) for path in paths for one in read_shard(path)[1])


def test_another_range_plays_what_is_missing_and_doubles_nothing(tmp_path, capsys):
    assert fill(tmp_path, range(10, 30)) == list(range(10, 30))
    assert fill(tmp_path, range(100)) == [*range(10), *range(30, 100)]
    assert fill(tmp_path, range(200)) == list(range(100, 200))
    assert "search step=200/200" in capsys.readouterr().err
    assert fill(tmp_path, range(120, 201)) == [200]
    assert fill(tmp_path, range(201)) == []
    assert successes_of(tmp_path) == list(range(0, 201, 2))
    counts = search_folder.count(search_folder.read(tmp_path).values())
    assert counts["task"]["instances"] == 201 and counts["task"]["solved"] == 101


def test_large_screenshots_make_more_shards(tmp_path, monkeypatch):
    size_bytes = sum(map(len, make_trajectory("e", "g").images.values()))
    monkeypatch.setattr(search_folder, "SHARD_BYTES", 3 * size_bytes)
    fill(tmp_path, range(20))
    names = sorted(path.name for path in tmp_path.glob("*.tfrecord"))
    assert names == [f"{n:06d}.tfrecord" for n in (0, 6, 12, 18)]
    assert successes_of(tmp_path) == list(range(0, 20, 2))
    assert fill(tmp_path, range(22)) == [20, 21]


def test_shard_that_is_missing_is_played_again(tmp_path):
    fill(tmp_path, range(40))
    (tmp_path / "000032.tfrecord").unlink()  # as after a kill before it was written
    assert fill(tmp_path, range(30, 42)) == list(range(32, 42))
    assert successes_of(tmp_path) == list(range(0, 42, 2))
    assert fill(tmp_path, range(42, 50), solved=lambda number: False) == list(range(42, 50))
    assert fill(tmp_path, range(50)) == [], "without a success there is no shard"


def test_instance_that_the_environment_broke_is_not_counted_and_is_played_again(tmp_path, capsys):
    assert fill(tmp_path, range(4), broken=range(4)) == [0, 1, 2, 3]
    assert not list(tmp_path.iterdir())
    assert "search step=4/4" in capsys.readouterr().err
    assert fill(tmp_path, range(40), broken=(0, 5, 32)) == list(range(40))
    assert fill(tmp_path, range(40), broken=(5,)) == [0, 5, 32]
    assert fill(tmp_path, range(40)) == [5]
    assert successes_of(tmp_path) == list(range(0, 40, 2))
    counts = search_folder.count(search_folder.read(tmp_path).values())
    assert counts["task"]["env_errors"] == counts["task"]["instances"] == 40
    header, row = search_folder.format_counts(counts).splitlines()
    assert header.split() == ["task", "solved", "by", "branch", "episodes", "env_errors"]
    assert row.split() == ["task", "20", "of", "40", "0", "80", "40"]


@pytest.mark.parametrize("content", ["", "7", '{"task": {"instances": 4}}', '[{"number": 1}]'])
def test_counts_that_cannot_be_read_are_one_line(tmp_path, content):
    (tmp_path / "000000.json").write_text(content)
    with pytest.raises(ConfigError, match=r"000000\.json: no list of searched instances .*--out"):
        fill(tmp_path, range(4))


def command(*arguments: object, ok: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tools.search", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout if ok else done.stderr


def test_command_keeps_successes_that_a_cold_start_reads(tmp_path):
    out = tmp_path / "demos"
    flags = ("--config=configs/quickstart.py", "--episodes=4", f"--out={out}")
    printed = command(*flags, "--instances=32")
    assert f"cold_start.demonstrations=\"('{out}',)\"" in printed
    (one,) = search_folder.count(search_folder.read(out).values()).values()
    _, successes = read_shard(out / "000000.tfrecord")
    # The base solves a quarter; four tries at temperature 1 solve most of 32.
    assert one["solved"] == len(successes) >= 10 and one["instances"] == 32
    assert 64 <= one["episodes"] <= 128 and one["env_errors"] == 0
    assert all(success.success for success in successes)
    assert len({success.task.seed for success in successes}) == len(successes)
    family = family_of(SHIPPED_MODEL)
    chat = Chat(SHIPPED_MODEL, ChatConfig().completed(SHIPPED_MODEL), family.chat)
    inputs = family.make_inputs(family.read_config(SHIPPED_MODEL))
    demonstrations = recorded_demonstrations.load([str(out)], chat, inputs)
    assert [d.turns[0].text for d in demonstrations] == [s.turns[0].text for s in successes]

    before = (out / "000000.tfrecord").stat().st_mtime_ns
    printed = command(*flags, "--first=20", "--instances=14")
    assert (out / "000000.tfrecord").stat().st_mtime_ns == before
    assert [line["number"] for line in json.loads((out / "000032.json").read_text())] == [32, 33]
    said = command(*flags, "--instances=34", "--whole=1", ok=False)
    assert "another search, in whole; give another --out" in said
    other = ("--config.actor.rollout.temperature=0.5", "--config.chat.history_turns=1")
    said = command(*flags, *other, "--instances=34", ok=False)
    assert "another search, in chat, temperature; give another --out" in said


def test_command_plays_the_policy_that_a_run_published(tmp_path):
    run = [
        sys.executable,
        "-m",
        "uirl_jax.main",
        "--config=quickstart",
        f"--workdir={tmp_path}/run",
    ]
    small = ("--config.learner.steps=1", "--config.evaluation.episodes=0")
    subprocess.run([*run, *small], cwd=ROOT, check=True, capture_output=True, timeout=300)
    flags = ("--config=configs/quickstart.py", f"--workdir={tmp_path}/run", "--checkpoint=policy")
    printed = command(*flags, f"--out={tmp_path}/demos", "--instances=8", "--episodes=4")
    assert "cold_start.demonstrations" in printed
    said = command(*flags, f"--out={tmp_path}/run", ok=False)
    assert f"--out={tmp_path}/run: is the workdir of a run" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--config and --out missing"),
        (("--config=configs/quickstart.py", "--out={out}", "--whole=9"), "whole=9, expected 1 to"),
        (("--config=configs/quickstart.py", "--out={out}", "--checkpoint=3"), "--workdir=RUN is"),
        (
            ("--config=configs/quickstart.py", "--out={out}", "--checkpoint=no"),
            "expected base, pol",
        ),
    ],
)
def test_what_cannot_be_searched_is_one_line(tmp_path, flags, said):
    printed = command(*(flag.format(out=tmp_path / "demos") for flag in flags), ok=False)
    assert printed.startswith("error: ") and printed.count("\n") == 1 and said in printed
    assert not list(tmp_path.rglob("*.tfrecord"))
