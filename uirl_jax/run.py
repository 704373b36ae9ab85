"""A run: config and workdir, and the objects that `main` builds from them.

`open_run` finds or creates the run of a workdir; `players` plays the episodes.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import json
import math
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from uirl_jax import assets, evaluation
from uirl_jax.actor.fleet import Fleet
from uirl_jax.actor.host import ActorConfig, LearnerLink, TaskSource, run_actor
from uirl_jax.config import reading, sizes
from uirl_jax.config.schema import RunConfig
from uirl_jax.engine import requests as engine_requests
from uirl_jax.engine.interface import SamplingEngine
from uirl_jax.errors import ConfigError, ImageError, RestartError, VerifierError
from uirl_jax.families import loading
from uirl_jax.families.border import Family, Inputs
from uirl_jax.families.chat import Chat
from uirl_jax.families.table import add_own, family_of
from uirl_jax.learner.algorithm import find_estimator
from uirl_jax.learner.cold_start import MODEL_DIR
from uirl_jax.learner.curriculum import Curriculum
from uirl_jax.learner.loop import find_callbacks
from uirl_jax.learner.own_rewards import OwnRewards
from uirl_jax.log_lines import key_values
from uirl_jax.models import hub
from uirl_jax.players import Players, make_chat
from uirl_jax.rl.losses import find_policy_loss
from uirl_jax.shards.layout import layout_of
from uirl_jax.store import Store, files, open_store
from uirl_jax.store.lease import only_actor
from uirl_jax.store.local import LocalStore
from uirl_jax.store.mirror import fetch_directory
from uirl_jax.trackers import (
    TENSORBOARD_DIR,
    TensorBoard,
    Tracker,
    WeightsAndBiases,
    tracker_failed,
)
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.client.openenv import OpenEnvClient
from uirl_jax.verifiers.client.rules import own_rules
from uirl_jax.verifiers.client.token import read_token
from uirl_jax.verifiers.client.used_containers import InStore
from uirl_jax.verifiers.containers.containers import Client, ContainerClient
from uirl_jax.verifiers.dialects import OPENENV
from uirl_jax.verifiers.recorded import in_process
from uirl_jax.verifiers.recorded import sets as recorded_sets
from uirl_jax.verifiers.recorded.rewards import PREFIX as RECORDED
from uirl_jax.verifiers.recorded.rewards import with_weights
from uirl_jax.verifiers.recorded.sets import RecordedSets
from uirl_jax.verifiers.server import supervisor

CONFIG_FILE = "config.json"
# What says where a run computes and is shown, and not what: a restart may change it.
PLACEMENT = ("mesh", "cluster", "tracking", "cold_start.browsers")
# Of an actor's reports, two hours; in a bucket a larger log is copied less often than every 10 s.
_MAX_REPORTS_BYTES = 1_000_000


def is_run(workdir: Path) -> bool:
    """Whether a role has written the workdir's config.json."""
    try:
        open_store(workdir).read(CONFIG_FILE)
    except FileNotFoundError:
        return False
    return True


def run_id_of(workdir: Path) -> str:
    """The id of the run in a workdir. Raises: ConfigError: it has none."""
    return _stored(open_store(workdir))[0]


def _stored(store: Store) -> tuple[str, dict[str, Any]]:
    """The id and the config of a workdir's run. Raises: ConfigError: it has none."""
    try:
        content = json.loads(store.read(CONFIG_FILE))
        return content["run_id"], content["config"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{store.location(CONFIG_FILE)}: is not a run's config ({error}); use another --workdir"
        ) from None


def open_run(workdir: Path, cfg: RunConfig, *, learns: bool = True) -> str:
    """Returns the run's id; the first role writes config.json.

    A config with more `learner.steps` than before extends the run, with the learning rate schedule
    of the new length; the previous final evaluation is renamed to its version. What PLACEMENT names
    may differ: a run may continue on another mesh.

    Args:
      learns: whether this role holds the learner's lease; only then a run is extended.
    Raises:
      ConfigError: the workdir has a run with another config; every difference is listed.
    """
    resolved = json.loads(reading.resolved_config_json(cfg))
    store = open_store(workdir)
    content = {"run_id": uuid.uuid4().hex, "config": resolved}
    store.put_new(CONFIG_FILE, _to_json(content))  # if two roles start together, one writes it
    run_id, known = _stored(store)
    known = _with_defaults(known)
    differences = sorted(_differences(known, resolved, "config"))
    extends = _extends(known, resolved, differences)
    if extends and learns:
        evaluation.keep_final(workdir, known["learner"]["steps"])
        LocalStore(workdir).delete(evaluation.SUMMARY_FILE)
        store.put(CONFIG_FILE, _to_json({"run_id": run_id, "config": resolved}))
    elif differences:
        way_out = "Use another --workdir, or remove this one"
        if extends:
            way_out = "Only --role=all and --role=learner can extend a run"
        raise ConfigError(
            f"{workdir} holds a run with another config: {'; '.join(differences)}. {way_out}"
        )
    return run_id


