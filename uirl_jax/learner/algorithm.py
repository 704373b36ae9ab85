"""From the config to the formula: what a step does with the groups that it was given.

    records -> rewards of tokens (rl.rewards) -> advantages (rl.advantages)
            -> batches (shards.batching), shares of tokens (rl.weights)
            -> scores, gradients and updates (learner.step, rl.losses)

Every algorithm is a choice of these: see configs/ and docs/algorithms.md. `learner.loop` decides
which groups a step gets; nothing here reads a shard, publishes or saves.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np
from flax import nnx

from uirl_jax.errors import ConfigError
from uirl_jax.learner import step as learner_step
from uirl_jax.learner.state import CriticConfig, TrainState
from uirl_jax.rl import advantages, rewards
from uirl_jax.rl.advantages import AdvantageConfig
from uirl_jax.rl.losses import PolicyLossConfig
from uirl_jax.rl.rewards import RewardConfig
from uirl_jax.rl.weights import Aggregation, token_weights
from uirl_jax.shards import batching
from uirl_jax.types import TrainBatch, Trajectory

Group = list[Trajectory]
Advantages = Callable[[list[np.ndarray]], list[np.ndarray]]  # of a step's tokens; for tests


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """Which algorithm the learner runs. Defaults are GRPO with DAPO's token mean."""

    # policy: the clipped policy gradient. imitation: cross-entropy of what was kept (rejection
    # sampling).
    objective: Literal["policy", "imitation"] = "policy"
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    loss: PolicyLossConfig = dataclasses.field(default_factory=PolicyLossConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)  # with estimator "gae"
    aggregation: Aggregation = "token_mean"
    max_tokens: int = 0  # that an episode may sample; for aggregation "constant_length"
    epochs: int = dataclasses.field(default=1, metadata={"min": 1})  # over a step's records
    minibatches: int = dataclasses.field(default=1, metadata={"min": 1})  # updates an epoch
    stop_kl: float = 0.0  # KL(old || policy) after which a step makes no more updates; 0: none
    # Groups whose rewards are all equal teach nothing: taken out and refilled (DAPO's dynamic
    # sampling, arXiv:2503.14476, section 3.2).
    skip_equal_groups: bool = False
    # Those groups are not computed: means, and what the loss adds for KL and entropy, are over the
    # other groups then.
    drop_equal_groups: bool = False
    # A group that failed as a whole gets a stored success of its instance (learner.replay); needs
    # curriculum.instances, so that instances come back.
    replay: bool = False
    keep_reward: float = 1.0  # imitation: episodes that were paid at least this are kept
    # imitation: at most so many of a group, the best first; 1 is best-of-n, 0 keeps all.
    keep_per_group: int = 0
    min_kept: int = dataclasses.field(default=1, metadata={"min": 1})  # imitation: else refilled

    def __post_init__(self) -> None:
        if self.aggregation == "constant_length" and self.max_tokens < 1:
            raise ConfigError(
                "algorithm.aggregation='constant_length' needs algorithm.max_tokens, the most "
                "tokens that an episode may sample (max_turns x max_new_tokens)"
            )
        within_groups = self.advantage.normalise not in ("batch", "none")
        if self.drop_equal_groups and not (
            within_groups
            and self.advantage.credit == "episode"
            and not self.kl_in_reward
            and not self.reward.overlong_max_tokens
        ):
            raise ConfigError(
                "algorithm.drop_equal_groups: advantages of such a group need not be 0 here; it "
                "needs advantage.credit='episode', advantages within groups, "
                "loss.kl_in='loss' and no overlong shaping"
            )
        if self.replay and self.objective == "policy" and self.loss.importance == "none":
            raise ConfigError(
                "algorithm.replay brings episodes of old policies, which "
                "algorithm.loss.importance='none' takes for new ones: use truncate or mask"
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
    """Whether a step may learn from the group; others are counted and replaced by fresh ones."""
    if cfg.objective == "policy" and not cfg.skip_equal_groups:
        return True
    return teaches(group, cfg)


def teaches(group: Group, cfg: AlgorithmConfig) -> bool:
    """Whether there is something in it to imitate, or to compare."""
    return bool(kept(group, cfg)) if cfg.objective == "imitation" else differs(group, cfg)


def differs(group: Group, cfg: AlgorithmConfig) -> bool:
    """Whether its episodes' returns differ, from each other or the virtual one beside them.

    What is taken off for length is no part of it: that groups of equal outcomes are left out is
    what DAPO asks for.
    """
    returns = [
        cfg.reward.outcome * of.reward + cfg.reward.turns * sum(turn.reward for turn in of.turns)
        for of in group
    ]
    if cfg.advantage.virtual_return is not None:
        returns.append(cfg.advantage.virtual_return)
    return bool(np.ptp(returns) > 0)


def kept(group: Group, cfg: AlgorithmConfig) -> Group:
    """The episodes that imitation trains on, the best first."""
    good = [of for of in group if of.reward >= cfg.keep_reward]
    good.sort(key=lambda of: -of.reward)
    return good[: cfg.keep_per_group] if cfg.keep_per_group else good


@dataclasses.dataclass
class _Minibatch:
    """The records of one update, in batches, and what was scored of them before the first one."""

    trajectories: list[Trajectory]
    batches: list[TrainBatch]
    scored: list[learner_step.Scored] | None = None


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
    replace_advantages: Advantages | None = None,
) -> tuple[TrainState, dict[str, float], int]:
    """One step of the learner on these groups. The state is donated.

    Args:
      make_batches: of the records of one update.
      seed: of the order in which several epochs go through the groups.
      replace_advantages: for tests; with zeros nothing may be learnt.
    Returns: (state, metrics: means over the updates, tokens in the rows that were computed).
    """
    started_s = time.monotonic()
    if cfg.objective == "imitation":
        groups = [kept(group, cfg) for group in groups]
    elif cfg.drop_equal_groups:
        groups = [group for group in groups if differs(group, cfg)] or groups
    rng = np.random.default_rng([seed, int(state.step)])
    parts = [_Minibatch(of, make_batches(of)) for of in _split(groups, cfg.minibatches)]
    batched_s = time.monotonic()
    scored_s = 0.0  # the model's passes before the advantages
    if cfg.objective == "imitation":
        for part in parts:
            part.batches = batching.fill(part.batches, weights_bt=_weights(part.trajectories, cfg))
    else:
        if cfg.recompute_old or cfg.has_critic:
            for part in parts:
                part.scored = [
                    steps.score(learner_step.params_of(state), frozen, arrays)
                    for arrays in _on_device(part.batches, mesh)
                ]
            jax.block_until_ready([part.scored for part in parts])
            scored_s = time.monotonic() - batched_s
        _fill_in_advantages(groups, parts, cfg, replace_advantages)

    filled_s = time.monotonic()
    made: list[dict[str, float]] = []
    for epoch in range(cfg.epochs):
        order = rng.permutation(len(parts)) if epoch else range(len(parts))
        for place in order:
            part = parts[place]
            arrays, number = _on_device(part.batches, mesh), len(made)
            if cfg.objective == "imitation":
                state, metrics = steps.supervised_update(state, frozen, arrays, number=number)
            else:
                state, metrics = steps.policy_update(
                    state, frozen, arrays, part.scored, number=number
                )
            made.append(learner_step.to_floats(metrics))
            if cfg.stop_kl and made[-1].get("actor/old_kl", 0.0) > cfg.stop_kl:
                break
        else:
            continue
        break
    state = steps.next_step(state)
    metrics = {name: float(np.mean([of[name] for of in made])) for name in made[0]}
    metrics["learner/updates"] = len(made)
    metrics["learner/tokens"] = sum(of["learner/tokens"] for of in made)
    metrics["time/batches_s"] = batched_s - started_s
    metrics["time/advantages_s"] = filled_s - batched_s - scored_s
    return state, metrics, sum(learner_step.tokens_in(part.batches) for part in parts)


