"""A step from records to an update, for every algorithm: on a tiny model, without an actor."""

import dataclasses
import functools
import importlib
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import packed_records, step_world
from tests.changed_advantages import seen_advantages
from tests.eight_devices import on_eight_devices
from tests.sample_trajectories import make_trajectory
from tools.bench import algorithms
from uirl_jax.config import reading, schema
from uirl_jax.errors import ConfigError, TrainingError, UserCodeError
from uirl_jax.families import loading
from uirl_jax.learner import algorithm, cold_start, loop
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.learner.algorithm import AlgorithmConfig
from uirl_jax.models import sharding
from uirl_jax.rl.advantages import AdvantageConfig, group_advantages
from uirl_jax.rl.losses import PolicyLossConfig
from uirl_jax.rl.rewards import RewardConfig, token_rewards, turn_lengths
from uirl_jax.shards import batching
from uirl_jax.types import StopReason, Trajectory

PPO = AlgorithmConfig(advantage=AdvantageConfig(estimator="gae", normalise="batch"), epochs=2)
CONFIGS = {
    "grpo": AlgorithmConfig(aggregation="trajectory_mean"),
    "dr_grpo": AlgorithmConfig(
        advantage=AdvantageConfig(normalise="group_mean"),
        aggregation="constant_length",
        max_tokens=10,
    ),
    "maxrl": AlgorithmConfig(advantage=AdvantageConfig(normalise="group_ratio")),
    "gspo": AlgorithmConfig(loss=PolicyLossConfig(ratio="turn"), minibatches=2),
    "rloo": AlgorithmConfig(
        advantage=AdvantageConfig(normalise="leave_one_out"), loss=PolicyLossConfig(kl_in="reward")
    ),
    "reinforce_pp": AlgorithmConfig(
        advantage=AdvantageConfig(normalise="batch", credit="token"),
        loss=PolicyLossConfig(kl_in="reward"),
    ),
    "turns": AlgorithmConfig(advantage=AdvantageConfig(credit="turn")),
    "gigpo": AlgorithmConfig(advantage=AdvantageConfig(screen_weight=1.0, turn_discount=0.9)),
    "ppo": PPO,
    "imitation": AlgorithmConfig(objective="imitation", keep_reward=0.5),
}


def groups(rewards: list[float] | None = None) -> list[list[Trajectory]]:
    """Four groups of four; by default every second episode is paid."""
    records, _ = packed_records.records()
    rewards = rewards or [float(n % 2) for n in range(len(records))]
    paid = [dataclasses.replace(of, reward=r) for of, r in zip(records, rewards, strict=True)]
    return [paid[n : n + 4] for n in range(0, len(paid), 4)]


@functools.cache
def compiled(loss, critic, use_reference: bool, recompute_old: bool, lr: float):
    """(model, optimizer, steps): compiled once for all tests that need the same programs."""
    model = step_world.make_model(targets=("all",))
    optimizer = learner_state.make_optimizer(learner_state.OptimizerConfig(lr=lr), 100)
    steps = learner_step.make_steps(
        model[0],
        optimizer,
        learner_step.StepConfig(
            loss, critic, use_reference=use_reference, recompute_old=recompute_old
        ),
    )
    return model, optimizer, steps


class Learner:
    """Steps of one algorithm on the tiny model."""

    def __init__(
        self, cfg: AlgorithmConfig, lr: float = 3e-3, mesh: jax.sharding.Mesh | None = None
    ) -> None:
        critic_cfg = cfg.critic if cfg.has_critic else None
        (_, lora, self.frozen), optimizer, self.steps = compiled(
            cfg.loss, critic_cfg, cfg.use_reference, cfg.recompute_old, lr
        )
        critic = None
        if critic_cfg is not None:
            critic_optimizer = learner_state.make_critic_optimizer(critic_cfg)
            critic = learner_state.init_critic(32, critic_optimizer)
        self.cfg, self.mesh = cfg, mesh
        self.state = learner_state.init_state(
            lora, optimizer, mesh, step_world.RULES, critic=critic
        )
        if mesh is not None:
            placed = sharding.state_shardings(mesh, self.frozen, step_world.RULES)
            self.frozen = jax.device_put(self.frozen, placed)

    def step(self, records=None, layout: str = "packed") -> dict[str, float]:
        self.state, metrics, _ = algorithm.learn(
            groups() if records is None else records,
            self.cfg,
            self.steps,
            self.state,
            self.frozen,
            make_batches=functools.partial(
                batching.make_batches,
                inputs=packed_records.INPUTS,
                cfg=packed_records.LAYOUTS[layout],
                parts=(1, 1) if self.mesh is None else sharding.batch_parts(self.mesh),
            ),
            mesh=self.mesh,
            seed=0,
        )
        return metrics


