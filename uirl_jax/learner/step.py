"""The jitted functions of a step: scores, gradients of a batch, their sum, and an update.

A step has one or more updates (learner.algorithm), an update one or more TrainBatches of the same
shape. The gradients of the batches are summed; the token weights of an update add up to 1, so
nothing is divided. Memory is that of one batch, whatever the size of the step. All functions are
pure. Shapes come in a few fixed buckets (shards.batching), so nothing compiles after warm-up.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

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

Arrays = dict[str, Any]  # a TrainBatch's arrays on the device; `vision` is a dict of arrays
Sums = dict[str, jax.Array]  # loss and metrics, summed over the sampled tokens
Params = tuple[nnx.State, Any]  # trainable, and the critic's parameters or None
# int32 (step, update, batch): folded into the dropout key.
At = tuple[jax.Array, jax.Array | np.int32, jax.Array | np.int32]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Settings that determine the compiled programs of a run."""

    loss: losses.PolicyLossConfig = dataclasses.field(default_factory=losses.PolicyLossConfig)
    critic: CriticConfig | None = None  # set if the state has a value head
    # The vision tower or its adapters are trainable: visual tokens are computed inside the loss,
    # and once more for the reference.
    vision_trainable: bool = False
    # Compute the base's logprobs (adapters off): one forward pass. False where nothing is frozen
    # or the KL coefficient is 0.
    use_reference: bool = True
    # Compute old logprobs in a separate forward pass, because a step has several updates or its
    # rewards need them. False: the loss's own logprobs serve as old ones, except with dropout,
    # which makes them differ and always needs the pass.
    recompute_old: bool = False
    # The actor's sampling settings, so that old and behaviour logprobs are of the same
    # distribution; otherwise they differ by the forbidden tokens' probability.
    temperature: float = 1.0
    forbidden_ids: tuple[int, ...] = ()
    # Seed of the adapters' dropout (LoraConfig.dropout), used with `At`. Only passes with
    # gradients use dropout.
    dropout_seed: int = 0


class Scored(NamedTuple):
    """Inputs of a batch's gradients that are computed without gradient; None where not needed."""

    visual_md: jax.Array | None  # None if the vision tower is trained: the loss computes them
    old_bt: jax.Array | None  # None if the loss's own logprobs serve (see recompute_old)
    ref_bt: jax.Array | None  # None without a reference
    values_after_bt: jax.Array | None  # the critic's value of the state after each token


class Total(NamedTuple):
    """Sums over an update's batches."""

    grads: Any  # with respect to (trainable, the critic's parameters or None)
    sums: Sums


