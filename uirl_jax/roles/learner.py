"""The learner: one process, or one of several on several hosts."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import AbstractMesh

from uirl_jax.config.schema import MeshConfig, RunConfig
from uirl_jax.console import output_kept
from uirl_jax.errors import ConfigError, StoppedError
from uirl_jax.families import loading
from uirl_jax.learner.bookkeeping import RunDirectory
from uirl_jax.learner.cluster import ALONE, Cluster
from uirl_jax.learner.cold_start import run_cold_start
from uirl_jax.learner.follow import follow_learner
from uirl_jax.learner.loop import Hooks, Judge, LearnerResult, all_are_good, run_learner
from uirl_jax.learner.training import TrainingConfig
from uirl_jax.log_lines import key_values
from uirl_jax.models import sharding
from uirl_jax.players import BackgroundLoop
from uirl_jax.roles.eval import own_verifier
from uirl_jax.roles.judge import judging
from uirl_jax.run import Run
from uirl_jax.shards import plan
from uirl_jax.watch.diagnosis import Watcher


def run_learner_role(run: Run, stop: threading.Event, cluster: Cluster = ALONE) -> None:
    """Runs the learner, or one process of it; actors in other processes write the shards.

    Raises: StoppedError: `stop` was set, here or in another process.
    """
    mesh = make_mesh(run.cfg.mesh)
    model = run.load_model(mesh, Path(run.cfg.model.path))
    if run.cfg.cold_start.steps:
        model = make_cold_start(run, model, mesh, stop)
    with contextlib.ExitStack() as stack:
        background = BackgroundLoop()
        if run.cfg.evaluation.every:
            run = stack.enter_context(own_verifier(run))
            stack.enter_context(background)
        judge = stack.enter_context(judging(run, model, background, stop))
        result = learn(run, model, mesh, stop, judge=judge, cluster=cluster)
    if cluster.leads:
        run.log("learner_ended", step=result.step, **result.accounting)
    check_finished(run, result, cluster)


def check_finished(run: Run, result: LearnerResult, cluster: Cluster) -> None:
    """Raises: StoppedError: the learner was stopped before its last step."""
    if not result.finished:
        how = "preempted at" if cluster.count > 1 else "stopped after"
        raise StoppedError(
            f"{how} step {result.step} of {run.cfg.learner.steps}; run the same command again to "
            "continue"
        )


def learn(
    run: Run,
    model: loading.PolicyModel,
    mesh: jax.sharding.Mesh,
    stop: threading.Event,
    on_ready: Callable[[], None] = lambda: None,
    cluster: Cluster = ALONE,
    judge: Judge = all_are_good,
) -> LearnerResult:
    """Runs the learner, or one process of it, on this thread."""
    training = training_of(run, model)
    directory = RunDirectory(
        run.workdir, run.run_id, run.resume_from, run.resume_step, run.open_trackers
    )
    log = "learner.log" if cluster.leads else f"learner-{cluster.index}.log"
    with jax.set_mesh(mesh), output_kept(run.workdir / "logs" / log):
        if not cluster.leads:
            return follow_learner(
                training,
                model,
                directory,
                cluster,
                run.cfg.cluster,
                mesh=mesh,
                on_ready=on_ready,
            )
        watcher = Watcher(run.workdir, run.cfg.learner.steps)
        return run_learner(
            training,
            model,
            directory,
            stop,
            mesh=mesh,
            cluster=cluster,
            hooks=Hooks(on_ready, watcher, watcher.waiting, judge),
            profile_steps=run.cfg.tracking.profile_steps,
        )


def training_of(run: Run, model: loading.PolicyModel) -> TrainingConfig:
    return TrainingConfig(
        run.cfg.learner,
        run.cfg.algorithm,
        run.curriculum,
        temperature=run.cfg.actor.rollout.temperature,
        forbidden_ids=run.make_chat(model).vocabulary(model.cfg.vocab_size).forbidden_ids,
        seed=run.cfg.seed,
    )


def make_cold_start(
    run: Run, model: loading.PolicyModel, mesh: jax.sharding.Mesh, stop: threading.Event
) -> loading.PolicyModel:
    """Runs the cold start on `model`; returns the new base model."""
    cfg = run.cfg
    if cfg.cold_start.train == "all" and not cfg.model.adapter:
        # Fresh adapters say nothing yet, and would be trained beside the weights.
        model = run.load_model(mesh, Path(cfg.model.path), adapters=False)
    path = run_cold_start(
        cfg.cold_start,
        model,
        run.make_chat(model),
        cfg.kinds,
        workdir=run.workdir,
        seed=cfg.seed,
        batch_cfg=cfg.learner.batch,
        task_dirs=cfg.verifier.task_dirs,
        recorded_sets=cfg.verifier.recorded.sets,
        stop=stop,
    )
    return run.load_model(mesh, path)


def make_mesh(cfg: MeshConfig) -> jax.sharding.Mesh:
    return sharding.make_mesh(cfg.data, cfg.fsdp, cfg.model)


def check_batches(cfg: RunConfig, mesh: jax.sharding.Mesh | AbstractMesh) -> None:
    """Checks that a part of a batch holds what one context may show.

    Says where rows are not divided, and where a step has fewer groups than minibatches.

    Args: cfg: completed.
    Raises: ConfigError.
    """
    batch = cfg.learner.batch
    shown = min(cfg.chat.most_screenshots, max(task.max_turns for task in cfg.tasks))
    parts = plan.data_parts(batch, sharding.batch_parts(mesh)[0])
    held = plan.screens_of_a_part(batch.image_rows[-1], parts)
    if held < shown:
        where = f"each of the {parts} parts of mesh.data" if parts > 1 else "a batch"
        raise ConfigError(
            f"learner.batch.image_rows={batch.image_rows}: a context may have {shown} screenshots, "
            f"{where} holds {held}; set ({shown * parts},)"
        )
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch.rows % devices:
        line = key_values(
            "rows_not_divided",
            rows=batch.rows,
            parts=devices,
            reason=f"every part of the mesh computes all rows; set learner.batch.rows={devices} or "
            "a multiple",
        )
        print(line, flush=True)
    per_step, minibatches = cfg.learner.groups_per_step, cfg.algorithm.minibatches
    if cfg.algorithm.objective == "policy" and minibatches > per_step:
        line = key_values(
            "fewer_minibatches",
            minibatches=per_step,
            asked=minibatches,
            reason="a group is in one of them, and a step has learner.groups_per_step; the "
            "learning rate falls as if there were all",
        )
        print(line, flush=True)
