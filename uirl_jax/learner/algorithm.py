"""One learner step on a list of groups, as the algorithm config defines it.

    records -> rewards of tokens (rl.rewards) -> advantages (rl.advantages)
            -> batches (shards.batching), shares of tokens (rl.weights)
            -> scores, gradients and updates (learner.step, rl.losses)

Each algorithm is a combination of these parts: see configs/ and docs/algorithms.md. `learner.loop`
selects the groups of a step; this module reads no shards, publishes nothing and saves nothing.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from uirl_jax import user_code
from uirl_jax.errors import ConfigError, UserCodeError
from uirl_jax.learner import step as learner_step
from uirl_jax.learner.state import CriticConfig, TrainState
from uirl_jax.models import sharding
from uirl_jax.rl import advantages, rewards
from uirl_jax.rl.advantages import AdvantageConfig
from uirl_jax.rl.losses import PolicyLossConfig
from uirl_jax.rl.rewards import RewardConfig
from uirl_jax.rl.weights import Aggregation, token_weights
from uirl_jax.shards import batching
from uirl_jax.types import TrainBatch, Trajectory

Group = list[Trajectory]


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """Which algorithm the learner runs. Defaults are GRPO with DAPO's token mean."""

    # policy: clipped policy gradient. imitation: cross-entropy on the kept episodes (rejection
    # sampling).
    objective: Literal["policy", "imitation"] = "policy"
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    loss: PolicyLossConfig = dataclasses.field(default_factory=PolicyLossConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)  # with estimator "gae"
    # How tokens are weighted: alike; within their trajectory, all trajectories alike; or summed and
    # divided by a constant (Dr. GRPO).
    aggregation: Aggregation = "token_mean"
    # Most tokens an episode may sample; for aggregation "constant_length".
    max_tokens: int = dataclasses.field(default=0, metadata={"min": 0, "max": 10_000_000})
    # Over a step's records.
    epochs: int = dataclasses.field(default=1, metadata={"min": 1, "max": 1000})
    # Updates per epoch.
    minibatches: int = dataclasses.field(default=1, metadata={"min": 1, "max": 10_000})
    # A step stops updating once KL(old || policy) exceeds this; 0: no limit.
    stop_kl: float = dataclasses.field(default=0.0, metadata={"min": 0.0, "max": 1000.0})
    # Replace groups whose rewards are all equal by fresh ones: their advantages are all 0 (DAPO's
    # dynamic sampling, arXiv:2503.14476, section 3.2).
    skip_equal_groups: bool = False
    # Leave those groups out of the computation. Means, and the KL and entropy terms of the loss,
    # are then over the other groups.
    drop_equal_groups: bool = False
    # Add a stored success of the same instance to a group without any success (learner.replay);
    # needs curriculum.instances, so that instances repeat.
    replay: bool = False
    # Imitation: keep episodes with at least this reward.
    keep_reward: float = dataclasses.field(default=1.0, metadata={"min": -1e6, "max": 1e6})
    # imitation: most episodes kept per group, the best first; 1 is best-of-n, 0 keeps all.
    keep_per_group: int = dataclasses.field(default=0, metadata={"min": 0, "max": 65_536})
    # imitation: episodes a step needs; more groups are sampled until it has them.
    min_kept: int = dataclasses.field(default=1, metadata={"min": 1, "max": 1_000_000})

    def __post_init__(self) -> None:
        if self.aggregation == "constant_length" and self.max_tokens < 1:
            raise ConfigError(
                "algorithm.aggregation='constant_length' needs algorithm.max_tokens: the maximum "
                "number of tokens an episode may sample (max_turns x max_new_tokens)"
            )
        if self.drop_equal_groups and not (
            self.advantage.within_groups
            and self.advantage.credit == "episode"
            and not self.kl_in_reward
            and not self.reward.overlong_max_tokens
            and not self.advantage.screen_weight
        ):
            raise ConfigError(
                "algorithm.drop_equal_groups: a group with equal rewards may have non-zero "
                "advantages with this config; it needs advantage.credit='episode', advantages "
                "within groups, loss.kl_in='loss', no overlong shaping and no screen_weight"
            )
        if self.advantage.normalise == "group_ratio" and (
            self.kl_in_reward or self.reward.overlong_max_tokens
        ):
            raise ConfigError(
                "algorithm.advantage.normalise='group_ratio' needs returns of at least 0: set "
                "loss.kl_in='loss' and no overlong shaping"
            )
        if self.stop_kl and self.objective == "imitation":
            raise ConfigError(
                f"algorithm.stop_kl={self.stop_kl:g}: imitation has no old policy whose KL could "
                "stop its epochs; set it to 0"
            )
        if self.replay and self.objective == "policy" and self.loss.importance == "none":
            raise ConfigError(
                "algorithm.replay adds episodes of old policies, which "
                "algorithm.loss.importance='none' treats as on-policy: use truncate or mask"
            )

    @property
    def has_critic(self) -> bool:
        return self.objective == "policy" and self.advantage.estimator == "gae"

    @property
    def use_reference(self) -> bool:
        return self.objective == "policy" and self.loss.kl_coefficient > 0

    @property
    def kl_in_reward(self) -> bool:
        return self.use_reference and self.loss.kl_in == "reward"

    @property
    def recompute_old(self) -> bool:
        return self.updates_a_step > 1 or self.kl_in_reward

    @property
    def updates_a_step(self) -> int:
        return self.epochs * self.minibatches