def likelihood(learner: Learner, good: bool) -> float:
    """Mean logprob of what the paid (or the unpaid) episodes sampled."""
    of = [[r for r in group if (r.reward > 0) == good] for group in groups()]
    cfg = AlgorithmConfig(objective="imitation", keep_reward=-1.0)
    probe = Learner(cfg, lr=0.0)
    probe.state = dataclasses.replace(
        probe.state, trainable=jax.tree.map(np.array, learner.state.trainable)
    )
    return -probe.step(of)["sft/loss"]


@pytest.mark.parametrize("name", CONFIGS)
def test_learn_makes_what_was_paid_likelier_than_what_was_not(name: str):
    learner = Learner(CONFIGS[name])
    before = [likelihood(learner, good) for good in (True, False)]
    for _ in range(4):
        metrics = learner.step()
        assert all(np.isfinite(value) for value in metrics.values()), metrics
    after = [likelihood(learner, good) for good in (True, False)]
    assert after[0] - before[0] > after[1] - before[1] + 0.01
    assert int(learner.state.step) == 4
    assert metrics["learner/updates"] == CONFIGS[name].updates_a_step


@pytest.mark.parametrize("name", CONFIGS)
def test_learn_does_not_hang_on_the_layout_or_the_order_in_a_group(name: str):
    cfg = dataclasses.replace(CONFIGS[name], minibatches=1)
    straight, other = Learner(cfg), Learner(cfg)
    expected = straight.step()
    turned = [group[::-1] for group in groups()]
    got = other.step(turned, "prompts shared")
    for metric in ("learner/loss", "learner/grad_norm"):
        assert got[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric


def test_learn_tells_the_share_of_padding():
    last = [record.turns[-1] for group in groups() for record in group]
    tokens = sum(len(turn.context_ids) + len(turn.token_ids) for turn in last)
    metrics = Learner(CONFIGS["grpo"]).step(layout="one sequence a row")
    assert metrics["learner/padding"] == pytest.approx(1 - tokens / (20 * 64))  # rows, row length


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
def test_learn_without_equal_groups_computes_less_and_pulls_as_the_others(kl_coefficient: float):
    cfg = CONFIGS["grpo"]
    cfg = dataclasses.replace(cfg, loss=PolicyLossConfig(kl_coefficient=kl_coefficient))
    mixed, equal = groups([0.0, 1.0] * 8)[:1], groups([1.0] * 16)[1:]
    expected, all_of_them, dropping = (
        Learner(dataclasses.replace(cfg, drop_equal_groups=drop)) for drop in (False, False, True)
    )
    for _ in range(2):  # the first one's policy is the base: its KL pulls nowhere
        alone = expected.step(mixed)
        whole = all_of_them.step([*mixed, *equal])
        dropped = dropping.step([*mixed, *equal])
    assert dropped["learner/tokens"] == alone["learner/tokens"] < whole["learner/tokens"]
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(dropping.state.trainable),
        jax.device_get(expected.state.trainable),
    )
    # Nothing but equal ones: a step all the same, which only KL could make change something.
    assert (dropping.step(equal)["learner/grad_norm"] > 0) == (kl_coefficient > 0)


def test_learn_with_equal_rewards_and_no_kl_changes_nothing():
    for cfg in (CONFIGS["grpo"], CONFIGS["dr_grpo"], CONFIGS["rloo"], CONFIGS["turns"]):
        cfg = dataclasses.replace(cfg, loss=PolicyLossConfig(kl_coefficient=0.0))
        learner = Learner(cfg)
        before = jax.device_get(learner.state.trainable)
        metrics = learner.step(groups([0.1] * 16))
        assert metrics["learner/grad_norm"] == 0.0
        step_world.assert_trees_close(before, jax.device_get(learner.state.trainable), atol=0)


def test_learn_with_a_reward_that_is_not_finite_names_the_episode():
    learner = Learner(CONFIGS["grpo"])
    with pytest.raises(TrainingError, match="episode 0-3: reward nan"):
        learner.step(groups([0.0, 1.0, 0.0, np.nan] * 4))


