"""The command line: validates the config and runs one role of a run, or all of them.

    python -m uirl_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
    python -m uirl_jax.main --config=... --workdir=... --role=learner     (actor, verifier, eval)
    uirl-jax --config=quickstart --workdir=runs/quickstart    (installed, in any folder)

Roles communicate only through the workdir. `all` runs the same code in one process, with the
bundled verifier server in a second one. After a kill, the same command continues the run.
"""

import contextlib
import errno
import functools
import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

if __name__ == "__main__":  # imports take seconds; as in __main__.py
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

from absl import app, flags, logging

from uirl_jax import platform_flags
from uirl_jax.actor import processes
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.config.suites import read_suite
from uirl_jax.errors import ConfigError, RestartError, StoppedError, UirlError
from uirl_jax.evaluation import STAGE_NAME, SUMMARY_FILE
from uirl_jax.learner import cluster
from uirl_jax.learner.bookkeeping import CHECKPOINTS
from uirl_jax.learner.cluster import ALONE, Cluster
from uirl_jax.learner.cold_start import check_sources
from uirl_jax.metrics import METRICS_FILE
from uirl_jax.roles import contenders
from uirl_jax.roles.actor import run_actor_role
from uirl_jax.roles.all import first_actor, run_all
from uirl_jax.roles.eval import run_eval_role, run_suite, with_suite
from uirl_jax.roles.learner import check_batches, make_mesh, run_learner_role
from uirl_jax.roles.verifier import run_verifier_role
from uirl_jax.run import Run, check_model, check_user_code, completed, is_run, open_run
from uirl_jax.store import StoreUnavailableError, mirror, open_store
from uirl_jax.store.lease import LEARNER, only_learner

Role = Literal["all", "learner", "actor", "verifier", "eval"]
ROLES: tuple[str, ...] = ("all", "learner", "actor", "verifier", "eval")


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
_VERIFIER_PORT_FILE = flags.DEFINE_string(
    "verifier_port_file", "", "set by --actors: where the bundled server of this host says its port"
)
_RESUME_FROM = flags.DEFINE_string(
    "resume_from", "", "workdir of another run, whose checkpoint a new workdir starts from"
)
_CHECKPOINT = flags.DEFINE_multi_string(
    "checkpoint",
    [],
    "step of the checkpoint for --role=eval or --resume_from; with --tasks also base, policy, a "
    "directory of an adapter or a model, or a server's http://HOST/v1, and several of these",
)
_CLUSTER = flags.DEFINE_string(
    "cluster",
    "auto",
    "how the processes of a learner on several hosts find each other: auto, none (this process is "
    f"alone), or one of {', '.join(cluster.methods())}",
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "HOST:PORT of process 0, where no cluster is detected"
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "processes of the learner, with --coordinator", lower_bound=1
)
_PROCESS_INDEX = flags.DEFINE_integer(
    "process_index", None, "number of this process, from 0, with --coordinator", lower_bound=0
)
_STAGE = flags.DEFINE_string("stage", "", "--role=eval: name of the result, eval/<stage>.json")
_TASKS = flags.DEFINE_string(
    "tasks", "", "--role=eval: a tasks.json or the name of a suite, in place of the run's tasks"
)


def run_role(role: Role, run: Run, stop: threading.Event, group: Cluster) -> int:
    """Runs the role; returns the exit code."""
    actions: dict[str, Callable[[], Any]] = {
        "all": lambda: run_all(run, stop, actors=_ACTORS.value, cluster=group),
        "learner": lambda: run_learner_role(run, stop, group),
        "actor": lambda: run_actor_role(run, stop, _ACTOR.value, _ACTORS.value),
        "eval": lambda: _evaluate(run, stop),
    }
    if role == "verifier":
        return run_verifier_role(run)
    platform_flags.keep_freed_memory()
    actions[role]()
    return 0


def _evaluate(run: Run, stop: threading.Event) -> None:
    if not _TASKS.value:
        return run_eval_role(run, stop, _STAGE.value, _checkpoint_step())
    run_suite(run, stop, read_suite(_TASKS.value), _CHECKPOINT.value or ["policy"])