def _with_defaults(known: dict[str, Any]) -> dict[str, Any]:
    """A run's config with the keys that are newer than the version that wrote it."""
    try:
        return json.loads(reading.resolved_config_json(reading.from_config(RunConfig, known)))
    except ConfigError:  # keys that are gone; they are listed as differences
        return known


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _extends(known: Any, wanted: Any, differences: Sequence[str]) -> bool:
    """Whether the only difference is a larger number of steps."""
    if len(differences) != 1 or not differences[0].startswith("config.learner.steps is "):
        return False
    before = known["learner"].get("steps")
    return isinstance(before, int) and before < wanted["learner"]["steps"]


def _differences(known: Any, wanted: Any, path: str) -> Iterator[str]:
    if path.removeprefix("config.") in PLACEMENT:
        return
    if isinstance(known, dict) and isinstance(wanted, dict):
        for key in known.keys() | wanted.keys():
            yield from _differences(known.get(key), wanted.get(key), f"{path}.{key}")
    elif known != wanted:
        yield f"{path} is {known!r} there and {wanted!r} here"


def check_family(cfg: RunConfig, family: Family) -> None:
    """Checks that the family supports the config. Raises: ConfigError."""
    turns = max(task.max_turns for task in cfg.tasks)
    wanted = {}
    if cfg.learner.batch.pack:
        wanted["packing"] = "learner.batch.pack=True"
    if cfg.learner.batch.share_prompts:
        wanted["share_in_group"] = "learner.batch.share_prompts=True"
    grows = turns > 1 and cfg.chat.history_turns != 0
    if grows and not cfg.chat.prompt.has_history:
        template = f"max_turns={turns} without {{history}} in chat.prompt_template"
        wanted["growing_contexts"] = template
        if cfg.chat.most_screenshots > 1:
            wanted["multi_image"] = f"chat.max_screenshots={cfg.chat.max_screenshots}"
    if cfg.engine.kind == "jax":
        wanted |= engine_requests.needed_capabilities(cfg.engine)
    family.require(wanted)


def completed(cfg: RunConfig, say: Callable[[str], None] = lambda line: None) -> RunConfig:
    """The config with what it leaves out: prompts of the adapter or the model, derived sizes.

    Args:
      say: called with a line for every size that was derived.
    Raises: ModelError, ConfigError: a file of the model is not valid; sizes that cannot be.
    """
    adapter = assets.find(cfg.model.adapter) if cfg.model.adapter else ""
    path = hub.model_directory(cfg.model.path, weights=False)
    cfg = dataclasses.replace(cfg, chat=cfg.chat.completed(adapter, path))
    if not cfg.screen_px:
        return cfg
    family = family_of(path)
    chat = Chat(path, cfg.chat, family.chat)
    inputs = family.make_inputs(family.read_config(path))
    chunked = family.capabilities.chunked_prefill
    return sizes.derived(cfg, chat, inputs, say, chunked_prefill=chunked)


def client_options(cfg: RunConfig, urls: Sequence[str]) -> dict[str, Any]:
    """What a client of a verifier is made with besides its dialect; the config's rules judge.

    Args: urls: that are played; none: a server of one's own. The config's token is for its own.
    Raises: ConfigError: the token's file cannot be read.
    """
    verifier = cfg.verifier
    token_file = verifier.token_file if tuple(urls) == verifier.urls else ""
    return {
        "delay_s": verifier.action_delay_s,
        "limits": verifier.limits,
        "token": read_token(token_file) if urls else None,
        "find_own_rule": with_weights(verifier.recorded.rewards, own_rules(cfg.rules)),
    }


