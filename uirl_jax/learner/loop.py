"""The learner's training run: groups of records in, one published policy version per step out.

Shards (from `actor.host`, through the workdir) -> here -> checkpoints and `policy/`. Each step:
take groups, learn, save, publish. `bookkeeping` writes the files and explains why their order makes
a SIGKILL at any point harmless.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from uirl_jax import user_code
from uirl_jax.console import Progress
from uirl_jax.errors import ConfigError, TrainingError
from uirl_jax.families.loading import PolicyModel
from uirl_jax.learner import algorithm, bookkeeping
from uirl_jax.learner import state as learner_state
from uirl_jax.learner.algorithm import AlgorithmConfig, Group
from uirl_jax.learner.bookkeeping import Bookkeeping, RunDirectory, policy_of
from uirl_jax.learner.cluster import ALONE, Cluster
from uirl_jax.learner.hosts import ENDED, PUBLISHED, STOPPED, Hosts
from uirl_jax.learner.mfu import step_flops, utilisation, weights_in_products
from uirl_jax.learner.own_rewards import OwnRewards
from uirl_jax.learner.profiling import Profiler
from uirl_jax.learner.replay import is_replayed
from uirl_jax.learner.supervised import check_finite
from uirl_jax.learner.training import LearnerConfig, TrainingConfig, prepare
from uirl_jax.log_lines import key_values
from uirl_jax.rl.losses import RATIO_EDGES, RATIOS
from uirl_jax.rl.rewards import turn_screens
from uirl_jax.store import open_store
from uirl_jax.trackers import Histogram
from uirl_jax.types import Trajectory
from uirl_jax.verifiers.recorded.rewards import parts_of

# A step takes at most MAX_REFILLS x groups_per_step groups, then trains on those that it has.
MAX_REFILLS = 10
FIRST_WAIT_S = 60.0  # for records, before it is said
_LEARNS_AGAIN = (
    "The same command would learn from them again: go on in another --workdir, with "
    "--resume_from={} and other settings, such as a lower learning rate"
)


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What a callback is told about a step, before its checkpoint is saved."""

    step: int  # from 1
    metrics: Mapping[str, float]  # by name, as in metrics.jsonl
    groups: Sequence[Group]  # all that the step took, without their screenshots


# Returns a reason to end the run after this step, or nothing.
OnStep = Callable[[StepReport], str | None]
Policy = Mapping[str, np.ndarray]  # what is trained, by leaf


class Judged(NamedTuple):
    """What a judge says of the policy of a step.

    Attributes:
      policy: for the actors: this one, or the last good one.
      of_step: whose policy that is.
      metrics: of its evaluation, if it was evaluated; by name, as in metrics.jsonl.
      ended: a reason to end the run after this step, or nothing.
      images: of a few turns of the evaluation, by name; for the trackers.
    """

    policy: Policy
    of_step: int
    metrics: Mapping[str, float] = {}
    ended: str = ""
    images: Mapping[str, bytes] = {}


# Called with (step, policy) at the start, and after every step before its checkpoint is saved: a
# run that is killed meanwhile repeats the step.
Judge = Callable[[int, Policy], Judged]


