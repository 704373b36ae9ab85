"""The command line: validates the config and runs one role of a run, or all of them.

    python -m uirl_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
    python -m uirl_jax.main --config=... --workdir=... --role=learner     (actor, verifier, eval)
    uirl-jax --config=quickstart --workdir=runs/quickstart    (installed, in any folder)

Roles communicate only through the workdir. `all` runs the same code in one process, with the
bundled verifier server in a second one. After a kill, the same command continues the run.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import json
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

if __name__ == "__main__":  # imports take seconds: until `main` handles signals, Ctrl-C just ends
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
from absl import app, flags, logging

from uirl_jax import evaluation, metrics, platform_flags, report
from uirl_jax.actor import processes
from uirl_jax.actor.journal import run_totals
from uirl_jax.actor.random_engine import RandomEngine
from uirl_jax.config import reading
from uirl_jax.config.schema import MeshConfig, RunConfig
from uirl_jax.errors import ConfigError, RestartError, UirlError
from uirl_jax.families import loading
from uirl_jax.learner.algorithm import Advantages
from uirl_jax.learner.bookkeeping import CHECKPOINTS, RunDirectory, read_adapters
from uirl_jax.learner.cold_start import MODEL_DIR, run_cold_start
from uirl_jax.learner.loop import LearnerResult, TrainingConfig, run_learner
from uirl_jax.models import sharding
from uirl_jax.players import Adapters, BackgroundLoop, Players, when_set
from uirl_jax.run import Run, check_model, check_user_code, completed, open_run
from uirl_jax.store import StoreUnavailableError, mirror, open_store
from uirl_jax.store.files import new_directory
from uirl_jax.store.lease import LEARNER, only_learner
from uirl_jax.verifiers.server import supervisor

Role = Literal["all", "learner", "actor", "verifier", "eval"]
BEST_FILE = "best/best.json"
ROLES: tuple[str, ...] = ("all", "learner", "actor", "verifier", "eval")


# -------------------------------------------------------------------------------------- the roles


def learn(
    run: Run,
    model: loading.PolicyModel,
    mesh: jax.sharding.Mesh,
    stop: threading.Event,
    on_ready: Callable[[], None] = lambda: None,
    replace_advantages: Advantages | None = None,
) -> LearnerResult:
    """Runs the learner on this thread."""
    watcher = report.Watcher(run.workdir, run.cfg.learner.steps)
    with jax.set_mesh(mesh), metrics.output_kept(run.workdir / "logs" / "learner.log"):
        return run_learner(
            TrainingConfig(
                run.cfg.learner,
                run.cfg.algorithm,
                run.curriculum,
                temperature=run.cfg.actor.rollout.temperature,
                forbidden_ids=run.make_chat(model).vocabulary(model.cfg.vocab_size).forbidden_ids,
                seed=run.cfg.seed,
            ),
            model,
            RunDirectory(run.workdir, run.run_id, run.resume_from, run.resume_step),
            stop,
            mesh=mesh,
            on_ready=on_ready,
            on_step=watcher,
            on_wait=watcher.waiting,
            replace_advantages=replace_advantages,
        )


def run_all(
    run: Run,
    stop: threading.Event,
    *,
    actors: int = 1,
    replace_advantages: Advantages | None = None,
) -> evaluation.EvalResult | None:
    """A whole run: verifier, base evaluation, cold start, RL, final evaluation, report.

    Args:
      actors: number of actors on this host: number 0 in this process, the others in their own.
    Returns: the evaluation of the run's final model.
    """
    cfg = run.cfg
    mesh = make_mesh(cfg.mesh)
    with contextlib.ExitStack() as stack:
        if cfg.verifier.is_bundled:
            stack.enter_context(bundled_server(run, "verifier.log", cfg.verifier.port))
        background = stack.enter_context(BackgroundLoop())
        model = run.load_model(mesh, Path(cfg.model.path))

        def enter_players(model: loading.PolicyModel) -> Players:
            players = run.make_players(model, "all")
            background.run(players.__aenter__())
            stack.callback(lambda: background.run(players.__aexit__()))
            return players

        players = enter_players(model)
        if cfg.evaluation.random:
            chance = RandomEngine(players.chat)
            background.run(run.measure(players, evaluation.CHANCE, stop, chance))
        measured = background.run(run.measure(players, "before", stop))
        note_result(run, 0, measured)
        if cfg.cold_start.steps:
            model = make_cold_start(run, model, mesh, stop)
            players = enter_players(model)
            measured = background.run(run.measure(players, "cold_start", stop))

        async_stop = asyncio.Event()
        acting: list[concurrent.futures.Future[dict[str, float]]] = []

        def begin_acting() -> None:
            acting.append(background.start(run.act(players, async_stop, 0)))
            # Stop the learner if the actor fails; it would wait for records forever.
            acting[0].add_done_callback(lambda future: future.exception() and stop.set())
            if actors > 1:
                stack.enter_context(start_actors(run, range(1, actors)))

        try:
            result = learn(run, model, mesh, stop, begin_acting, replace_advantages)
        finally:
            background.start(_set(async_stop))
            if acting:
                acting[0].result()
        if not result.finished:
            raise RestartError(
                f"stopped after step {result.step} of {cfg.learner.steps}; "
                "run the same command again to continue"
            )
        version, adapters = players.take_policy()
        if cfg.learner.steps:  # without steps the model is the one evaluated last
            measured = background.run(run.measure(players, "after", stop))
            note_result(run, result.step, measured)
            keep_best(run, players, version, adapters, measured)
        peak_rss_gib = metrics.peak_rss_gib()  # while the verifier is still running
    _conclude(run, result, peak_rss_gib)
    return measured


def bundled_server(run: Run, log: str, port: int) -> contextlib.AbstractContextManager[None]:
    """The run's verifier server in a child process; port 0: any free port."""
    return supervisor.bundled_server(
        run.port_file, run.workdir / "logs" / log, port=port, task_dirs=run.cfg.verifier.task_dirs
    )


