"""The command: validates the config, then wires the rooms together, one role or all of them.

    python -m uirl_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
    python -m uirl_jax.main --config=... --workdir=... --role=learner     (actor, verifier, eval)

Roles meet in the workdir and nowhere else: `all` is the same code in one process, with the bundled
verifier server in a second one. A process that is killed is started again with the same command.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from absl import app, flags, logging

from uirl_jax import config, evaluate, metrics, platform_flags, policy_sync, report
from uirl_jax.actor.fleet import Fleet
from uirl_jax.actor.host import ActorConfig, run_actor, run_tasks
from uirl_jax.actor.player import Player
from uirl_jax.actor.random_engine import RandomEngine
from uirl_jax.chat import Chat
from uirl_jax.curriculum import Curriculum
from uirl_jax.engine.engine import Engine
from uirl_jax.engine.interface import SamplingEngine
from uirl_jax.engine.openai import OpenAIEngine
from uirl_jax.errors import ConfigError, RestartError, UirlError
from uirl_jax.learner.algorithm import Advantages
from uirl_jax.learner.cold_start import MODEL_DIR, run_cold_start
from uirl_jax.learner.loop import LearnerResult, run_learner
from uirl_jax.models import loading, qwen2_vl_weights, sharding
from uirl_jax.run_config import MeshConfig, RunConfig
from uirl_jax.shards.record import TokenLayout
from uirl_jax.verifiers import supervisor
from uirl_jax.verifiers.client import VerifierClient
from uirl_jax.verifiers.containers import ContainerClient

T = TypeVar("T")
Role = Literal["all", "learner", "actor", "verifier", "eval"]
ROLES: tuple[str, ...] = ("all", "learner", "actor", "verifier", "eval")


# ---------------------------------------------------------------------------------- the workdir


def open_run(workdir: Path, cfg: RunConfig) -> str:
    """The run's id; config.json is written by whichever role comes first.

    Raises:
      ConfigError: the workdir holds a run with another config; every difference is named.
    """
    resolved = json.loads(config.resolved_config_json(cfg))
    path = workdir / "config.json"
    workdir.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"run_id": uuid.uuid4().hex, "config": resolved}, indent=2) + "\n"
    temporary = workdir / f".config-{uuid.uuid4().hex}.tmp"
    try:
        temporary.write_text(content, encoding="utf-8")
        # A link is made only where no file is, so that of two roles that start together one wins.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        run_id, known = found["run_id"], found["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: is not a run's config ({error}); use another --workdir"
        ) from None
    differences = sorted(_differences(known, resolved, "config"))
    if differences:
        raise ConfigError(
            f"{workdir} holds a run with another config: {'; '.join(differences)}. Use another "
            "--workdir, or remove this one"
        )
    return run_id


def _differences(known: Any, wanted: Any, path: str) -> Iterator[str]:
    if isinstance(known, dict) and isinstance(wanted, dict):
        for key in known.keys() | wanted.keys():
            yield from _differences(known.get(key), wanted.get(key), f"{path}.{key}")
    elif known != wanted:
        yield f"{path} is {known!r} there and {wanted!r} here"


# ------------------------------------------------------------------------------------- the pieces


class BackgroundLoop:
    """An asyncio loop in a thread of its own: the actor's, beside the learner's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="actor", daemon=True)

    def __enter__(self) -> "BackgroundLoop":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result()


