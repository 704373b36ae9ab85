"""The learner's run: groups of records in, adapters out, one published policy version a step.

Shards (from `actor.host`, through the workdir) -> here -> checkpoints and `policy/`. Reads top to
bottom. The order at the end of a step is what makes a SIGKILL at any point harmless: first the
checkpoint is committed, with the data cursor in it, then the policy is published, then the shards
that are used up are deleted. A run that starts again finds either the step whole or its records
unread.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from uirl_jax import policy_sync
from uirl_jax.checkpoints import Checkpointer
from uirl_jax.curriculum import Curriculum
from uirl_jax.errors import TrainingError, UirlError
from uirl_jax.learner import algorithm
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import step as learner_step
from uirl_jax.learner.algorithm import AlgorithmConfig, Group
from uirl_jax.learner.replay import Replay, is_replayed
from uirl_jax.learner.supervised import check_finite
from uirl_jax.metrics import MetricsWriter, Progress, key_values
from uirl_jax.models import qwen2_vl_weights
from uirl_jax.models.loading import PolicyModel
from uirl_jax.shards import batching
from uirl_jax.shards.queue import QUARANTINE, ShardQueue
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import put_shard
from uirl_jax.store import Store, open_store
from uirl_jax.types import TrainBatch, Trajectory


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
class LearnerResult:
    """How a run of the learner ended."""

    step: int
    finished: bool  # False where it was asked to stop
    accounting: dict[str, int]  # published = trained + stale + quarantined + duplicate + pending
    train_seconds: float  # in this and all earlier processes of the run


def run_learner(
    cfg: LearnerConfig,
    algorithm_cfg: AlgorithmConfig,
    model: PolicyModel,
    *,
    workdir: Path,
    run_id: str,
    mesh: jax.sharding.Mesh,
    curriculum: Curriculum,
    stop: threading.Event,
    on_ready: Callable[[], None] = lambda: None,
    temperature: float = 1.0,
    forbidden_ids: Sequence[int] = (),
    seed: int = 0,
    replace_advantages: algorithm.Advantages | None = None,
) -> LearnerResult:
    """Trains until cfg.steps are done or `stop` is set; carries on where an earlier process ended.

    Args:
      curriculum: of the run's tasks; told how they went, which every policy carries to the actors.
      on_ready: called once the policy that the run carries on from is published. An actor that
        looked before may find that of a run that had ended.
      temperature, forbidden_ids: as the actors sample; see `learner.step`.
      seed: of the adapters' dropout.
      replace_advantages: for tests: with zeros nothing may be learnt.
    Raises:
      CheckpointError: there are checkpoints and none is whole.
      TrainingError: a loss, gradient norm or reward that is not finite (the step's records are set
        aside under quarantine/), or no episode worth imitating. The last checkpoint stays.
    """
    # 1. The state: fresh, or of the newest checkpoint that is whole.
    updates = cfg.steps * algorithm_cfg.updates_a_step
    optimizer_cfg = cfg.optimizer.resolved("adapters")
    print(optimizer_cfg.describe(model.lora, "adapters"), flush=True)
    optimizer = learner_state.make_optimizer(optimizer_cfg, updates)
    critic = None
    if algorithm_cfg.has_critic:
        critic = learner_state.init_critic(
            model.cfg.hidden_size, learner_state.make_critic_optimizer(algorithm_cfg.critic)
        )
    state = learner_state.init_state(model.lora, optimizer, mesh, critic=critic)
    steps = learner_step.make_steps(
        model.graphdef,
        optimizer,
        algorithm_cfg.loss,
        critic_cfg=algorithm_cfg.critic if algorithm_cfg.has_critic else None,
        vision_trainable="visual" in model.lora,
        use_reference=algorithm_cfg.use_reference,
        recompute_old=algorithm_cfg.recompute_old,
        temperature=temperature,
        forbidden_ids=forbidden_ids,
        image_cfg=model.image_cfg,
        dropout_seed=seed,
        state_shardings=jax.tree.map(lambda leaf: leaf.sharding, state),
    )
    store = open_store(workdir)
    checkpointer = Checkpointer(workdir / "checkpoints", keep=cfg.keep_checkpoints)
    metrics_writer = MetricsWriter(workdir)
    with checkpointer, metrics_writer:
        restored = checkpointer.restore_latest(jax.tree.map(_abstract, state))
        meta = {"shards": None, "groups": [], "extra": 0, "train_seconds": 0.0}
        meta |= {"tallies": {}, "replay": {}}
        if restored:
            state, meta = restored.arrays, meta | restored.meta
            for line in restored.skipped:
                print(key_values("checkpoint_skipped", reason=line), flush=True)
        step = int(state.step)
        metrics_writer.truncate_from(step + 1)
        queue = ShardQueue(store, run_id, model.base_hash, meta["shards"])
        trained = _Ranges(meta["groups"])
        extra = int(meta["extra"])  # groups on top of groups_per_step, over all steps
        tallies = curriculum.tallies(meta["tallies"])
        replay = Replay(store, model.base_hash, _layout(model), meta["replay"])
        earlier_s, started_s = float(meta["train_seconds"]), time.monotonic()

        def train_seconds() -> float:
            return earlier_s + time.monotonic() - started_s

        def save() -> dict[str, Any]:
            meta = {
                "shards": queue.state(),
                "groups": trained.pairs,
                "extra": extra,
                "train_seconds": train_seconds(),
                "tallies": tallies.to_json(),
                "replay": dict(replay.files),
            }
            checkpointer.save(step, state, meta)
            return meta

        def make_batches(trajectories: Sequence[Trajectory]) -> list[TrainBatch]:
            return batching.make_batches(
                trajectories,
                image_cfg=model.image_cfg,
                image_token_id=model.cfg.image_token_id,
                cfg=cfg.batch,
            )

        def publish() -> None:
            policy_sync.publish(
                store,
                version=step,
                step=step,
                adapters=qwen2_vl_weights.adapters_to_numpy(state.trainable),
                base_hash=model.base_hash,
                run_id=run_id,
                extra={
                    "groups_trained": trained.pairs,
                    "groups_extra": extra,
                    "tallies": tallies.to_json(),
                },
            )

        # Shards and stored successes go when no checkpoint that is kept could ask for them again.
        saved: collections.deque[dict[str, Any]] = collections.deque(maxlen=cfg.keep_checkpoints)
        if not restored:
            saved.append(save())
        publish()
        on_ready()

        # 2. Steps.
        progress = Progress("training", cfg.steps, first_step=step)
        saved_s = 0.0
        while step < cfg.steps and not stop.is_set():
            step_started_s = time.monotonic()
            groups: list[Group] = []
            taken: list[Group] = []  # all of the step, without their screenshots
            useless: collections.deque[Group] = collections.deque(maxlen=cfg.groups_per_step)
            while missing := _missing(groups, len(taken) - len(groups), cfg, algorithm_cfg):
                if len(taken) >= MAX_REFILLS * cfg.groups_per_step:
                    groups = groups or _of_no_use(useless, step + 1, len(taken), algorithm_cfg)
                    break
                wanted = trained.count + missing - (step + 1) * cfg.groups_per_step - extra
                if wanted > 0:  # said, or no actor would start more than a step takes
                    extra += wanted
                    publish()
                more = _wait_for_groups(queue, cfg, missing, step, stop)
                if more is None:
                    break
                for group in more:
                    trained.add(int(group[0].group_id))
                    curriculum.count(tallies, group)
                if algorithm_cfg.replay:
                    more = [replay.complete(group) for group in more]
                    replay.remember(more, step + 1)
                for group in more:
                    (groups if algorithm.useful(group, algorithm_cfg) else useless).append(group)
                    taken.append([dataclasses.replace(of, images={}) for of in group])
            if stop.is_set():
                break
            waited_s = time.monotonic() - step_started_s

            try:
                state, metrics, tokens = algorithm.learn(
                    groups,
                    algorithm_cfg,
                    steps,
                    state,
                    model.frozen,
                    make_batches=make_batches,
                    mesh=mesh,
                    seed=seed,
                    replace_advantages=replace_advantages,
                )
                check_finite(step + 1, metrics)
            except TrainingError as error:
                aside = _set_aside(store, f"{QUARANTINE}/step-{step + 1}", groups, model)
                raise TrainingError(f"{error}; its records are in {aside}") from None

            step += 1
            learnt_s = time.monotonic() - step_started_s - waited_s

            # 3. What it was: before it is saved. Killed in between, a step is taken again and its
            # line goes (`truncate_from`); the other way round a saved step would lack its line.
            whole_s = saved_s + waited_s + learnt_s
            metrics |= _describe(taken, algorithm_cfg, step - 1) | curriculum.describe(tallies)
            metrics |= {
                "time/save_and_publish_s": saved_s,  # of the step before
                "time/wait_for_records_s": waited_s,
                "time/learn_s": learnt_s,
                "time/step_s": whole_s,
                "learner/tokens_per_s": tokens / whole_s,
                "compile/count": steps.compile_count(),
            }
            metrics |= {f"records/{name}": n for name, n in queue.accounting().items()}
            metrics_writer.write(step, metrics)

            saving_s = time.monotonic()
            saved.append(save())
            publish()
            if len(saved) == saved.maxlen:
                queue.committed(saved[0]["shards"])
                replay.prune(meta["replay"] for meta in saved)
            saved_s = time.monotonic() - saving_s
            progress.update(
                step,
                reward=metrics["reward/mean"],
                success=metrics["success/mean"],
                tokens_per_s=metrics["learner/tokens_per_s"],
            )
        progress.close()
        queue.poll()
        return LearnerResult(step, step >= cfg.steps, queue.accounting(), train_seconds())


class _Ranges:
    """Which group indices were trained, as ascending [start, stop) pairs: actors skip these."""

    def __init__(self, pairs: list[list[int]]) -> None:
        self.pairs = [list(pair) for pair in pairs]

    def add(self, index: int) -> None:
        merged: list[list[int]] = []
        for start, stop in sorted([*self.pairs, [index, index + 1]]):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(stop, merged[-1][1])
            else:
                merged.append([start, stop])
        self.pairs = merged

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.pairs)


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


def _of_no_use(
    useless: Sequence[Group], step: int, count: int, algorithm_cfg: AlgorithmConfig
) -> list[Group]:
    """What a step does with, that has waited long enough for better. Raises TrainingError."""
    said = {"step": step, "groups": count, "mean_reward": round(_mean_reward(useless), 3)}
    if algorithm_cfg.objective == "imitation":
        raise TrainingError(
            f"step {step}: none of the {count} groups played for it has an episode to imitate: "
            f"rewards of {algorithm_cfg.keep_reward} (algorithm.keep_reward) are kept, the last "
            f"groups' mean is {said['mean_reward']}"
        )
    print(key_values("nothing_to_learn", **said), flush=True)
    return list(useless)


def _mean_reward(groups: Sequence[Group]) -> float:
    return float(np.mean([record.reward for group in groups for record in group]))


def _wait_for_groups(
    queue: ShardQueue, cfg: LearnerConfig, count: int, version: int, stop: threading.Event
) -> list[Group] | None:
    while not stop.is_set():
        queue.poll()
        groups = queue.take_groups(count, version, cfg.max_staleness)
        if groups is not None:
            return groups
        stop.wait(cfg.poll_s)
    return None


def _set_aside(store: Store, prefix: str, groups: Sequence[Group], model: PolicyModel) -> str:
    """Shards of a step's records, one a group, for whoever looks for what went wrong.

    Returns: where they are, or why they are not: what went wrong itself is told in every case.
    """
    layout = _layout(model)
    try:
        for group in groups:
            name = f"{prefix}/group-{group[0].group_id}.tfrecord"
            fresh = [record for record in group if not is_replayed(record, group)]
            put_shard(store, name, fresh, base_hash=model.base_hash, layout=layout)
    except UirlError as error:
        return f"nowhere whole ({error})"
    return store.location(prefix)


def _layout(model: PolicyModel) -> TokenLayout:
    return TokenLayout(
        model.cfg.vocab_size, model.cfg.image_token_id, model.cfg.vision.spatial_merge_size
    )


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


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
