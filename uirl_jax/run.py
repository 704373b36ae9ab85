"""A run as its roles see it: config and workdir, and the players of its episodes.

`main` puts them together. `open_run` says which run a workdir holds.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from uirl_jax import config, evaluate, metrics, policy_sync
from uirl_jax.actor.fleet import Fleet
from uirl_jax.actor.host import ActorConfig, run_actor, run_tasks
from uirl_jax.actor.player import Player
from uirl_jax.chat import Chat
from uirl_jax.curriculum import Curriculum
from uirl_jax.engine.engine import Engine
from uirl_jax.engine.interface import SamplingEngine
from uirl_jax.engine.openai import OpenAIEngine
from uirl_jax.errors import ConfigError, RestartError
from uirl_jax.learner.cold_start import MODEL_DIR
from uirl_jax.models import loading, qwen2_vl_weights
from uirl_jax.run_config import RunConfig
from uirl_jax.shards.record import TokenLayout
from uirl_jax.store import Store, open_store
from uirl_jax.store.lease import only_actor
from uirl_jax.types import Trajectory
from uirl_jax.verifiers import supervisor
from uirl_jax.verifiers.client import VerifierClient
from uirl_jax.verifiers.containers import ContainerClient

T = TypeVar("T")
CONFIG_FILE = "config.json"


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


def open_run(workdir: Path, cfg: RunConfig, *, learns: bool = True) -> str:
    """The run's id; config.json is written by whichever role comes first.

    More `learner.steps` than a run was begun with carry it on, at the learning rate of a run of
    that length; what it was measured to solve at its end before is kept as that version's.

    Args:
      learns: whether this role holds the learner's lease; no other carries a run on.
    Raises:
      ConfigError: the workdir holds a run with another config; every difference is named.
    """
    resolved = json.loads(config.resolved_config_json(cfg))
    store = open_store(workdir)
    content = {"run_id": uuid.uuid4().hex, "config": resolved}
    store.put_new(CONFIG_FILE, _to_json(content))  # of two roles that start together one writes it
    try:
        found = json.loads(store.read(CONFIG_FILE))
        run_id, known = found["run_id"], found["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{store.location(CONFIG_FILE)}: is not a run's config ({error}); use another --workdir"
        ) from None
    differences = sorted(_differences(known, resolved, "config"))
    goes_on = _goes_on(known, resolved, differences)
    if goes_on and learns:
        evaluate.rename_stage(workdir, "after", f"version_{known['learner']['steps']}")
        store.delete(evaluate.SUMMARY_FILE)
        store.put(CONFIG_FILE, _to_json({"run_id": run_id, "config": resolved}))
    elif differences:
        way_out = "Use another --workdir, or remove this one"
        if goes_on:
            way_out = "Only --role=all and --role=learner carry a run on"
        raise ConfigError(
            f"{workdir} holds a run with another config: {'; '.join(differences)}. {way_out}"
        )
    return run_id


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _goes_on(known: Any, wanted: Any, differences: Sequence[str]) -> bool:
    """Whether more steps are all that is wanted."""
    if len(differences) != 1 or not differences[0].startswith("config.learner.steps is "):
        return False
    before = known["learner"].get("steps")
    return isinstance(before, int) and before < wanted["learner"]["steps"]


def _differences(known: Any, wanted: Any, path: str) -> Iterator[str]:
    if isinstance(known, dict) and isinstance(wanted, dict):
        for key in known.keys() | wanted.keys():
            yield from _differences(known.get(key), wanted.get(key), f"{path}.{key}")
    elif known != wanted:
        yield f"{path} is {known!r} there and {wanted!r} here"


@dataclasses.dataclass(frozen=True)
class Run:
    """What every role has: the config, the workdir, and the model's words."""

    cfg: RunConfig
    workdir: Path
    run_id: str
    own_port_file: Path | None = None  # of a bundled server that is this role's alone

    @property
    def port_file(self) -> Path:
        return self.own_port_file or self.workdir / "verifier.port"

    @property
    def store(self) -> Store:
        return open_store(self.workdir)

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
        """Samples groups until the learner has finished.

        Raises: ConfigError: another process is that actor.
        """
        run, cfg = self.run, self.run.cfg
        actor_id = f"a{actor_index}"
        log = run.workdir / "logs" / f"actor-{actor_id}.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)

        def on_report(scalars: dict[str, float]) -> None:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"unix_s": time.time(), **scalars}) + "\n")

        loop = asyncio.get_running_loop()
        with only_actor(run.store, actor_id, lambda: loop.call_soon_threadsafe(stop.set)):
            return await run_actor(
                self.player(actor_id, temperature=cfg.actor.rollout.temperature),
                ActorConfig(
                    group_size=cfg.actor.group_size,
                    groups_per_step=cfg.learner.groups_per_step,
                    steps=cfg.learner.steps,
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
        progress = metrics.Progress(f"evaluation {stage}", cfg.episodes)
        ended: list[Trajectory] = []

        def on_done(trajectory: Trajectory) -> None:
            ended.append(trajectory)
            progress.update(len(ended), success=sum(t.success for t in ended) / len(ended))

        evaluating = evaluate.evaluate(
            lambda tasks: run_tasks(player, tasks, seed=run.cfg.seed, on_done=on_done),
            evaluate.eval_tasks(run.cfg.kinds, cfg.episodes),
            stage,
            run.workdir,
            base_hash=self.model.base_hash,
            layout=run.layout(self.model),
        )
        try:
            where = f"in the evaluation of stage {stage!r}"
            result = await _unless_stopped(evaluating, stop, where)
        finally:
            progress.close()
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
        manifest = policy_sync.read_manifest(self.run.store)
        if manifest is None:
            return -1
        adapters = policy_sync.load(
            self.run.store, manifest, self.model.base_hash, run_id=self.run.run_id
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
        return Engine(
            *policy, model_cfg=model.cfg, cfg=cfg.engine, image_cfg=model.image_cfg, **ids
        )
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


async def _unless_stopped(
    coroutine: Coroutine[Any, Any, T], stop: threading.Event, where: str
) -> T:
    """What the coroutine returns; it is cancelled, and has ended, where `stop` is set before.

    Raises: RestartError: so it was.
    """
    working, watching = (
        asyncio.create_task(coroutine),
        asyncio.create_task(when_set(stop, asyncio.Event())),
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


async def when_set(stop: threading.Event, event: asyncio.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(0.1)
    event.set()