def test_learn_gigpo_compares_the_turns_that_saw_a_screenshot_in_every_record_of_the_group():
    """The others' and the own turns, cut short or not, and those of a replayed success."""
    group = groups([0.0, 1.0, 0.0, 1.0] * 4)[0]
    again = []
    for record in group:  # a second turn sees the first screenshot again
        key = record.turns[0].image_keys[0]
        turns = [
            dataclasses.replace(t, image_keys=(key,) * len(t.image_keys)) for t in record.turns
        ]
        again.append(dataclasses.replace(record, turns=tuple(turns)))
    again[0] = dataclasses.replace(again[0], stop_reason=StopReason.MAX_TURNS)
    again[3] = dataclasses.replace(again[3], group_id="an older one")
    cfg = CONFIGS["gigpo"]
    with seen_advantages() as seen:
        Learner(cfg).step([again])
        Learner(cfg).step([group])
    lengths = [turn_lengths(record) for record in again]
    assert sorted(map(len, lengths)) == [1, 1, 2, 2]
    returns = [
        record.reward * 0.9 ** (len(record.turns) - 1 - turn)
        for record in again
        for turn in range(len(record.turns))
    ]
    for record, tokens in zip(again, seen[0], strict=True):
        ends = np.cumsum(turn_lengths(record))
        for turn, end in enumerate(ends):
            value = record.reward * 0.9 ** (len(record.turns) - 1 - turn)
            expected = (record.reward - 0.5) / 0.5
            expected += (value - np.mean(returns)) / np.std(returns)
            assert tokens[end - 1] == pytest.approx(expected, abs=1e-4)
    # Screens that no other turn saw add nothing: the records' own second screenshots differ.
    for record, tokens in zip(group, seen[1], strict=True):
        for end in np.cumsum(turn_lengths(record))[1:]:
            assert tokens[end - 1] == pytest.approx((record.reward - 0.5) / 0.5, abs=1e-4)


