"""Show the agent how it is done, by mouse and keyboard, and record that for the cold start.

    python -m tools.record_demo --config=configs/sft.py --out=demos
    python -m tools.record_demo --config=configs/sft.py --out=demos --task=miniwob/click-test-2
    python -m tools.record_demo ... --task_dir=examples/own_tasks/thermostat
    python -m tools.record_demo ... --url=http://127.0.0.1:8000 --task=simple_data_entry

Opens a session as an actor does, on the bundled server or on a verifier by URL, and prints the
address of a page that shows its screen. What is done there becomes the agent's actions: the session
gets them, and the record has them with the screenshots before them. Each demonstration that is
saved is one shard file in --out, whole or not at all. The config is that of the run that will
learn: its tasks, verifier, action format and limits. docs/demonstrations.md.
"""

import asyncio
import contextlib
import dataclasses
import json
import re
import secrets
import signal
import sys
import tempfile
from pathlib import Path

from absl import app, flags

from tools import command_line
from tools.recorder import site
from tools.recorder.episode import Agent, Demonstration
from uirl_jax import seeds
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ConfigError, VerifierError
from uirl_jax.families.chat import Chat
from uirl_jax.families.table import add_own, family_of
from uirl_jax.models import hub
from uirl_jax.run import client_options, completed
from uirl_jax.shards.layout import layout_of
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import write_shard
from uirl_jax.types import TaskSpec, Trajectory
from uirl_jax.verifiers import own_tasks
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.server import supervisor

DEFAULT_MAX_TURNS = 30  # of a task that the config does not have

_CONFIG = reading.define_config_file(RunConfig, help="of the run that will learn from it")
_OUT = flags.DEFINE_string("out", None, "folder for the demonstrations; it is made")
_TASK = flags.DEFINE_string("task", None, "instead of the config's tasks: simple_data_entry, ...")
_VARIANT = flags.DEFINE_string("variant", None, "of --task")
_MAX_TURNS = flags.DEFINE_integer("max_turns", None, "of an episode", lower_bound=1)
_TASK_DIR = flags.DEFINE_multi_string("task_dir", [], "a task of your own (docs/own_task.md)")
_SEED = flags.DEFINE_integer(
    "seed",
    None,
    "of the first instance, later ones count up; drawn where it is not given",
    lower_bound=seeds.TRAIN_SEEDS.start,
    upper_bound=seeds.TRAIN_SEEDS.stop - 1,  # what lies above is held out
)
_EPISODES = flags.DEFINE_integer("episodes", 1, "demonstrations to save", lower_bound=1)
_URL = flags.DEFINE_string("url", None, "of a verifier; none: the config's, or the bundled server")
_PORT = flags.DEFINE_integer("port", 0, "of the page; 0: any free one", 0, 65535)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be demonstrated, where, and to whom."""

    cfg: RunConfig
    tasks: list[TaskSpec]  # in turn
    task_dirs: tuple[str, ...]
    urls: tuple[str, ...]  # none: the bundled server
    agent: Agent
    layout: TokenLayout
    out: Path
    first_seed: int
    episodes: int

    def task_at(self, instance: int) -> TaskSpec:
        span = len(seeds.TRAIN_SEEDS)
        return dataclasses.replace(
            self.tasks[instance % len(self.tasks)], seed=(self.first_seed + instance) % span
        )

    def save(self, trajectory: Trajectory) -> Path:
        """One shard file. Raises ShardError, and leaves none."""
        task = re.sub(r"[^A-Za-z0-9_-]+", "-", trajectory.task.name)
        name = f"{task}-seed{trajectory.task.seed}-{trajectory.episode_id[:8]}.tfrecord"
        # No weights took part: the base is named by none, and no learner takes it for its actor's.
        write_shard(self.out / name, [trajectory], base_hash="", layout=self.layout)
        return self.out / name


def read_plan() -> Plan:
    """The flags and the config. Raises ConfigError or ModelError."""
    missing = [f"--{flag.name}" for flag in (_CONFIG, _OUT) if flag.value is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} missing; e.g. --config=configs/sft.py --out=demos"
        )
    cfg = reading.from_config(RunConfig, _CONFIG.value)
    if cfg.verifier.containers.runtime != "none" and _URL.value is None:
        raise ConfigError(
            "verifier.containers: the recorder starts none; start one and give its --url"
        )
    task_dirs = tuple(dict.fromkeys((*cfg.verifier.task_dirs, *_TASK_DIR.value)))
    model_dir = hub.model_directory(cfg.model.path, weights=False)
    add_own(cfg.model.family)
    family = family_of(model_dir)
    model_cfg = family.read_config(model_dir)
    cfg = completed(cfg)
    chat = Chat(model_dir, cfg.chat, family.chat)
    out = Path(_OUT.value)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out={out}: {error.strerror}") from error
    first_seed = _SEED.value
    if first_seed is None:
        first_seed = secrets.randbelow(len(seeds.TRAIN_SEEDS))
    return Plan(
        cfg,
        read_tasks(cfg),
        task_dirs,
        (_URL.value,) if _URL.value is not None else cfg.verifier.urls,
        Agent(
            chat,
            family.make_inputs(model_cfg),
            cfg.max_context_tokens,
            cfg.actor.rollout.max_new_tokens,
            cfg.actor.rollout.success_reward,
        ),
        layout_of(model_cfg),
        out,
        first_seed,
        _EPISODES.value,
    )


def read_tasks(cfg: RunConfig) -> list[TaskSpec]:
    """The config's tasks, or the one that the flags name."""
    name = _TASK.value
    if name is None and _TASK_DIR.value:
        name = own_tasks.PREFIX + Path(_TASK_DIR.value[0]).resolve().name
    if name is None and _VARIANT.value is not None:
        raise ConfigError(f"--variant={_VARIANT.value}: of which --task?")
    tasks = cfg.kinds
    if name is not None:
        known = [task for task in cfg.kinds if task.name == name]
        tasks = known[:1] or [TaskSpec(name, 0, "", DEFAULT_MAX_TURNS)]
    changes = {"variant": _VARIANT.value, "max_turns": _MAX_TURNS.value}
    changes = {key: value for key, value in changes.items() if value is not None}
    return [dataclasses.replace(task, **changes) for task in tasks]