async def _set(event: asyncio.Event) -> None:
    event.set()


def note_result(run: Run, step: int, result: evaluation.EvalResult) -> None:
    """Writes an evaluation into metrics.jsonl and TensorBoard, once."""
    scalars = {
        "eval/success": result.rate,
        "eval/reward": result.mean_reward,
        "eval/turns": result.mean_turns,
        "eval/env_errors": result.env_errors,
    }
    known = any(
        row["step"] == step and "eval/success" in row for row in metrics.read_metrics(run.workdir)
    )
    with metrics.MetricsWriter(run.workdir) as writer:
        if not known and step >= (writer.last_step or 0):
            writer.amend(step, scalars)


def keep_best(
    run: Run, players: Players, version: int, adapters: Adapters, result: evaluation.EvalResult
) -> None:
    """Exports the adapters of the policy with the best evaluation so far to best/version_<n>/.

    The first of several equal ones stays. best/best.json names it, with its result.
    """
    store = open_store(run.workdir)
    try:
        best = json.loads(store.read(BEST_FILE))["rate"]
    except (OSError, ValueError, KeyError, TypeError):
        best = -1.0
    if not adapters or result.attempts == 0 or result.rate <= best:
        return
    target = run.workdir / "best" / f"version_{version}"
    shutil.rmtree(target, ignore_errors=True)  # of a process that was killed here
    with new_directory(target) as directory:
        loading.save_policy(players.model, directory, players.to_trainable(adapters), run.cfg.chat)
    kind = "adapter" if players.model.trains == "adapters" else "model"
    content = {"version": version, kind: str(target), **dataclasses.asdict(result)}
    store.put(BEST_FILE, (json.dumps(content, indent=2) + "\n").encode())
    for earlier in target.parent.glob("version_*"):
        if earlier != target:
            shutil.rmtree(earlier, ignore_errors=True)


