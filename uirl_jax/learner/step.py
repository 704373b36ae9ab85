"""One optimizer step: visual tokens once, old and ref logprobs once, then gradients by microbatch.

Everything here is jitted at the edge and pure; `learner.loop` feeds it and writes down what it
returns. Shapes come in a few fixed buckets (shards.batching): nothing compiles after warm-up.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from uirl_jax.learner.state import TrainState
from uirl_jax.models import qwen2_vl, sharding
from uirl_jax.rl import losses
from uirl_jax.types import TrainBatch

Arrays = dict[str, jax.Array]
_ROW_FIELDS = (
    "token_ids_bt",
    "segment_ids_bt",
    "completion_mask_bt",
    "vision_index_bt",
    "behaviour_logprobs_bt",
    "advantages_bt",
)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The jitted functions of a run. `score` and `update` share the table of visual tokens."""

    score: Callable[[nnx.State, nnx.State, Arrays], tuple[jax.Array, jax.Array, jax.Array]]
    update: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    supervised: Callable[[TrainState, nnx.State, Arrays], tuple[TrainState, dict[str, jax.Array]]]

    def compile_count(self) -> int:
        """Programs compiled so far; stands still after warm-up."""
        return sum(fn._cache_size() for fn in (self.score, self.update, self.supervised))


def to_device(batch: TrainBatch, mesh: jax.sharding.Mesh | None) -> Arrays:
    """The batch's arrays on the mesh (rows over its data axes), or on the one device there is.

    Rows that the mesh does not divide go to every device whole: right, and slower.
    """
    arrays = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if mesh is None:
        return {name: jnp.asarray(array) for name, array in arrays.items()}
    shardings = sharding.batch_shardings(mesh, arrays)
    return {name: jax.device_put(array, shardings[name]) for name, array in arrays.items()}


