"""Rows of tokens that are trained with the adapters: model, step, engine, policy, checkpoint."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import engine_world, small_model, step_world
from tests.policies import random_policy
from uirl_jax import policy_sync
from uirl_jax.checkpoints import Checkpointer
from uirl_jax.engine import weights as engine_weights
from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.models import weights
from uirl_jax.models.lora import LoraConfig, LoRAParam
from uirl_jax.store import open_store

IDS = (3, 7, 49)
LORA = dataclasses.replace(small_model.LORA, trainable_token_ids=(49, 3, 7))
CONFIGS = {"tied": small_model.CONFIG, "untied": small_model.UNTIED}
TOKENS_BT = np.array([[3, 49, 12, 7, 7, 48, 0], [5, 3, 2, 8, 49, 6, 4]], np.int32)
ROWS = TokenRows(
    TOKENS_BT,
    positions_abt=np.broadcast_to(np.arange(7, dtype=np.int32), (3, 2, 7)),
    segment_ids_bt=np.ones_like(TOKENS_BT),
)
WEIGHTS_BTV = np.random.default_rng(5).normal(size=(2, 7, 50)).astype(np.float32)


@functools.partial(jax.jit, static_argnames="adapters")
def logits_of(model: Qwen2VL, *, adapters: bool = True) -> jax.Array:
    return model.logits(model.hidden(ROWS, None, adapters=adapters), adapters=adapters)


@jax.jit
def gradients_of(model: Qwen2VL) -> nnx.State:
    """Of a weighted sum of all logits, with respect to every leaf."""
    graphdef, state = nnx.split(model)
    return jax.grad(lambda state: (logits_of(nnx.merge(graphdef, state)) * WEIGHTS_BTV).sum())(
        state
    )


def by_path(state: nnx.State) -> dict[str, np.ndarray]:
    return weights.adapters_to_numpy(state)


@functools.cache
def trained(kind: str) -> Qwen2VL:
    """No row is that of the base."""
    return small_model.noisy(CONFIGS[kind], LORA)


def with_rows_in_the_base(kind: str) -> Qwen2VL:
    """The oracle: the same model without trained rows, whose own tables hold them."""
    leaves = by_path(nnx.state(trained(kind)))
    table_vd = leaves["text/embedding"].copy()
    table_vd[list(IDS)] = leaves.pop("text/embedding_rows/rows")
    leaves["text/embedding"] = table_vd
    if kind == "untied":
        head_dv = leaves["text/lm_head/kernel"].copy()
        head_dv[:, list(IDS)] = leaves.pop("text/head_rows/rows").T
        leaves["text/lm_head/kernel"] = head_dv
    plain = small_model.fresh(CONFIGS[kind])
    nnx.update(plain, weights.adapters_from_numpy(leaves, nnx.state(plain)))
    return plain


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_replace_those_of_the_base_in_logits_and_gradients(kind):
    model, oracle = trained(kind), with_rows_in_the_base(kind)
    expected_btv = np.asarray(logits_of(oracle))
    # The products of the rows are summed in another order: float32 rounding.
    np.testing.assert_allclose(logits_of(model), expected_btv, rtol=1e-5, atol=1e-5)
    base_btv = np.asarray(logits_of(model, adapters=False))
    assert np.abs(base_btv - expected_btv).max() > 0.1

    got, expected = by_path(gradients_of(model)), by_path(gradients_of(oracle))
    table_vd = expected["text/embedding"]  # tied: what comes from the embedding and the head
    largest = np.abs(table_vd).max()
    rows_nd = got["text/embedding_rows/rows"]
    np.testing.assert_allclose(rows_nd, table_vd[list(IDS)], atol=1e-5 * largest)
    others = np.setdiff1d(np.arange(50), IDS)
    np.testing.assert_allclose(got["text/embedding"][others], table_vd[others], atol=1e-5 * largest)
    assert not got["text/embedding"][list(IDS)].any()  # nothing reads the rows that are replaced
    if kind == "untied":
        head_dv = expected["text/lm_head/kernel"]
        np.testing.assert_allclose(
            got["text/head_rows/rows"], head_dv[:, list(IDS)].T, atol=1e-5 * np.abs(head_dv).max()
        )


@pytest.mark.parametrize("kind", CONFIGS)
def test_fresh_rows_are_the_base_and_adapters_off_reads_none(kind):
    fresh = small_model.fresh(CONFIGS[kind], LORA)
    base_btv = np.asarray(logits_of(fresh, adapters=False))
    got_btv = np.asarray(logits_of(fresh))
    others = np.setdiff1d(np.arange(50), IDS)
    np.testing.assert_array_equal(got_btv[..., others], base_btv[..., others])
    # Their columns are a product of their own, which may be summed in another order.
    np.testing.assert_allclose(got_btv, base_btv, rtol=1e-5, atol=1e-6)

    broken = nnx.clone(fresh)
    nans = jax.tree.map(lambda x: jnp.full_like(x, np.nan), nnx.state(fresh, LoRAParam))
    nnx.update(broken, nans)
    np.testing.assert_array_equal(logits_of(broken, adapters=False), base_btv)


def test_rows_are_adapters_in_the_order_of_their_ids():
    adapters = by_path(nnx.state(trained("untied"), LoRAParam))
    assert adapters["text/embedding_rows/rows"].shape == (3, 32)
    assert adapters["text/head_rows/rows"].shape == (3, 32)
    fresh = small_model.fresh(small_model.UNTIED, LORA)
    leaves = by_path(nnx.state(fresh))
    np.testing.assert_array_equal(
        leaves["text/embedding_rows/rows"], leaves["text/embedding"][list(IDS)]
    )
    np.testing.assert_array_equal(
        leaves["text/head_rows/rows"], leaves["text/lm_head/kernel"][:, list(IDS)].T
    )
    assert "text/head_rows/rows" not in by_path(nnx.state(trained("tied")))


def test_step_trains_the_rows_and_its_reference_is_the_base():
    ids = (5, 20, 63)
    graphdef, adapters, frozen = step_world.make_model(trainable_token_ids=ids)
    plain_graphdef, _, plain_frozen = step_world.make_model()
    assert jax.tree.structure(frozen) == jax.tree.structure(plain_frozen)
    optimizer = learner_state.make_optimizer(step_world.OPTIMIZER, 10)
    arrays = learner_step.to_device(step_world.make_batch(), None)
    run = learner_step.make_steps(graphdef, optimizer, learner_step.StepConfig())
    scored = run.score((adapters, None), frozen, arrays)

    cfg = learner_step.StepConfig(use_reference=False, recompute_old=True)
    base = learner_step.make_steps(plain_graphdef, optimizer, cfg)
    _, plain, _ = step_world.make_model()
    off = jax.tree.map(jnp.zeros_like, plain)
    expected_bt = base.score((off, None), frozen, arrays).old_bt
    np.testing.assert_allclose(scored.ref_bt, expected_bt, atol=1e-6)

    before = jax.device_get(adapters["text"]["embedding_rows"]["rows"][...])
    state = learner_state.init_state(adapters, optimizer)
    state, _ = run.policy_update(state, frozen, [arrays])
    after = jax.device_get(state.trainable["text"]["embedding_rows"]["rows"][...])
    assert (np.abs(after - before).max(axis=1) > 1e-4).all()
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == before.shape]
    assert len(moments) == 2


def rows_policy() -> engine_world.PolicyModel:
    lora = LoraConfig(rank=2, alpha=4.0, trainable_token_ids=(5, 20, 33))
    policy = random_policy(engine_world.MODEL_CFG, lora)
    return dataclasses.replace(policy, trainable=engine_world.redrawn(policy.trainable, 1))


def test_engine_samples_with_the_rows_what_the_learner_scores_highest():
    policy = rows_policy()
    engine = engine_world.new_engine(policy)
    asked = [
        dataclasses.replace(one, temperature=0.0)
        for one in (engine_world.request(0, 5, "a"), engine_world.request(1, 14, ""))
    ]
    sampled = set()
    for lora, version in ((policy.trainable, 7), (engine_world.redrawn(policy.trainable, 2), 8)):
        if version == 8:
            engine.set_policy(lora, version)
        for one, result in zip(asked, engine_world.sample_all(engine, asked), strict=True):
            tokens = result.token_ids.tolist()
            logits_tv, _ = engine_world.without_cache(policy, one, tokens, lora=lora)
            start = len(one.context_ids) - 1
            best = engine_world.masked_log_softmax(
                logits_tv[start : start + len(tokens)], 1.0, engine_world.FORBIDDEN
            )
            assert tokens == best.argmax(axis=-1).tolist()
            engine_world.assert_logprobs(policy, one, result, lora=lora)
            sampled |= set(tokens)
    # Rows of 0.5 beside embeddings of 0.02: a model that reads the base's never says these.
    assert sampled & {5, 20, 33}


def test_policy_and_checkpoint_give_the_rows_back(tmp_path):
    policy = rows_policy()
    arrays = weights.adapters_to_numpy(policy.trainable)
    store = open_store(tmp_path)
    manifest = policy_sync.publish(
        store, version=1, step=1, arrays=arrays, base_hash="base", run_id="run", extra={}
    )
    loaded = policy_sync.load(store, manifest, "base")
    got = weights.adapters_from_numpy(loaded, policy.trainable)
    engine_weights.check_fits(got, policy.trainable, 1)
    step_world.assert_trees_close(got, policy.trainable, atol=0)
    assert "text/embedding_rows/rows" in loaded

    optimizer = learner_state.make_optimizer(step_world.OPTIMIZER, 10)
    state = learner_state.init_state(policy.trainable, optimizer)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, state, {})
        restored = checkpointer.restore_latest(learner_state.abstract(state))
    assert restored is not None
    step_world.assert_trees_close(restored.arrays, state, atol=0)