def _conclude(run: Run, result: LearnerResult, peak_rss_gib: float) -> None:
    """Writes summary.json and report.html, and prints the final table."""
    results = evaluation.read_results(run.workdir)
    summary_path = run.workdir / evaluation.SUMMARY_FILE
    page = run.workdir / "report.html"
    # An existing summary is from the process that finished the run; its peak memory is kept.
    if not _is_json_object(summary_path):  # or it is damaged
        episodes = run_totals(run.workdir, run.run_id)
        content = evaluation.summary(
            results,
            seed=run.cfg.seed,
            train_seconds=result.train_seconds,
            peak_rss_gib=peak_rss_gib,
            accounting=result.accounting,
            lost=episodes["lost"],
            env_error=episodes["env_error"],
            report=page,
            facts=report.machine_facts(),
        )
        evaluation.write_summary(run.workdir, content)
    content = json.loads(summary_path.read_text(encoding="utf-8"))
    report.write_report(run.workdir)
    print()
    print(evaluation.format_table(list(results.values())))
    print()
    print(f"episodes: {evaluation.format_episodes(content['episodes'])}")
    print(
        f"training: {metrics.format_duration(content['train_seconds'])}, "
        f"peak memory {content['peak_rss_gib']:.2f} GiB"
    )
    print(f"report:   {page}", flush=True)