def make_steps(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss_cfg: losses.GrpoConfig,
    *,
    microbatches: int = 1,
    vision_trainable: bool = False,
    use_reference: bool = True,
    temperature: float = 1.0,
    forbidden_ids: Sequence[int] = (),
    dropout_seed: int = 0,
    state_shardings: Any = None,
) -> Steps:
    """Builds the jitted steps of one run.

    Args:
      graphdef: of the model; merged with (trainable, frozen) inside.
      microbatches: a batch's rows are cut into so many parts, taken one after the other; the
        loss is the same (sums and denominators), memory is divided.
      vision_trainable: the vision tower, or its adapters, are among the trainable leaves, so its
        visual tokens are computed inside the loss, once a microbatch, and for the reference apart.
      use_reference: compute the base's logprobs (adapters off). Off where nothing is frozen, or
        where the KL coefficient is 0: it is a forward pass that would be thrown away.
      temperature, forbidden_ids: as the actor samples, so that both mean the same distribution:
        without them old and behaviour differ by what the forbidden tokens would have got.
      dropout_seed: with it, a step's number and a microbatch's draw what the adapters' dropout
        zeroes (LoraConfig.dropout). Only passes that gradients are taken of drop anything.
      state_shardings: where a step leaves the train state. Left to the compiler it may come out
        placed otherwise than it went in, and the second step compiles everything again.
    """

    def visual_tokens(
        model: nnx.Module,
        batch: Arrays,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        return qwen2_vl.encode_images(
            model,
            batch["patches_ipf"],
            batch["patch_positions_ip2"],
            batch["patch_segments_ip"],
            adapters=adapters,
            dropout_key=dropout_key,
        )

    def logprobs(
        model: nnx.Module,
        batch: Arrays,
        visual_md: jax.Array,
        *,
        adapters: bool,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        x_btd = qwen2_vl.hidden(
            model,
            batch["token_ids_bt"],
            visual_md,
            batch["vision_index_bt"],
            batch["positions_3bt"],
            batch["segment_ids_bt"],
            adapters=adapters,
            dropout_key=dropout_key,
        )
        forbidden_v = None
        if forbidden_ids:
            forbidden_v = np.isin(np.arange(model.cfg.vocab_size), forbidden_ids)
        return qwen2_vl.token_logprobs(
            model,
            x_btd,
            batch["token_ids_bt"],
            temperature=temperature,
            forbidden_v=forbidden_v,
        )

    @jax.jit
    def score(
        trainable: nnx.State, frozen: nnx.State, batch: Arrays
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        model = nnx.merge(graphdef, trainable, frozen)
        visual_md = visual_tokens(model, batch)
        old_bt = logprobs(model, batch, visual_md, adapters=True)
        if not use_reference:
            return visual_md, old_bt, old_bt
        base_md = visual_tokens(model, batch, adapters=False) if vision_trainable else visual_md
        return visual_md, old_bt, logprobs(model, batch, base_md, adapters=False)

    def accumulate(
        state: TrainState,
        frozen: nnx.State,
        batch: Arrays,
        visual_md: jax.Array | None,
        rows: Arrays,
        loss_fn: Callable[[jax.Array, Arrays], Any],
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Gradients of sum(loss) / sum(denominator) over the microbatches, then one update."""
        denominator = jnp.maximum(batch["completion_mask_bt"].astype(jnp.float32).sum(), 1.0)

        def microbatch_loss(
            trainable: nnx.State, part: Arrays, dropout_key: jax.Array
        ) -> tuple[jax.Array, Arrays]:
            model = nnx.merge(graphdef, trainable, frozen)
            vision_key, text_key = jax.random.split(dropout_key)
            table_md = visual_md
            if table_md is None:
                table_md = visual_tokens(model, batch, dropout_key=vision_key)
            new_bt = logprobs(model, part, table_md, adapters=True, dropout_key=text_key)
            loss_sum, _, metrics = loss_fn(new_bt, part)
            return loss_sum / denominator, metrics

        gradient = jax.value_and_grad(microbatch_loss, has_aux=True)
        rows = rows | {name: batch[name] for name in _ROW_FIELDS}
        parts = {name: _split_rows(array, microbatches) for name, array in rows.items()}
        parts["positions_3bt"] = jnp.moveaxis(
            _split_rows(jnp.moveaxis(batch["positions_3bt"], 0, 1), microbatches), 2, 1
        )

        step_key = jax.random.fold_in(jax.random.key(dropout_seed), state.step)
        inputs = (parts, jax.random.split(step_key, microbatches))

        def body(carry: Any, one: tuple[Arrays, jax.Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, gradient(state.trainable, *one)), None

        total = gradient(state.trainable, *jax.tree.map(lambda array: array[0], inputs))
        if microbatches > 1:
            total, _ = jax.lax.scan(body, total, jax.tree.map(lambda array: array[1:], inputs))
        (loss, sums), grads = total

        grad_norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        metrics = {name: value / denominator for name, value in sums.items()}
        metrics |= {
            "learner/loss": loss,
            "learner/grad_norm": grad_norm,
            "learner/update_norm": optax.tree.norm(updates),
            "learner/tokens": batch["completion_mask_bt"].sum(),
        }
        return TrainState(trainable, opt_state, state.step + 1), metrics

    @jax.jit(donate_argnames=("state",), out_shardings=(state_shardings, None))
    def update(
        state: TrainState,
        frozen: nnx.State,
        batch: Arrays,
        visual_md: jax.Array,
        old_bt: jax.Array,
        ref_bt: jax.Array,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss_fn(logprobs_bt: jax.Array, part: Arrays) -> Any:
            return losses.clipped_policy_loss(
                logprobs_bt,
                old_bt=part["old_bt"],
                behaviour_bt=part["behaviour_logprobs_bt"],
                ref_bt=part["ref_bt"],
                advantages_bt=part["advantages_bt"],
                completion_mask_bt=part["completion_mask_bt"],
                cfg=loss_cfg,
            )

        rows = {"old_bt": old_bt, "ref_bt": ref_bt}
        table_md = None if vision_trainable else visual_md
        return accumulate(state, frozen, batch, table_md, rows, loss_fn)

    @jax.jit(donate_argnames=("state",), out_shardings=(state_shardings, None))
    def supervised(
        state: TrainState, frozen: nnx.State, batch: Arrays
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss_fn(logprobs_bt: jax.Array, part: Arrays) -> Any:
            return losses.supervised_loss(
                logprobs_bt, completion_mask_bt=part["completion_mask_bt"]
            )

        table_md = None
        if not vision_trainable:
            table_md = visual_tokens(nnx.merge(graphdef, state.trainable, frozen), batch)
        return accumulate(state, frozen, batch, table_md, {}, loss_fn)

    return Steps(score, update, supervised)


def _split_rows(array: jax.Array, parts: int) -> jax.Array:
    """[B, ...] -> [parts, B / parts, ...], row b going to part b % parts.

    Strided, so that on a mesh every part still has rows of every device.
    """
    rows = array.shape[0]
    return jnp.swapaxes(array.reshape(rows // parts, parts, *array.shape[1:]), 0, 1)


def to_floats(metrics: dict[str, jax.Array]) -> dict[str, float]:
    """One transfer for all of a step's metrics."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def tokens_in(batch: TrainBatch) -> int:
    """Real (not padding) tokens of the batch."""
    return int(np.count_nonzero(batch.segment_ids_bt))
