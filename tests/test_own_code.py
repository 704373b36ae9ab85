"""Functions of the user's own, by import path: the examples, and every way to get them wrong."""

import asyncio
import dataclasses
import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aiohttp import web

from examples.own_code import learning, rewards
from tests import actor_world as world
from tests import command_world, test_losses, tiny_model
from tests.field_servers import Container, serving
from tests.sample_trajectories import make_trajectory
from tests.test_dialects import client_of
from uirl_jax import evaluation, user_code
from uirl_jax.actor.rollout import RolloutSetup, run_episode
from uirl_jax.errors import ConfigError, UserCodeError, VerifierError
from uirl_jax.learner.algorithm import find_estimator
from uirl_jax.learner.loop import StepReport, find_callbacks
from uirl_jax.learner.own_rewards import OwnRewards
from uirl_jax.metrics import read_metrics
from uirl_jax.rl.advantages import AdvantageConfig
from uirl_jax.rl.losses import PolicyLossConfig, find_policy_loss
from uirl_jax.rl.rewards import OwnReward, RewardConfig
from uirl_jax.types import Judgement, Rule, TaskSpec
from uirl_jax.verifiers.client import rules
from uirl_jax.verifiers.server.server import serve

MODULE = """
import math
from uirl_jax.types import Rule
CONSTANT = 3
def broken(*arguments, **options):
    return 1 / 0
def nan(trajectory):
    return math.nan
def huge(trajectory):
    return 1e7
def word(report):
    return 7
def short(group, token_rewards, turn_lengths):
    return [rewards[:-1] for rewards in token_rewards]
def rows(logprobs_bt, **arrays):
    return logprobs_bt.sum(1), {}
def unnamed(logprobs_bt, **arrays):
    return logprobs_bt.sum(), {"tokens": logprobs_bt.sum(), "entropy": logprobs_bt.sum()}
def halved(logprobs_bt, **arrays):
    return logprobs_bt.sum(), {"offpolicy/weight": logprobs_bt.sum()}
def no_rule(task):
    return "click it"
def no_instruction(task):
    return Rule("", lambda progress, turns: None)
def odd(task):
    return Rule("Go", lambda progress, turns: (1, 0.0, False))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the folder where the command is started."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "wrong.py").write_text("import math\n\nmath.nowhere\n")
    (tmp_path / "needs.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "wandbx_hooks.py").write_text("import wandbx\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    return tmp_path


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("mine", "expected 'module:name'"),
        ("mine:f()", "expected 'module:name'"),
        ("../mine:f", "expected 'module:name'"),
        ("mine:__import__('os')", "expected 'module:name'"),
        ("nowhere:f", "no module 'nowhere' in {folder} or on PYTHONPATH"),
        ("mine:f", "mine.py: has no such name"),
        ("mine:CONSTANT", "mine.py: CONSTANT is int, expected a function"),
        ("wrong:f", "wrong.py, line 3: AttributeError"),
        ("needs:f", "needs.py, line 1: No module named 'not_installed_anywhere'"),
        ("wandbx_hooks:f", "wandbx_hooks.py, line 1: No module named 'wandbx'"),
        ("mine.deeper:f", "no module 'mine.deeper' in {folder} or on PYTHONPATH"),
        ("time:nowhere", "the module time: has no such name"),
        ("empty_folder:f", "the module empty_folder: has no such name"),
    ],
)
def test_reference_that_cannot_be_loaded_is_one_error(module, reference, said):
    with pytest.raises(ConfigError) as caught:
        user_code.load(reference, "learner.callbacks")
    assert said.replace("{folder}", str(module)) in str(caught.value)
    assert str(caught.value).startswith(f"learner.callbacks={reference!r}")


def test_rewards_add_up_with_their_weights_and_are_logged_apart():
    own = OwnRewards(
        RewardConfig(
            outcome=2.0,
            functions=(
                OwnReward("examples.own_code.rewards:few_tokens", 0.5),
                OwnReward("examples.own_code.rewards:no_repeats"),
            ),
        )
    )
    group = [make_trajectory(f"e{n}", versions=(0,) * (n + 1), reward=float(n)) for n in range(3)]
    whole = own.add(group)
    few = [1 / 2, 2 / 5, 3 / 9]  # turn u samples u + 2 tokens
    repeats = [rewards.no_repeats(one) for one in group]
    expected = [2.0 * n + 0.5 * few[n] + repeats[n] for n in range(3)]
    assert [one.reward for one in whole] == pytest.approx(expected)
    assert own.then.outcome == 1.0  # its weight is in the reward already
    assert own.metrics() == pytest.approx(
        {
            "reward/verifier": 1.0,
            "reward/few_tokens": np.mean(few),
            "reward/no_repeats": np.mean(repeats),
        }
    )
    assert own.metrics() == {}
    untouched = OwnRewards(RewardConfig(outcome=2.0))
    assert untouched.add(group) == group and untouched.then.outcome == 2.0
    with pytest.raises(ConfigError, match="each needs a name of its own"):
        OwnRewards(RewardConfig(functions=(OwnReward("a:f"), OwnReward("b:f"))))
    with pytest.raises(ConfigError, match="'länge' is the name of a metric too"):
        OwnRewards(RewardConfig(functions=(OwnReward("a:länge"),)))
    for taken in ("verifier", "mean"):  # metrics that are there in any case
        with pytest.raises(ConfigError, match="none can be called verifier or mean"):
            OwnRewards(RewardConfig(functions=(OwnReward(f"a:{taken}"),)))


def test_no_repeats_sees_the_same_action_on_the_same_screen():
    one = make_trajectory()
    turn = one.turns[0]
    assert turn.action is not None
    same = dataclasses.replace(one, turns=(turn, turn))
    other = dataclasses.replace(turn, image_keys=("else",))
    assert rewards.no_repeats(same) == -1.0
    assert rewards.no_repeats(dataclasses.replace(one, turns=(turn, other))) == 0.0


def test_advantage_of_the_example_is_the_side_of_the_median():
    estimate = find_estimator(AdvantageConfig(function="examples.own_code.learning:above_median"))
    token_rewards = [np.array([0.0, 1.0]), np.array([0.5]), np.array([0.0, 0.0, 0.0])]
    got = estimate([], token_rewards, [[2], [1], [3]])
    expected = [[1.0, 1.0], [0.0], [-1.0, -1.0, -1.0]]
    assert [list(advantages_s) for advantages_s in got] == expected


def test_loss_of_the_example_has_the_gradient_of_the_paper():
    example = test_losses.example()
    arrays = {name: jnp.asarray(array) for name, array in example.items()}
    cfg = PolicyLossConfig(
        clip_low=1.0, clip_high=0.28, function="examples.own_code.learning:cispo"
    )
    loss_of = find_policy_loss(cfg)

    def loss(logprobs_bt):
        return loss_of(**arrays | {"logprobs_bt": logprobs_bt}, cfg=cfg)[0]

    sampled_bt = example["weights_bt"] > 0
    ratio_bt = np.exp(np.where(sampled_bt, example["logprobs_bt"] - example["old_bt"], 0.0))
    clipped_bt = np.clip(ratio_bt, 0.0, 1.28)
    assert (clipped_bt < ratio_bt).any()
    expected_bt = np.where(
        sampled_bt, -example["weights_bt"] * clipped_bt * example["advantages_bt"], 0.0
    )
    gradient_bt = jax.grad(loss)(arrays["logprobs_bt"])
    np.testing.assert_allclose(gradient_bt, expected_bt, rtol=1e-5, atol=1e-6)
    assert loss_of(**arrays, cfg=cfg)[1]["tokens"] == sampled_bt.sum()


def test_callbacks_of_the_example_end_a_solved_run_and_log_failures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = dataclasses.replace(make_trajectory(), success=False)
    group = [dataclasses.replace(make_trajectory(), success=True), failed]
    references = [f"examples.own_code.learning:{f}" for f in ("stop_when_solved", "log_failures")]
    stop, log = find_callbacks(references)
    for success, expected in ((0.9, None), (0.95, f"{references[0]}: success is 95%")):
        assert stop(StepReport(3, {"success/mean": success}, [group])) == expected
    assert log(StepReport(3, {}, [group])) is None
    lines = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert lines == [{"step": 3, "task": failed.task.name, "seed": failed.task.seed}]


def test_functions_that_fail_or_answer_wrongly_are_one_error(module):
    one = make_trajectory()
    token_rewards = [np.zeros(2)]

    def loss(ref: str) -> object:
        own = find_policy_loss(PolicyLossConfig(function=ref))
        return own(jnp.zeros((2, 3)), weights_bt=jnp.ones((2, 3)))

    bad = [
        ("broken", lambda ref: OwnRewards(RewardConfig(functions=(OwnReward(ref),))).add([one])),
        *(
            (name, lambda ref: OwnRewards(RewardConfig(functions=(OwnReward(ref),))).add([one]))
            for name in ("nan", "huge")
        ),
        ("word", lambda ref: find_callbacks([ref])[0](StepReport(1, {}, []))),
        ("broken", lambda ref: find_callbacks([ref])[0](StepReport(1, {}, []))),
        ("short", lambda ref: find_estimator(AdvantageConfig(function=ref))([], token_rewards, [])),
        *((name, loss) for name in ("rows", "unnamed", "halved")),
        ("no_rule", lambda ref: rules.own_rules({"t": ref})(TaskSpec("t", 0))),
        ("odd", lambda ref: rules.own_rules({"t": ref})(TaskSpec("t", 0)).judge({}, 1)),
    ]
    for name, call in bad:
        with pytest.raises(UserCodeError) as caught:
            call(f"mine:{name}")
        assert str(caught.value).startswith(f"mine:{name}: "), caught.value
        assert "\n" not in str(caught.value)
        if name == "broken":
            assert "mine.py, line 6: ZeroDivisionError" in str(caught.value)
        if name == "unnamed":
            assert "named group/name, of A-Z a-z 0-9 _ . -, got ['entropy']" in str(caught.value)


def test_rule_of_the_example_judges_a_server_that_does_not():
    own = rules.own_rules({"simple_data_entry": "examples.own_code.rules:first_rows"})
    rule = own(TaskSpec("simple_data_entry", 0, "2"))
    assert own(TaskSpec("desktop/click_button", 0)) is None
    assert rule.instruction == "Submit the first 2 rows of the sheet, from the top down."

    def counts(rows, wrong=0):
        return {"submitted_row_indices": rows, "num_incorrect_submissions": wrong}

    assert rule.judge(counts([]), 3) == Judgement(False, pytest.approx(-0.03), False)
    assert rule.judge(counts([0, 1]), 5) == Judgement(True, pytest.approx(0.95), True)
    assert rule.judge(counts([1]), 5) == rule.judge(counts([0], 1), 5) == (True, 0.0, False)
    with pytest.raises(VerifierError, match="expected rows and a count"):
        rule.judge({}, 1)

    async def run():
        async with (
            serving(Container("g2b")) as url,
            client_of(url, "g2b", find_own_rule=own) as client,
        ):
            session = await client.create(TaskSpec("simple_data_entry", 0, "2"))
            progress = await client.progress(session.id)
            return session, progress

    session, progress = asyncio.run(run())
    assert session.instruction == rule.instruction and session.judged_here
    assert (progress["done"], progress["reward"], progress["success"]) == (False, 0.0, False)
    assert progress["submitted_row_indices"] == []


def test_rule_judges_a_progress_that_no_dialect_has():
    """A server of another task behind the same calls: what it counts is the rule's business."""

    class Shop(Container):
        async def progress(self, request):
            return web.json_response({"basket": ["milk"], "total": 1.5 - len(self.asked)})

        asked: ClassVar[list[int]] = []

    def find(task):
        def judge(progress, turns):
            bought = progress["basket"] == ["milk"] and progress["total"] <= 1.5
            return Judgement(bought, float(bought), bought)

        return rules.own_rule(task, "tests:shop", lambda _: Rule("Buy milk.", judge))

    async def run():
        async with serving(Shop("g2b")) as url, client_of(url, "g2b", find_own_rule=find) as client:
            session = await client.create(TaskSpec("shop", 0))
            first = await client.progress(session.id)
            Shop.asked.append(1)
            return session, first, await client.progress(session.id)

    session, first, second = asyncio.run(run())
    assert session.instruction == "Buy milk."
    assert first["success"] and first["basket"] == ["milk"]
    assert second["total"] < first["total"] and second["success"]  # a number may fall


