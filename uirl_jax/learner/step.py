"""One optimizer step: a few TrainBatches of one shape in, one update of the adapters out.

For each batch: visual tokens and the base's logprobs once and without gradient, then gradients of
the sum of the losses; the sums of all batches are divided by their common denominator, and the
optimizer takes one step. So memory is that of one batch, however much a step trains on. Everything
that is compiled here is pure; `learner.loop` feeds it and writes down what it returns. Shapes come
in a few fixed buckets (shards.batching): nothing compiles after warm-up.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
Sums = dict[str, jax.Array]  # of a metric over the sampled tokens


class Scored(NamedTuple):
    """What a batch's gradients need and what no gradient goes through.

    None: visual tokens that the loss itself computes, because the vision tower is trained; old
    logprobs that would be the loss's own, as they are with one update a step unless its pass drops
    something out; a reference that nobody asks for.
    """

    visual_md: jax.Array | None
    old_bt: jax.Array | None
    ref_bt: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Steps:
    """The jitted functions of a run, and the two steps that are made of them.

    score(trainable, frozen, arrays) -> Scored
    policy_gradients(trainable, frozen, arrays, scored, (step, number)) -> (gradients, sums)
    supervised_gradients(trainable, frozen, arrays, (step, number)) -> (gradients, sums)
    add(total, one): of two batches' gradients and sums; the first is donated.
    apply(state, (gradients, sums)) -> (state, metrics); the state is donated.
    """

    score: Callable[[nnx.State, nnx.State, Arrays], Scored]
    policy_gradients: Callable[..., tuple[nnx.State, Sums]]
    supervised_gradients: Callable[..., tuple[nnx.State, Sums]]
    add: Callable[[Any, Any], Any]
    apply: Callable[[TrainState, tuple[nnx.State, Sums]], tuple[TrainState, Sums]]

    def policy_step(
        self, state: TrainState, frozen: nnx.State, batches: Sequence[Arrays]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update from the batches' advantages. The state is donated."""

        def gradients(number: int, arrays: Arrays) -> tuple[nnx.State, Sums]:
            scored = self.score(state.trainable, frozen, arrays)
            at = (state.step, np.int32(number))
            return self.policy_gradients(state.trainable, frozen, arrays, scored, at)

        return self._step(state, batches, gradients)

    def supervised_step(
        self, state: TrainState, frozen: nnx.State, batches: Sequence[Arrays]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update towards the batches' sampled tokens. The state is donated."""

        def gradients(number: int, arrays: Arrays) -> tuple[nnx.State, Sums]:
            at = (state.step, np.int32(number))
            return self.supervised_gradients(state.trainable, frozen, arrays, at)

        return self._step(state, batches, gradients)

    def _step(
        self,
        state: TrainState,
        batches: Sequence[Arrays],
        gradients: Callable[[int, Arrays], tuple[nnx.State, Sums]],
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        total = gradients(0, batches[0])
        for number, arrays in enumerate(batches[1:], 1):
            total = self.add(total, gradients(number, arrays))
        return self.apply(state, total)

    def compile_count(self) -> int:
        """Programs compiled so far; stands still after warm-up."""
        compiled = (self.score, self.policy_gradients, self.supervised_gradients)
        return sum(fn._cache_size() for fn in (*compiled, self.add, self.apply))


def to_device(batch: TrainBatch, mesh: jax.sharding.Mesh | None) -> Arrays:
    """The batch's arrays on the mesh (rows over its data axes), or on the one device there is.

    Rows that the mesh does not divide go to every device whole: right, and slower.
    """
    arrays = {
        field.name: array
        for field in dataclasses.fields(batch)
        if (array := getattr(batch, field.name)) is not None
    }
    if mesh is None:
        return {name: jnp.asarray(array) for name, array in arrays.items()}
    shardings = sharding.batch_shardings(mesh, arrays)
    return {name: jax.device_put(array, shardings[name]) for name, array in arrays.items()}


def make_steps(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss_cfg: losses.GrpoConfig,
    *,
    vision_trainable: bool = False,
    use_reference: bool = True,
    temperature: float = 1.0,
    forbidden_ids: Sequence[int] = (),
    dropout_seed: int = 0,
    state_shardings: Any = None,
) -> Steps:
    """Builds the jitted functions of one run.

    Args:
      graphdef: of the model; merged with (trainable, frozen) inside.
      vision_trainable: the vision tower, or its adapters, are among the trainable leaves, so its
        visual tokens are computed inside the loss, and for the reference apart.
      use_reference: compute the base's logprobs (adapters off). Off where nothing is frozen, or
        where the KL coefficient is 0: it is a forward pass that would be thrown away.
      temperature, forbidden_ids: as the actor samples, so that both mean the same distribution:
        without them old and behaviour differ by what the forbidden tokens would have got.
      dropout_seed: with it, a step's number and a batch's number in it draw what the adapters'
        dropout zeroes (LoraConfig.dropout). Only passes that gradients are taken of drop anything.
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
            prefix_segments_bt=batch.get("prefix_segments_bt"),
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
            batch["sampled_index_bs"],
            temperature=temperature,
            forbidden_v=forbidden_v,
        )

    @jax.jit
    def score(trainable: nnx.State, frozen: nnx.State, batch: Arrays) -> Scored:
        model = nnx.merge(graphdef, trainable, frozen)
        recompute_old = model.lora is not None and model.lora.dropout > 0
        visual_md = old_bt = ref_bt = None
        if recompute_old or not vision_trainable:
            visual_md = visual_tokens(model, batch)
        if recompute_old:
            old_bt = logprobs(model, batch, visual_md, adapters=True)
        if use_reference:
            # Where adapters of the tower move its visual tokens, the base has its own.
            base_md = visual_tokens(model, batch, adapters=False) if vision_trainable else visual_md
            ref_bt = logprobs(model, batch, base_md, adapters=False)
        return Scored(None if vision_trainable else visual_md, old_bt, ref_bt)

    def gradients(
        loss_fn: Callable[[jax.Array], tuple[jax.Array, jax.Array, Sums]],
        trainable: nnx.State,
        frozen: nnx.State,
        batch: Arrays,
        visual_md: jax.Array | None,
        at: tuple[jax.Array, jax.Array],
    ) -> tuple[nnx.State, Sums]:
        """Of the loss's sum; the sums of its metrics, of itself and of its denominator."""
        dropout_key = jax.random.key(dropout_seed)
        for number in at:
            dropout_key = jax.random.fold_in(dropout_key, number)
        vision_key, text_key = jax.random.split(dropout_key)

        def loss_sum(trainable: nnx.State) -> tuple[jax.Array, Sums]:
            model = nnx.merge(graphdef, trainable, frozen)
            table_md = visual_md
            if table_md is None:
                table_md = visual_tokens(model, batch, dropout_key=vision_key)
            new_bt = logprobs(model, batch, table_md, adapters=True, dropout_key=text_key)
            total, denominator, sums = loss_fn(new_bt)
            return total, sums | {"learner/loss": total, "learner/tokens": denominator}

        return jax.grad(loss_sum, has_aux=True)(trainable)

    gradient_shardings = None
    if state_shardings is not None:
        gradient_shardings = (state_shardings.trainable, None)

    @jax.jit(out_shardings=gradient_shardings)
    def policy_gradients(
        trainable: nnx.State,
        frozen: nnx.State,
        batch: Arrays,
        scored: Scored,
        at: tuple[jax.Array, jax.Array],
    ) -> tuple[nnx.State, Sums]:
        def loss_fn(logprobs_bt: jax.Array) -> Any:
            return losses.clipped_policy_loss(
                logprobs_bt,
                old_bt=logprobs_bt if scored.old_bt is None else scored.old_bt,
                behaviour_bt=batch["behaviour_logprobs_bt"],
                ref_bt=logprobs_bt if scored.ref_bt is None else scored.ref_bt,
                advantages_bt=batch["advantages_bt"],
                completion_mask_bt=batch["completion_mask_bt"],
                cfg=loss_cfg,
            )

        return gradients(loss_fn, trainable, frozen, batch, scored.visual_md, at)

    @jax.jit(out_shardings=gradient_shardings)
    def supervised_gradients(
        trainable: nnx.State, frozen: nnx.State, batch: Arrays, at: tuple[jax.Array, jax.Array]
    ) -> tuple[nnx.State, Sums]:
        def loss_fn(logprobs_bt: jax.Array) -> Any:
            return losses.supervised_loss(
                logprobs_bt, completion_mask_bt=batch["completion_mask_bt"]
            )

        visual_md = None
        if not vision_trainable:
            visual_md = visual_tokens(nnx.merge(graphdef, trainable, frozen), batch)
        return gradients(loss_fn, trainable, frozen, batch, visual_md, at)

    @jax.jit(donate_argnums=0, out_shardings=gradient_shardings)
    def add(total: Any, one: Any) -> Any:
        return jax.tree.map(jnp.add, total, one)

    @jax.jit(donate_argnums=0, out_shardings=(state_shardings, None))
    def apply(state: TrainState, total: tuple[nnx.State, Sums]) -> tuple[TrainState, Sums]:
        grads, sums = total
        denominator = jnp.maximum(sums["learner/tokens"], 1.0)
        grads = jax.tree.map(lambda leaf: leaf / denominator, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        metrics = {name: value / denominator for name, value in sums.items()}
        metrics |= {
            "learner/grad_norm": optax.tree.norm(grads),
            "learner/update_norm": optax.tree.norm(updates),
            "learner/tokens": sums["learner/tokens"],
        }
        return TrainState(trainable, opt_state, state.step + 1), metrics

    return Steps(score, policy_gradients, supervised_gradients, add, apply)


def to_floats(metrics: dict[str, jax.Array]) -> dict[str, float]:
    """One transfer for all of a step's metrics."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def tokens_in(batches: Sequence[TrainBatch]) -> int:
    """Real (not padding) tokens of a step."""
    return sum(int(np.count_nonzero(batch.segment_ids_bt)) for batch in batches)