def test_learn_kl_in_the_reward_is_kl_of_the_policy_to_the_base():
    """With nothing paid, RLOO compares the KL alone: a token likelier than the base's costs."""
    cfg = dataclasses.replace(
        CONFIGS["rloo"], loss=PolicyLossConfig(kl_in="reward", kl_coefficient=0.5)
    )
    learner = Learner(cfg)
    with seen_advantages() as seen:
        learner.step(groups([0.0] * 16))
    scores = Learner(dataclasses.replace(cfg, minibatches=2))
    (batch,) = batching.make_batches(
        [of for group in groups() for of in group],
        inputs=packed_records.INPUTS,
        cfg=packed_records.LAYOUTS["packed"],
    )
    scored = scores.steps.score(
        learner_step.params_of(scores.state), scores.frozen, learner_step.to_device(batch, None)
    )
    counts = [len(of) for of in seen[0]]
    difference = np.asarray(scored.old_bt - scored.ref_bt)
    kl = [of.sum() for of in batching.gather([batch], [difference], counts)]
    assert np.abs(kl).max() > 0.1
    for first in range(0, 16, 4):
        for n in range(4):
            others = np.mean([kl[first + m] for m in range(4) if m != n])
            expected = -0.5 * (kl[first + n] - others)
            np.testing.assert_allclose(seen[0][first + n], expected, rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------------------- PPO


def test_ppo_critic_learns_what_episodes_were_paid():
    learner = Learner(dataclasses.replace(PPO, critic=learner_state.CriticConfig(lr=3e-2)))
    steps = [learner.step() for _ in range(30)]
    assert steps[-1]["critic/error"] < 0.7 * steps[0]["critic/error"]
    explained = [metrics["critic/explained_variance"] for metrics in steps]
    assert explained[0] < 0.1 < 0.2 < explained[-1] <= 1.0


def test_ppo_truncated_episodes_bootstrap_and_ended_ones_do_not():
    """A critic that says 2 everywhere: what was cut short is worth 2 (discounted) at its end."""
    cfg = dataclasses.replace(
        PPO,
        advantage=AdvantageConfig(
            estimator="gae", normalise="none", turn_discount=0.5, gae_lambda=1.0
        ),
    )
    learner = Learner(cfg)
    head = {"kernel": np.zeros((32, 1), np.float32), "bias": np.full((1,), 2.0, np.float32)}
    critic = learner.state.critic._replace(params={"value_head": head})
    learner.state = dataclasses.replace(learner.state, critic=critic)
    records = groups([0.0] * 16)
    cut = dataclasses.replace(records[0][0], stop_reason=StopReason.MAX_TURNS)
    records[0][0] = cut
    with seen_advantages() as seen:
        learner.step(records)
    ended = next(n for n in range(1, 16) if len(records[n // 4][n % 4].turns) == 1)
    assert len(cut.turns) == 1
    np.testing.assert_allclose(seen[0][0], 0.5 * 2 - 2, atol=1e-5)
    np.testing.assert_allclose(seen[0][ended], 0.0 - 2, atol=1e-5)


def test_ppo_stops_its_updates_where_the_policy_has_moved_enough():
    cfg = dataclasses.replace(PPO, epochs=4, stop_kl=1e-9)
    metrics = Learner(cfg).step()
    # The first update starts from KL 0, the second sees what it did.
    assert metrics["learner/updates"] == 2
    assert Learner(dataclasses.replace(cfg, stop_kl=1e9)).step()["learner/updates"] == 4


def test_own_loss_without_a_kl_cannot_be_stopped_by_it(tmp_path, monkeypatch):
    code = "def loss(logprobs_bt, **_):\n    return 0.0 * logprobs_bt.sum(), {}\n"
    (tmp_path / "kl_free.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    own = dataclasses.replace(CONFIGS["grpo"], loss=PolicyLossConfig(function="kl_free:loss"))
    assert Learner(own).step()["learner/updates"] == 1
    with pytest.raises(UserCodeError, match=r"kl_free:loss: returns no actor/old_kl"):
        Learner(dataclasses.replace(own, stop_kl=0.1)).step()


# ------------------------------------------------------------------------------------- selection


def test_kept_are_the_best_above_the_threshold():
    group = groups([0.2, 0.9, 0.5, 1.0] * 4)[0]
    cfg = AlgorithmConfig(objective="imitation", keep_reward=0.5)
    assert [of.reward for of in algorithm.kept(group, cfg)] == [1.0, 0.9, 0.5]
    two = dataclasses.replace(cfg, keep_per_group=2)
    assert [of.reward for of in algorithm.kept(group, two)] == [1.0, 0.9]
    assert not algorithm.useful(group, dataclasses.replace(cfg, keep_reward=1.5))


def test_groups_differ_where_their_advantages_do():
    """Whatever of a record's rewards counts, and whatever stands beside the group."""
    for outcome, virtual, paid in itertools.product((1.0, 0.5), (None, 0.5, 1.0), (0.0, 1.0)):
        cfg = AlgorithmConfig(
            reward=RewardConfig(outcome=outcome),
            advantage=AdvantageConfig(virtual_return=virtual, normalise="group_mean"),
        )
        group = groups([paid] * 16)[0]
        advantages = group_advantages(
            [token_rewards(of, cfg.reward) for of in group],
            [turn_lengths(of) for of in group],
            cfg.advantage,
        )
        assert algorithm.differs(group, cfg) == np.concatenate(advantages).any(), cfg
    apart = AlgorithmConfig(reward=RewardConfig(turns=1.0))
    group = groups([1.0] * 16)[0]
    turn = dataclasses.replace(group[0].turns[0], reward=0.5)
    better = dataclasses.replace(group[0], turns=(turn, *group[0].turns[1:]))
    assert algorithm.differs([better, *group[1:]], apart)
    assert not algorithm.differs([better, *group[1:]], AlgorithmConfig())


def test_useful_groups_are_those_with_different_rewards_where_equal_ones_are_skipped():
    mixed, equal = groups([0.0, 1.0] * 8)[0], groups([1.0] * 16)[0]
    skipping = AlgorithmConfig(skip_equal_groups=True)
    assert algorithm.useful(mixed, skipping) and not algorithm.useful(equal, skipping)
    assert algorithm.useful(equal, AlgorithmConfig())
    # Beside a virtual success it is a group that failed which differs.
    virtual = dataclasses.replace(skipping, advantage=AdvantageConfig(virtual_return=1.0))
    failed = groups([0.0] * 16)[0]
    assert algorithm.useful(failed, virtual) and not algorithm.useful(failed, skipping)
    assert algorithm.useful(mixed, virtual) and not algorithm.useful(equal, virtual)


# --------------------------------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, ()) for name in (*algorithms.ALGORITHMS, "sft", "own_task")),
        *((name, ("base",)) for name in ("simple_data_entry_cpu", "miniwob_cpu")),
        *(("sft", (task,)) for task in algorithms.TASKS.values()),
        ("sft", ("data_entry,rows=1,columns=1",)),
    ],
)
def test_config_that_starts_from_the_shipped_model_is_one_that_runs(name, arguments):
    cfg = importlib.import_module(f"configs.{name}").get_config(*arguments)
    resolved = reading.from_config(schema.RunConfig, cfg)
    assert resolved.model.path.endswith("tiny-ui-base")


@pytest.mark.parametrize(
    ("name", "stages", "page"),
    [
        ("simple_data_entry_cpu", {"base": "entry-base", "start": None}, "docs/notes/results.md"),
        ("miniwob_cpu", {"base": "miniwob-base", "grpo": None}, "configs/miniwob_cpu.py"),
        ("miniwob_points", {"base": "points-base", "grpo": None}, "configs/miniwob_points.py"),
    ],
)
def test_stage_starts_from_what_the_one_before_it_wrote(name, stages, page):
    """Into the workdir that the page has it write to."""
    told = Path(page).read_text(encoding="utf-8")
    get_config = importlib.import_module(f"configs.{name}").get_config
    made = {stage: reading.from_config(schema.RunConfig, get_config(stage)) for stage in stages}
    for before, stage in itertools.pairwise(stages):
        workdir = f"runs/{stages[before]}"
        assert f"--config=configs/{name}.py:{before} --workdir={workdir}\n" in told
        assert made[before].learner.steps == 0 and made[before].cold_start.quality == 1.0
        assert Path(made[stage].model.path) == Path(workdir) / cold_start.MODEL_DIR
    grpo = reading.from_config(schema.RunConfig, get_config())
    assert grpo.learner.steps > 0 and grpo.cold_start.steps == 0


@pytest.mark.parametrize("name", ["simple_data_entry_cpu", "miniwob_pages"])
def test_shipped_adapters_fit_the_start_that_they_were_trained_on(name):
    get_config = importlib.import_module(f"configs.{name}").get_config
    grpo, trained = (
        reading.from_config(schema.RunConfig, get_config(stage)) for stage in ("grpo", "trained")
    )
    assert trained == dataclasses.replace(grpo, model=trained.model)  # the same, played alike
    options = {"lora": trained.model.lora, "seed": 0}
    fresh = loading.load(grpo.model.path, **options).trainable
    learnt = loading.load(trained.model.path, adapter=trained.model.adapter, **options).trainable
    distance = jax.tree.map(lambda a, b: float(abs(a - b).max()), fresh, learnt)
    assert min(jax.tree.leaves(distance)) > 0.01  # in every layer's every matrix


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"aggregation": "constant_length"}, "needs algorithm.max_tokens"),
        ({"advantage": {"estimator": "gae"}}, "advantage.normalise='group_std'"),
        ({"advantage": {"credit": "token"}}, "credit='token'; use 'batch' or 'none'"),
        *(
            ({"advantage": {"virtual_return": 1.0, **other}}, "needs advantage.credit='episode'")
            for other in ({"credit": "turn"}, {"normalise": "batch"}, {"function": "my_code:f"})
        ),
        *(
            ({"advantage": {"screen_weight": 1.0, **other}}, "needs advantage.credit='episode'")
            for other in ({"credit": "turn"}, {"normalise": "batch"}, {"function": "my_code:f"})
        ),
        ({"drop_equal_groups": True, "advantage": {"screen_weight": 1.0}}, "no screen_weight"),
        ({"objective": "imitation", "stop_kl": 0.1}, "imitation has no old policy"),
        ({"reward": {"overlong_max_tokens": 5}}, "overlong_buffer_tokens=0, expected 1 to"),
        ({"epochs": 0}, "algorithm.epochs"),
        (
            {"drop_equal_groups": True, "loss": {"kl_coefficient": 0.1, "kl_in": "reward"}},
            "loss.kl_in='loss'",
        ),
        (
            {
                "drop_equal_groups": True,
                "loss": {"kl_coefficient": 0.0},
                "reward": {"overlong_max_tokens": 8, "overlong_buffer_tokens": 4},
            },
            "no overlong shaping",
        ),
        *(
            ({"advantage": {"normalise": "group_ratio"}, **other}, "needs returns of at least 0")
            for other in (
                {"loss": {"kl_in": "reward"}},
                {"reward": {"overlong_max_tokens": 8, "overlong_buffer_tokens": 4}},
            )
        ),
        ({"loss": {"kl_estimator": "k4"}}, "kl_estimator"),
        ({"loss": {"importance_floor": 2.5}}, "expected between 0 and loss.importance_cap=2.0"),
        ({"loss": {"importance_floor": 0.5, "importance": "mask"}}, "needs loss.importance='trunc"),
        ({"loss": {"importance_cap": 0.9, "importance": "mask"}}, "every weight would be 0"),
        (
            {"advantage": {"normalise": "group_ratio", "virtual_return": -0.5}},
            "virtual_return=-0.5: .* needs them to be at least 0",
        ),
    ],
)
def test_config_of_an_algorithm_that_makes_no_sense_is_one_line(section: dict, message: str):
    cfg = importlib.import_module("configs.quickstart").get_config()
    cfg.algorithm = section
    with pytest.raises(ConfigError, match=message) as caught:
        reading.from_config(schema.RunConfig, cfg)
    assert "\n" not in str(caught.value)