def useful(group: Group, cfg: AlgorithmConfig) -> bool:
    """Whether a step trains on the group; other groups are counted and replaced by fresh ones."""
    if cfg.objective == "policy" and not cfg.skip_equal_groups:
        return True
    return teaches(group, cfg)


def teaches(group: Group, cfg: AlgorithmConfig) -> bool:
    """Whether the group has an episode to imitate, or returns that differ."""
    return bool(kept(group, cfg)) if cfg.objective == "imitation" else differs(group, cfg)


def differs(group: Group, cfg: AlgorithmConfig) -> bool:
    """Whether the group's returns, with the virtual return if there is one, are not all equal.

    The rewards of turns count with their weight, reward.turns. How an episode's return is split
    over its turns, and length penalties, do not count: DAPO leaves out groups with equal outcomes.
    """
    returns = [
        cfg.reward.outcome * record.reward
        + cfg.reward.turns * sum(turn.reward for turn in record.turns)
        for record in group
    ]
    if cfg.advantage.virtual_return is not None:
        returns.append(cfg.advantage.virtual_return)
    return bool(np.ptp(returns) > 0)


def kept(group: Group, cfg: AlgorithmConfig) -> Group:
    """The episodes that imitation trains on, highest reward first."""
    good = [record for record in group if record.reward >= cfg.keep_reward]
    good.sort(key=lambda record: -record.reward)
    return good[: cfg.keep_per_group] if cfg.keep_per_group else good