def all_are_good(step: int, policy: Policy) -> Judged:
    return Judged(policy, step)


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What the learner calls while it runs.

    Attributes:
      on_ready: called once the policy that the run continues from is published. An actor that
        reads the manifest earlier may see the last policy of a run that has since been extended.
      on_step: called after every step, before the callbacks of the config.
      on_wait: called with the seconds when a step has waited one minute for records, two, four, ...
      judge: decides which policy the actors get.
    """

    on_ready: Callable[[], None] = lambda: None
    on_step: OnStep = lambda report: None
    on_wait: Callable[[float], None] = lambda seconds: None
    judge: Judge = all_are_good


NO_HOOKS = Hooks()


@dataclasses.dataclass(frozen=True)
class LearnerResult:
    """How a run of the learner ended."""

    step: int
    finished: bool  # False if it was stopped before the last step, and not by a callback
    accounting: dict[str, int]  # published = trained + stale + quarantined + duplicate + pending
    train_seconds: float  # over this and all earlier processes of the run


class Spent(NamedTuple):
    """What a step took."""

    saved_s: float  # saving and publishing after the step before
    waited_s: float  # for records
    batched_s: float
    host_cpu_s: float  # CPU time of this process until there are batches
    learnt_s: float  # with batched_s
    tokens: int  # that it learnt from, without padding


def run_learner(
    cfg: TrainingConfig,
    model: PolicyModel,
    run: RunDirectory,
    stop: threading.Event,
    *,
    mesh: jax.sharding.Mesh,
    cluster: Cluster = ALONE,
    hooks: Hooks = NO_HOOKS,
    profile_steps: Sequence[int] = (),
) -> LearnerResult:
    """Trains until cfg.learner.steps are done or `stop` is set; continues from the last checkpoint.

    With several processes this is process 0's; `follow` runs in the others.

    Args:
      cluster: the learner's processes.
      profile_steps: the first and the last that are traced; see `profiling`.
    Raises:
      CheckpointError: there are checkpoints and all are damaged.
      TrainingError: a loss, gradient norm or reward is not finite (the step's records are copied to
        quarantine/), or there is no episode to imitate. The last checkpoint is kept.
    """
    own_rewards = OwnRewards(cfg.algorithm.reward)
    cfg = dataclasses.replace(
        cfg, algorithm=dataclasses.replace(cfg.algorithm, reward=own_rewards.then)
    )
    callbacks = (hooks.on_step, *find_callbacks(cfg.learner.callbacks))
    steps, schedule, state = prepare(cfg, model, mesh)
    num_weights = weights_in_products(model)
    advantages: list[np.ndarray] = []  # of the step's tokens, for its histogram
    update = functools.partial(
        algorithm.update,
        cfg=cfg.algorithm,
        steps=steps,
        frozen=model.frozen,
        mesh=mesh,
        seed=cfg.seed,
        on_advantages=advantages.extend,
    )
    store = open_store(run.workdir)
    hosts = Hosts(cluster, store, run.run_id, mesh, model.inputs, cfg.learner.batch)
    keep = cfg.learner.keep
    profiler = Profiler(run.workdir, profile_steps)
    with (
        contextlib.closing(profiler),
        bookkeeping.restore(run, model, cfg.curriculum, state, keep) as (books, state),
    ):
        step = int(state.step)
        ended = books.ended(cfg.learner.steps)
        judged = _begin(cfg.learner, books, state, model, hooks.judge)
        cluster.tell(PUBLISHED, str(step))
        hooks.on_ready()

        progress = Progress("training", cfg.learner.steps, first_step=step)
        saved_s = 0.0
        while step < cfg.learner.steps and not stop.is_set() and not ended:
            # ---------------------------------------------------------------- take
            profiler.begin(step + 1)
            step_started_s, cpu_started_s = time.monotonic(), time.process_time()
            groups, taken = _take(cfg, books, own_rewards, step, judged.policy, stop, hooks.on_wait)
            if stop.is_set():
                break
            waited_s = time.monotonic() - step_started_s

            # ---------------------------------------------------------------- learn
            try:
                chosen = algorithm.choose(groups, cfg.algorithm)
                batches = hosts.decide(step + 1, chosen, books.refs)
                batched_s = time.monotonic() - step_started_s - waited_s
                host_cpu_s = time.process_time() - cpu_started_s
                state, metrics, tokens = update(chosen, batches, state=state)
                check_finite(step + 1, metrics)
            except TrainingError as error:
                location = books.set_aside(step + 1, groups)
                way_out = _LEARNS_AGAIN.format(store.location())
                raise TrainingError(f"{error}; its records are in {location}. {way_out}") from None
            del groups, chosen, batches  # frees screenshots before the next step's are read
            step += 1
            learnt_s = time.monotonic() - step_started_s - waited_s

            # ------------------------------------------------------- judge, save, publish
            judged = hooks.judge(step, policy_of(state, model))
            histograms = _histograms(taken, advantages, metrics)
            advantages.clear()
            spent = Spent(saved_s, waited_s, batched_s, host_cpu_s, learnt_s, tokens)
            flops = step_flops(
                num_weights, tokens, cfg.algorithm, all_trained=model.trains == "all weights"
            )
            metrics |= {
                **_step_metrics(step, taken, judged, spent, cfg.algorithm, own_rewards, books),
                **utilisation(flops, learnt_s, mesh.devices.flatten().tolist()),
                "learner/lr": learner_state.learning_rate(schedule, state),
                "compile/count": steps.compile_count(),
            }
            report = StepReport(step, metrics, taken)
            ended = next((why for call in callbacks if (why := call(report))), "")
            if ended := ended or judged.ended:
                books.end(cfg.learner.steps, ended)
            # This order makes a SIGKILL at any point harmless, see `bookkeeping`.
            books.write_metrics(step, metrics, histograms, judged.images)
            saving_s = time.monotonic()
            books.save(step, state)
            books.publish(step, judged.policy)
            books.delete_used()
            saved_s = time.monotonic() - saving_s
            progress.update(
                step,
                reward=metrics["reward/mean"],
                success=metrics["success/mean"],
                tokens_per_s=metrics["learner/tokens_per_s"],
            )
        progress.close()
        hosts.end(step, ENDED if step >= cfg.learner.steps or ended else STOPPED)
        if ended:
            print(key_values("ended_early", step=step, reason=ended), flush=True)
        accounting = books.final_accounting()
        finished = step >= cfg.learner.steps or bool(ended)
        return LearnerResult(step, finished, accounting, books.train_seconds)


def _begin(
    cfg: LearnerConfig,
    books: Bookkeeping,
    state: learner_state.TrainState,
    model: PolicyModel,
    judge: Judge,
) -> Judged:
    """Publishes the policy that the run continues from, and returns what the judge says of it.

    Raises: ConfigError: a run that continues another one would have no step to take.
    """
    step = int(state.step)
    if books.is_fresh and step >= cfg.steps > 0:
        raise ConfigError(
            f"learner.steps={cfg.steps}: the checkpoint to resume from is of step {step}, and "
            "steps are counted from there; set a larger number"
        )
    if books.is_fresh:
        books.begin_at(step * cfg.groups_per_step)
        books.save(step, state)
    judged = judge(step, policy_of(state, model))
    if judged.metrics:
        books.amend_metrics(step, judged.metrics, judged.images)
    books.publish(step, judged.policy)
    return judged


def _step_metrics(
    step: int,
    taken: Sequence[Group],
    judged: Judged,
    spent: Spent,
    cfg: AlgorithmConfig,
    own_rewards: OwnRewards,
    books: Bookkeeping,
) -> dict[str, float]:
    """Of the groups that a step took, its time, the queue, and the evaluation after it.

    Args: step: the number of steps done.
    """
    return {
        **_describe(taken, cfg, step - 1),
        **own_rewards.metrics(),
        **books.describe(),
        **_speed(spent),
        **judged.metrics,
        "offpolicy/steps_kept_back": step - judged.of_step,
    }


def _speed(spent: Spent) -> dict[str, float]:
    whole_s = spent.saved_s + spent.waited_s + spent.learnt_s
    return {
        "time/batches_s": spent.batched_s,
        "time/host_cpu_s": spent.host_cpu_s,
        "time/save_and_publish_s": spent.saved_s,
        "time/wait_for_records_s": spent.waited_s,
        "time/learn_s": spent.learnt_s,
        "time/step_s": whole_s,
        "learner/tokens_per_s": spent.tokens / whole_s,
    }


def find_callbacks(references: Sequence[str]) -> list[OnStep]:
    """The user's own callbacks, with their answers checked. Raises: ConfigError."""

    def checked(reference: str, function: Callable[[StepReport], Any]) -> OnStep:
        def call(report: StepReport) -> str | None:
            with user_code.blamed(reference):
                answer = function(report)
                if answer is not None and not isinstance(answer, str):
                    raise TypeError(f"returned {type(answer).__name__}, expected None or a text")
            return f"{reference}: {answer}" if answer else None

        return call

    functions = [user_code.load(reference, "learner.callbacks") for reference in references]
    return [checked(*pair) for pair in zip(references, functions, strict=True)]