def _is_json_object(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (OSError, ValueError):
        return False


def make_cold_start(
    run: Run, model: loading.PolicyModel, mesh: jax.sharding.Mesh, stop: threading.Event
) -> loading.PolicyModel:
    """Runs the cold start on `model`; returns the new base model."""
    cfg = run.cfg
    path = run_cold_start(
        cfg.cold_start,
        model,
        run.make_chat(model),
        cfg.kinds,
        workdir=run.workdir,
        seed=cfg.seed,
        batch_cfg=cfg.learner.batch,
        task_dirs=cfg.verifier.task_dirs,
        stop=stop,
    )
    return run.load_model(mesh, path)


def run_learner_role(run: Run, stop: threading.Event) -> None:
    """Runs the learner; actors in other processes write the shards."""
    mesh = make_mesh(run.cfg.mesh)
    model = run.load_model(mesh, Path(run.cfg.model.path))
    if run.cfg.cold_start.steps:
        model = make_cold_start(run, model, mesh, stop)
    result = learn(run, model, mesh, stop)
    run.log("learner_ended", step=result.step, **result.accounting)
    if not result.finished:
        raise RestartError(f"stopped after step {result.step}; run the same command to continue")


def run_actor_role(run: Run, stop: threading.Event, first: int, actors: int) -> None:
    """Runs actors; the learner and the verifiers are other processes.

    Args:
      first: number of the first actor.
      actors: one runs in this process; several run in processes of their own.
    """
    if actors > 1:
        with start_actors(run, range(first, first + actors)) as processes:
            processes.wait(stop)
        return

    async def act() -> None:
        if run.cfg.cold_start.steps and not (run.workdir / MODEL_DIR).is_dir():
            run.log("waiting", file=run.workdir / MODEL_DIR)  # the learner writes it
            while not (run.workdir / MODEL_DIR).is_dir():
                if stop.is_set():
                    return
                await asyncio.sleep(max(0.5, run.store.poll_s))
                run.fetch_cold_start()
        model = run.load_base(None)
        async with run.make_players(model, f"a{first}") as players:
            ended = asyncio.Event()
            watching = asyncio.create_task(when_set(stop, ended))
            try:
                await run.act(players, ended, first)
            finally:
                watching.cancel()

    asyncio.run(act())


def start_actors(
    run: Run, numbers: Sequence[int]
) -> contextlib.AbstractContextManager[processes.ActorProcesses]:
    command = [*processes.command_of_this_process(), "--role=actor", "--actors=1"]
    return processes.actor_processes(command, numbers, run.workdir / "logs")


def run_eval_role(
    run: Run, stop: threading.Event, stage: str, checkpoint: int | None = None
) -> None:
    """Evaluates the newest published policy, or the base model if none is published.

    Args:
      checkpoint: evaluates the checkpoint of this step instead.

    It starts its own bundled verifier: the run's may be busy or stopped.
    """

    async def measure(run: Run) -> evaluation.EvalResult:
        async with run.make_players(run.load_base(None), "eval") as players:
            if checkpoint is None:
                version, adapters = players.take_policy()
            else:
                version, adapters, _ = read_adapters(run.workdir, checkpoint)
                players.engine.set_policy(players.to_trainable(adapters), version)
            name = evaluation.stage_name(stage, version, run.cfg.learner.steps)
            result = await run.measure(players, name, stop)
            keep_best(run, players, version, adapters, result)
            return result

    with contextlib.ExitStack() as stack:
        if run.cfg.verifier.is_bundled:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            run = dataclasses.replace(run, own_port_file=Path(folder) / "port")
            stack.enter_context(bundled_server(run, "verifier-eval.log", 0))
        result = asyncio.run(measure(run))
    print(evaluation.format_table([result]), flush=True)


def run_verifier_role(run: Run) -> int:
    """Runs the bundled server in this process until it is stopped."""
    from uirl_jax.verifiers.server import server

    cfg = run.cfg.verifier
    task_dirs = [f"--task-dir={folder}" for folder in cfg.task_dirs]
    return server.main(["--port", str(cfg.port), "--port-file", str(run.port_file), *task_dirs])


def make_mesh(cfg: MeshConfig) -> jax.sharding.Mesh:
    return sharding.make_mesh(cfg.data, cfg.fsdp, cfg.model)


# ------------------------------------------------------------------------------------ the command

_CONFIG = reading.define_config_file(
    RunConfig,
    help="config file (configs/quickstart.py) or name of a shipped one (quickstart), followed by "
    "':' and an argument if it takes one (quickstart:enter_text)",
)
flags.declare_key_flag("config")  # so that --help lists it
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "directory for all files of the run, or gs://bucket/prefix"
)
_LOCAL_DIR = flags.DEFINE_string(
    "local_dir", "", "for a --workdir in a bucket: directory for the files of this process"
)
_ROLE = flags.DEFINE_enum("role", "all", ROLES, "which part of the run this process is")
_ACTOR = flags.DEFINE_integer("actor", 0, "number of this actor, from 0", lower_bound=0)
_ACTORS = flags.DEFINE_integer(
    "actors", 1, "actors on this host; several are processes that are restarted", lower_bound=1
)
_EXIT_WITH_PARENT = flags.DEFINE_integer(
    "exit_with_parent", 0, "set by --actors: end when the process with this id ends"
)
_RESUME_FROM = flags.DEFINE_string(
    "resume_from", "", "workdir of another run, whose checkpoint a new workdir starts from"
)
_CHECKPOINT = flags.DEFINE_integer(
    "checkpoint", None, "step of the checkpoint for --role=eval or --resume_from", lower_bound=0
)
_STAGE = flags.DEFINE_string("stage", "", "--role=eval: name of the result, eval/<stage>.json")


def run_role(role: Role, run: Run, stop: threading.Event) -> int:
    """Runs the role; returns the exit code."""
    actions: dict[str, Callable[[], Any]] = {
        "all": lambda: run_all(run, stop, actors=_ACTORS.value),
        "learner": lambda: run_learner_role(run, stop),
        "actor": lambda: run_actor_role(run, stop, _ACTOR.value, _ACTORS.value),
        "eval": lambda: run_eval_role(run, stop, _STAGE.value, _CHECKPOINT.value),
    }
    if role == "verifier":
        return run_verifier_role(run)
    platform_flags.keep_freed_memory()
    actions[role]()
    return 0