@dataclasses.dataclass
class _Minibatch:
    """The records of one update, their batches, and the scores from before the first update."""

    trajectories: list[Trajectory]
    batches: list[TrainBatch]
    scored: list[learner_step.Scored] | None = None
    scores_here: list[learner_step.Scored] | None = None  # on the host, where they are needed


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The records that a step trains on.

    Attributes:
      groups: of which advantages are computed.
      parts: the records of each update, whole groups in their order.
    """

    groups: Sequence[Group]
    parts: list[list[Trajectory]]


def choose(groups: Sequence[Group], cfg: AlgorithmConfig) -> Chosen:
    """Leaves out what the algorithm does not train on, and splits the rest into updates."""
    if cfg.objective == "imitation":
        groups = [kept(group, cfg) for group in groups]
    elif cfg.drop_equal_groups:
        groups = [group for group in groups if differs(group, cfg)] or groups
    return Chosen(groups, _split(groups, cfg.minibatches))


def learn(
    groups: Sequence[Group],
    cfg: AlgorithmConfig,
    steps: learner_step.Steps,
    state: TrainState,
    frozen: nnx.State,
    *,
    make_batches: Callable[[Sequence[Trajectory]], list[TrainBatch]],
    mesh: jax.sharding.Mesh | None,
    seed: int,
) -> tuple[TrainState, dict[str, float], int]:
    """One learner step on these groups, in one process. The state is donated.

    Args:
      make_batches: makes the batches of one update from its records.
      seed: of the minibatch order in epochs after the first.
    Returns: (state, metrics as means over the updates, number of tokens that are not padding).
    """
    started_s = time.monotonic()
    chosen = choose(groups, cfg)
    batches = [make_batches(records) for records in chosen.parts]
    batches_s = time.monotonic() - started_s
    state, metrics, tokens = update(
        chosen,
        batches,
        cfg,
        steps,
        state,
        frozen,
        mesh=mesh,
        seed=seed,
    )
    return state, metrics | {"time/batches_s": batches_s}, tokens


def update(
    chosen: Chosen | None,
    batches: Sequence[list[TrainBatch]],
    cfg: AlgorithmConfig,
    steps: learner_step.Steps,
    state: TrainState,
    frozen: nnx.State,
    *,
    mesh: jax.sharding.Mesh | None,
    seed: int,
    on_advantages: Callable[[list[np.ndarray]], None] = lambda token_advantages: None,
) -> tuple[TrainState, dict[str, float], int]:
    """The updates of one step, by all processes of the learner together. The state is donated.

    Args:
      chosen: the records of the batches; None in every process but the first, which computes
        advantages and weights for all.
      batches: of each update; a process's own rows are enough.
      seed: see `learn`.
      on_advantages: told those of every token, an array for each record.
    Returns: as `learn`; the number of tokens is of the batches that are here.
    """
    started_s = time.monotonic()
    rng = np.random.default_rng([seed, int(state.step)])
    parts = [[]] * len(batches) if chosen is None else chosen.parts
    minibatches = [_Minibatch(*pair) for pair in zip(parts, batches, strict=True)]
    scored_s = 0.0  # forward passes before the advantages
    if cfg.objective == "policy" and (cfg.recompute_old or cfg.has_critic):
        for minibatch in minibatches:
            minibatch.scored = [
                steps.score(learner_step.params_of(state), frozen, arrays)
                for arrays in _on_device(minibatch.batches, mesh)
            ]
            jax.block_until_ready(minibatch.scored)
            if cfg.kl_in_reward or cfg.has_critic:
                minibatch.scores_here = _to_host(minibatch.scored)
        scored_s = time.monotonic() - started_s
    if chosen is not None:
        if cfg.objective == "imitation":
            for minibatch in minibatches:
                weights = _weights(minibatch.trajectories, cfg)
                minibatch.batches = batching.fill(minibatch.batches, weights_bt=weights)
        else:
            on_advantages(_fill_in_advantages(chosen.groups, minibatches, cfg))
    _from_first_process(minibatches, cfg)

    filled_s = time.monotonic()
    updates: list[dict[str, float]] = []  # metrics of each
    for epoch in range(cfg.epochs):
        order = rng.permutation(len(minibatches)) if epoch else range(len(minibatches))
        for index in order:
            minibatch = minibatches[index]
            arrays, number = _on_device(minibatch.batches, mesh), len(updates)
            if cfg.objective == "imitation":
                state, metrics = steps.supervised_update(state, frozen, arrays, number=number)
            else:
                state, metrics = steps.policy_update(
                    state, frozen, arrays, minibatch.scored, number=number
                )
            updates.append(learner_step.to_floats(metrics))
            if cfg.stop_kl and _old_kl(updates[-1], cfg) > cfg.stop_kl:
                break
        else:
            continue
        break
    state = steps.next_step(state)
    metrics = {name: float(np.mean([update[name] for update in updates])) for name in updates[0]}
    metrics["learner/updates"] = len(updates)
    metrics["learner/tokens"] = sum(update["learner/tokens"] for update in updates)
    metrics["time/advantages_s"] = filled_s - started_s - scored_s
    metrics["time/score_s"] = scored_s
    metrics["time/update_s"] = time.monotonic() - filled_s
    tokens = sum(learner_step.tokens_in(part.batches) for part in minibatches)
    slots = sum(batch.segment_ids_bt.size for part in minibatches for batch in part.batches)
    metrics["learner/padding"] = 1.0 - tokens / slots if slots else 0.0
    return state, metrics, tokens


def _old_kl(metrics: Mapping[str, float], cfg: AlgorithmConfig) -> float:
    """KL(old || policy) of an update. Raises: UserCodeError: an own loss does not return it."""
    if "actor/old_kl" not in metrics:
        raise UserCodeError(
            f"{cfg.loss.function}: returns no actor/old_kl, which algorithm.stop_kl="
            f"{cfg.stop_kl:g} needs; return its sum over the tokens, or set stop_kl to 0"
        )
    return metrics["actor/old_kl"]


# The fields that the first process computes for all.
_SHARED = ("weights_bt",)
_SHARED_BY_POLICY = ("weights_bt", "advantages_bt")
_SHARED_BY_CRITIC = (*_SHARED_BY_POLICY, "values_bt", "returns_bt")


def _from_first_process(minibatches: Sequence[_Minibatch], cfg: AlgorithmConfig) -> None:
    """Sets what the first process computed in the batches of all processes."""
    if jax.process_count() == 1:
        return
    policy = _SHARED_BY_CRITIC if cfg.has_critic else _SHARED_BY_POLICY
    names = policy if cfg.objective == "policy" else _SHARED

    def fields(batch: TrainBatch) -> dict[str, np.ndarray]:
        empty = np.zeros(batch.token_ids_bt.shape, np.float32)
        arrays = {name: getattr(batch, name) for name in names}
        return {name: empty if array is None else array for name, array in arrays.items()}

    mine = [[fields(batch) for batch in minibatch.batches] for minibatch in minibatches]
    given = multihost_utils.broadcast_one_to_all(mine)
    for minibatch, of_batches in zip(minibatches, given, strict=True):
        minibatch.batches = [
            dataclasses.replace(batch, **{name: np.asarray(a) for name, a in arrays.items()})
            for batch, arrays in zip(minibatch.batches, of_batches, strict=True)
        ]


def _to_host(scored: Sequence[learner_step.Scored]) -> list[learner_step.Scored]:
    """The scores as numpy arrays of all rows, in every process."""
    return [sharding.to_host(scores._replace(visual_md=None)) for scores in scored]


def _split(groups: Sequence[Group], count: int) -> list[list[Trajectory]]:
    """The records of whole groups, split into at most `count` parts of about equal group count."""
    count = min(count, len(groups))
    cuts = np.array_split(np.arange(len(groups)), count)
    return [[record for n in cut for record in groups[n]] for cut in cuts]


def _on_device(
    batches: Sequence[TrainBatch], mesh: jax.sharding.Mesh | None
) -> Iterator[learner_step.Arrays]:
    """Transfers one batch at a time: screenshots are large and are freed after the gradients."""
    return (learner_step.to_device(batch, mesh) for batch in batches)


def _weights(trajectories: Sequence[Trajectory], cfg: AlgorithmConfig) -> list[float]:
    tokens = [sum(rewards.turn_lengths(trajectory)) for trajectory in trajectories]
    return token_weights(tokens, cfg.aggregation, max_tokens=cfg.max_tokens)


def _fill_in_advantages(
    groups: Sequence[Group],
    minibatches: Sequence[_Minibatch],
    cfg: AlgorithmConfig,
) -> list[np.ndarray]:
    """Sets advantages and weights in the batches; with a critic also values and returns.

    Returns: the advantages of every record's tokens.
    """
    fields = token_fields(groups, minibatches, cfg)
    first = 0
    for minibatch in minibatches:
        members = slice(first, first + len(minibatch.trajectories))
        minibatch.batches = batching.fill(
            minibatch.batches,
            weights_bt=_weights(minibatch.trajectories, cfg),
            **{name: values[members] for name, values in fields.items()},
        )
        first += len(minibatch.trajectories)
    return fields["advantages_bt"]


def token_fields(
    groups: Sequence[Group], minibatches: Sequence[_Minibatch], cfg: AlgorithmConfig
) -> dict[str, list[np.ndarray]]:
    """advantages_bt of every record's tokens; with a critic also values_bt and returns_bt."""
    lengths = [rewards.turn_lengths(record) for group in groups for record in group]
    kl = None
    if cfg.kl_in_reward:
        kl = _gathered(minibatches, lambda scored: _known(scored.old_bt) - _known(scored.ref_bt))
    records = [record for group in groups for record in group]
    token_rewards = [
        rewards.token_rewards(
            record,
            cfg.reward,
            kl_s=None if kl is None else kl[number],
            kl_coefficient=cfg.loss.kl_coefficient,
        )
        for number, record in enumerate(records)
    ]
    fields: dict[str, list[np.ndarray]] = {}
    if cfg.has_critic:
        after = _gathered(minibatches, lambda scored: _known(scored.values_after_bt))
        before = _gathered(
            minibatches,
            lambda scored: np.pad(_known(scored.values_after_bt), ((0, 0), (1, 0)))[:, :-1],
        )
        estimated = [
            advantages.generalised_advantages(
                token_rewards[n],
                before[n],
                lengths[n],
                discount=cfg.advantage.turn_discount,
                gae_lambda=cfg.advantage.gae_lambda,
                bootstrap=after[n][-1] if record.stop_reason.truncated and len(after[n]) else 0.0,
            )
            for n, record in enumerate(records)
        ]
        token_advantages = [advantages_s for advantages_s, _ in estimated]
        fields = {"values_bt": before, "returns_bt": [returns_s for _, returns_s in estimated]}
    else:
        token_advantages, first = [], 0
        estimate = find_estimator(cfg.advantage)
        for group in groups:
            members = slice(first, first + len(group))
            token_advantages += estimate(group, token_rewards[members], lengths[members])
            first += len(group)
    if cfg.advantage.normalise == "batch":
        token_advantages = advantages.batch_normalised(
            token_advantages, epsilon=cfg.advantage.epsilon
        )
    token_advantages = advantages.with_negative_weight(
        token_advantages, cfg.advantage.negative_weight
    )
    return fields | {"advantages_bt": token_advantages}


