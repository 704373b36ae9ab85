"""Makes data for a grounding cold start: screens in Chromium, "Click X.", and the box of X.

    python -m tools.make_grounding_data --out=grounding --screens=10000 --seed=0
    python -m tools.make_grounding_data --out=grounding-test --screens=500 --seed=0 --split=test
    python -m uirl_jax.main --config=configs/miniwob_cpu.py:base --workdir=runs/grounded \\
        --config.cold_start.demonstrations="('grounding',)"

Pages are composed at random from HTML and style sheets of npm's registry, or are MiniWoB++'s; boxes
and texts are read from the page. --split=test has other components than train. Interrupted, the
same command continues. docs/grounding_data.md.
"""

import asyncio
import collections
import re
import sys
import time
from pathlib import Path

from absl import app, flags

from tools import command_line
from tools.grounding import dataset, pointing, sources
from tools.grounding.libraries import LIBRARIES, LibraryError, cache_directory, read_css
from uirl_jax.console import Progress
from uirl_jax.errors import ConfigError
from uirl_jax.verifiers.browser import BrowserError

_SIDES_PX = range(64, 4097)
_MAX_SCREENS = 1_000_000

_OUT = flags.DEFINE_string("out", None, "folder for the data; it is made")
_SCREENS = flags.DEFINE_integer("screens", None, "how many screens")
_SEED = flags.DEFINE_integer("seed", 0, "of the stream", lower_bound=0)
_SPLIT = flags.DEFINE_enum("split", "train", sources.SPLITS, "test has held-out components alone")
_SIZE = flags.DEFINE_string("size", "160x210", "WIDTHxHEIGHT of the pages in pixels")
_DENSITY = flags.DEFINE_integer("density", 1, "pixels of the screen a side of one of --size", 1, 4)
_QUESTIONS = flags.DEFINE_integer("questions", 4, "at most so many of a screen", 1, 50)
_SOURCES = flags.DEFINE_list("sources", [], "these alone: plain, bootstrap, miniwob, ...")
_BROWSERS = flags.DEFINE_integer("browsers", 6, "screens drawn at once", 1, 64)
_CACHE = flags.DEFINE_string("cache", None, "of the libraries; none: ~/.cache/uirl_jax/components")


def read_size(text: str) -> tuple[int, int]:
    """Raises ConfigError for what is no size of a screen."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if match is None or not all(int(side) in _SIDES_PX for side in match.groups()):
        raise ConfigError(
            f"--size={text}: expected WIDTHxHEIGHT, {_SIDES_PX.start} to {_SIDES_PX.stop - 1} "
            "pixels each"
        )
    return int(match[1]), int(match[2])


def find_sources(
    split: str, wanted: list[str], size_px: tuple[int, int], cache: Path, density: int = 1
) -> tuple[dict[str, tuple[str, ...]], dict[str, str], list[str]]:
    """What screens can be drawn from.

    Returns:
      Components by source; style sheets by library; why sources are left out.

    Raises: ConfigError: an unknown source, a wanted one that cannot be had, or none at all.
    """
    known = sources.source_names(split)
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(
            f"--sources={','.join(unknown)}: not of --split={split}, which has {', '.join(known)}"
        )
    found: dict[str, tuple[str, ...]] = {}
    css: dict[str, str] = {}
    reasons: dict[str, str] = {}
    libraries = {library.name: library for library in LIBRARIES}
    for name in wanted or known:
        try:
            if name in libraries:
                css[name] = read_css(libraries[name], cache)
            if name == "miniwob" and sources.miniwob_scale(size_px, density) is None:
                raise BrowserError(
                    "its screens are 160x210, 320x420, 480x630 or 640x840, --size times --density"
                )
            found[name] = sources.miniwob_tasks(split) if name == "miniwob" else (name,)
        except (LibraryError, BrowserError) as error:
            reasons[name] = str(error)
    lines = [f"left out: {name}: {reason}" for name, reason in reasons.items()]
    if not found or (wanted and reasons):
        raise ConfigError("; ".join(lines))
    return found, css, lines


async def make(out: Path, screens: int, size_px: tuple[int, int]) -> int:
    """Fills the folder; returns the number of examples. Raises UirlError."""
    try:
        from tools.grounding.browser import Browsers
        from tools.grounding.stream import Stream
    except ModuleNotFoundError as error:
        raise BrowserError(
            f"screens are drawn in a browser, and {error.name} is not installed: "
            "pip install -e '.[browser]'"
        ) from error
    split, seed, density = _SPLIT.value, _SEED.value, _DENSITY.value
    cache = Path(_CACHE.value) if _CACHE.value else cache_directory()
    found, css, left_out = find_sources(split, _SOURCES.value, size_px, cache, density)
    for line in left_out:
        print(line, flush=True)
    names = {f"{one.package}@{one.version}" for one in LIBRARIES if one.name in css}
    async with Browsers(size_px, css, density=density, browsers=_BROWSERS.value) as browsers:
        settings = dataset.Settings(
            seed=seed,
            split=split,
            size=size_px,
            density=density,
            questions=_QUESTIONS.value,
            sources={name: list(components) for name, components in found.items()},
            libraries=sorted(names),
            renderer=browsers.renderer,
        )
        folder = dataset.Folder(out, settings)
        folder.refuse_more_than(screens)
        stream = Stream(browsers, found, seed=seed, split=split, questions=_QUESTIONS.value)
        progress = Progress("screens", screens)
        started_s = time.monotonic()
        try:
            drawn = await stream.fill(folder, screens, progress.update)
        finally:
            progress.close()
        taken_s = time.monotonic() - started_s
    shards = -(-screens // dataset.SCREENS_PER_SHARD)
    rows = folder.finish(shards, pointing.SOURCE)
    counts = collections.Counter(row["component"].partition("/")[0] for row in rows)
    speed = f", {drawn} drawn at {drawn / taken_s * 60:.0f} a minute" if drawn else ""
    print(f"{out}: {screens} screens, {len(rows)} examples{speed}")
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return len(rows)


@command_line.one_line_errors()
def main(argv: list[str]) -> int:
    del argv
    try:
        folder, screens = _OUT.value, _SCREENS.value
        if folder is None or screens is None:
            raise ConfigError(
                "--out and --screens are needed; e.g. --out=grounding --screens=1000 --seed=0"
            )
        if not 1 <= screens <= _MAX_SCREENS:
            raise ConfigError(f"--screens={screens}: expected 1 to {_MAX_SCREENS}")
        out, size_px = Path(folder), read_size(_SIZE.value)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out={out}: {error.strerror}") from error
        asyncio.run(make(out, screens, size_px))
    except KeyboardInterrupt:
        print("interrupted: the same command continues", file=sys.stderr)
        return 130
    print(f"to evaluate on it: a config with verifier.task_dirs=('{out / pointing.NAME}',)")
    print(f"look at it: {out / dataset.SHEET}")
    print(f"to learn from it: --config.cold_start.demonstrations=\"('{out}',)\"")
    return 0


if __name__ == "__main__":
    app.run(main)