@dataclasses.dataclass(frozen=True)
class Run:
    """What every role has: the config, the workdir, and the model's words."""

    cfg: RunConfig
    workdir: Path
    run_id: str

    @property
    def port_file(self) -> Path:
        return self.workdir / "verifier.port"

    def load_model(self, mesh: jax.sharding.Mesh | None, path: Path) -> loading.PolicyModel:
        cfg = self.cfg.model
        return loading.load(
            path,
            lora=cfg.lora,
            seed=self.cfg.seed,
            param_dtype=cfg.param_dtype,
            remat=cfg.remat,
            mesh=mesh,
            quantize=cfg.quantize,
            # What a cold start writes has the adapter merged into it.
            adapter=cfg.adapter if path == Path(cfg.path) else "",
        )

    def load_base(self, mesh: jax.sharding.Mesh | None) -> loading.PolicyModel:
        """What the adapters are trained on: model.path, or what the run's cold start made of it.

        Raises: ConfigError where that is still to be made.
        """
        if not self.cfg.cold_start.steps:
            return self.load_model(mesh, Path(self.cfg.model.path))
        path = self.workdir / MODEL_DIR
        if not path.is_dir():
            raise ConfigError(
                f"{path} is not there yet: the config has a cold start, which --role=all and "
                "--role=learner make"
            )
        return self.load_model(mesh, path)

    def make_chat(self, model: loading.PolicyModel) -> Chat:
        image_cfg = model.image_cfg
        return Chat(model.path, self.cfg.chat, image_cfg.merge_size, image_cfg.patch_size)

    def layout(self, model: loading.PolicyModel) -> TokenLayout:
        return TokenLayout(
            model.cfg.vocab_size, model.cfg.image_token_id, model.image_cfg.merge_size
        )

    def base_urls(self) -> list[str]:
        verifier = self.cfg.verifier
        if verifier.is_bundled:
            return supervisor.read_urls(self.port_file)
        return list(verifier.urls) or [f"{verifier.containers.runtime}:{verifier.containers.image}"]

    def make_client(self, url: str, owner: str) -> VerifierClient | ContainerClient:
        """Of one of base_urls; `owner` is the role that containers are deleted for."""
        verifier = self.cfg.verifier
        options = {"dialect": verifier.dialect, "delay_s": verifier.action_delay_s}
        if verifier.containers.runtime == "none":
            return VerifierClient(url, **options)
        return ContainerClient(verifier.containers, f"{self.run_id}-{owner}", **options)

    @property
    def curriculum(self) -> Curriculum:
        return Curriculum(self.cfg.curriculum, self.cfg.kinds, self.cfg.seed)

    def say(self, event: str, **fields: object) -> None:
        print(metrics.key_values(event, **fields), flush=True)


class Players:
    """Engine and verifiers, entered in an asyncio loop: what plays episodes."""

    def __init__(self, run: Run, model: loading.PolicyModel, owner: str) -> None:
        self.run, self.model = run, model
        self.talk = run.make_chat(model)
        self.engine = make_engine(run.cfg, model, self.talk)
        self.fleet = Fleet(run.base_urls, lambda url: run.make_client(url, owner))
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Players":
        await self._stack.__aenter__()
        await self._stack.enter_async_context(self.engine)
        await self._stack.enter_async_context(self.fleet)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.__aexit__(None, None, None)

    def player(
        self, actor_id: str, *, temperature: float, engine: SamplingEngine | None = None
    ) -> Player:
        cfg = self.run.cfg.actor
        return Player(
            self.fleet,
            engine or self.engine,
            self.talk,
            self.model.image_cfg,
            dataclasses.replace(
                cfg.rollout,
                temperature=temperature,
                max_context_tokens=self.run.cfg.max_context_tokens,
            ),
            concurrency=cfg.concurrency,
            run_id=self.run.run_id,
            actor_id=actor_id,
        )

    def to_lora(self, adapters: dict[str, np.ndarray]) -> Any:
        return qwen2_vl_weights.adapters_from_numpy(adapters, self.model.lora)

    async def act(self, stop: asyncio.Event, actor_index: int, actors: int) -> dict[str, float]:
        """Samples groups until the learner has finished."""
        run, cfg = self.run, self.run.cfg
        actor_id = f"a{actor_index}"
        log = run.workdir / "logs" / f"actor-{actor_id}.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)

        def on_report(scalars: dict[str, float]) -> None:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"unix_s": time.time(), **scalars}) + "\n")

        return await run_actor(
            self.player(actor_id, temperature=cfg.actor.rollout.temperature),
            ActorConfig(
                group_size=cfg.actor.group_size,
                groups_per_step=cfg.learner.groups_per_step,
                max_staleness=cfg.learner.max_staleness,
                policy_lag=cfg.actor.policy_lag,
                first_group=actor_index,
                group_stride=actors,
            ),
            workdir=run.workdir,
            base_hash=self.model.base_hash,
            layout=run.layout(self.model),
            to_lora=self.to_lora,
            task_for_group=run.curriculum.task,
            run_seed=cfg.seed,
            stop=stop,
            on_report=on_report,
        )

    async def evaluate(
        self, stage: str, stop: threading.Event, engine: SamplingEngine | None = None
    ) -> evaluate.EvalResult:
        """Success on held-out instances with the policy that the engine holds; once a stage.

        Args:
          engine: plays in its place.
        Raises: RestartError where `stop` was set; the stage begins anew with the same command.
        """
        run, cfg = self.run, self.run.cfg.evaluation
        known = evaluate.read_results(run.workdir)
        if stage in known:
            return known[stage]
        started_s = time.monotonic()
        player = self.player("eval", temperature=cfg.temperature, engine=engine)
        evaluating = evaluate.evaluate(
            lambda tasks: run_tasks(player, tasks, seed=run.cfg.seed),
            evaluate.eval_tasks(run.cfg.kinds, cfg.episodes),
            stage,
            run.workdir,
            base_hash=self.model.base_hash,
            layout=run.layout(self.model),
        )
        result = await _unless_stopped(evaluating, stop, f"in the evaluation of stage {stage!r}")
        run.say(
            "evaluated",
            stage=stage,
            success=f"{result.rate:.3f}",
            episodes=result.attempts,
            seconds=f"{time.monotonic() - started_s:.1f}",
        )
        return result

    def take_policy(self) -> int:
        """The newest published policy into the engine; its version, or -1 where there is none."""
        manifest = policy_sync.read_manifest(self.run.workdir)
        if manifest is None:
            return -1
        adapters = policy_sync.load(
            self.run.workdir, manifest, self.model.base_hash, run_id=self.run.run_id
        )
        self.engine.set_policy(self.to_lora(adapters), manifest.version)
        return manifest.version