def _checkpoint_step() -> int | None:
    """The step of the one --checkpoint. Raises: ConfigError: another value."""
    if not _CHECKPOINT.value:
        return None
    if len(_CHECKPOINT.value) > 1 or not _CHECKPOINT.value[0].isdecimal():
        shown = " ".join(f"--checkpoint={value}" for value in _CHECKPOINT.value)
        raise ConfigError(f"{shown}: expected the step of one checkpoint; others go with --tasks")
    return int(_CHECKPOINT.value[0])


def _check_checkpoint_flags(learns: bool) -> None:
    """Raises: ConfigError: flags that this role does not use, or that name nothing."""
    source = _RESUME_FROM.value
    if _ROLE.value == "actor" and _EXIT_WITH_PARENT.value:
        return  # the command of the learner beside it, which has checked its own flags
    if source and not learns:
        raise ConfigError("--resume_from is for --role=all and --role=learner")
    if _CHECKPOINT.value and not source and _ROLE.value != "eval":
        raise ConfigError("--checkpoint is for --role=eval, or goes with --resume_from")
    if _TASKS.value:
        if _ROLE.value != "eval":
            raise ConfigError("--tasks is for --role=eval")
        if _STAGE.value:
            raise ConfigError("--stage: the suite of --tasks has a name of its own")
        read_suite(_TASKS.value)
        contenders.check_names(_CHECKPOINT.value)
    else:
        _checkpoint_step()
    if _STAGE.value and not STAGE_NAME.fullmatch(_STAGE.value):
        raise ConfigError(
            f"--stage={_STAGE.value}: names files, expected 1 to 64 of a-z, 0-9 and _"
        )
    if source and "://" not in source and not (Path(source) / CHECKPOINTS).is_dir():
        raise ConfigError(f"--resume_from={source}: has no {CHECKPOINTS}/; give a run's workdir")


def _own_files(role: str, index: int, actor: int) -> mirror.Own:
    """What a process writes beside the store, and the logs of others that it reads.

    Args:
      index: of a process of a learner on several hosts; 0: the first, or the only one.
      actor: the number of the actor that plays in this process, or comes first of several.
    """
    of_actor = (f"actor/a{actor}-*", f"logs/actor-a{actor}.*", f"logs/actor-{actor}.*")
    of_evaluation = ("eval/*", "best/version_*", "logs/verifier-eval.log")
    if role in ("actor", "verifier"):
        return mirror.Own(f"{role}-{actor}", of_actor if role == "actor" else ())
    if role == "eval":
        return mirror.Own(role, of_evaluation)
    sampled = of_actor if role == "all" else ()
    if index:
        logs = (f"logs/learner-{index}.log", f"logs/verifier-{index}.log")
        return mirror.Own(f"learner-{index}", (*logs, *sampled))
    pages = (METRICS_FILE, SUMMARY_FILE, "report.html", "findings.json")
    folders = (
        "cold_start/*",
        "tb/*",
        "wandb/*",
        "profile/*",
        "logs/learner.log",
        "logs/verifier.log",
    )
    written = (*pages, *folders, *of_evaluation, *sampled)
    return mirror.Own("learner", written, read=("logs/actor-*.jsonl",), lease=LEARNER)


def _membership(learns: bool) -> cluster.Membership | None:
    """Raises: ConfigError."""
    if learns:
        return cluster.find(
            _CLUSTER.value, _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_INDEX.value
        )
    if _COORDINATOR.value:
        raise ConfigError("--coordinator is for the processes of a learner, --role=learner or all")
    return None


