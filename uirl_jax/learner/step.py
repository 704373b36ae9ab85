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

from uirl_jax.families.border import TokenRows
from uirl_jax.learner.state import Critic, CriticConfig, TrainState, make_critic_optimizer
from uirl_jax.models import scoring, sharding
from uirl_jax.rl import losses
from uirl_jax.types import TrainBatch

Arrays = dict[str, Any]  # of a TrainBatch, on the device; `vision` is a dict of arrays
Sums = dict[str, jax.Array]  # of the loss, and of metrics over the sampled tokens
Params = tuple[nnx.State, Any]  # trainable, and the critic's parameters or None
# int32 (step, update, batch): what dropout draws from.
At = tuple[jax.Array, jax.Array | np.int32, jax.Array | np.int32]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What decides which programs a run compiles."""

    loss: losses.PolicyLossConfig = dataclasses.field(default_factory=losses.PolicyLossConfig)
    critic: CriticConfig | None = None  # of the value head, if the state has one
    # The vision tower, or its adapters, are among the trainable leaves: its visual tokens are
    # computed inside the loss, and once more for the reference.
    vision_trainable: bool = False
    # Compute the base's logprobs (adapters off). Off where nothing is frozen, or where the KL
    # coefficient is 0: it is a forward pass that would be thrown away.
    use_reference: bool = True
    # Give old logprobs a pass of their own, because a step has several updates or its rewards need
    # them. Otherwise they are the loss's own, and the pass is saved; only dropout makes them
    # differ, so with dropout there is one in any case.
    recompute_old: bool = False
    # As the actor samples, so that both mean the same distribution: without them old and behaviour
    # differ by what the forbidden tokens would have got.
    temperature: float = 1.0
    forbidden_ids: tuple[int, ...] = ()
    # With it, and with `At`, the adapters' dropout draws what it zeroes (LoraConfig.dropout). Only
    # passes that gradients are taken of drop anything.
    dropout_seed: int = 0


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
    """The jitted functions of a run, see `Params` and `At`.

    score(params, frozen, arrays) -> Scored
    policy_gradients(params, frozen, arrays, scored, at) -> Total
    supervised_gradients(params, frozen, arrays, at) -> Total
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


def params_of(state: TrainState) -> Params:
    """What gradients are taken of."""
    return state.trainable, state.critic.params if state.critic else None


def _at(state: TrainState, number: int, place: int) -> At:
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
        return jax.tree.map(jnp.asarray, arrays)
    return jax.device_put(arrays, sharding.batch_shardings(mesh, arrays))


def make_steps(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    cfg: StepConfig,
    state_shardings: Any = None,
) -> Steps:
    """Builds the jitted functions of one run.

    Args:
      graphdef: of the model; merged with (trainable, frozen) inside.
      state_shardings: where a step leaves the train state. Left to the compiler it may come out
        placed otherwise than it went in, and the second step compiles everything again.
    """
    critic_optimizer = None if cfg.critic is None else make_critic_optimizer(cfg.critic)
    total_shardings = None
    if state_shardings is not None:
        total_shardings = Total(params_of(state_shardings), None)

    @jax.jit
    def score(params: Params, frozen: nnx.State, batch: Arrays) -> Scored:
        trainable, critic = params
        return _score(nnx.merge(graphdef, trainable, frozen), critic, batch, cfg)

    @jax.jit(out_shardings=total_shardings)
    def policy_gradients(
        params: Params, frozen: nnx.State, batch: Arrays, scored: Scored, at: At
    ) -> Total:
        keys = _dropout_keys(cfg.dropout_seed, at)

        def loss_fn(params: Params) -> tuple[jax.Array, Sums]:
            trainable, critic = params
            model = nnx.merge(graphdef, trainable, frozen)
            entropies = cfg.loss.entropy_coefficient > 0
            new = _new_policy(
                model, critic, batch, scored.visual_md, keys, cfg, entropies=entropies
            )
            return _policy_loss(new, batch, scored, cfg)

        return _gradients(loss_fn, params)

    @jax.jit(out_shardings=total_shardings)
    def supervised_gradients(params: Params, frozen: nnx.State, batch: Arrays, at: At) -> Total:
        visual_md = None
        if not cfg.vision_trainable:
            visual_md = _visual_tokens(nnx.merge(graphdef, params[0], frozen), batch)
        keys = _dropout_keys(cfg.dropout_seed, at)

        def loss_fn(params: Params) -> tuple[jax.Array, Sums]:
            trainable, critic = params
            model = nnx.merge(graphdef, trainable, frozen)
            new = _new_policy(model, critic, batch, visual_md, keys, cfg)
            return losses.supervised_loss(new.logprobs_bt, weights_bt=batch["weights_bt"])

        return _gradients(loss_fn, params)

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
        metrics = _update_metrics(sums, grads, updates)
        return TrainState(trainable, opt_state, critic, state.step), metrics

    @jax.jit(donate_argnums=0, out_shardings=state_shardings)
    def next_step(state: TrainState) -> TrainState:
        return dataclasses.replace(state, step=state.step + 1)

    return Steps(score, policy_gradients, supervised_gradients, add, apply, next_step)