@dataclasses.dataclass(frozen=True)
class Steps:
    """The jitted functions of a run, see `Params` and `At`.

    score(params, frozen, arrays) -> Scored
    policy_gradients(params, frozen, arrays, scored, at) -> Total
    supervised_gradients(params, frozen, arrays, at) -> Total
    add(total, batch_total) -> Total; the first is donated.
    apply(state, total) -> (state, metrics): one optimizer update; the state is donated.
    next_step(state) -> state: increments the step counter.
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
          scored: scores of each batch; None: each batch is scored just before its gradients, so
            that the visual tokens of only one batch are on the device.
          number: index of the update in the step.
        """

        def gradients(batch_index: int, arrays: Arrays) -> Total:
            params = params_of(state)
            scores = scored[batch_index] if scored else self.score(params, frozen, arrays)
            at = _at(state, number, batch_index)
            return self.policy_gradients(params, frozen, arrays, scores, at)

        return self._update(state, batches, gradients)

    def supervised_update(
        self,
        state: TrainState,
        frozen: nnx.State,
        batches: Iterable[Arrays],
        *,
        number: int = 0,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One cross-entropy update on the batches' weighted tokens. The state is donated."""

        def gradients(batch_index: int, arrays: Arrays) -> Total:
            at = _at(state, number, batch_index)
            return self.supervised_gradients(params_of(state), frozen, arrays, at)

        return self._update(state, batches, gradients)

    def _update(
        self,
        state: TrainState,
        batches: Iterable[Arrays],
        gradients: Callable[[int, Arrays], Total],
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        total: Total | None = None
        for batch_index, arrays in enumerate(batches):
            batch_total = gradients(batch_index, arrays)
            total = batch_total if total is None else self.add(total, batch_total)
        assert total is not None  # an update has batches
        return self.apply(state, total)

    def compile_count(self) -> int:
        """Number of programs compiled so far; constant after warm-up."""
        return sum(getattr(self, f.name)._cache_size() for f in dataclasses.fields(self))


def params_of(state: TrainState) -> Params:
    """The parameters that gradients are taken with respect to."""
    return state.trainable, state.critic.params if state.critic else None


def _at(state: TrainState, number: int, batch_index: int) -> At:
    return state.step, np.int32(number), np.int32(batch_index)


# Not used on the device: the origin of the tokens, and a mask that the weights imply.
HOST_FIELDS = ("trajectory_bs", "token_bs", "completion_mask_bt")


def to_device(batch: TrainBatch, mesh: jax.sharding.Mesh | None) -> Arrays:
    """The batch's arrays on the mesh (rows over its data axes), or on the default device.

    If the data axes do not divide the number of rows, every device gets all rows: correct, slower.
    With several processes each gives the rows of its own devices; the other rows are not read.
    """
    arrays = {
        field.name: array
        for field in dataclasses.fields(batch)
        if (array := getattr(batch, field.name)) is not None and field.name not in HOST_FIELDS
    }
    if mesh is None:
        return jax.tree.map(jnp.asarray, arrays)
    return jax.tree.map(sharding.place, arrays, sharding.batch_shardings(mesh, arrays))


def make_steps(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    cfg: StepConfig,
    state_shardings: Any = None,
) -> Steps:
    """Builds the jitted functions of one run.

    Args:
      graphdef: of the model; merged with (trainable, frozen) inside.
      state_shardings: output shardings of the train state. Without them the compiler may choose
        others than the input's, and the second step compiles everything again.
    """
    critic_optimizer = None if cfg.critic is None else make_critic_optimizer(cfg.critic)
    total_shardings = None
    if state_shardings is not None:
        total_shardings = Total(params_of(state_shardings), cast(Any, None))

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
    def add(total: Total, batch_total: Total) -> Total:
        return jax.tree.map(jnp.add, total, batch_total)

    @jax.jit(donate_argnums=0, out_shardings=(state_shardings, None))
    def apply(state: TrainState, total: Total) -> tuple[TrainState, dict[str, jax.Array]]:
        (grads, critic_grads), sums = total
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        critic = state.critic
        if critic is not None and critic_optimizer is not None:
            head_updates, head_state = critic_optimizer.update(critic_grads, critic.opt_state)
            head = optax.apply_updates(critic.params, head_updates)
            critic = Critic(cast(Any, head), head_state)
        metrics = _update_metrics(sums, grads, updates)
        return TrainState(cast(Any, trainable), opt_state, critic, state.step), metrics

    @jax.jit(donate_argnums=0, out_shardings=state_shardings)
    def next_step(state: TrainState) -> TrainState:
        return dataclasses.replace(state, step=state.step + 1)

    return Steps(score, policy_gradients, supervised_gradients, add, apply, next_step)


# ---------------------------------------------------------------------------- forward passes


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
    visual_md: jax.Array | None,
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
    model: Any,
    batch: Arrays,
    x_btd: jax.Array,
    cfg: StepConfig,
    *,
    adapters: bool = True,
    entropies: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """float32[B,T] logprobs of the batch's tokens, and their distributions' entropies or None."""
    forbidden_v: Any = None
    if cfg.forbidden_ids:
        forbidden_v = np.isin(np.arange(model.cfg.vocab_size), cfg.forbidden_ids)
    return scoring.token_logprobs_and_entropies(
        model,
        x_btd,
        batch["token_ids_bt"],
        batch["sampled_index_bs"],
        temperature=cfg.temperature,
        forbidden_v=forbidden_v,
        adapters=adapters,
        entropies=entropies,
    )


def _values_after(critic: Any, x_btd: jax.Array) -> jax.Array:
    """float32[B,T]: the value of the state after each token."""
    head = critic["value_head"]
    return (x_btd.astype(jnp.float32) @ head["kernel"] + head["bias"])[..., 0]


def _score(model: Any, critic: Any, batch: Arrays, cfg: StepConfig) -> Scored:
    """The fields of `Scored` that cfg needs."""
    needs_old = cfg.recompute_old or (model.lora is not None and model.lora.dropout > 0)
    visual_md = old_bt = ref_bt = after_bt = None
    if needs_old or critic is not None or not cfg.vision_trainable:
        visual_md = _visual_tokens(model, batch)
    if needs_old or critic is not None:
        x_btd = _hidden(model, batch, visual_md, adapters=True)
        old_bt = _logprobs(model, batch, x_btd, cfg)[0] if needs_old else None
        after_bt = None if critic is None else _values_after(critic, x_btd)
    if cfg.use_reference:
        # If the vision tower is trained, the base's visual tokens differ and are computed again.
        base_md = visual_md
        if cfg.vision_trainable:
            base_md = _visual_tokens(model, batch, adapters=False)
        x_btd = _hidden(model, batch, base_md, adapters=False)
        ref_bt, _ = _logprobs(model, batch, x_btd, cfg, adapters=False)
    return Scored(None if cfg.vision_trainable else visual_md, old_bt, ref_bt, after_bt)


class _NewPolicy(NamedTuple):
    """The current parameters' outputs, through which gradients flow."""

    logprobs_bt: jax.Array
    entropies_bt: jax.Array | None
    values_bt: jax.Array | None  # the critic's value of the state before each token


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
    """The forward pass with gradients.

    Args:
      visual_md: None if the vision tower is trained: computed here.
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
    """Dropout keys of the vision tower and the text blocks, for this step, update and batch."""
    dropout_key = jax.random.key(seed)
    for number in at:
        dropout_key = jax.random.fold_in(dropout_key, number)
    vision_key, text_key = jax.random.split(dropout_key)
    return vision_key, text_key


# ---------------------------------------------------------------------------- losses and updates


def _policy_loss(
    new: _NewPolicy, batch: Arrays, scored: Scored, cfg: StepConfig
) -> tuple[jax.Array, Sums]:
    """The policy loss and, with a critic, the value loss."""
    loss, sums = losses.find_policy_loss(cfg.loss)(
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
    if new.values_bt is None or cfg.critic is None:
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
    """Means over the sampled tokens of an update, and the norms of its gradient and update."""
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
    if "critic/squared" in metrics:
        metrics["critic/explained_variance"] = losses.explained_variance(metrics)
        for name in ("critic/return", "critic/return_squared"):
            del metrics[name]
    if "offpolicy/weight" in sums:
        # Effective sample size as a share of the tokens: (sum w)^2 / (n sum w^2).
        squared = jnp.square(sums["offpolicy/weight"])
        least = jnp.finfo(jnp.float32).tiny
        metrics["offpolicy/effective_sample"] = squared / jnp.maximum(
            tokens * sums["offpolicy/weight_squared"], least
        )
    return metrics


def to_floats(metrics: dict[str, jax.Array]) -> dict[str, float]:
    """Transfers all metrics of an update at once."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def tokens_in(batches: Sequence[TrainBatch]) -> int:
    """Number of tokens that are not padding."""
    return sum(int(np.count_nonzero(batch.segment_ids_bt)) for batch in batches)