# ------------------------------------------------------------------------- the groups of a step


def _take(
    cfg: TrainingConfig,
    books: Bookkeeping,
    own_rewards: OwnRewards,
    step: int,
    policy: Policy,
    stop: threading.Event,
    on_wait: Callable[[float], None],
) -> tuple[list[Group], list[Group]]:
    """Waits for the groups of step + 1; returns early if `stop` is set.

    Returns: the groups to learn from, and all groups that were taken, without their screenshots.
    Raises: TrainingError: no group of many has an episode to imitate.
    """
    per_step = cfg.learner.groups_per_step
    groups: list[Group] = []
    taken: list[Group] = []
    useless: collections.deque[Group] = collections.deque(maxlen=per_step)
    while missing := _missing(groups, len(taken) - len(groups), cfg.learner, cfg.algorithm):
        if len(taken) >= MAX_REFILLS * per_step:
            groups = groups or _useless_groups(useless, step + 1, len(taken), cfg.algorithm)
            break
        if books.allow_extra(missing, (step + 1) * per_step):
            books.publish(step, policy)  # actors read the new limit from the manifest
        more = _wait_for_groups(books, cfg.learner, missing, step, stop, on_wait)
        if more is None:
            break
        more = [own_rewards.add(group) for group in more]
        books.count(more)
        if cfg.algorithm.replay:
            more = books.replay(more, step + 1)
        for group in more:
            (groups if algorithm.useful(group, cfg.algorithm) else useless).append(group)
            taken.append([dataclasses.replace(record, images={}) for record in group])
    return groups, taken


