"""Makes a set of recorded screens and steps from a published one, from JSON lines, or from nothing.

    python -m tools.prepare_gui_data --kind=demo --rows=100 --out=demo
    python -m tools.prepare_gui_data mine.jsonl --kind=jsonl --out=mine
    python -m tools.prepare_gui_data grounding grounding-test --kind=grounding --out=pointing
    python -m tools.prepare_gui_data aitw/general --kind=aitw --splits=standard.json --out=general

--out gets rows.parquet, which tasks `recorded/<set>` play, verl/<split>.parquet for verl's
RLHFDataset, left_out.jsonl with every row that was left out and why, and summary.json. It is
renamed into place when it is whole. Nothing is downloaded. docs/gui_data.md.
"""

from pathlib import Path
from typing import Any

from absl import app, flags

from tools import command_line
from tools.gui_data import sets
from tools.gui_data.preparing import LEFT_OUT, ROWS, Wanted, make_set
from tools.gui_data.source import MAX_LINES, LeftOut
from uirl_jax.errors import ConfigError

_KIND = flags.DEFINE_enum("kind", None, sets.KINDS, "of the source")
_OUT = flags.DEFINE_string("out", None, "folder for the set; it must not exist")
_IMAGES = flags.DEFINE_string("images", None, "folder of the pictures, if not the published one")
_SPLITS = flags.DEFINE_string("splits", None, "JSON table of splits, if not the published one")
_LIMIT = flags.DEFINE_integer("limit", None, "stop after so many rows", lower_bound=1)
_LONGEST = flags.DEFINE_integer("longest_px", None, "shrink larger pictures", lower_bound=16)
_TEST = flags.DEFINE_float("test_share", 0.1, "of a set without splits", 0, 1)
_VALIDATION = flags.DEFINE_float("validation_share", 0.0, "of a set without splits", 0, 1)
_VERL = flags.DEFINE_boolean("verl", True, "also files for verl")
_ROWS = flags.DEFINE_integer("rows", 90, "of --kind=demo", 1, 1_000_000)
_SEED = flags.DEFINE_integer("seed", 0, "of --kind=demo")


def _wanted() -> Wanted:
    return Wanted(
        images=Path(_IMAGES.value) if _IMAGES.value else None,
        splits=Path(_SPLITS.value) if _SPLITS.value else None,
        limit=_LIMIT.value,
        longest_px=_LONGEST.value,
        validation_share=_VALIDATION.value,
        test_share=_TEST.value,
        has_verl=_VERL.value,
        demo_rows=_ROWS.value,
        demo_seed=_SEED.value,
    )


def _tell(out: Path, summary: dict[str, Any], left_out: LeftOut) -> None:
    splits = ", ".join(f"{split} {count}" for split, count in summary["splits"].items())
    print(f"{out / ROWS}: {summary['rows']} rows ({splits}), {summary['steps']} steps")
    if left_out.counts:
        counts = ", ".join(
            f"{count} {what}{'s' if count > 1 else ''}"
            for what, count in summary["left_out"].items()
        )
        few = max(left_out.counts.values()) <= MAX_LINES
        named = "them" if few else f"the first {MAX_LINES:,} of each kind"
        print(f"warning: left out: {counts}; {out / LEFT_OUT} names {named}")
        print(f"the first: {left_out.first}")
    for note in left_out.notes:
        print(f"warning: {note}")
    if shared := summary["screens_in_two_splits"]:
        print(f"warning: {shared} screens are in two splits of the source's own")
    if len(summary["splits"]) == 1:
        print(f"warning: every row is in split {splits.split()[0]}")
    print(f"to play it: --recorded-set=NAME={out / ROWS}, and the task recorded/NAME")


@command_line.one_line_errors()
def main(argv: list[str]) -> int:
    if not _KIND.value or not _OUT.value:
        raise ConfigError("--kind or --out is missing; e.g. mine.jsonl --kind=jsonl --out=mine")
    out = Path(_OUT.value)
    _tell(out, *make_set(_KIND.value, argv[1:], out, _wanted()))
    return 0


if __name__ == "__main__":
    app.run(main)
