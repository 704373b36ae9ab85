"""What is compiled of a step: scores, gradients of a batch, their sum, and one update from it.

A step is one update or several (learner.algorithm), an update one TrainBatch or several of one
shape: gradients of a batch's loss are added up, and since the tokens' weights add up to 1 over an
update there is nothing to divide. So memory is that of one batch, however much a step trains on.
Everything here is pure. Shapes come in a few fixed buckets (shards.batching): nothing compiles
after warm-up.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from uirl_jax.learner.state import Critic, CriticConfig, TrainState, make_critic_optimizer
from uirl_jax.models import qwen2_vl, scoring, sharding
from uirl_jax.rl import losses
from uirl_jax.types import TrainBatch
from uirl_jax.vision_inputs import PUBLISHED_IMAGES, ImageConfig

Arrays = dict[str, jax.Array]
Sums = dict[str, jax.Array]  # of the loss, and of metrics over the sampled tokens


class Scored(NamedTuple):
    """What a batch's gradients need and what no gradient goes through.

    None: visual tokens that the loss itself computes, because the vision tower is trained; old
    logprobs that would be the loss's own, as they are with one update a step unless its pass drops
    something out; a reference or values that nobody asks for.
    """

    visual_md: jax.Array | None
    old_bt: jax.Array | None
    ref_bt: jax.Array | None
    values_after_bt: jax.Array | None  # the critic's, of the state after each token


class Total(NamedTuple):
    """Sums over a step's batches."""

    grads: Any  # of (trainable, the critic's parameters or None)
    sums: Sums


