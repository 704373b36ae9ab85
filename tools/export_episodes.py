"""Writes recorded episodes in formats that other programs read: Inspect AI's log, and ATIF.

    python -m tools.export_episodes inspect runs/quickstart/eval/after --out=logs
    python -m tools.export_episodes atif runs/quickstart --episode=3f2a --out=trajectories

`inspect`: one JSON log with a sample for every episode, its screenshots in it as attachments;
inspect_ai.log.read_eval_log and `inspect view` open it. Episodes of the same instance are epochs of
one sample. `atif`: for each episode a folder with trajectory.json in Harbor's Agent Trajectory
Interchange Format (v1.7), and its screenshots as files beside it. --out is made. Paths are shards
or directories with shards.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools import command_line
from tools.episode_formats import atif, inspect_log
from tools.episode_formats.parts import AGENT, Read, Source
from tools.inspect_shards import find_episode, find_shards
from uirl_jax.errors import ConfigError, ShardError
from uirl_jax.shards.reader import read_shard
from uirl_jax.store.files import new_directory
from uirl_jax.types import Trajectory
from uirl_jax.untrusted.json import printable

_WRITERS = {"inspect": inspect_log.write, "atif": atif.write}


def reader(paths: Sequence[Path], episode: str) -> Read:
    """Reads the episodes, each id once; damaged shards are passed over, and said so once.

    Raises: ConfigError: there is not exactly one episode of that id.
    """
    if episode:
        found = find_episode(paths, episode)
        return lambda: iter((found,))
    damaged: set[Path] = set()

    def read() -> Iterator[Trajectory]:
        seen: set[str] = set()
        for path in paths:
            if path in damaged:
                continue
            try:
                trajectories = read_shard(path)[1]
            except ShardError as error:
                print(f"passed over: {error}", file=sys.stderr)
                damaged.add(path)
                continue
            for trajectory in trajectories:
                if trajectory.episode_id not in seen:
                    seen.add(trajectory.episode_id)
                    yield trajectory

    return read


def export(kind: str, paths: Sequence[Path], episode: str, source: Source, out: Path) -> int:
    """Writes `out`, whole or not at all; returns the number of episodes.

    Raises: ConfigError: `out` is there already, or there is no episode. RecordError: a screenshot
      in another format.
    """
    if out.exists():
        raise ConfigError(f"--out={out}: is there already; give a new directory")
    with new_directory(out) as directory:
        count = _WRITERS[kind](reader(paths, episode), source, directory)
        if not count:
            raise ConfigError("no shard could be read: there is no episode")
    return count


@command_line.one_line_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.export_episodes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("format", choices=sorted(_WRITERS))
    parser.add_argument("path", type=Path, help="a shard, or a directory with shards")
    parser.add_argument("--out", type=Path, required=True, help="a directory that is made")
    parser.add_argument("--episode", default="", help="the start of an id; else all episodes")
    parser.add_argument("--name", default="", help="of the evaluation; else that of the path")
    parser.add_argument("--model", default=AGENT, help="the policy's name, for the reader")
    parser.add_argument("--json", type=Path, help="a file for what was written, machine-readable")
    args = parser.parse_args(argv)
    command_line.check_folder("--out", args.out)
    command_line.check_file("--json", args.json)
    paths = find_shards(args.path)
    name = args.name or args.path.resolve().name
    source = Source(printable(name, 200), printable(args.model, 200) or AGENT)
    count = export(args.format, paths, args.episode, source, args.out)
    written = sorted(str(path) for path in args.out.rglob("*.json"))
    if args.json is not None:
        content = {"format": args.format, "episodes": count, "files": written}
        command_line.write_json(args.json, content)
    print(f"{written[0] if len(written) == 1 else args.out}: {count} episodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