def _wait_for_groups(
    books: Bookkeeping,
    cfg: LearnerConfig,
    count: int,
    version: int,
    stop: threading.Event,
    on_wait: Callable[[float], None],
) -> list[Group] | None:
    started_s, say_at_s = time.monotonic(), FIRST_WAIT_S
    while not stop.is_set():
        groups = books.take(count, version, cfg.max_staleness)
        if groups is not None:
            return groups
        if time.monotonic() - started_s >= say_at_s:
            on_wait(say_at_s)
            say_at_s *= 2
        stop.wait(max(cfg.poll_s, books.poll_s))
    return None


def _missing(
    groups: list[Group],
    useless: int,
    cfg: LearnerConfig,
    algorithm_cfg: AlgorithmConfig,
) -> int:
    """Estimates how many groups a step still needs; `useless` ones were taken besides `groups`."""
    if algorithm_cfg.objective != "imitation":
        return cfg.groups_per_step - len(groups)
    seen = len(groups) + useless
    if seen < cfg.groups_per_step:
        return cfg.groups_per_step - seen
    # min_kept counts episodes: estimate the groups that yield the rest at the rate so far.
    n_kept = sum(len(algorithm.kept(group, algorithm_cfg)) for group in groups)
    short = max(algorithm_cfg.min_kept - n_kept, 0)
    return min(cfg.groups_per_step, -(-short * seen // n_kept) if n_kept else seen)


def _useless_groups(
    useless: Sequence[Group], step: int, count: int, algorithm_cfg: AlgorithmConfig
) -> list[Group]:
    """The groups of a step without any useful one. Raises TrainingError for imitation."""
    fields = {"step": step, "groups": count, "mean_reward": round(_mean_reward(useless), 3)}
    if algorithm_cfg.objective == "imitation":
        raise TrainingError(
            f"step {step}: none of its {count} groups has an episode to imitate: episodes with a "
            f"reward of at least {algorithm_cfg.keep_reward} (algorithm.keep_reward) are kept, the "
            f"mean reward of the last groups is {fields['mean_reward']}"
        )
    print(key_values("nothing_to_learn", **fields), flush=True)
    return list(useless)


def _histograms(
    groups: Sequence[Group], advantages: Sequence[np.ndarray], metrics: dict[str, float]
) -> dict[str, Histogram]:
    """Of a step's rewards, advantages and ratios; takes the bins of the ratios out of `metrics`."""
    found = {"reward/episodes": Histogram.of([r.reward for group in groups for r in group])}
    if advantages:
        found["advantage/tokens"] = Histogram.of(np.concatenate(advantages))
    edges = np.array(RATIO_EDGES)
    shares = [metrics.pop(f"{RATIOS}/{number}", 0.0) for number in range(len(edges) - 1)]
    if any(shares):  # not of a loss of one's own
        counts = np.round(np.array(shares) * metrics["learner/tokens"])
        found["offpolicy/ratios"] = Histogram(counts, edges)
    return found


def _mean_reward(groups: Sequence[Group]) -> float:
    return float(np.mean([record.reward for group in groups for record in group]))


def _describe(
    groups: Sequence[Group], algorithm_cfg: AlgorithmConfig, version: int
) -> dict[str, float]:
    """Metrics of all groups that a step took, including those it did not train on.

    Replayed records are counted separately: an older policy sampled them.
    """
    signals = [algorithm.teaches(group, algorithm_cfg) for group in groups]
    replayed: list[Trajectory] = []
    trajectories: list[Trajectory] = []
    for group in groups:
        for record in group:
            (replayed if is_replayed(record, group) else trajectories).append(record)
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
        "groups/useless": sum(not signal for signal in signals),
        "groups/shared_screens": _share_of_shared_screens(groups),
        "groups/replaced": sum(not algorithm.useful(group, algorithm_cfg) for group in groups),
        "offpolicy/staleness": float(np.mean(staleness)),
        "replay/episodes": len(replayed),
        "replay/staleness": float(
            np.mean([version - record.oldest_policy_version for record in replayed] or [0.0])
        ),
        **_describe_recorded(trajectories),
    } | {f"stop_reason/{reason}": count / len(trajectories) for reason, count in reasons.items()}


def _describe_recorded(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of every rule over the episodes on recorded steps; empty without them."""
    found = [parts for trajectory in trajectories if (parts := parts_of(trajectory)) is not None]
    if not found:
        return {}
    return {f"recorded/{name}": float(np.mean([one[name] for one in found])) for name in found[0]}


def _share_of_shared_screens(groups: Sequence[Group]) -> float:
    """Of the turns, those whose screenshot another turn of the group saw: what GiGPO compares."""
    shared, turns = 0, 0
    for group in groups:
        seen = collections.Counter(key for record in group for key in turn_screens(record))
        shared += sum(count for key, count in seen.items() if key and count > 1)
        turns += seen.total()
    return shared / max(turns, 1)