def make_engine(cfg: RunConfig, model: loading.PolicyModel, talk: Chat) -> Engine | OpenAIEngine:
    """What samples: this process, or a server elsewhere."""
    policy = (model.graphdef, model.frozen, model.lora, 0)
    ids = {
        "end_token_ids": talk.end_token_ids,
        "forbidden_ids": forbidden_ids(talk, model),
    }
    if cfg.engine.kind == "jax":
        return Engine(*policy, model_cfg=model.cfg, cfg=cfg.engine, **ids)
    return OpenAIEngine(
        *policy,
        cfg=cfg.engine,
        max_context=cfg.max_context_tokens,
        vocab_size=model.cfg.vocab_size,
        image_token_id=model.cfg.image_token_id,
        as_read=talk.as_read,
        **ids,
    )


def forbidden_ids(talk: Chat, model: loading.PolicyModel) -> tuple[int, ...]:
    """Never sampled: markers that would open a turn or an image, and the ids above the tokenizer's,
    which are padding of the embedding table and decode to nothing."""
    return (*talk.forbidden_ids, *range(talk.vocab_size, model.cfg.vocab_size))


# -------------------------------------------------------------------------------------- the roles


def learn(
    run: Run,
    model: loading.PolicyModel,
    mesh: jax.sharding.Mesh,
    stop: threading.Event,
    replace_advantages: Advantages | None = None,
) -> LearnerResult:
    """The learner's run, on this thread."""
    with jax.set_mesh(mesh):
        return run_learner(
            run.cfg.learner,
            run.cfg.algorithm,
            model,
            workdir=run.workdir,
            run_id=run.run_id,
            mesh=mesh,
            curriculum=run.curriculum,
            stop=stop,
            temperature=run.cfg.actor.rollout.temperature,
            forbidden_ids=forbidden_ids(run.make_chat(model), model),
            seed=run.cfg.seed,
            replace_advantages=replace_advantages,
        )


