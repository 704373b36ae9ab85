"""Collects a policy's own successes as demonstrations: best of several, and branches of failures.

    python -m tools.search --config=configs/quickstart.py --checkpoint=base --instances=100 \
        --out=demos
    python -m tools.search --config=configs/miniwob_pages.py --workdir=runs/pages \
        --checkpoint=policy --instances=960 --episodes=8 --out=demos

For every training instance of the config's tasks it plays two episodes from the start (--whole);
while none succeeds it plays failed ones again up to a turn where the policy was unsure, and goes on
from there. The shortest success is kept. A cold start learns from the folder, in a new base with
which RL carries on:

    --config.cold_start.demonstrations="('demos',)" --config.cold_start.train=all

--checkpoint is base, policy, a step, an adapter, a model directory or a server's URL, as in
--role=eval. Started again with the same --out, also with more --instances or another --first, it
plays what is missing. docs/expert_iteration.md.
"""

import asyncio
import dataclasses
import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from tools import command_line, search_folder
from uirl_jax import platform_flags, seeds
from uirl_jax.actor.host import group_id
from uirl_jax.actor.rollout import derive_seed
from uirl_jax.actor.search import Found, SearchConfig, search
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ConfigError
from uirl_jax.players import Players
from uirl_jax.roles import contenders
from uirl_jax.roles.eval import own_verifier
from uirl_jax.run import Run, check_model, check_user_code, completed, is_run, run_id_of
from uirl_jax.shards.layout import layout_of
from uirl_jax.store.files import write_atomically
from uirl_jax.types import TaskSpec, Trajectory, Turn

SUMMARY_FILE = "search.json"

_CONFIG = reading.define_config_file(RunConfig, help="of the run whose tasks are played")
_WORKDIR = flags.DEFINE_string("workdir", "", "the run of --checkpoint=policy or of a step")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "base", "whose episodes; see above")
_OUT = flags.DEFINE_string("out", None, "folder for the demonstrations; it is made")
_INSTANCES = flags.DEFINE_integer("instances", 100, "of the tasks in turn", lower_bound=1)
_FIRST = flags.DEFINE_integer("first", 0, "number of the first one", lower_bound=0)
_EPISODES = flags.DEFINE_integer(
    "episodes", 8, "at most, of an instance, besides env_errors", lower_bound=1
)
_WHOLE = flags.DEFINE_integer("whole", 2, "of them from the start, before branches", lower_bound=1)


async def search_all(
    players: Players,
    kinds: Sequence[TaskSpec],
    numbers: Sequence[int],
    cfg: SearchConfig,
    *,
    seed: int,
    temperature: float,
) -> list[Found]:
    """Searches instances at once; the players' concurrency is the limit."""
    player = players.player("search", temperature=temperature)

    async def one(number: int) -> Found:
        task = dataclasses.replace(kinds[number % len(kinds)], seed=seeds.train_seed(seed, number))

        async def play(episode: int, repeat: Sequence[Turn]) -> Trajectory:
            sample_seed = derive_seed(seed, number, episode)
            attempt = await player.play(task, sample_seed, group_id(number), repeat=repeat)
            return attempt.trajectory

        return await search(
            lambda starts: asyncio.gather(*(play(*start) for start in starts)),
            cfg,
            np.random.default_rng([seed, number]),
        )

    return list(await asyncio.gather(*(one(number) for number in numbers)))


async def collect(
    players: Players, run: Run, cfg: SearchConfig, out: Path, asked: Sequence[int]
) -> dict[str, dict[str, int]]:
    """Fills the folder; returns its counts by task, and says what was given up."""
    kinds = run.cfg.kinds

    async def search_some(numbers: Sequence[int]) -> list[Found]:
        temperature = run.cfg.actor.rollout.temperature
        return await search_all(
            players, kinds, numbers, cfg, seed=run.cfg.seed, temperature=temperature
        )

    known, given_up = await search_folder.fill(
        out,
        asked,
        search_some,
        lambda number: kinds[number % len(kinds)].name,
        base_hash=players.model.base_hash,
        layout=layout_of(players.model.cfg),
    )
    if given_up:
        env_errors = sum(one.env_errors for one in given_up)
        print(
            f"{len(given_up)} instances were given up after {env_errors} env_errors and are not "
            "counted; the same command plays them again",
            file=sys.stderr,
        )
    return search_folder.count(known.values())


