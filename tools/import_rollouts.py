"""Turns rollouts that ui-rl saved into demonstrations for a cold start.

    python -m tools.import_rollouts --config=ui_rl.py --rollouts=rollouts --out=demos
    python -m tools.import_rollouts ... --rollouts=rollouts/row_002_fail_0001.json --failures

Reads row_*.json, or the files that are named, and writes one shard file for each, as
tools.record_demo does. The config is that of the run that will learn: its model, action format and
limits decide how the same actions are written. Rollouts that were no success are left out, unless
--failures. docs/coming_from_ui_rl.md.
"""

import collections
import sys
from pathlib import Path

from absl import app, flags

from tools import command_line
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.demonstrations.ui_rl import read_rollout
from uirl_jax.errors import ConfigError, RecordError
from uirl_jax.families.chat import Chat
from uirl_jax.families.table import add_own, family_of
from uirl_jax.models import hub
from uirl_jax.run import completed
from uirl_jax.shards.layout import layout_of
from uirl_jax.shards.writer import write_shard

_CONFIG = reading.define_config_file(RunConfig, help="of the run that will learn from it")
_OUT = flags.DEFINE_string("out", None, "folder for the demonstrations; it is made")
_FROM = flags.DEFINE_multi_string("rollouts", [], "a rollout, or a folder with row_*.json")
_FAILURES = flags.DEFINE_boolean("failures", False, "also rollouts that were no success")


def find_rollouts(paths: list[str]) -> list[Path]:
    """Raises: ConfigError: no such file, or a folder without rollouts."""
    found: list[Path] = []
    for path in map(Path, paths):
        files = sorted(path.glob("row_*.json")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise ConfigError(f"{path}: no such file, or a folder without row_*.json")
        found += files
    return list(dict.fromkeys(found))


def _targets(files: list[Path], out: Path) -> dict[Path, Path]:
    """Where each goes. Two runs have rollouts of one name: the second one gets a number.

    Raises: ConfigError: one is there already.
    """
    targets: dict[Path, Path] = {}
    taken: set[Path] = set()
    for file in files:
        number, target = 1, out / f"{file.stem}.tfrecord"
        while target in taken:
            number += 1
            target = out / f"{file.stem}-{number}.tfrecord"
        if target.exists():
            raise ConfigError(f"{target}: is there already; give another --out")
        taken.add(target)
        targets[file] = target
    return targets


def import_all(cfg: RunConfig, files: list[Path], out: Path, failures: bool) -> int:
    """Writes the demonstrations; returns how many. A file that is refused costs itself alone.

    Raises: ConfigError, ModelError: of the config's model; ShardError: a full disk.
    """
    cfg = completed(cfg)
    model_dir = hub.model_directory(cfg.model.path, weights=False)
    add_own(cfg.model.family)
    family = family_of(model_dir)
    model_cfg = family.read_config(model_dir)
    chat = Chat(model_dir, cfg.chat, family.chat)
    inputs, layout = family.make_inputs(model_cfg), layout_of(model_cfg)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out={out}: {error.strerror}") from error
    counts: collections.Counter[str] = collections.Counter()
    for file, target in _targets(files, out).items():
        try:
            trajectory = read_rollout(file, chat, inputs)
        except RecordError as error:
            print(f"refused: {error}", file=sys.stderr)
            counts["refused"] += 1
            continue
        if not trajectory.success and not failures:
            counts["no success"] += 1
            continue
        longest = max(len(turn.context_ids) for turn in trajectory.turns)
        most = max(len(turn.token_ids) for turn in trajectory.turns)
        limits = (cfg.max_context_tokens, cfg.actor.rollout.max_new_tokens)
        if longest > limits[0] or most > limits[1]:
            counts["longer than the config's limits"] += 1
            print(
                f"left out: {file}: a context of {longest} tokens and an answer of {most}; the "
                f"config takes {limits[0]} and {limits[1]}",
                file=sys.stderr,
            )
            continue
        write_shard(target, [trajectory], base_hash="", layout=layout)
        counts["written"] += 1
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return counts["written"]


@command_line.one_line_errors()
def main(argv: list[str]) -> int:
    del argv
    wanted = ((_CONFIG, "config"), (_OUT, "out"), (_FROM, "rollouts"))
    if missing := [f"--{name}" for flag, name in wanted if not flag.value]:
        raise ConfigError(
            f"{' and '.join(missing)} missing; e.g. --config=ui_rl.py --rollouts=rollouts "
            "--out=demos"
        )
    cfg = reading.from_config(RunConfig, _CONFIG.value)
    files = find_rollouts(_FROM.value)
    written = import_all(cfg, files, Path(_OUT.value), _FAILURES.value)
    if not written:
        print("nothing was written", file=sys.stderr)
        return 1
    print(f"to learn from it: --config.cold_start.demonstrations=\"('{_OUT.value}',)\"")
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=reading.parse_flags)