def find_estimator(cfg: AdvantageConfig) -> Callable[..., list[np.ndarray]]:
    """(group, token rewards, turn lengths) -> advantages: the config's, or the user's own.

    Raises: ConfigError: there is no such function.
    """
    if not cfg.function:
        return lambda group, token_rewards, turn_lengths: advantages.group_advantages(
            token_rewards,
            turn_lengths,
            cfg,
            turn_screens=[rewards.turn_screens(record) for record in group],
        )
    own = user_code.load(cfg.function, "algorithm.advantage.function")

    def checked(
        group: Group, token_rewards: list[np.ndarray], turn_lengths: list[Sequence[int]]
    ) -> list[np.ndarray]:
        with user_code.blamed(cfg.function):
            found = [np.asarray(a, np.float32) for a in own(group, token_rewards, turn_lengths)]
        wanted = [rewards_s.shape for rewards_s in token_rewards]
        if [a.shape for a in found] != wanted or not all(np.isfinite(a).all() for a in found):
            raise UserCodeError(
                f"{cfg.function}: returned arrays of {[a.shape for a in found]}, expected finite "
                f"advantages of {wanted}: one for each sampled token of each episode"
            )
        return found

    return checked


def _known(score_bt: Any) -> np.ndarray:
    """A field of Scored on the host; `score` computes those that the algorithm needs."""
    assert score_bt is not None
    return score_bt


def _gathered(
    minibatches: Sequence[_Minibatch], array_of: Callable[[learner_step.Scored], np.ndarray]
) -> list[np.ndarray]:
    """One array of scores per record: float32[S], in the order of the groups."""
    gathered = []
    for minibatch in minibatches:
        assert minibatch.scores_here is not None  # fetched before advantages are computed
        arrays = [array_of(scores) for scores in minibatch.scores_here]
        counts = [sum(rewards.turn_lengths(record)) for record in minibatch.trajectories]
        gathered += batching.gather(minibatch.batches, arrays, counts)
    return gathered