# ---------------------------------------------------------------------------- the model's passes


def _visual_tokens(
    model: Any,
    batch: Arrays,
    *,
    adapters: bool = True,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """visual_md of the batch's screenshots."""
    return model.encode_images(batch["vision"], adapters=adapters, dropout_key=dropout_key)


def _hidden(
    model: Any,
    batch: Arrays,
    visual_md: jax.Array,
    *,
    adapters: bool,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """x_btd: the last hidden states."""
    rows = TokenRows(
        batch["token_ids_bt"],
        batch["positions_abt"],
        batch["segment_ids_bt"],
        batch["vision_index_bt"],
        batch.get("prefix_segments_bt"),
        batch["turn_ids_bt"],
    )
    return model.hidden(rows, visual_md, adapters=adapters, dropout_key=dropout_key)


def _logprobs(
    model: nnx.Module,
    batch: Arrays,
    x_btd: jax.Array,
    cfg: StepConfig,
    *,
    entropies: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """float32[B,T] logprobs of the batch's tokens, and the entropies if asked for."""
    forbidden_v = None
    if cfg.forbidden_ids:
        forbidden_v = np.isin(np.arange(model.cfg.vocab_size), cfg.forbidden_ids)
    return scoring.token_logprobs_and_entropies(
        model,
        x_btd,
        batch["token_ids_bt"],
        batch["sampled_index_bs"],
        temperature=cfg.temperature,
        forbidden_v=forbidden_v,
        entropies=entropies,
    )


def _values_after(critic: Any, x_btd: jax.Array) -> jax.Array:
    """float32[B,T]: the value of the state after each token."""
    head = critic["value_head"]
    return (x_btd.astype(jnp.float32) @ head["kernel"] + head["bias"])[..., 0]


def _score(model: nnx.Module, critic: Any, batch: Arrays, cfg: StepConfig) -> Scored:
    """Everything in `Scored` that cfg asks for."""
    needs_old = cfg.recompute_old or (model.lora is not None and model.lora.dropout > 0)
    visual_md = old_bt = ref_bt = after_bt = None
    if needs_old or critic is not None or not cfg.vision_trainable:
        visual_md = _visual_tokens(model, batch)
    if needs_old or critic is not None:
        x_btd = _hidden(model, batch, visual_md, adapters=True)
        old_bt = _logprobs(model, batch, x_btd, cfg)[0] if needs_old else None
        after_bt = None if critic is None else _values_after(critic, x_btd)
    if cfg.use_reference:
        # Where adapters of the tower change its visual tokens, the base has its own.
        base_md = visual_md
        if cfg.vision_trainable:
            base_md = _visual_tokens(model, batch, adapters=False)
        x_btd = _hidden(model, batch, base_md, adapters=False)
        ref_bt, _ = _logprobs(model, batch, x_btd, cfg)
    return Scored(None if cfg.vision_trainable else visual_md, old_bt, ref_bt, after_bt)


class _NewPolicy(NamedTuple):
    """What a loss is computed from: the current parameters' outputs, through which gradients go."""

    logprobs_bt: jax.Array
    entropies_bt: jax.Array | None
    values_bt: jax.Array | None  # the critic's, of the state before each token


def _new_policy(
    model: nnx.Module,
    critic: Any,
    batch: Arrays,
    visual_md: jax.Array | None,
    dropout_keys: tuple[jax.Array, jax.Array],
    cfg: StepConfig,
    *,
    entropies: bool = False,
) -> _NewPolicy:
    """The pass that gradients are taken of.

    Args:
      visual_md: None: computed here, because the vision tower is trained.
      dropout_keys: of the vision tower and of the text blocks.
    """
    vision_key, text_key = dropout_keys
    if visual_md is None:
        visual_md = _visual_tokens(model, batch, dropout_key=vision_key)
    x_btd = _hidden(model, batch, visual_md, adapters=True, dropout_key=text_key)
    new_bt, entropies_bt = _logprobs(model, batch, x_btd, cfg, entropies=entropies)
    before_bt = None
    if critic is not None:
        before_bt = jnp.pad(_values_after(critic, x_btd)[:, :-1], ((0, 0), (1, 0)))
    return _NewPolicy(new_bt, entropies_bt, before_bt)


def _dropout_keys(seed: int, at: At) -> tuple[jax.Array, jax.Array]:
    """Keys of the vision tower and of the text blocks, for this step, update and batch."""
    dropout_key = jax.random.key(seed)
    for number in at:
        dropout_key = jax.random.fold_in(dropout_key, number)
    vision_key, text_key = jax.random.split(dropout_key)
    return vision_key, text_key


# ---------------------------------------------------------------------------- losses and updates


def _policy_loss(
    new: _NewPolicy, batch: Arrays, scored: Scored, cfg: StepConfig
) -> tuple[jax.Array, Sums]:
    """The clipped policy loss and, with a critic, the value loss."""
    loss, sums = losses.clipped_policy_loss(
        new.logprobs_bt,
        old_bt=new.logprobs_bt if scored.old_bt is None else scored.old_bt,
        behaviour_bt=batch["behaviour_logprobs_bt"],
        ref_bt=new.logprobs_bt if scored.ref_bt is None else scored.ref_bt,
        advantages_bt=batch["advantages_bt"],
        weights_bt=batch["weights_bt"],
        turn_ids_bt=batch["turn_ids_bt"],
        entropies_bt=new.entropies_bt,
        cfg=cfg.loss,
    )
    if new.values_bt is None:
        return loss, sums
    value_loss, value_sums = losses.value_loss(
        new.values_bt,
        old_values_bt=batch["values_bt"],
        returns_bt=batch["returns_bt"],
        weights_bt=batch["weights_bt"],
        clip=cfg.critic.clip,
    )
    return loss + cfg.critic.coefficient * value_loss, sums | value_sums


def _gradients(loss_fn: Callable[[Params], tuple[jax.Array, Sums]], params: Params) -> Total:
    def with_loss(params: Params) -> tuple[jax.Array, Sums]:
        loss, sums = loss_fn(params)
        return loss, sums | {"learner/loss": loss}

    return Total(*jax.grad(with_loss, has_aux=True)(params))


def _update_metrics(sums: Sums, grads: Any, updates: Any) -> dict[str, jax.Array]:
    """Means over the sampled tokens of an update, and the norms of its gradient and its change."""
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
    return metrics


def to_floats(metrics: dict[str, jax.Array]) -> dict[str, float]:
    """One transfer for all of a step's metrics."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def tokens_in(batches: Sequence[TrainBatch]) -> int:
    """Real (not padding) tokens of a step."""
    return sum(int(np.count_nonzero(batch.segment_ids_bt)) for batch in batches)