def test_rule_comes_before_the_bundled_servers_own():
    """The server pays for a click on the button; this rule pays for the second turn."""

    def second_turn(task):
        def judge(progress, turns):
            assert progress["reward"] is None or progress["done"]
            return Judgement(turns == 2, 0.5 * (turns == 2), turns == 2)

        return Rule("", judge)

    def find(task):
        return rules.own_rule(task, "tests:second_turn", second_turn)

    async def run():
        task = TaskSpec("desktop/click_button", 0, "misses=9", 4)
        url = "http://127.0.0.1:{}"
        async with (
            serve() as port,
            client_of(url.format(port), "g1+", find_own_rule=find) as client,
        ):
            setup = RolloutSetup(
                client,
                world.ScriptedEngine(lambda turn: "click(0, 0)"),
                world.chat(),
                world.inputs(),
                world.ROLLOUT,
            )
            return await run_episode(
                task, setup, seed=1, group_id="g", run_id="run", actor_id="a0", waits_s={}
            )

    episode = asyncio.run(run())
    assert len(episode.turns) == 2 and episode.success and episode.reward == 0.5
    assert episode.instruction.startswith("Click the ")


def test_run_with_own_rewards_advantage_loss_and_callback_ends_when_told(tmp_path):
    model_dir = tiny_model.write(tmp_path / "model")
    config = "tests/own_code_config.py"
    process = command_world.run(tmp_path / "run", model_dir, config=config)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "event=ended_early step=2" in process.stdout
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2]
    for row in rows:
        if "reward/mean" in row:
            parts = 0.1 * row["reward/few_tokens"] + 0.5 * row["reward/no_repeats"]
            assert row["reward/mean"] == pytest.approx(row["reward/verifier"] + parts, abs=1e-6)
    assert list(evaluation.read_results(tmp_path / "run")) == ["before", "after"]
    # The same command trains nothing more; a longer run goes on (and is told to stop no more).
    again = command_world.run(tmp_path / "run", model_dir, config=config)
    assert again.returncode == 0 and "event=ended_early step=2" in again.stdout
    longer = command_world.run(
        tmp_path / "run", model_dir, "--config.learner.steps=5", config=config
    )
    assert longer.returncode == 0, longer.stderr[-2000:]
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2, 3, 4, 5]


def test_run_with_a_function_that_is_missing_writes_nothing(tmp_path):
    flags = "--config.learner.callbacks=('examples.own_code.learning:stop',)"
    process = command_world.run(tmp_path / "run", tmp_path, flags)
    assert process.returncode == 1 and process.stderr.count("\n") == 1, process.stderr
    assert "learning.py: has no such name" in process.stderr
    assert not (tmp_path / "run" / "config.json").exists()


def test_example_median_of_equal_returns_is_zero():
    equal = [np.array([0.5, 0.5])] * 3
    assert all((a == 0).all() for a in learning.above_median([], equal, [[2]] * 3))