def _run(cfg: RunConfig, workdir: Path, learns: bool, stop: threading.Event, group: Cluster) -> int:
    """Opens the run and runs the role of the command line; returns the exit code."""

    def on_lost() -> None:
        if group.count > 1:
            group.end("error: another process holds the learner's lease", RestartError.exit_code)
        stop.set()

    leads = learns and group.leads
    lease = only_learner(open_store(workdir), on_lost) if leads else contextlib.nullcontext()
    actor = first_actor(group, _ACTORS.value) if learns else _ACTOR.value
    own = _own_files(_ROLE.value, group.index, actor)
    with lease, mirror.copied(workdir, open_store, own):
        # Before config.json is written: the corrected command can then use the workdir.
        if learns:
            make_mesh(cfg.mesh)
        if _ROLE.value == "eval" and not (cfg.evaluation.episodes or _TASKS.value):
            raise ConfigError(
                "evaluation.episodes=0: there is nothing to evaluate; set it, or --tasks"
            )
        whole = cfg if not _TASKS.value else with_suite(cfg, read_suite(_TASKS.value))
        if _ROLE.value != "verifier":
            check_user_code(cfg, learns=learns)
            whole = completed(whole, functools.partial(print, flush=True))
            check_model(whole)
        if learns:
            check_batches(whole, make_mesh(cfg.mesh))
            if not is_run(workdir):  # else it may have them all, and their folders may be gone
                names = {kind.name for kind in cfg.kinds}
                check_sources(cfg.cold_start, names, cfg.verifier.task_dirs)
        if leads or not learns:
            run_id = open_run(workdir, cfg, learns=learns)
            group.tell("run", run_id)
        else:
            run_id = group.wait_for("run")
        resume_from = reading.workdir_of(_RESUME_FROM.value) if _RESUME_FROM.value else None
        step = None if _TASKS.value else _checkpoint_step()
        port_file = Path(_VERIFIER_PORT_FILE.value) if _VERIFIER_PORT_FILE.value else None
        run = Run(whole, workdir, run_id, port_file, resume_from, step)
        if _ROLE.value != "verifier":  # the server handles these signals itself
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, lambda *_: stop.set())
        return run_role(cast(Role, _ROLE.value), run, stop, group)


def _run_in_cluster(
    cfg: RunConfig,
    workdir: Path,
    stop: threading.Event,
    orphaned: threading.Event,
    membership: cluster.Membership,
) -> int:
    """`_run` as one process of a learner on several hosts: if one fails, all end."""
    group = cluster.join(membership, cfg.cluster)
    with group.watched(stop, orphaned, cfg.cluster):
        try:
            if cfg.cold_start.steps:
                raise ConfigError(
                    f"cold_start.steps={cfg.cold_start.steps}: a cold start runs in one process; "
                    "run it first, on one host with --config.learner.steps=0, and set model.path "
                    "to its cold_start/model and cold_start.steps=0 here"
                )
            if cfg.evaluation.every and cfg.evaluation.episodes:
                raise ConfigError(
                    f"evaluation.every={cfg.evaluation.every}: a learner on several hosts "
                    "evaluates before and after the run only; set it to 0, and run --role=eval "
                    "beside it"
                )
            facts = {
                **cluster.code_facts(),
                "config": json.loads(reading.resolved_config_json(cfg)),
            }
            group.compare(facts, cfg.cluster.start_timeout_s)
            code = _run(cfg, workdir, True, stop, group)
        except StoppedError as stopped:
            group.end(str(stopped), cfg.cluster.preempted_exit_code)
        except (UirlError, OSError) as error:
            group.end_after(error, *_line_of(error))
        except Exception as error:  # the others wait for this process: tell them why it ends
            group.end_after(error)
    group.leave()
    return code


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
        membership = _membership(learns)
        if membership is None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        elif not _EXIT_WITH_PARENT.value:
            return cluster.run_in_child(processes.command_of_this_process(), membership)
        orphaned = stop if membership is None else threading.Event()
        if _EXIT_WITH_PARENT.value:
            processes.stop_with_parent(_EXIT_WITH_PARENT.value, orphaned)
        if membership is None:
            return _run(cfg, workdir, learns, stop, ALONE)
        cluster.end_with_the_others(stop)
        return _run_in_cluster(cfg, workdir, stop, orphaned, membership)
    except (UirlError, OSError) as error:
        line, exit_code = _line_of(error)
        print(line, file=sys.stderr)
        return exit_code


def _line_of(error: UirlError | OSError) -> tuple[str, int]:
    """What is printed of an error, and the exit code."""
    if isinstance(error, UirlError):
        return f"error: {error}", error.exit_code
    # A disk-full error often has no file name.
    where = "" if error.filename else f"{_WORKDIR.value}: "
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "; free disk space, then the same command continues the run" if full else ""
    exit_code = RestartError.exit_code if isinstance(error, StoreUnavailableError) else 1
    return f"error: {where}{error}{advice}", exit_code


def command() -> None:
    """The command `uirl-jax`. absl takes the help text from the module that was started."""
    sys.modules["__main__"].__doc__ = __doc__
    for flag in flags.FLAGS.get_key_flags_for_module(__name__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.run(main, flags_parser=reading.parse_flags)


if __name__ == "__main__":
    app.run(main, flags_parser=reading.parse_flags)
