"""The learner's run: groups of records in, adapters out, one published policy version a step.

Shards (from `actor.host`, through the workdir) -> here -> checkpoints and `policy/`. Reads top to
bottom: take, learn, write down, publish. `bookkeeping` does the writing, and says why the order at
the end of a step makes a SIGKILL at any point harmless.
"""

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from uirl_jax.errors import TrainingError
from uirl_jax.families.loading import PolicyModel
from uirl_jax.learner import algorithm, bookkeeping
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.learner.algorithm import AlgorithmConfig, Group
from uirl_jax.learner.bookkeeping import Bookkeeping, RunDirectory
from uirl_jax.learner.curriculum import Curriculum
from uirl_jax.learner.replay import is_replayed
from uirl_jax.learner.state import TrainState
from uirl_jax.learner.supervised import check_finite
from uirl_jax.metrics import Progress, key_values
from uirl_jax.shards import batching


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """What a step trains on, and for how many steps."""

    steps: int = dataclasses.field(metadata={"min": 0})
    groups_per_step: int = dataclasses.field(default=8, metadata={"min": 1})
    # Versions; 0: the actor waits for every new policy.
    max_staleness: int = dataclasses.field(default=0, metadata={"min": 0})
    batch: batching.BatchConfig = dataclasses.field(default_factory=batching.BatchConfig)
    optimizer: learner_state.OptimizerConfig = dataclasses.field(
        default_factory=learner_state.OptimizerConfig
    )
    keep_checkpoints: int = dataclasses.field(default=3, metadata={"min": 1})
    # Between looks at the shard directory.
    poll_s: float = dataclasses.field(default=0.02, metadata={"above": 0.0})


MAX_REFILLS = 10  # a step takes at most so many times groups_per_step, and then what it has


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides what a run's learner computes."""

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    # Of the run's tasks; counts how they went, which every policy carries to the actors.
    curriculum: Curriculum
    temperature: float = 1.0  # as the actors sample, see learner.step
    forbidden_ids: tuple[int, ...] = ()
    seed: int = 0  # of the adapters' dropout, and of the order of minibatches


@dataclasses.dataclass(frozen=True)
class LearnerResult:
    """How a run of the learner ended."""

    step: int
    finished: bool  # False where it was asked to stop
    accounting: dict[str, int]  # published = trained + stale + quarantined + duplicate + pending
    train_seconds: float  # in this and all earlier processes of the run


def run_learner(
    cfg: TrainingConfig,
    model: PolicyModel,
    run: RunDirectory,
    stop: threading.Event,
    *,
    mesh: jax.sharding.Mesh,
    on_ready: Callable[[], None] = lambda: None,
    replace_advantages: algorithm.Advantages | None = None,
) -> LearnerResult:
    """Trains until cfg.learner.steps are done or `stop` is set; continues an earlier process's run.

    Args:
      on_ready: called once the policy that the run continues from is published. An actor that
        looked before may find that of a run that had ended.
      replace_advantages: for tests: with zeros nothing may be learnt.
    Raises:
      CheckpointError: there are checkpoints and none is whole.
      TrainingError: a loss, gradient norm or reward that is not finite (the step's records are set
        aside under quarantine/), or no episode worth imitating. The last checkpoint stays.
    """
    steps, state = _compile(cfg, model, mesh)
    learn = functools.partial(
        algorithm.learn,
        cfg=cfg.algorithm,
        steps=steps,
        frozen=model.frozen,
        make_batches=functools.partial(
            batching.make_batches, inputs=model.inputs, cfg=cfg.learner.batch
        ),
        mesh=mesh,
        seed=cfg.seed,
        replace_advantages=replace_advantages,
    )
    keep_checkpoints = cfg.learner.keep_checkpoints
    with bookkeeping.restore(
        run, model, cfg.curriculum, state, keep_checkpoints=keep_checkpoints
    ) as (books, state):
        step = int(state.step)
        if books.is_fresh:
            books.save(step, state)
        books.publish(step, state)
        on_ready()

        progress = Progress("training", cfg.learner.steps, first_step=step)
        saved_s = 0.0
        while step < cfg.learner.steps and not stop.is_set():
            # ---------------------------------------------------------------- take
            step_started_s = time.monotonic()
            groups, taken = _take(cfg, books, step, state, stop)
            if stop.is_set():
                break
            waited_s = time.monotonic() - step_started_s

            # ---------------------------------------------------------------- learn
            try:
                state, metrics, tokens = learn(groups, state=state)
                check_finite(step + 1, metrics)
            except TrainingError as error:
                aside = books.set_aside(step + 1, groups)
                raise TrainingError(f"{error}; its records are in {aside}") from None
            del groups  # with their screenshots, before the next step's arrive
            step += 1
            learnt_s = time.monotonic() - step_started_s - waited_s

            # ---------------------------------------------------------------- write down, publish
            whole_s = saved_s + waited_s + learnt_s
            metrics |= _describe(taken, cfg.algorithm, step - 1)
            metrics |= {
                "time/save_and_publish_s": saved_s,  # of the step before
                "time/wait_for_records_s": waited_s,
                "time/learn_s": learnt_s,
                "time/step_s": whole_s,
                "learner/tokens_per_s": tokens / whole_s,
                "compile/count": steps.compile_count(),
            }
            # This order makes a SIGKILL at any point harmless, see `bookkeeping`.
            books.write_metrics(step, metrics)
            saving_s = time.monotonic()
            books.save(step, state)
            books.publish(step, state)
            books.delete_used()
            saved_s = time.monotonic() - saving_s
            progress.update(
                step,
                reward=metrics["reward/mean"],
                success=metrics["success/mean"],
                tokens_per_s=metrics["learner/tokens_per_s"],
            )
        progress.close()
        accounting = books.final_accounting()
        return LearnerResult(step, step >= cfg.learner.steps, accounting, books.train_seconds)