def _check_checkpoint_flags(learns: bool) -> None:
    """Raises: ConfigError: flags that this role does not use, or a workdir without checkpoints."""
    source = _RESUME_FROM.value
    if source and not learns:
        raise ConfigError("--resume_from is for --role=all and --role=learner")
    if _CHECKPOINT.value is not None and not source and _ROLE.value != "eval":
        raise ConfigError("--checkpoint is for --role=eval, or goes with --resume_from")
    if source and "://" not in source and not (Path(source) / CHECKPOINTS).is_dir():
        raise ConfigError(f"--resume_from={source}: has no {CHECKPOINTS}/; give a run's workdir")


def _own_files(role: str, actor: int) -> mirror.Own:
    """What a role writes beside the store, and the logs of others that it reads."""
    of_actor = (f"actor/a{actor}-*", f"logs/actor-a{actor}.*", f"logs/actor-{actor}.*")
    of_evaluation = ("eval/*", "best/version_*", "logs/verifier-eval.log")
    if role in ("actor", "verifier"):
        return mirror.Own(f"{role}-{actor}", of_actor if role == "actor" else ())
    if role == "eval":
        return mirror.Own(role, of_evaluation)
    pages = (metrics.METRICS_FILE, evaluation.SUMMARY_FILE, "report.html", "findings.json")
    folders = ("cold_start/*", "tb/*", "logs/learner.log", "logs/verifier.log")
    written = (*pages, *folders, *of_evaluation, *(of_actor if role == "all" else ()))
    return mirror.Own("learner", written, read=("logs/actor-*.jsonl",), lease=LEARNER)


def main(argv: list[str]) -> int:
    del argv
    platform_flags.set_defaults()  # before the first use of a device: XLA reads them then
    logging.set_verbosity(logging.WARNING)  # Orbax logs every save at INFO
    stop = threading.Event()
    try:
        missing = [f"--{flag.name}" for flag in (_CONFIG, _WORKDIR) if flag.value is None]
        if missing or _WORKDIR.value is None:
            raise ConfigError(
                f"{' and '.join(missing)} missing; e.g. --config=configs/quickstart.py "
                "--workdir=runs/quickstart"
            )
        cfg = reading.from_config(RunConfig, _CONFIG.value)
        workdir = reading.workdir_of(_WORKDIR.value, _LOCAL_DIR.value)
        learns = _ROLE.value in ("all", "learner")
        _check_checkpoint_flags(learns)
        lease = only_learner(open_store(workdir), stop.set) if learns else contextlib.nullcontext()
        with lease, mirror.copied(workdir, open_store, _own_files(_ROLE.value, _ACTOR.value)):
            # Before config.json is written: the corrected command can then use the workdir.
            if learns:
                make_mesh(cfg.mesh)
            whole = cfg
            if _ROLE.value != "verifier":
                check_user_code(cfg, learns=learns)
                whole = completed(cfg, functools.partial(print, flush=True))
                check_model(whole)
            run_id = open_run(workdir, cfg, learns=learns)
            resume_from = reading.workdir_of(_RESUME_FROM.value) if _RESUME_FROM.value else None
            run = Run(whole, workdir, run_id, None, resume_from, _CHECKPOINT.value)
            if _ROLE.value != "verifier":  # the server handles these signals itself
                for signum in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(signum, lambda *_: stop.set())
            if _EXIT_WITH_PARENT.value:
                processes.stop_with_parent(_EXIT_WITH_PARENT.value, stop)
            return run_role(cast(Role, _ROLE.value), run, stop)
    except UirlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        # A disk-full error often has no file name.
        where = "" if error.filename else f"{_WORKDIR.value}: "
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; free disk space, then the same command continues the run" if full else ""
        print(f"error: {where}{error}{advice}", file=sys.stderr)
        return RestartError.exit_code if isinstance(error, StoreUnavailableError) else 1


def command() -> None:
    """The command `uirl-jax`. absl takes the help text from the module that was started."""
    sys.modules["__main__"].__doc__ = __doc__
    for flag in flags.FLAGS.get_key_flags_for_module(__name__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.run(main, flags_parser=reading.parse_flags)


if __name__ == "__main__":
    app.run(main, flags_parser=reading.parse_flags)
