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
--role=eval. Started again with the same --out it plays what is missing. docs/expert_iteration.md.
"""

import asyncio
import collections
import dataclasses
import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from uirl_jax import platform_flags, seeds
from uirl_jax.actor.host import group_id
from uirl_jax.actor.rollout import derive_seed
from uirl_jax.actor.search import Found, SearchConfig, search
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ConfigError, UirlError
from uirl_jax.metrics import Progress
from uirl_jax.players import Players
from uirl_jax.roles import contenders
from uirl_jax.roles.eval import own_verifier
from uirl_jax.run import Run, check_model, check_user_code, completed
from uirl_jax.shards.layout import layout_of
from uirl_jax.shards.writer import write_shard
from uirl_jax.store.files import write_atomically
from uirl_jax.types import TaskSpec, Trajectory, Turn

SHARD_INSTANCES = 32  # at most so many are searched again after a kill
SUMMARY_FILE = "search.json"

_CONFIG = reading.define_config_file(RunConfig, help="of the run whose tasks are played")
_WORKDIR = flags.DEFINE_string("workdir", "", "the run of --checkpoint=policy or of a step")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "base", "whose episodes; see above")
_OUT = flags.DEFINE_string("out", None, "folder for the demonstrations; it is made")
_INSTANCES = flags.DEFINE_integer("instances", 100, "of the tasks in turn", lower_bound=1)
_FIRST = flags.DEFINE_integer("first", 0, "number of the first one", lower_bound=0)
_EPISODES = flags.DEFINE_integer("episodes", 8, "at most, of an instance", lower_bound=1)
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
    players: Players, run: Run, cfg: SearchConfig, out: Path, first: int, instances: int
) -> dict[str, dict[str, int]]:
    """Writes the successes, a shard for some instances at a time; returns counts by task."""
    model, kinds = players.model, run.cfg.kinds
    progress = Progress("search", instances)
    solved = done = 0
    for start in range(first, first + instances, SHARD_INSTANCES):
        numbers = range(start, min(start + SHARD_INSTANCES, first + instances))
        counts_path = out / f"{start:06d}.json"
        if not counts_path.exists():
            found = await search_all(
                players,
                kinds,
                numbers,
                cfg,
                seed=run.cfg.seed,
                temperature=run.cfg.actor.rollout.temperature,
            )
            successes = [f.shortest for f in found if f.shortest is not None]
            if successes:
                write_shard(
                    out / f"{start:06d}.tfrecord",
                    successes,
                    base_hash=model.base_hash,
                    layout=layout_of(model.cfg),
                )
            names = [kinds[number % len(kinds)].name for number in numbers]
            counts = json.dumps(count(names, found), indent=2) + "\n"
            write_atomically(counts_path, counts.encode())  # last: the shard is whole
        counted = json.loads(counts_path.read_text(encoding="utf-8"))
        solved += sum(one["solved"] for one in counted.values())
        done += len(numbers)
        progress.update(done, success=solved / done)
    progress.close()
    total: collections.defaultdict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for path in sorted(out.glob("[0-9]*.json")):
        for name, values in json.loads(path.read_text(encoding="utf-8")).items():
            total[name].update(values)
    return {name: dict(values) for name, values in sorted(total.items())}


def count(names: Sequence[str], found: Sequence[Found]) -> dict[str, dict[str, int]]:
    """By task: instances, solved ones, those that a branch solved, and episodes."""
    counts: dict[str, dict[str, int]] = {}
    for name, one in zip(names, found, strict=True):
        values = counts.setdefault(
            name, dict.fromkeys(("instances", "solved", "by_branch", "episodes", "env_errors"), 0)
        )
        values["instances"] += 1
        values["solved"] += one.shortest is not None
        values["by_branch"] += one.by_branch
        values["episodes"] += one.played
        values["env_errors"] += one.env_errors
    return counts


def format_counts(counts: dict[str, dict[str, int]]) -> str:
    width = max(len(name) for name in (*counts, "task"))
    lines = [f"{'task':{width}}  solved      by branch  episodes"]
    for name, one in counts.items():
        solved = f"{one['solved']} of {one['instances']}"
        lines.append(f"{name:{width}}  {solved:10}  {one['by_branch']:9}  {one['episodes']:8}")
    return "\n".join(lines)


def run_search(cfg: RunConfig, workdir: Path, out: Path, limits: SearchConfig) -> int:
    """The command; returns the number of demonstrations in the folder."""
    platform_flags.set_defaults()
    check_user_code(cfg, learns=False)
    cfg = completed(cfg)
    check_model(cfg)
    contenders.name_of(_CHECKPOINT.value)
    asked = {
        "checkpoint": _CHECKPOINT.value,
        "seed": cfg.seed,
        "tasks": [dataclasses.astuple(kind) for kind in cfg.kinds],
        **dataclasses.asdict(limits),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out={out}: {error.strerror}") from error
    _check_same(out, asked)
    run = Run(cfg, workdir, uuid.uuid4().hex)

    async def play(run: Run) -> dict[str, dict[str, int]]:
        async with contenders.playing(run, _CHECKPOINT.value) as (players, _):
            return await collect(players, run, limits, out, _FIRST.value, _INSTANCES.value)

    with own_verifier(run) as run:
        counts = asyncio.run(play(run))
    print(format_counts(counts))
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
        other = sorted(
            key for key in known.keys() | asked.keys() if known.get(key) != asked.get(key)
        )
        if other:
            raise ConfigError(f"{path}: another search, in {', '.join(other)}; give another --out")
    write_atomically(path, (json.dumps(asked, indent=2) + "\n").encode())


def main(argv: list[str]) -> int:
    del argv
    try:
        if missing := [
            f"--{n}" for n, flag in (("config", _CONFIG), ("out", _OUT)) if not flag.value
        ]:
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
    except UirlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not found:
        print("no success was found", file=sys.stderr)
        return 1
    print(f"to learn from it: --config.cold_start.demonstrations=\"('{_OUT.value}',)\"")
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=reading.parse_flags)