def check_model(cfg: RunConfig) -> None:
    """Checks everything about the model and its adapters that costs no weights.

    Args:
      cfg: `completed`.
    Raises: ConfigError, ModelError.
    """
    path = hub.model_directory(cfg.model.path, weights=False)
    family = family_of(path)
    check_family(cfg, family)
    checked = loading.check(family, path, lora=cfg.model.adapters, adapter=cfg.model.adapter)
    longest = cfg.max_context_tokens + cfg.actor.rollout.max_new_tokens
    limit = longest if family.max_positions is None else family.max_positions(checked.cfg)
    if longest > limit:
        raise ConfigError(
            f"contexts of {cfg.max_context_tokens} tokens and "
            f"{cfg.actor.rollout.max_new_tokens} new ones: {path} takes {limit} positions "
            "(max_position_embeddings or sliding_window of its config.json); lower "
            "actor.rollout.max_context_tokens or "
            "engine.context_lengths"
        )


def check_user_code(cfg: RunConfig, *, learns: bool) -> None:
    """Imports what of the user's own the config names; of functions, an actor needs rules alone.

    Raises: ConfigError: one is missing, or its module cannot be imported.
    """
    add_own(cfg.model.family)
    own_rules(cfg.rules)
    if learns:
        OwnRewards(cfg.algorithm.reward)
        find_estimator(cfg.algorithm.advantage)
        find_policy_loss(cfg.algorithm.loss)
        find_callbacks(cfg.learner.callbacks)


