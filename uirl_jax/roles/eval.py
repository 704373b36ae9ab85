"""Evaluates policies: of a run on its own held-out instances, or several on a suite."""

import asyncio
import contextlib
import dataclasses
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from uirl_jax import evaluation, metrics
from uirl_jax.config.schema import RunConfig, TaskConfig
from uirl_jax.errors import ConfigError
from uirl_jax.families import loading
from uirl_jax.learner.bookkeeping import read_adapters
from uirl_jax.learner.curriculum import CurriculumConfig
from uirl_jax.players import Adapters, Players
from uirl_jax.roles import contenders
from uirl_jax.roles.verifier import bundled_server
from uirl_jax.run import Run
from uirl_jax.store import files, open_store
from uirl_jax.verifiers.recorded.rewards import PREFIX as RECORDED

BEST_FILE = "best/best.json"


def run_eval_role(
    run: Run, stop: threading.Event, stage: str, checkpoint: int | None = None
) -> None:
    """Evaluates the newest published policy, or the base model if none is published.

    It starts its own bundled verifier: the run's may be busy or stopped. A stage that was evaluated
    before is not played again.

    Args:
      checkpoint: evaluates the checkpoint of this step instead.

    Raises: ConfigError: that stage was of another policy.
    """

    async def measure(run: Run) -> evaluation.EvalResult:
        async with run.make_players(run.load_base(None), contenders.new_owner()) as players:
            if checkpoint is None:
                published, adapters = players.take_policy()
                version = _step_of_published(run, published)
            else:
                version, adapters, _ = read_adapters(run.workdir, checkpoint)
                published = version
            if adapters:
                players.engine.set_policy(players.to_trainable(adapters), version)
            name = evaluation.stage_name(
                stage, published if stage else version, run.cfg.learner.steps
            )
            result = await run.measure(players, name, stop)
            known = result.policy_version
            if stage not in evaluation.RUN_STAGES and known not in (None, version):
                raise ConfigError(
                    f"--stage={stage}: it was evaluated before, with version {known}, and this is "
                    f"version {version}; use another name"
                )
            if run.cfg.publish.gate == "none":  # else the run's own evaluations decide
                keep_best(run, players, version, adapters, result)
            return result

    with own_verifier(run) as run:
        result = asyncio.run(measure(run))
    print(evaluation.format_table([result]), flush=True)
    if result.recorded:
        print(f"\n{evaluation.format_recorded(result.recorded)}", flush=True)


def _step_of_published(run: Run, published: int) -> int:
    """Whose policy the manifest has: its version counts steps, also while a gate keeps policies
    from the actors."""
    good = evaluation.read_decisions(run.store).version
    return good if run.cfg.publish.gate == "actors" and 0 <= good < published else published


def with_suite(cfg: RunConfig, suite: evaluation.Suite) -> RunConfig:
    """The config of a run with a suite's tasks, before its sizes are derived: it is about these.

    Raises: ConfigError: the tasks cannot be played with it.
    """
    kinds = {
        (task.name, task.variant, task.max_turns): cfg.rules.get(task.name, "")
        for task in suite.tasks
    }
    tasks = tuple(TaskConfig(*kind, rule=rule) for kind, rule in kinds.items())
    # Nothing is trained: the curriculum's limits are about the run's own tasks.
    return dataclasses.replace(cfg, tasks=tasks, curriculum=CurriculumConfig())