def _split(groups: Sequence[Group], count: int) -> list[list[Trajectory]]:
    """The records of whole groups, in at most `count` parts of about the same number of groups."""
    count = min(count, len(groups))
    cuts = np.array_split(np.arange(len(groups)), count)
    return [[record for n in cut for record in groups[n]] for cut in cuts]


def _on_device(
    batches: Sequence[TrainBatch], mesh: jax.sharding.Mesh | None
) -> Iterator[learner_step.Arrays]:
    """One after the other: screenshots are large, and a batch's go when its gradients are there."""
    return (learner_step.to_device(batch, mesh) for batch in batches)


def _weights(trajectories: Sequence[Trajectory], cfg: AlgorithmConfig) -> list[float]:
    tokens = [sum(rewards.turn_lengths(of)) for of in trajectories]
    return token_weights(tokens, cfg.aggregation, max_tokens=cfg.max_tokens)


def _fill_in_advantages(
    groups: Sequence[Group],
    parts: Sequence[_Minibatch],
    cfg: AlgorithmConfig,
    replace_advantages: Advantages | None,
) -> None:
    """Sets the parts' batches' advantages and weights, with a critic also values and returns."""
    lengths = [rewards.turn_lengths(record) for group in groups for record in group]
    kl = (
        _gathered(parts, lambda scored: scored.old_bt - scored.ref_bt) if cfg.kl_in_reward else None
    )
    records = [record for group in groups for record in group]
    paid = [
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
        after = _gathered(parts, lambda scored: scored.values_after_bt)
        before = _gathered(
            parts, lambda scored: np.pad(scored.values_after_bt, ((0, 0), (1, 0)))[:, :-1]
        )
        estimated = [
            advantages.generalised_advantages(
                paid[n],
                before[n],
                lengths[n],
                discount=cfg.advantage.turn_discount,
                gae_lambda=cfg.advantage.gae_lambda,
                bootstrap=after[n][-1] if record.stop_reason.truncated and len(after[n]) else 0.0,
            )
            for n, record in enumerate(records)
        ]
        tokens = [of for of, _ in estimated]
        fields = {"values_bt": before, "returns_bt": [of for _, of in estimated]}
    else:
        tokens, first = [], 0
        for group in groups:
            of = slice(first, first + len(group))
            tokens += advantages.group_advantages(paid[of], lengths[of], cfg.advantage)
            first += len(group)
    if cfg.advantage.normalise == "batch":
        tokens = advantages.batch_normalised(tokens, epsilon=cfg.advantage.epsilon)
    if replace_advantages is not None:
        tokens = replace_advantages(tokens)
    fields["advantages_bt"] = tokens

    first = 0
    for part in parts:
        of = slice(first, first + len(part.trajectories))
        part.batches = batching.fill(
            part.batches,
            weights_bt=_weights(part.trajectories, cfg),
            **{name: values[of] for name, values in fields.items()},
        )
        first += len(part.trajectories)


def _gathered(
    parts: Sequence[_Minibatch], array_of: Callable[[learner_step.Scored], np.ndarray]
) -> list[np.ndarray]:
    """float32[S] of every record, in the order of the groups."""
    out = []
    for part in parts:
        arrays = [
            array_of(jax.device_get(scored._replace(visual_md=None))) for scored in part.scored
        ]
        counts = [sum(rewards.turn_lengths(of)) for of in part.trajectories]
        out += batching.gather(part.batches, arrays, counts)
    return out