@dataclasses.dataclass(frozen=True)
class Run:
    """The config, the workdir and the id of a run; used by every role."""

    cfg: RunConfig
    workdir: Path
    run_id: str
    own_port_file: Path | None = None  # of a bundled server that only this role or host uses
    resume_from: Path | None = None  # see bookkeeping.RunDirectory
    resume_step: int | None = None

    @property
    def port_file(self) -> Path:
        return self.own_port_file or self.workdir / "verifier.port"

    @property
    def store(self) -> Store:
        return open_store(self.workdir)

    @property
    def curriculum(self) -> Curriculum:
        return Curriculum(self.cfg.curriculum, self.cfg.kinds, self.cfg.seed)

    def open_trackers(self) -> list[Tracker]:
        """Where metrics go besides metrics.jsonl. One that cannot start is said and left out."""
        cfg = self.cfg.tracking
        opened: list[Tracker] = []
        if cfg.tensorboard:
            opened.append(TensorBoard(self.workdir / TENSORBOARD_DIR))
        if cfg.wandb != "off":
            config = json.loads(reading.resolved_config_json(self.cfg))
            try:
                opened.append(WeightsAndBiases(cfg, self.workdir, self.run_id, config))
            except Exception as error:  # no network, no key
                print(tracker_failed(WeightsAndBiases.__name__, error), flush=True)
        return opened

    def log(self, event: str, **fields: object) -> None:
        print(key_values(event, **fields), flush=True)

    # ------------------------------------------------------------------------------ the model

    def load_model(
        self,
        mesh: jax.sharding.Mesh | None,
        path: Path,
        adapter: str | None = None,
        *,
        adapters: bool = True,
    ) -> loading.PolicyModel:
        """Loads the model of a directory.

        Args:
          adapter: to start from; None: the config's, for the config's own model.
          adapters: False: none, whatever the config says; all weights are to be trained.
        Raises: ConfigError: the model's family does not support the config.
        """
        cfg = self.cfg.model
        if not adapters:
            adapter = ""
        elif adapter is None:  # a cold start's model has the adapter merged into it
            adapter = cfg.adapter if path == Path(cfg.path) else ""
        family = family_of(hub.model_directory(path, weights=False))
        check_family(self.cfg, family)
        self.log(
            "model",
            path=path,
            family=family.model_type,
            action_format=self.cfg.chat.format.name,
            coordinates=self.cfg.chat.format.coordinates,
            pretrained_coordinates=family.coordinates or "none",
        )
        return loading.load(
            path,
            lora=cfg.adapters if adapters else None,
            seed=self.cfg.seed,
            param_dtype=cfg.param_dtype,
            remat=cfg.remat,
            mesh=mesh,
            quantize=cfg.quantize,
            adapter=adapter,
        )

    def load_base(self, mesh: jax.sharding.Mesh | None) -> loading.PolicyModel:
        """The model of `base_dir`. Raises: ConfigError: as base_dir, load_model."""
        return self.load_model(mesh, self.base_dir())

    def base_dir(self) -> Path:
        """The base model of the adapters: model.path, or the model of the run's cold start.

        Raises: ConfigError: the cold start is not done yet.
        """
        if not self.cfg.cold_start.steps:
            return Path(self.cfg.model.path)
        path = self.workdir / MODEL_DIR
        self.fetch_cold_start()
        if not path.is_dir():
            raise ConfigError(
                f"{path} does not exist yet: the config has a cold start, which --role=all or "
                "--role=learner runs"
            )
        return path

    def fetch_cold_start(self) -> None:
        """Of a run in a bucket: fetches the model of its cold start once it is there."""
        fetch_directory(self.workdir, open_store, str(MODEL_DIR))

    def make_chat(self, model: loading.PolicyModel) -> Chat:
        return make_chat(self.cfg.chat, model)

    # ------------------------------------------------------------------------------ its players

    def make_players(self, model: loading.PolicyModel, owner: str) -> Players:
        """
        Args: owner: of this process among those of the run, used to label containers: the next
            process with this owner deletes those that it finds.
        Raises: ConfigError: recorded sets that cannot be read, or with too large a picture.
        """
        sets = self._recorded_sets(model.inputs)
        fleet = Fleet(self.base_urls, lambda url: self.make_client(url, owner, sets))
        chat = self.make_chat(model)
        return Players(self.cfg.play, model, chat, fleet, self.workdir, self.run_id)

    def base_urls(self) -> list[str]:
        verifier = self.cfg.verifier
        if verifier.is_bundled:
            if not self.cfg.needs_server:
                return [in_process.URL]
            return supervisor.read_urls(self.port_file)
        return list(verifier.urls) or [f"{verifier.containers.runtime}:{verifier.containers.image}"]

    def _recorded_sets(self, inputs: Inputs) -> RecordedSets:
        """The sets that this process plays itself; those of its server are only checked.

        Raises: ConfigError: see `make_players`.
        """
        cfg = self.cfg
        if not cfg.verifier.is_bundled:
            return RecordedSets({})
        sets = recorded_sets.load(cfg.verifier.recorded.sets)
        most = cfg.learner.batch.patch_lengths[-1]
        if cfg.engine.kind == "jax":
            most = min(most, cfg.engine.image_row_patches)
        most_pixels = cfg.verifier.limits.max_image_pixels
        for size in sorted(sets.sizes(), reverse=True):
            if math.prod(size) > most_pixels:
                raise ConfigError(
                    f"verifier.recorded.sets: a picture of {size[0]}x{size[1]}, at most "
                    f"{most_pixels} pixels are decoded; prepare the set with --longest_px"
                )
            try:
                patches = inputs.plan_screen(size).patches
            except ImageError as error:
                raise ConfigError(f"verifier.recorded.sets: {error}") from error
            if patches > most:
                raise ConfigError(
                    f"verifier.recorded.sets: a picture of {size[0]}x{size[1]} pixels has "
                    f"{patches} patches, engine and learner take {most}; set screen_px={size}, or "
                    "prepare the set with a smaller --longest_px"
                )
        return RecordedSets({}) if cfg.needs_server else sets

    def make_client(self, url: str, owner: str, sets: RecordedSets) -> Client:
        """Makes the client of one of base_urls. Args: sets: what this process plays itself."""
        verifier = self.cfg.verifier
        options = client_options(self.cfg, verifier.urls)
        if url == in_process.URL:
            return in_process.RecordedClient(
                sets,
                find_own_rule=options["find_own_rule"],
                max_pixels=verifier.limits.max_image_pixels,
            )
        if verifier.dialect == OPENENV:
            return OpenEnvClient(url, **options)
        options["dialect"] = verifier.dialect
        if verifier.containers.runtime == "none":
            return VerifierClient(url, used=InStore(self.store), **options)
        del options["token"]  # theirs is made with each of them
        return ContainerClient(verifier.containers, f"{self.run_id}-{owner}", **options)

    async def measure(
        self,
        players: Players,
        stage: str,
        stop: threading.Event,
        engine: SamplingEngine | None = None,
    ) -> evaluation.EvalResult:
        """`Players.evaluate` on the run's own instances (evaluation.seeds)."""
        cfg = self.cfg.evaluation
        tasks = evaluation.eval_tasks(self.cfg.kinds, cfg.episodes, seeds=cfg.seeds)
        known = evaluation.read_results(self.workdir).get(stage)
        if known is None or not known.attempts:  # else `evaluate` returns it
            tasks = await asyncio.to_thread(self.without_repeated_rows, tasks, stage=stage)
        return await players.evaluate(
            stage, tasks, stop, temperature=cfg.temperature, engine=engine
        )

    def without_repeated_rows(self, specs: Sequence[TaskSpec], **of: str) -> list[TaskSpec]:
        """The instances with each step of the run's recorded sets once; says what it leaves out.

        What a server of others has is not known here: all of its instances are played.

        Args: of: what they are of, for what is said: suite or stage, and its name.
        Raises: ConfigError: a set that cannot be read, or has no rows of the split.
        """
        names = {spec.name for spec in specs if spec.name.startswith(RECORDED)}
        if not names or not self.cfg.verifier.is_bundled:
            return list(specs)
        paths = self.cfg.verifier.recorded.sets
        played_of = {name: paths[name] for name in paths if RECORDED + name in names}
        ((kind, name),) = of.items()
        try:
            kept = _each_row_once(tuple(played_of.items()), tuple(specs))
        except VerifierError as error:
            way_out = "; set evaluation.seeds or evaluation.episodes=0" if kind == "stage" else ""
            raise ConfigError(f"{kind} {name}: {error}{way_out}") from error
        played = collections.Counter(spec.label for spec in kept)
        for label, asked in collections.Counter(spec.label for spec in specs).items():
            if played[label] < asked:
                line = key_values(
                    f"{kind}_shortened",
                    **of,
                    task=label,
                    asked=asked,
                    played=played[label],
                    reason="the set has no more that differ",
                )
                print(line, flush=True)
        return list(kept)

    async def act(
        self, players: Players, stop: asyncio.Event, actor_index: int
    ) -> dict[str, float]:
        """Samples groups until the learner has finished.

        Raises:
          ConfigError: another process has this actor number.
          RestartError: its lease was lost.
        """
        cfg = self.cfg
        actor_id = f"a{actor_index}"
        log = self.workdir / "logs" / f"actor-{actor_id}.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)

        player = players.player(actor_id, temperature=cfg.actor.rollout.temperature)

        def on_report(scalars: dict[str, float]) -> None:
            reasons = dict(player.statistics.env_error_reasons.most_common(5))
            line = {"unix_s": time.time(), **scalars, "env_error_reasons": reasons}
            # On a full disk shards wait until there is room; a report is not worth the groups.
            with contextlib.suppress(OSError):
                _append_report(log, json.dumps(line) + "\n")

        loop = asyncio.get_running_loop()
        lost = threading.Event()

        def on_lost() -> None:
            lost.set()
            loop.call_soon_threadsafe(stop.set)

        with contextlib.ExitStack() as stack:
            # In a bucket the lease of a host that died is free after a minute.
            lease = only_actor(self.store, actor_id, on_lost)
            await asyncio.to_thread(stack.enter_context, lease)
            report = await run_actor(
                player,
                ActorConfig(
                    group_size=cfg.actor.group_size,
                    groups_per_step=cfg.learner.groups_per_step,
                    steps=cfg.learner.steps,
                    max_staleness=cfg.learner.max_staleness,
                    policy_lag=cfg.actor.policy_lag,
                    overdue_s=self._overdue_s,
                ),
                LearnerLink(
                    self.workdir,
                    players.model.base_hash,
                    layout_of(players.model.cfg),
                    players.to_trainable,
                ),
                TaskSource(self.curriculum.task, cfg.seed),
                stop,
                on_report,
            )
        if lost.is_set():  # not the end of the run: whoever started it starts it again
            raise RestartError(
                f"the lease of actor {actor_id} was lost: {self.store.location('')} was away for "
                "too long, or another process took it; start the actor again"
            )
        return report

    @property
    def _overdue_s(self) -> float:
        """Longer than a group takes: its members play at once, or in so many rounds."""
        actor = self.cfg.actor
        rounds = -(-actor.group_size // actor.concurrency)
        return 2.0 * rounds * actor.rollout.episode_timeout_s


def _append_report(log: Path, line: str) -> None:
    """Adds a line; what is older moves to `<log>.1` once it is long. Raises: OSError."""
    if log.exists() and log.stat().st_size + len(line) > _MAX_REPORTS_BYTES:
        # Others read the last line at any time, so the log is there all the time.
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        with files.replacing(log) as (file,):
            file.write(line.encode())
        return
    with log.open("a", encoding="utf-8") as file:
        file.write(line)


@functools.lru_cache(maxsize=4)  # an evaluation of a run is played again and again
def _each_row_once(
    paths: tuple[tuple[str, str], ...], specs: tuple[TaskSpec, ...]
) -> tuple[TaskSpec, ...]:
    """Args: paths: of the recorded sets, by name. Reads them whole: seconds for a gigabyte."""
    sets = recorded_sets.load(dict(paths))
    names = {RECORDED + name for name, _ in paths}

    def shown_by(spec: TaskSpec) -> tuple[int, int] | None:
        return sets.shown(spec) if spec.name in names else None

    return tuple(evaluation.distinct(specs, shown_by))