def test_learn_for_a_hundred_steps_leaves_frozen_weights_bit_for_bit():
    learner = Learner(CONFIGS["grpo"])
    before = jax.device_get(learner.frozen)
    for _ in range(100):
        learner.step()
    assert int(learner.state.step) == 100
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(learner.frozen), before)


def test_learn_in_bfloat16_keeps_adapters_and_optimizer_in_float32_and_stays_close():
    """The base and activations in bfloat16, what is trained in float32."""
    cfg = CONFIGS["grpo"]
    whole, halved = Learner(cfg), Learner(cfg)
    halved.frozen = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), whole.frozen)
    start = jax.device_get(whole.state.trainable)
    for _ in range(3):
        expected, got = whole.step(), halved.step()
    floats = [leaf for leaf in jax.tree.leaves(halved.state) if leaf.dtype != jnp.int32]
    assert floats and {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}
    # bfloat16 has 8 bits: logprobs are off by about 1 % each, their mean over the tokens by less.
    assert got["actor/entropy"] == pytest.approx(expected["actor/entropy"], rel=0.02)
    moved = [
        np.concatenate([(np.asarray(a) - b).ravel() for a, b in zip(leaves, at, strict=True)])
        for leaves, at in (
            (jax.tree.leaves(whole.state.trainable), jax.tree.leaves(start)),
            (jax.tree.leaves(halved.state.trainable), jax.tree.leaves(start)),
        )
    ]
    cosine = moved[0] @ moved[1] / np.linalg.norm(moved[0]) / np.linalg.norm(moved[1])
    assert cosine > 0.8, "updates point the same way"


