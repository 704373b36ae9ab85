"""The step on a tiny model: what must not change a loss, and what must not change at all."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.eight_devices import on_eight_devices
from tests.step_world import OPTIMIZER, RULES, assert_trees_close, make_batch, make_model
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.learner.step import StepConfig
from uirl_jax.models import sharding
from uirl_jax.rl.losses import PolicyLossConfig
from uirl_jax.types import TrainBatch


def split_rows(batch: TrainBatch, parts: int) -> list[TrainBatch]:
    """Batches of a few rows each, every one with the whole table of screenshots."""
    rows = np.split(np.arange(len(batch.token_ids_bt)), parts)
    names = [name for name in vars(batch) if name.endswith(("_bt", "_bs"))]

    def some(of: np.ndarray) -> TrainBatch:
        cut = {n: getattr(batch, n)[of] for n in names if getattr(batch, n) is not None}
        return dataclasses.replace(batch, **cut, positions_abt=batch.positions_abt[:, of])

    return [some(of) for of in rows]


def take_steps(*batches: TrainBatch, mesh=None):
    """Metrics of a step, adapters after it.

    By plain gradient descent, so that a change of the adapters is the gradient itself: AdamW's
    first step is its sign, which rounding decides wherever it is nearly zero.
    """
    graphdef, lora, frozen = make_model()
    optimizer = learner_state.make_optimizer(learner_state.OptimizerConfig("sgd", lr=1.0), 10)
    run = learner_step.make_steps(graphdef, optimizer, StepConfig())
    state = learner_state.init_state(lora, optimizer, mesh, RULES)
    if mesh is not None:
        frozen = jax.device_put(frozen, sharding.state_shardings(mesh, frozen, RULES))
    arrays = [learner_step.to_device(batch, mesh) for batch in batches]
    state, metrics = run.policy_update(state, frozen, arrays)
    return learner_step.to_floats(metrics), jax.device_get(state.trainable)


def test_step_of_several_batches_equals_one_of_all_their_rows():
    batch = make_batch()
    whole, whole_lora = take_steps(batch)
    parts, parts_lora = take_steps(*split_rows(batch, 4))
    for name, value in whole.items():
        assert parts[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert_trees_close(whole_lora, parts_lora, atol=1e-6)  # of a gradient no longer than 1


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "sgd"])
def test_every_optimizer_starts_on_a_mesh_as_without_one(name):
    _, lora, _ = make_model()
    optimizer = learner_state.make_optimizer(learner_state.OptimizerConfig(name, lr=1.0), 10)
    alone = learner_state.init_state(lora, optimizer)
    meshed = learner_state.init_state(lora, optimizer, sharding.make_mesh(1, 1, 1), RULES)
    assert_trees_close(alone, meshed, atol=0.0)


def test_update_with_more_padding_is_the_same_update():
    batch = make_batch()
    padded = dataclasses.replace(
        batch,
        **{
            name: np.pad(
                getattr(batch, name),
                [(0, 0)] * (getattr(batch, name).ndim - 2) + [(0, 8), (0, 8)],
                constant_values=-1 if name in ("vision_index_bt", "sampled_index_bs") else 0,
            )
            for name in (
                *("token_ids_bt", "segment_ids_bt", "positions_abt", "completion_mask_bt"),
                *("vision_index_bt", "sampled_index_bs", "behaviour_logprobs_bt", "advantages_bt"),
                *("weights_bt", "turn_ids_bt"),
            )
        },
    )
    metrics, lora = take_steps(batch)
    padded_metrics, padded_lora = take_steps(padded)
    assert padded_metrics["learner/loss"] == pytest.approx(metrics["learner/loss"], abs=1e-6)
    assert padded_metrics["learner/grad_norm"] == pytest.approx(metrics["learner/grad_norm"], 1e-4)
    assert_trees_close(lora, padded_lora, atol=1e-6)


def test_update_with_zero_advantages_and_no_kl_changes_nothing():
    batch = make_batch()
    batch = dataclasses.replace(batch, advantages_bt=np.zeros_like(batch.advantages_bt))
    graphdef, lora, frozen = make_model()
    before = jax.device_get(lora)
    optimizer = learner_state.make_optimizer(OPTIMIZER, 10)
    run = learner_step.make_steps(
        graphdef,
        optimizer,
        StepConfig(PolicyLossConfig(kl_coefficient=0.0), use_reference=False),
    )
    state = learner_state.init_state(lora, optimizer)
    state, _ = run.policy_update(state, frozen, [learner_step.to_device(batch, None)])
    assert_trees_close(before, jax.device_get(state.trainable), atol=0)


def test_update_leaves_frozen_weights_bit_for_bit_and_learns():
    graphdef, lora, frozen = make_model()
    before = jax.device_get(frozen)
    batch = make_batch()
    optimizer = learner_state.make_optimizer(OPTIMIZER, 50)
    run = learner_step.make_steps(graphdef, optimizer, StepConfig())
    state = learner_state.init_state(lora, optimizer)
    arrays = learner_step.to_device(batch, None)
    losses = []
    for _ in range(12):
        state, metrics = run.supervised_update(state, frozen, [arrays])
        losses.append(float(metrics["sft/loss"]))
    assert losses[-1] < 0.9 * losses[0]
    assert_trees_close(before, jax.device_get(frozen), atol=0)
    assert run.compile_count() == 2  # gradients, and their application


def adapters_off(lora):
    return jax.tree.map(jnp.zeros_like, lora)


def test_reference_is_the_base_without_adapters():
    graphdef, lora, frozen = make_model(dropout=0.1)  # so that old has a pass of its own
    optimizer = learner_state.make_optimizer(OPTIMIZER, 10)
    run = learner_step.make_steps(graphdef, optimizer, StepConfig())
    arrays = learner_step.to_device(make_batch(), None)
    scored = run.score((lora, None), frozen, arrays)
    base = run.score((adapters_off(lora), None), frozen, arrays)
    np.testing.assert_allclose(scored.ref_bt, base.old_bt, atol=1e-6)
    assert np.abs(np.asarray(scored.old_bt - scored.ref_bt)).max() > 1e-3


def test_step_without_a_pass_for_old_logprobs_is_the_step_with_one():
    graphdef, lora, frozen = make_model()
    optimizer = learner_state.make_optimizer(OPTIMIZER, 10)
    run = learner_step.make_steps(graphdef, optimizer, StepConfig())
    scoring = learner_step.make_steps(make_model(dropout=0.1)[0], optimizer, StepConfig())
    arrays = learner_step.to_device(make_batch(), None)
    scored = run.score((lora, None), frozen, arrays)
    assert scored.old_bt is None
    old_bt = scoring.score((lora, None), frozen, arrays).old_bt
    at = (jnp.int32(0), np.int32(0), np.int32(0))
    got, got_sums = run.policy_gradients((lora, None), frozen, arrays, scored, at)
    expected, sums = run.policy_gradients(
        (lora, None), frozen, arrays, scored._replace(old_bt=old_bt), at
    )
    for name, value in sums.items():
        assert float(got_sums[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert_trees_close(got, expected, atol=1e-4 * largest)


def test_update_vision_adapters_learn_and_the_reference_is_the_base():
    graphdef, lora, frozen = make_model(targets=("vision", "merger"), dropout=0.1)
    optimizer = learner_state.make_optimizer(OPTIMIZER, 10)
    run = learner_step.make_steps(graphdef, optimizer, StepConfig(vision_trainable=True))
    arrays = learner_step.to_device(make_batch(), None)
    scored = run.score((lora, None), frozen, arrays)
    # The base's visual tokens too: with the adapters' the reference would move as they learn.
    base = run.score((adapters_off(lora), None), frozen, arrays)
    np.testing.assert_allclose(scored.ref_bt, base.old_bt, atol=1e-6)
    np.testing.assert_allclose(base.ref_bt, base.old_bt, atol=1e-6)
    assert np.abs(np.asarray(scored.old_bt - scored.ref_bt)).max() > 1e-3

    # Without dropout, for the arithmetic: visual tokens inside the loss are those that were scored.
    graphdef, lora, frozen = make_model(targets=("vision", "merger"))
    run = learner_step.make_steps(graphdef, optimizer, StepConfig(vision_trainable=True))
    before = jax.device_get(lora)
    state, metrics = run.policy_update(learner_state.init_state(lora, optimizer), frozen, [arrays])
    assert float(metrics["learner/grad_norm"]) > 1e-6
    for (path, leaf), old in zip(
        jax.tree.leaves_with_path(jax.device_get(state.trainable)),
        jax.tree.leaves(before),
        strict=True,
    ):
        assert np.abs(leaf - old).max() > 1e-4, jax.tree_util.keystr(path)
    difference_bt = np.asarray(scored.ref_bt - scored.old_bt)
    kl_bt = np.exp(difference_bt) - difference_bt - 1
    mask_bt = np.asarray(arrays["weights_bt"] > 0)
    expected = (kl_bt * mask_bt).sum() / mask_bt.sum()
    assert float(metrics["actor/kl_loss"]) == pytest.approx(expected, rel=1e-3)


def losses_with(*, rows: int = 8, parts: int = 1, dropout_seed: int = 0, **lora) -> list[float]:
    """Of three supervised steps that change nothing, taken twice, on equal rows."""
    graphdef, trainable, frozen = make_model(**lora)
    optimizer = learner_state.make_optimizer(dataclasses.replace(OPTIMIZER, lr=0.0), 10)
    run = learner_step.make_steps(
        graphdef,
        optimizer,
        StepConfig(vision_trainable="visual" in trainable, dropout_seed=dropout_seed),
    )
    batch = make_batch()
    same = dataclasses.replace(
        batch,
        **{
            name: np.repeat(array[:1], rows, axis=0)
            for name, array in vars(batch).items()
            if array is not None and name.endswith(("_bt", "_bs"))
        },
        positions_abt=batch.positions_abt[:, :rows],
    )
    batches = [learner_step.to_device(part, None) for part in split_rows(same, parts)]
    losses = []
    for _ in range(2):
        state = learner_state.init_state(trainable, optimizer)
        for _ in range(3):
            state, metrics = run.supervised_update(state, frozen, batches)
            state = run.next_step(state)
            losses.append(float(metrics["sft/loss"]))
    return losses


def test_update_with_dropout_draws_by_seed_step_and_batch():
    half, other_seed, in_parts = (
        losses_with(dropout=0.4, **options)
        for options in ({"rows": 4}, {"rows": 4, "dropout_seed": 1}, {"parts": 2})
    )
    assert half[:3] == half[3:]
    assert len({*half, *other_seed}) == 6
    # A second batch with the first one's draws would have its loss as well.
    assert np.abs(np.subtract(half, in_parts)).min() > 1e-5


def test_update_with_dropout_drops_in_the_vision_tower_too():
    losses = losses_with(targets=("vision",), dropout=0.4)
    assert losses[:3] == losses[3:]
    assert len(set(losses)) == 3


def test_score_with_dropout_drops_nothing():
    arrays = learner_step.to_device(make_batch(), None)
    scored = []
    for rate in (0.0, 0.4):
        graphdef, lora, frozen = make_model(dropout=rate)
        optimizer = learner_state.make_optimizer(OPTIMIZER, 10)
        run = learner_step.make_steps(graphdef, optimizer, StepConfig())
        scored.append(run.score((lora, None), frozen, arrays))
    plain, dropping = scored
    np.testing.assert_array_equal(plain.visual_md, dropping.visual_md)
    np.testing.assert_array_equal(plain.ref_bt, dropping.ref_bt)
    # The old logprobs have a pass of their own, and nothing is dropped in it.
    at = (jnp.int32(0), np.int32(0), np.int32(0))
    _, sums = run.policy_gradients((lora, None), frozen, arrays, dropping, at)
    drift = float(sums["offpolicy/drift"])
    mask_bt = np.asarray(arrays["weights_bt"] > 0)
    behaviour_bt = np.asarray(arrays["behaviour_logprobs_bt"])
    expected = (np.abs(np.asarray(dropping.old_bt) - behaviour_bt) * mask_bt).sum()
    assert drift == pytest.approx(expected, rel=1e-5)
    half = learner_step.make_steps(make_model(dropout=0.8)[0], optimizer, StepConfig())
    np.testing.assert_array_equal(half.score((lora, None), frozen, arrays).old_bt, dropping.old_bt)


def test_update_on_eight_devices_equals_one_device():
    done = on_eight_devices("print_steps", "test_step")
    assert done.returncode == 0, done.stderr[-2000:]
    on_eight = json.loads(done.stdout.splitlines()[-1])
    metrics, _ = take_steps(make_batch())
    for name in ("learner/loss", "learner/grad_norm", "actor/kl_loss", "offpolicy/drift"):
        assert on_eight[name] == pytest.approx(metrics[name], rel=1e-4), name


def check_rows_apart() -> None:
    """The body of the test below, in a process of its own: eight data parts, a row each."""
    mesh = sharding.make_mesh(8, 1, 1)
    graphdef, lora, frozen = make_model(targets=("all",))
    optimizer = learner_state.make_optimizer(OPTIMIZER, 10)
    with jax.set_mesh(mesh):
        state = learner_state.init_state(lora, optimizer, mesh, RULES)
        placed = jax.tree.map(lambda leaf: leaf.sharding, state)
        frozen = jax.device_put(frozen, sharding.state_shardings(mesh, frozen, RULES))
        arrays = learner_step.to_device(make_batch(), mesh)
        for trains_vision in (False, True):
            cfg = StepConfig(vision_trainable=trains_vision)
            run = learner_step.make_steps(graphdef, optimizer, cfg, placed)
            args = (learner_step.params_of(state), frozen, arrays)
            at = (jnp.int32(0), np.int32(0), np.int32(0))
            score = run.score.lower(*args).compile()
            gradients = run.policy_gradients.lower(*args, run.score(*args), at).compile()
            assert collectives(score) == set(), "a row is scored where it is"
            assert collectives(gradients) == {"all-reduce"}, "the sum over the rows"
        # A batch that was planned for no mesh ends the training.
        elsewhere = dict(arrays, vision_index_bt=jnp.roll(arrays["vision_index_bt"], 1, axis=0))
        _, metrics = run.policy_update(state, frozen, [elsewhere])
        assert np.isnan(float(metrics["learner/loss"]))


def collectives(compiled) -> set[str]:
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return set(re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text()))


def test_no_visual_token_leaves_its_data_part():
    done = on_eight_devices("check_rows_apart", "test_step")
    assert done.returncode == 0, done.stderr[-2000:]


def print_steps():
    assert len(jax.devices()) == 8
    test_mesh = sharding.make_mesh(2, 2, 2)
    with jax.set_mesh(test_mesh):
        print(json.dumps(take_steps(make_batch(), mesh=test_mesh)[0]))