def run_suite(
    run: Run, stop: threading.Event, suite: evaluation.Suite, checkpoints: Sequence[str]
) -> None:
    """Plays what is missing of a suite with every contender, and prints scores and comparisons.

    Args:
      run: its config has the suite's tasks (`with_suite`).
      checkpoints: see `contenders`.
    """
    for checkpoint in checkpoints:
        contenders.check(run, checkpoint)
    suite = suite.only(run.without_repeated_rows(suite.specs, suite=suite.name))
    directory = evaluation.open_suite(run.workdir, suite)
    played: dict[str, evaluation.Played] = {}

    async def play(run: Run) -> None:
        for checkpoint in checkpoints:
            async with contenders.playing(run, checkpoint) as (players, contender):
                played[contender.name] = await players.play_suite(suite, directory, contender, stop)

    with own_verifier(run) as run:
        asyncio.run(play(run))
    scores, comparisons = evaluation.conclude(directory, played)
    print(evaluation.format_scores(scores))
    if len(run.cfg.tasks) > 1:
        by_task = {name: evaluation.score_by_task(one) for name, one in played.items()}
        print(evaluation.format_tasks(by_task))
    if comparisons:
        print(evaluation.format_comparisons(comparisons))
    if any(task.name.startswith(RECORDED) for task in suite.tasks):
        for name in played:
            recorded = evaluation.recorded_results(evaluation.ended_episodes(directory / name))
            print(f"\n{name}\n{evaluation.format_recorded(recorded)}\n")
    print(f"scores: {directory / 'scores.json'}", flush=True)


@contextlib.contextmanager
def own_verifier(run: Run) -> Iterator[Run]:
    """The run with a bundled server of its own, if it plays on one: the run's may be busy."""
    if not run.cfg.needs_server:
        yield run
        return
    with tempfile.TemporaryDirectory() as folder:
        run = dataclasses.replace(run, own_port_file=Path(folder) / "port")
        with bundled_server(run, "verifier-eval.log", 0):
            yield run


def scalars_of(result: evaluation.EvalResult) -> dict[str, float]:
    """What metrics.jsonl has of an evaluation."""
    return {
        "eval/success": result.rate,
        "eval/success_low": result.low,
        "eval/reward": result.mean_reward,
        "eval/turns": result.mean_turns,
        "eval/mistakes": result.mistakes,
        "eval/env_errors": result.env_errors,
    }


def note_result(run: Run, step: int, result: evaluation.EvalResult) -> None:
    """Writes an evaluation into metrics.jsonl and TensorBoard, once; of no episodes, nothing."""
    if not (result.attempts or result.missing):
        return
    known = any(
        row["step"] == step and "eval/success" in row for row in metrics.read_metrics(run.workdir)
    )
    with metrics.MetricsWriter(run.workdir, trackers=run.open_trackers()) as writer:
        if not known and step >= (writer.last_step or 0):
            writer.amend(step, scalars_of(result), evaluation.pictures(run.workdir, result.stage))


def keep_best(
    run: Run,
    players: Players,
    version: int,
    adapters: Adapters,
    result: evaluation.EvalResult,
    *,
    anyway: bool = False,
) -> None:
    """Exports the adapters of the policy with the best evaluation so far to best/version_<n>/.

    The first of several equal ones stays. best/best.json names it, with its result. An evaluation
    beside the run may do the same at the same time: one waits for the other.

    Args: anyway: this one is exported whatever the others' success, as it passed a gate.
    Raises: OSError: what the best one is cannot be read, or the disk is full; it stays the best.
    """
    if not adapters or result.attempts == 0:
        return
    store, target = open_store(run.workdir), run.workdir / "best" / f"version_{version}"
    with files.alone(target.parent):
        try:
            best = json.loads(store.read(BEST_FILE))["rate"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            best = -1.0
        if not (anyway or result.rate > best):
            return
        with files.new_directory(target, replaces=True) as directory:
            trained = players.to_trainable(adapters)
            loading.save_policy(players.model, directory, trained, run.cfg.chat)
            files.sync_files(directory)
        kind = "adapter" if players.model.trains == "adapters" else "model"
        content = {"version": version, kind: str(target), **dataclasses.asdict(result)}
        store.put(BEST_FILE, (json.dumps(content, indent=2) + "\n").encode())
        for earlier in target.parent.glob("version_*"):
            if earlier != target:
                shutil.rmtree(earlier, ignore_errors=True)