def check_mesh() -> None:
    """The body of the test below, in a process of its own: the device count is fixed at start."""
    assert len(jax.devices()) == 8
    for name in ("ppo", "gspo"):  # the critic and its returns; a ratio by turns
        expected = Learner(CONFIGS[name]).step()
        compiled.cache_clear()  # programs of no mesh
        mesh = sharding.make_mesh(data=2, fsdp=2, model=2)
        with jax.set_mesh(mesh):
            got = Learner(CONFIGS[name], mesh=mesh).step()
        for metric in ("learner/loss", "learner/grad_norm", "actor/entropy"):
            difference = abs(got[metric] - expected[metric])
            assert difference < 1e-5 * max(1, abs(expected[metric])), (name, metric, difference)


def test_algorithms_on_eight_fake_devices_equal_one_device():
    done = on_eight_devices("check_mesh", "test_algorithm")
    assert done.returncode == 0, done.stderr[-3000:]


def test_groups_without_signal_are_counted_also_where_they_are_not_replaced():
    groups = [
        [make_trajectory(f"e{number}{member}", f"g{number}", reward=reward) for member in range(2)]
        for number, reward in enumerate((0.0, 1.0, 0.5))
    ]
    groups[2][0] = dataclasses.replace(groups[2][0], reward=1.0)
    metrics = loop._describe(groups, AlgorithmConfig(), version=0)
    assert metrics["groups/useless"] == 2 and metrics["groups/replaced"] == 0
    assert metrics["groups/with_signal"] == pytest.approx(1 / 3)


def test_shared_screens_are_those_that_two_turns_of_a_group_saw():
    group = groups()[0]  # one screen for all first turns, another for each second one
    seconds = sum(len(record.turns) - 1 for record in group)
    described = functools.partial(loop._describe, algorithm_cfg=AlgorithmConfig(), version=0)
    assert seconds == 2 and described([group])["groups/shared_screens"] == 4 / 6
    assert described([group[:1], group[1:2]])["groups/shared_screens"] == 0.0
    text = dataclasses.replace(group[0].turns[0], image_keys=())
    blind = [dataclasses.replace(record, turns=(text,)) for record in group]
    assert described([blind])["groups/shared_screens"] == 0.0