def run_search(cfg: RunConfig, workdir: Path, out: Path, limits: SearchConfig) -> int:
    """The command; returns the number of demonstrations in the folder."""
    platform_flags.set_defaults()
    check_user_code(cfg, learns=False)
    cfg = completed(cfg)
    check_model(cfg)
    contenders.name_of(_CHECKPOINT.value)
    asked = {
        "checkpoint": _CHECKPOINT.value,
        "model": [cfg.model.path, cfg.model.adapter],
        "run": run_id_of(workdir) if _WORKDIR.value else "",
        "chat": dataclasses.asdict(cfg.chat),
        "temperature": cfg.actor.rollout.temperature,
        "seed": cfg.seed,
        "tasks": [dataclasses.astuple(kind) for kind in cfg.kinds],
        **dataclasses.asdict(limits),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out={out}: {error.strerror}") from error
    if is_run(out):
        raise ConfigError(f"--out={out}: is the workdir of a run; give a folder of its own")
    _check_same(out, asked)
    # A published policy is taken from its own run alone.
    run = Run(cfg, workdir, run_id_of(workdir) if _WORKDIR.value else uuid.uuid4().hex)

    async def play(run: Run) -> dict[str, dict[str, int]]:
        async with contenders.playing(run, _CHECKPOINT.value) as (players, _):
            asked = range(_FIRST.value, _FIRST.value + _INSTANCES.value)
            return await collect(players, run, limits, out, asked)

    with own_verifier(run) as run:
        counts = asyncio.run(play(run))
    print(search_folder.format_counts(counts))
    return sum(one["solved"] for one in counts.values())


def _check_same(out: Path, asked: dict) -> None:
    """Raises: ConfigError: the folder has another search's demonstrations."""
    path = out / SUMMARY_FILE
    if path.exists():
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path}: {error}; give another --out") from None
        asked = json.loads(json.dumps(asked))
        # A folder of an earlier release says less.
        other = sorted(key for key in known.keys() & asked.keys() if known[key] != asked[key])
        if other:
            raise ConfigError(f"{path}: another search, in {', '.join(other)}; give another --out")
    write_atomically(path, (json.dumps(asked, indent=2) + "\n").encode())


@command_line.one_line_errors()
def main(argv: list[str]) -> int:
    del argv
    if missing := [f"--{n}" for n, flag in (("config", _CONFIG), ("out", _OUT)) if not flag.value]:
        raise ConfigError(
            f"{' and '.join(missing)} missing; e.g. --config=configs/quickstart.py --out=demos"
        )
    needs_run = _CHECKPOINT.value == "policy" or _CHECKPOINT.value.isdecimal()
    if needs_run and not _WORKDIR.value:
        raise ConfigError(f"--checkpoint={_CHECKPOINT.value}: --workdir=RUN is missing")
    try:
        limits = SearchConfig(_EPISODES.value, _WHOLE.value)
    except ValueError as error:
        raise ConfigError(f"--episodes and --whole: {error}") from None
    cfg = reading.from_config(RunConfig, _CONFIG.value)
    out = Path(_OUT.value)
    workdir = reading.workdir_of(_WORKDIR.value) if _WORKDIR.value else out
    found = run_search(cfg, workdir, out, limits)
    if not found:
        print("no success was found", file=sys.stderr)
        return 1
    print(f"to learn from it: --config.cold_start.demonstrations=\"('{_OUT.value}',)\"")
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=reading.parse_flags)