def run_all(
    run: Run, stop: threading.Event, replace_advantages: Advantages | None = None
) -> evaluate.EvalResult | None:
    """One machine: verifier, base evaluation, cold start, GRPO, final evaluation, report."""
    cfg = run.cfg
    mesh = make_mesh(cfg.mesh)
    with contextlib.ExitStack() as stack:
        if cfg.verifier.is_bundled:
            log = run.workdir / "logs" / "verifier.log"
            stack.enter_context(
                supervisor.bundled_server(
                    run.port_file,
                    log,
                    port=cfg.verifier.port,
                    task_dirs=cfg.verifier.task_dirs,
                )
            )
        background = stack.enter_context(BackgroundLoop())
        model = run.load_model(mesh, Path(cfg.model.path))

        def enter_players(model: loading.PolicyModel) -> Players:
            players = Players(run, model, "all")
            background.run(players.__aenter__())
            stack.callback(lambda: background.run(players.__aexit__()))
            return players

        players = enter_players(model)
        if cfg.evaluation.random:
            background.run(players.evaluate("random", stop, RandomEngine(players.talk)))
        background.run(players.evaluate("before", stop))
        if cfg.cold_start.steps:
            model = make_cold_start(run, model, mesh, stop)
            players = enter_players(model)
            background.run(players.evaluate("cold_start", stop))

        async_stop = asyncio.Event()
        acting = background.start(players.act(async_stop, 0, 1))
        # An actor that ends with an error would leave the learner waiting for records for ever.
        acting.add_done_callback(lambda future: future.exception() and stop.set())
        try:
            result = learn(run, model, mesh, stop, replace_advantages)
        finally:
            background.start(_set(async_stop))
            actor_metrics = acting.result()
        if not result.finished:
            raise RestartError(
                f"stopped after step {result.step} of {cfg.learner.steps}; "
                "run the same command again to carry on"
            )
        players.take_policy()
        after = background.run(players.evaluate("after", stop))
        peak_rss_gib = metrics.peak_rss_gib()  # here, where the verifier still lives
    _conclude(run, result, actor_metrics, peak_rss_gib)
    return after


async def _set(event: asyncio.Event) -> None:
    event.set()


def _conclude(
    run: Run, result: LearnerResult, actor_metrics: dict[str, float], peak_rss_gib: float
) -> None:
    """summary.json, report.html, and the table that a run ends with."""
    results = evaluate.read_results(run.workdir)
    summary_path = run.workdir / evaluate.SUMMARY_FILE
    page = run.workdir / "report.html"
    if not summary_path.exists():  # else the run had ended before: its peak memory was another's
        content = evaluate.summary(
            results,
            seed=run.cfg.seed,
            train_seconds=result.train_seconds,
            peak_rss_gib=peak_rss_gib,
            accounting=result.accounting,
            lost=int(actor_metrics["actor/lost"]),
            env_error=int(actor_metrics["actor/env_error"]),
            report=page,
            facts=report.machine_facts(),
        )
        evaluate.write_summary(run.workdir, content)
    content = json.loads(summary_path.read_text(encoding="utf-8"))
    report.write_report(run.workdir)
    print()
    print(evaluate.format_table(list(results.values())))
    print()
    print(f"episodes: {evaluate.format_episodes(content['episodes'])}")
    print(
        f"training: {metrics.format_duration(content['train_seconds'])}, "
        f"peak memory {content['peak_rss_gib']:.2f} GiB"
    )
    print(f"report:   {page}", flush=True)


def make_cold_start(
    run: Run, model: loading.PolicyModel, mesh: jax.sharding.Mesh, stop: threading.Event
) -> loading.PolicyModel:
    """The base that the cold start makes of `model`."""
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
    """The learner alone; actors of other processes fill the shard directory."""
    mesh = make_mesh(run.cfg.mesh)
    model = run.load_model(mesh, Path(run.cfg.model.path))
    if run.cfg.cold_start.steps:
        model = make_cold_start(run, model, mesh, stop)
    result = learn(run, model, mesh, stop)
    run.say("learner_ended", step=result.step, **result.accounting)
    if not result.finished:
        raise RestartError(f"stopped after step {result.step}; run the same command to carry on")


def run_actor_role(run: Run, stop: threading.Event, actor_index: int, actors: int) -> None:
    """One actor process; the learner and the verifiers are elsewhere."""

    async def act() -> None:
        if run.cfg.cold_start.steps and not (run.workdir / MODEL_DIR).is_dir():
            run.say("waiting", file=run.workdir / MODEL_DIR)  # which the learner is making
            while not (run.workdir / MODEL_DIR).is_dir():
                if stop.is_set():
                    return
                await asyncio.sleep(0.5)
        model = run.load_base(None)
        async with Players(run, model, f"a{actor_index}") as players:
            ended = asyncio.Event()
            watching = asyncio.create_task(_when_set(stop, ended))
            try:
                await players.act(ended, actor_index, actors)
            finally:
                watching.cancel()

    asyncio.run(act())