def _compile(
    cfg: TrainingConfig, model: PolicyModel, mesh: jax.sharding.Mesh
) -> tuple[learner_step.Steps, TrainState]:
    """The jitted functions of the run (XLA compiles them when they are first called), and a fresh
    state."""
    algorithm_cfg = cfg.algorithm
    optimizer_cfg = cfg.learner.optimizer.resolved("adapters")
    print(optimizer_cfg.describe(model.lora, "adapters"), flush=True)
    updates = cfg.learner.steps * algorithm_cfg.updates_a_step
    optimizer = learner_state.make_optimizer(optimizer_cfg, updates)
    critic, critic_cfg = None, None
    if algorithm_cfg.has_critic:
        critic_cfg = algorithm_cfg.critic
        critic_optimizer = learner_state.make_critic_optimizer(critic_cfg)
        critic = learner_state.init_critic(model.cfg.hidden_size, critic_optimizer)
    rules = model.family.weights.sharding_rules
    state = learner_state.init_state(model.lora, optimizer, mesh, rules, critic=critic)
    step_cfg = learner_step.StepConfig(
        algorithm_cfg.loss,
        critic_cfg,
        vision_trainable=model.trains_vision,
        use_reference=algorithm_cfg.use_reference,
        recompute_old=algorithm_cfg.recompute_old,
        temperature=cfg.temperature,
        forbidden_ids=cfg.forbidden_ids,
        dropout_seed=cfg.seed,
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return learner_step.make_steps(model.graphdef, optimizer, step_cfg, shardings), state


# ------------------------------------------------------------------------- the groups of a step


def _take(
    cfg: TrainingConfig, books: Bookkeeping, step: int, state: TrainState, stop: threading.Event
) -> tuple[list[Group], list[Group]]:
    """Waits for the groups of step + 1; ends early where `stop` is set.

    Returns: the groups to learn from, and all that were taken, without their screenshots.
    Raises: TrainingError: none of many groups has an episode to imitate.
    """
    per_step = cfg.learner.groups_per_step
    groups: list[Group] = []
    taken: list[Group] = []
    useless: collections.deque[Group] = collections.deque(maxlen=per_step)
    while missing := _missing(groups, len(taken) - len(groups), cfg.learner, cfg.algorithm):
        if len(taken) >= MAX_REFILLS * per_step:
            groups = groups or _without_use(useless, step + 1, len(taken), cfg.algorithm)
            break
        if books.allow_extra(missing, (step + 1) * per_step):
            books.publish(step, state)  # actors learn of it from the manifest
        more = _wait_for_groups(books, cfg.learner, missing, step, stop)
        if more is None:
            break
        if cfg.algorithm.replay:
            more = books.replay(more, step + 1)
        for group in more:
            (groups if algorithm.useful(group, cfg.algorithm) else useless).append(group)
            taken.append([dataclasses.replace(record, images={}) for record in group])
    return groups, taken


def _wait_for_groups(
    books: Bookkeeping, cfg: LearnerConfig, count: int, version: int, stop: threading.Event
) -> list[Group] | None:
    while not stop.is_set():
        groups = books.take(count, version, cfg.max_staleness)
        if groups is not None:
            return groups
        stop.wait(cfg.poll_s)
    return None


def _missing(
    groups: list[Group],
    passed: int,
    cfg: LearnerConfig,
    algorithm_cfg: AlgorithmConfig,
) -> int:
    """How many groups a step still needs, as far as can be told; `passed` taught it nothing."""
    if algorithm_cfg.objective != "imitation":
        return cfg.groups_per_step - len(groups)
    seen = len(groups) + passed
    if seen < cfg.groups_per_step:
        return cfg.groups_per_step - seen
    # Episodes count there, and not groups: as many groups as it takes at the rate so far.
    n_kept = sum(len(algorithm.kept(group, algorithm_cfg)) for group in groups)
    short = max(algorithm_cfg.min_kept - n_kept, 0)
    return min(cfg.groups_per_step, -(-short * seen // n_kept) if n_kept else seen)


def _without_use(
    useless: Sequence[Group], step: int, count: int, algorithm_cfg: AlgorithmConfig
) -> list[Group]:
    """The groups of a step that found no useful one in MAX_REFILLS tries. Raises TrainingError."""
    fields = {"step": step, "groups": count, "mean_reward": round(_mean_reward(useless), 3)}
    if algorithm_cfg.objective == "imitation":
        raise TrainingError(
            f"step {step}: none of the {count} groups played for it has an episode to imitate: "
            f"rewards of {algorithm_cfg.keep_reward} (algorithm.keep_reward) are kept, the last "
            f"groups' mean is {fields['mean_reward']}"
        )
    print(key_values("nothing_to_learn", **fields), flush=True)
    return list(useless)


def _mean_reward(groups: Sequence[Group]) -> float:
    return float(np.mean([record.reward for group in groups for record in group]))


def _describe(
    groups: Sequence[Group], algorithm_cfg: AlgorithmConfig, version: int
) -> dict[str, float]:
    """Metrics of the groups that a step took, whether it learnt from them or not.

    Replayed records are counted apart: they say nothing of how the policy does now.
    """
    signals = [algorithm.teaches(group, algorithm_cfg) for group in groups]
    replayed = [of for group in groups for of in group if is_replayed(of, group)]
    trajectories = [of for group in groups for of in group if not is_replayed(of, group)]
    turns = [len(trajectory.turns) for trajectory in trajectories]
    sampled = [sum(len(t.token_ids) for t in trajectory.turns) for trajectory in trajectories]
    staleness = [version - trajectory.oldest_policy_version for trajectory in trajectories]
    reasons = collections.Counter(trajectory.stop_reason for trajectory in trajectories)
    return {
        "reward/mean": float(np.mean([trajectory.reward for trajectory in trajectories])),
        "success/mean": float(np.mean([trajectory.success for trajectory in trajectories])),
        "episode/turns": float(np.mean(turns)),
        "episode/sampled_tokens": float(np.mean(sampled)),
        "episode/seconds": float(np.mean([trajectory.duration_s for trajectory in trajectories])),
        "groups/with_signal": float(np.mean(signals)),
        "groups/useless": sum(not algorithm.useful(group, algorithm_cfg) for group in groups),
        "offpolicy/staleness": float(np.mean(staleness)),
        "replay/episodes": len(replayed),
        "replay/staleness": float(
            np.mean([version - of.oldest_policy_version for of in replayed] or [0.0])
        ),
    } | {f"stop_reason/{reason}": count / len(trajectories) for reason, count in reasons.items()}
