"""Looks at shards of trajectories: list, verify, extract an episode, repair a damaged shard.

    python -m tools.inspect_shards list runs/quickstart
    python -m tools.inspect_shards list runs/quickstart/eval/after --episodes
    python -m tools.inspect_shards verify runs/quickstart/quarantine
    python -m tools.inspect_shards extract runs/quickstart --episode=3f2a --out=episode
    python -m tools.inspect_shards repair runs/quickstart/quarantine/a0.tfrecord --out=whole

A path is a shard, or a directory that is searched for shards (a workdir, its shards/, kept/, eval/,
quarantine/). `repair` writes what is whole to another file and leaves the damaged one where it is.
"""

import argparse
import collections
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools import command_line
from uirl_jax.errors import ConfigError, ShardError
from uirl_jax.shards.reader import read_shard
from uirl_jax.shards.salvage import salvage
from uirl_jax.shards.writer import write_shard
from uirl_jax.store.files import new_directory
from uirl_jax.types import Trajectory, Turn
from uirl_jax.untrusted.json import printable

_OTHERS = ("cold_start", "quarantine")  # folders of a workdir: what no policy played, or is broken
_SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp"}


def find_shards(path: Path) -> list[Path]:
    """The shards below a path. Raises: ConfigError: no such path, or no shard below it."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        kind, _, key = str(path).partition(":/")
        if kind in ("gs", "s3"):
            raise ConfigError(
                f"{kind}://{key}: this command reads files of this machine; copy the run first, as "
                f"with gcloud storage cp -r {kind}://{key} DIR"
            )
        raise ConfigError(f"{path}: no such file or directory")
    found = sorted(path.rglob("*.tfrecord"))
    if not found:
        raise ConfigError(f"{path}: holds no shard (*.tfrecord)")
    return found


def find_shards_of_policies(path: Path) -> list[Path]:
    """`find_shards` without a run's demonstrations and what it refused.

    Raises: ConfigError: there is none.
    """
    found = find_shards(path)
    kept = [one for one in found if one == path or one.relative_to(path).parts[0] not in _OTHERS]
    if not kept:
        raise ConfigError(f"{path}: holds no shard that a policy played")
    return kept


def list_shards(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """A row for every shard; `problem` says why it cannot be read.

    One that a learner deletes meanwhile, as it does with those that it has used, is passed over.
    """
    for path in paths:
        row: dict[str, Any] = {"shard": str(path)}
        try:
            row["bytes"] = path.stat().st_size
            header, trajectories = read_shard(path)
        except (FileNotFoundError, ShardError) as error:
            if not path.exists():
                print(f"passed over: {path}: was deleted meanwhile", file=sys.stderr)
                continue
            yield row | {"problem": _without(path, error)}
            continue
        yield row | {
            "run": header.run_id,
            "actor": header.actor_id,
            "versions": [header.lowest_version, header.highest_version],
            "episodes": len(trajectories),
            "successes": sum(one.success for one in trajectories),
            "turns": sum(len(one.turns) for one in trajectories),
            "tasks": dict(collections.Counter(one.task.name for one in trajectories)),
        }


def list_episodes(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """A row for every episode. Damaged shards are passed over."""
    for path in paths:
        try:
            trajectories = read_shard(path)[1]
        except ShardError as error:
            print(f"passed over: {error}", file=sys.stderr)
            continue
        for one in trajectories:
            yield {
                "episode_id": one.episode_id,
                "task": one.task.name,
                "variant": one.task.variant,
                "seed": one.task.seed,
                "stop_reason": str(one.stop_reason),
                "success": one.success,
                "reward": one.reward,
                "turns": len(one.turns),
                "versions": list(one.policy_versions),
                "shard": str(path),
            }


def _print_episodes(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        variant = f" {row['variant']}" if row["variant"] else ""
        task = printable(f"{row['task']}{variant} seed {row['seed']}", 120)
        low, high = row["versions"]
        print(
            f"{printable(row['episode_id'])}: {task}, {row['stop_reason']}, reward "
            f"{row['reward']:g}, {row['turns']} turns of versions {low} to {high}"
        )


def _without(path: Path, error: ShardError) -> str:
    return printable(str(error).removeprefix(f"{path}: "), 300)


def _print_list(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        if "problem" in row:
            print(f"{row['shard']}: DAMAGED: {row['problem']}")
            continue
        low, high = row["versions"]
        tasks = ", ".join(f"{printable(name)} {count}" for name, count in row["tasks"].items())
        print(
            f"{row['shard']}: {row['episodes']} episodes ({row['successes']} successes, "
            f"{row['turns']} turns) of versions {low} to {high}, {row['bytes']} bytes; {tasks}"
        )


def find_episode(paths: Sequence[Path], episode: str) -> Trajectory:
    """The one episode whose id begins so. Damaged shards are passed over.

    Raises: ConfigError: there is none, or there are several.
    """
    found: dict[str, Trajectory] = {}
    for path in paths:
        try:
            trajectories = read_shard(path)[1]
        except ShardError as error:
            print(f"passed over: {error}", file=sys.stderr)
            continue
        found |= {one.episode_id: one for one in trajectories if one.episode_id.startswith(episode)}
    if len(found) != 1:
        which = f"{len(found)}: {', '.join(sorted(found)[:5])}" if found else "none"
        raise ConfigError(
            f"--episode={episode}: expected the start of one episode's id, got {which}"
        )
    return next(iter(found.values()))


def extract(trajectory: Trajectory, out: Path) -> None:
    """Writes episode.json and the screenshots. Raises: ConfigError: `out` is there already."""
    if out.exists():
        raise ConfigError(f"--out={out}: is there already; give a new directory")
    names = {
        key: f"{n:03d}{_suffix(data)}" for n, (key, data) in enumerate(trajectory.images.items())
    }
    content = {
        "episode_id": trajectory.episode_id,
        "group_id": trajectory.group_id,
        "task": dataclasses.asdict(trajectory.task),
        "instruction": trajectory.instruction,
        "stop_reason": str(trajectory.stop_reason),
        "reward": trajectory.reward,
        "success": trajectory.success,
        "run_id": trajectory.run_id,
        "actor_id": trajectory.actor_id,
        "turns": [_turn(turn, names) for turn in trajectory.turns],
    }
    with new_directory(out) as directory:
        for key, data in trajectory.images.items():
            (directory / names[key]).write_bytes(data)
        text = json.dumps(content, indent=2, allow_nan=False)
        (directory / "episode.json").write_text(text + "\n", encoding="utf-8")


def _turn(turn: Turn, names: dict[str, str]) -> dict[str, Any]:
    action = turn.action
    return {
        "screenshots": [names[key] for key in turn.image_keys],
        "text": turn.text,
        "action": None
        if action is None
        else {name: value for name, value in vars(action).items() if value is not None},
        "error": turn.error,
        "reward": turn.reward,
        "progress": turn.progress,
        "token_ids": turn.token_ids.tolist(),
        "logprobs": [round(float(value), 6) for value in turn.logprobs],
        "policy_versions": sorted({int(version) for version in turn.policy_versions}),
    }


def _suffix(data: bytes) -> str:
    return next((end for start, end in _SUFFIXES.items() if data.startswith(start)), ".bin")


def repair(shard: Path, out: Path) -> str:
    """Writes the whole records of a damaged shard; returns what was done.

    Raises: ShardError: nothing is whole. ConfigError: `out` is there already.
    """
    if out.exists():
        raise ConfigError(f"--out={out}: is there already; give a new file")
    kept = salvage(shard)
    for line in kept.damage:
        print(f"dropped: {printable(line, 300)}")
    if not kept.trajectories:
        raise ShardError(f"{shard}: no record is whole")
    header = kept.header
    write_shard(out, kept.trajectories, base_hash=header.base_hash, layout=header.layout)
    return f"{out}: {len(kept.trajectories)} of {header.records} records; {shard} is unchanged"


@command_line.one_line_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.inspect_shards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="a line for every shard")
    listing.add_argument("--json", action="store_true", help="an object for every shard instead")
    listing.add_argument("--episodes", action="store_true", help="a line for every episode instead")
    verify = commands.add_parser("verify", help="exit code 1 if one is damaged")
    one = commands.add_parser("extract", help="an episode as JSON and pictures")
    one.add_argument("--episode", required=True, help="the start of its id")
    one.add_argument("--out", type=Path, required=True, help="a directory that is made")
    mended = commands.add_parser("repair", help="the whole records of a damaged shard")
    mended.add_argument("--out", type=Path, required=True, help="the new shard")
    for command in (listing, verify, one, mended):
        command.add_argument("path", type=Path, help="a shard, or a directory with shards")
    args = parser.parse_args(argv)
    if args.command == "repair":
        print(repair(args.path, args.out))
        return 0
    paths = find_shards(args.path)
    if args.command == "extract":
        extract(find_episode(paths, args.episode), args.out)
        print(args.out / "episode.json")
        return 0
    if args.command == "list" and args.episodes:
        rows = list(list_episodes(paths))
        if args.json:
            print("\n".join(map(json.dumps, rows)))
        else:
            _print_episodes(rows)
        return 0
    rows = list(list_shards(paths))
    damaged = [row for row in rows if "problem" in row]
    if args.command == "list":
        if args.json:
            print("\n".join(map(json.dumps, rows)))
        else:
            _print_list(rows)
        return 0
    _print_list(damaged)
    print(f"{len(rows)} shards, {len(damaged)} damaged")
    return bool(damaged)


if __name__ == "__main__":
    sys.exit(main())