@dataclasses.dataclass(frozen=True)
class Steps:
    """The jitted functions of a run; `params` is (trainable, the critic's parameters or None).

    score(params, frozen, arrays) -> Scored
    policy_gradients(params, frozen, arrays, scored, at) -> Total
    supervised_gradients(params, frozen, arrays, at) -> Total; at: what dropout draws from, int32
        (step, update, batch)
    add(total, one) -> Total; the first is donated.
    apply(state, total) -> (state, metrics): one update of the optimizer; the state is donated.
    next_step(state) -> state: counts a step.
    """

    score: Callable[..., Scored]
    policy_gradients: Callable[..., Total]
    supervised_gradients: Callable[..., Total]
    add: Callable[[Total, Total], Total]
    apply: Callable[[TrainState, Total], tuple[TrainState, dict[str, jax.Array]]]
    next_step: Callable[[TrainState], TrainState]

    def policy_update(
        self,
        state: TrainState,
        frozen: nnx.State,
        batches: Iterable[Arrays],
        scored: Sequence[Scored] | None = None,
        *,
        number: int = 0,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update from the batches' advantages. The state is donated.

        Args:
          scored: of each batch; None scores one after the other, so that one batch's visual tokens
            are on the device at a time.
          number: of the update in the step.
        """

        def gradients(place: int, arrays: Arrays) -> Total:
            params = params_of(state)
            of = scored[place] if scored else self.score(params, frozen, arrays)
            return self.policy_gradients(params, frozen, arrays, of, _at(state, number, place))

        return self._update(state, batches, gradients)

    def supervised_update(
        self,
        state: TrainState,
        frozen: nnx.State,
        batches: Iterable[Arrays],
        *,
        number: int = 0,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update towards the batches' weighted tokens. The state is donated."""

        def gradients(place: int, arrays: Arrays) -> Total:
            at = _at(state, number, place)
            return self.supervised_gradients(params_of(state), frozen, arrays, at)

        return self._update(state, batches, gradients)

    def _update(
        self,
        state: TrainState,
        batches: Iterable[Arrays],
        gradients: Callable[[int, Arrays], Total],
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        total = None
        for place, arrays in enumerate(batches):
            one = gradients(place, arrays)
            total = one if total is None else self.add(total, one)
        return self.apply(state, total)

    def compile_count(self) -> int:
        """Programs compiled so far; stands still after warm-up."""
        return sum(getattr(self, f.name)._cache_size() for f in dataclasses.fields(self))


def params_of(state: TrainState) -> tuple[nnx.State, Any]:
    """What gradients are taken of."""
    return state.trainable, state.critic.params if state.critic else None


def _at(state: TrainState, number: int, place: int) -> tuple[jax.Array, np.int32, np.int32]:
    return state.step, np.int32(number), np.int32(place)


# The device has no use for them: where tokens come from, and what others already say.
HOST_FIELDS = ("trajectory_bs", "token_bs", "completion_mask_bt")


def to_device(batch: TrainBatch, mesh: jax.sharding.Mesh | None) -> Arrays:
    """The batch's arrays on the mesh (rows over its data axes), or on the one device there is.

    Rows that the mesh does not divide go to every device whole: right, and slower.
    """
    arrays = {
        field.name: array
        for field in dataclasses.fields(batch)
        if (array := getattr(batch, field.name)) is not None and field.name not in HOST_FIELDS
    }
    if mesh is None:
        return {name: jnp.asarray(array) for name, array in arrays.items()}
    shardings = sharding.batch_shardings(mesh, arrays)
    return {name: jax.device_put(array, shardings[name]) for name, array in arrays.items()}


def make_steps(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss_cfg: losses.PolicyLossConfig,
    *,
    critic_cfg: CriticConfig | None = None,
    vision_trainable: bool = False,
    use_reference: bool = True,
    recompute_old: bool = False,
    temperature: float = 1.0,
    forbidden_ids: Sequence[int] = (),
    image_cfg: ImageConfig = PUBLISHED_IMAGES,
    dropout_seed: int = 0,
    state_shardings: Any = None,
) -> Steps:
    """Builds the jitted functions of one run.

    Args:
      graphdef: of the model; merged with (trainable, frozen) inside.
      critic_cfg: of the value head, where the state has one.
      vision_trainable: the vision tower, or its adapters, are among the trainable leaves, so its
        visual tokens are computed inside the loss, and for the reference apart.
      use_reference: compute the base's logprobs (adapters off). Off where nothing is frozen, or
        where the KL coefficient is 0: it is a forward pass that would be thrown away.
      recompute_old: give old logprobs a pass of their own, because a step has several updates or
        its rewards need them. Otherwise they are the loss's own, and the pass is saved; only
        dropout makes them differ, so with dropout there is one in any case.
      temperature, forbidden_ids: as the actor samples, so that both mean the same distribution:
        without them old and behaviour differ by what the forbidden tokens would have got.
      image_cfg: of the model's directory: what the levels of a screenshot mean to it.
      dropout_seed: with it, and with `at`, the adapters' dropout draws what it zeroes
        (LoraConfig.dropout). Only passes that gradients are taken of drop anything.
      state_shardings: where a step leaves the train state. Left to the compiler it may come out
        placed otherwise than it went in, and the second step compiles everything again.
    """
    critic_optimizer = None if critic_cfg is None else make_critic_optimizer(critic_cfg)

    def visual_tokens(
        model: nnx.Module,
        batch: Arrays,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        return qwen2_vl.encode_images(
            model,
            qwen2_vl.pixel_values(batch["patches_ipc"], image_cfg),
            batch["patch_positions_ip2"],
            batch["patch_segments_ip"],
            adapters=adapters,
            dropout_key=dropout_key,
        )

    def hidden(
        model: nnx.Module,
        batch: Arrays,
        visual_md: jax.Array,
        *,
        adapters: bool,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        return qwen2_vl.hidden(
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

    def logprobs(
        model: nnx.Module, batch: Arrays, x_btd: jax.Array, *, entropies: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        forbidden_v = None
        if forbidden_ids:
            forbidden_v = np.isin(np.arange(model.cfg.vocab_size), forbidden_ids)
        return scoring.token_logprobs_and_entropies(
            model,
            x_btd,
            batch["token_ids_bt"],
            batch["sampled_index_bs"],
            temperature=temperature,
            forbidden_v=forbidden_v,
            entropies=entropies,
        )

    def values_after(critic: Any, x_btd: jax.Array) -> jax.Array:
        """float32[B,T], of the state after each token."""
        head = critic["value_head"]
        return (x_btd.astype(jnp.float32) @ head["kernel"] + head["bias"])[..., 0]

    @jax.jit
    def score(params: tuple[nnx.State, Any], frozen: nnx.State, batch: Arrays) -> Scored:
        trainable, critic = params
        model = nnx.merge(graphdef, trainable, frozen)
        needs_old = recompute_old or (model.lora is not None and model.lora.dropout > 0)
        visual_md = old_bt = ref_bt = after_bt = None
        if needs_old or critic is not None or not vision_trainable:
            visual_md = visual_tokens(model, batch)
        if needs_old or critic is not None:
            x_btd = hidden(model, batch, visual_md, adapters=True)
            old_bt = logprobs(model, batch, x_btd)[0] if needs_old else None
            after_bt = None if critic is None else values_after(critic, x_btd)
        if use_reference:
            # Where adapters of the tower move its visual tokens, the base has its own.
            base_md = visual_tokens(model, batch, adapters=False) if vision_trainable else visual_md
            x_btd = hidden(model, batch, base_md, adapters=False)
            ref_bt, _ = logprobs(model, batch, x_btd)
        return Scored(None if vision_trainable else visual_md, old_bt, ref_bt, after_bt)

    def gradients(
        loss_fn: Callable[..., tuple[jax.Array, Sums]],
        params: tuple[nnx.State, Any],
        frozen: nnx.State,
        batch: Arrays,
        visual_md: jax.Array | None,
        at: tuple[jax.Array, jax.Array, jax.Array],
        *,
        entropies: bool = False,
    ) -> Total:
        dropout_key = jax.random.key(dropout_seed)
        for number in at:
            dropout_key = jax.random.fold_in(dropout_key, number)
        vision_key, text_key = jax.random.split(dropout_key)

        def loss_of(params: tuple[nnx.State, Any]) -> tuple[jax.Array, Sums]:
            trainable, critic = params
            model = nnx.merge(graphdef, trainable, frozen)
            table_md = visual_md
            if table_md is None:
                table_md = visual_tokens(model, batch, dropout_key=vision_key)
            x_btd = hidden(model, batch, table_md, adapters=True, dropout_key=text_key)
            new_bt, entropies_bt = logprobs(model, batch, x_btd, entropies=entropies)
            before_bt = None
            if critic is not None:
                before_bt = jnp.pad(values_after(critic, x_btd)[:, :-1], ((0, 0), (1, 0)))
            loss, sums = loss_fn(new_bt, entropies_bt, before_bt)
            return loss, sums | {"learner/loss": loss}

        return Total(*jax.grad(loss_of, has_aux=True)(params))

    total_shardings = None
    if state_shardings is not None:
        total_shardings = Total(params_of(state_shardings), None)

    @jax.jit(out_shardings=total_shardings)
    def policy_gradients(
        params: tuple[nnx.State, Any],
        frozen: nnx.State,
        batch: Arrays,
        scored: Scored,
        at: tuple[jax.Array, jax.Array, jax.Array],
    ) -> Total:
        def loss_fn(
            new_bt: jax.Array, entropies_bt: jax.Array | None, values_bt: jax.Array | None
        ) -> tuple[jax.Array, Sums]:
            loss, sums = losses.clipped_policy_loss(
                new_bt,
                old_bt=new_bt if scored.old_bt is None else scored.old_bt,
                behaviour_bt=batch["behaviour_logprobs_bt"],
                ref_bt=new_bt if scored.ref_bt is None else scored.ref_bt,
                advantages_bt=batch["advantages_bt"],
                weights_bt=batch["weights_bt"],
                turn_ids_bt=batch["turn_ids_bt"],
                entropies_bt=entropies_bt,
                cfg=loss_cfg,
            )
            if values_bt is None:
                return loss, sums
            value_loss, value_sums = losses.value_loss(
                values_bt,
                old_values_bt=batch["values_bt"],
                returns_bt=batch["returns_bt"],
                weights_bt=batch["weights_bt"],
                clip=critic_cfg.clip,
            )
            return loss + critic_cfg.coefficient * value_loss, sums | value_sums

        entropies = loss_cfg.entropy_coefficient > 0
        return gradients(loss_fn, params, frozen, batch, scored.visual_md, at, entropies=entropies)

    @jax.jit(out_shardings=total_shardings)
    def supervised_gradients(
        params: tuple[nnx.State, Any],
        frozen: nnx.State,
        batch: Arrays,
        at: tuple[jax.Array, jax.Array, jax.Array],
    ) -> Total:
        def loss_fn(new_bt: jax.Array, *unused: None) -> tuple[jax.Array, Sums]:
            return losses.supervised_loss(new_bt, weights_bt=batch["weights_bt"])

        visual_md = None
        if not vision_trainable:
            visual_md = visual_tokens(nnx.merge(graphdef, params[0], frozen), batch)
        return gradients(loss_fn, params, frozen, batch, visual_md, at)

    @jax.jit(donate_argnums=0, out_shardings=total_shardings)
    def add(total: Total, one: Total) -> Total:
        return jax.tree.map(jnp.add, total, one)

    @jax.jit(donate_argnums=0, out_shardings=(state_shardings, None))
    def apply(state: TrainState, total: Total) -> tuple[TrainState, dict[str, jax.Array]]:
        (grads, critic_grads), sums = total
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        critic = state.critic
        if critic is not None:
            head_updates, head_state = critic_optimizer.update(critic_grads, critic.opt_state)
            critic = Critic(optax.apply_updates(critic.params, head_updates), head_state)
        tokens = jnp.maximum(sums["tokens"], 1.0)
        metrics = {
            name: value / tokens
            for name, value in sums.items()
            if name not in ("tokens", "learner/loss", "offpolicy/weight_squared")
        }
        metrics |= {
            "learner/loss": sums["learner/loss"],
            "learner/grad_norm": optax.tree.norm(grads),
            "learner/update_norm": optax.tree.norm(updates),
            "learner/tokens": sums["tokens"],
        }
        if "offpolicy/weight" in sums:
            # Share of the tokens that equally weighted ones would be: (sum w)^2 / (n sum w^2).
            squared = jnp.square(sums["offpolicy/weight"])
            least = jnp.finfo(jnp.float32).tiny
            metrics["offpolicy/effective_sample"] = squared / jnp.maximum(
                tokens * sums["offpolicy/weight_squared"], least
            )
        return TrainState(trainable, opt_state, critic, state.step), metrics

    @jax.jit(donate_argnums=0, out_shardings=state_shardings)
    def next_step(state: TrainState) -> TrainState:
        return dataclasses.replace(state, step=state.step + 1)

    return Steps(score, policy_gradients, supervised_gradients, add, apply, next_step)


def to_floats(metrics: dict[str, jax.Array]) -> dict[str, float]:
    """One transfer for all of a step's metrics."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def tokens_in(batches: Sequence[TrainBatch]) -> int:
    """Real (not padding) tokens of a step."""
    return sum(int(np.count_nonzero(batch.segment_ids_bt)) for batch in batches)