async def record(plan: Plan, port_file: Path, port: int) -> list[site.Saved]:
    """Serves the page until enough is saved, or until SIGINT or SIGTERM; what was saved.

    Raises:
      VerifierError: no session can be had at the start.
      ConfigError: the page's port cannot be had.
    """
    options = client_options(plan.cfg, plan.urls) | {"dialect": plan.cfg.verifier.dialect}
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, VerifierClient] = {}

        async def open_next(task: TaskSpec) -> Demonstration:
            # The bundled server has another address when it was started again.
            urls = plan.urls or tuple(supervisor.read_urls(port_file))
            if not urls:
                raise VerifierError("the bundled verifier is being started again; try again")
            if urls[0] not in clients:
                client = VerifierClient(urls[0], **options)
                clients[urls[0]] = await stack.enter_async_context(client)
            return await Demonstration.open(clients[urls[0]], task, plan.agent)

        recorder = site.Recorder(open_next, plan.task_at, plan.save, plan.episodes)
        stopped = asyncio.Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
        await recorder.open()
        stack.push_async_callback(recorder.close)
        async with site.serve(recorder, port) as address:
            print(f"open in a browser on this machine: {address}", flush=True)
            waiting = [asyncio.create_task(event.wait()) for event in (recorder.finished, stopped)]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        unsaved = recorder.demonstration.turns if recorder.demonstration is not None else []
        if unsaved:
            print(f"not saved and gone: a demonstration of {len(unsaved)} actions")
        return recorder.saved


@command_line.one_line_errors()
def main(argv: list[str]) -> int:
    del argv
    try:
        plan = read_plan()
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            port_file = directory / "verifier.port"
            if not plan.urls:
                stack.enter_context(
                    supervisor.bundled_server(
                        port_file,
                        directory / "verifier.log",
                        task_dirs=plan.task_dirs,
                        recorded=plan.cfg.verifier.recorded.sets,
                    )
                )
            saved = asyncio.run(record(plan, port_file, _PORT.value))
    except KeyboardInterrupt:  # before there was anything to lose
        return 130
    for one in saved:
        fields = {"solved": one.trajectory.success, "reward": one.trajectory.reward}
        print(f"{one.path}: {len(one.trajectory.turns)} actions {json.dumps(fields)}")
    if saved:
        print(f"to learn from it: --config.cold_start.demonstrations=\"('{plan.out}',)\"")
        return 0
    print("nothing was saved", file=sys.stderr)
    return 1


if __name__ == "__main__":
    app.run(main, flags_parser=reading.parse_flags)