async def _when_set(stop: threading.Event, event: asyncio.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(0.1)
    event.set()


async def _unless_stopped(
    coroutine: Coroutine[Any, Any, T], stop: threading.Event, where: str
) -> T:
    """What the coroutine returns; it is cancelled, and has ended, where `stop` is set before.

    Raises: RestartError: so it was.
    """
    working, watching = (
        asyncio.create_task(coroutine),
        asyncio.create_task(_when_set(stop, asyncio.Event())),
    )
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RestartError(f"stopped {where}; run the same command again to make it")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def run_eval_role(run: Run, stop: threading.Event, stage: str) -> None:
    """Success of the newest published policy, or of the base where nothing is published yet."""

    async def measure() -> evaluate.EvalResult:
        async with Players(run, run.load_base(None), "eval") as players:
            version = players.take_policy()
            return await players.evaluate(stage or f"version_{max(version, 0)}", stop)

    print(evaluate.format_table([asyncio.run(measure())]), flush=True)


def run_verifier_role(run: Run) -> int:
    """The bundled server, in this process, until it is ended."""
    from uirl_jax.verifiers import server

    cfg = run.cfg.verifier
    task_dirs = [f"--task-dir={folder}" for folder in cfg.task_dirs]
    return server.main(["--port", str(cfg.port), "--port-file", str(run.port_file), *task_dirs])


def make_mesh(cfg: MeshConfig) -> jax.sharding.Mesh:
    return sharding.make_mesh(cfg.data, cfg.fsdp, cfg.model)


# ------------------------------------------------------------------------------------ the command

_CONFIG = config.define_config_file(RunConfig, help="an experiment, e.g. configs/quickstart.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "everything that the run writes is in here")
_ROLE = flags.DEFINE_enum("role", "all", ROLES, "which part of the run this process is")
_ACTOR = flags.DEFINE_integer("actor", 0, "number of this actor, from 0", lower_bound=0)
_ACTORS = flags.DEFINE_integer("actors", 1, "how many actors the run has", lower_bound=1)
_STAGE = flags.DEFINE_string("stage", "", "--role=eval: name of the result, eval/<stage>.json")


def run_role(role: Role, run: Run, stop: threading.Event) -> int:
    """Dispatches; the exit code."""
    actions: dict[str, Callable[[], Any]] = {
        "all": lambda: run_all(run, stop),
        "learner": lambda: run_learner_role(run, stop),
        "actor": lambda: run_actor_role(run, stop, _ACTOR.value, _ACTORS.value),
        "eval": lambda: run_eval_role(run, stop, _STAGE.value),
    }
    if role == "verifier":
        return run_verifier_role(run)
    actions[role]()
    return 0


def main(argv: list[str]) -> int:
    del argv
    platform_flags.set_defaults()  # before the first use of a device, when XLA reads them
    logging.set_verbosity(logging.WARNING)  # Orbax logs every save at INFO
    stop = threading.Event()
    try:
        missing = [f"--{flag.name}" for flag in (_CONFIG, _WORKDIR) if flag.value is None]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} missing; e.g. --config=configs/quickstart.py "
                "--workdir=runs/quickstart"
            )
        cfg = config.from_config(RunConfig, _CONFIG.value)
        workdir = Path(_WORKDIR.value)
        run = Run(cfg, workdir, open_run(workdir, cfg))
        if _ROLE.value != "verifier":  # the server ends gracefully by itself
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, lambda *_: stop.set())
        return run_role(_ROLE.value, run, stop)
    except UirlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        # A full disk is often noticed where no file name is at hand any more.
        where = "" if error.filename else f"{_WORKDIR.value}: "
        print(f"error: {where}{error}; the same command carries on", file=sys.stderr)
        return 1


if __name__ == "__main__":
    app.run(main, flags_parser=config.parse_flags)
