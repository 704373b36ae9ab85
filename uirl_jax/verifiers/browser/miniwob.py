"""`miniwob/<task>`: the tasks of MiniWoB++ (Farama's package `miniwob`), in a real browser.

The package's pages and scripts are served; none of its Python code is imported. The screen is the
task's area, 160x210 pixels, in the upper left corner of the viewport; with `scale=2` each pixel of
the page becomes four of the screen. The instruction is the task's utterance. An episode seeds the
page's random numbers and has no time limit. It restarts the page of an earlier episode, as the
package does, or loads a fresh one: no difference can be seen (tests/test_miniwob_restarts.py), and
a restart costs a tenth of the CPU time.

The reward is the raw one (WOB_RAW_REWARD_GLOBAL), which does not decay with time, and 0 where it is
negative; it is given at the end. Only 1 is a success, because some tasks pay for parts. Nothing
changes after the end. docs/miniwob_tasks.md lists the tasks and why some cannot be played.
"""

import functools
import importlib.resources
import importlib.util
import json
import mimetypes
import re
from pathlib import Path
from typing import Any

import numpy as np

from uirl_jax.errors import VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.browser import MINIWOB_PREFIX, BrowserError
from uirl_jax.verifiers.browser.pool import BrowserPool
from uirl_jax.verifiers.browser.tab import Tab
from uirl_jax.verifiers.dialects import AIMED_REWARD
from uirl_jax.verifiers.tasks import variants

AREA_PX = (160, 210)
VARIANTS = {"scale": ("1", "2", "3", "4")}  # pixels of the screen for one of the page
_VIEWPORT_PX = (500, 320)
_URL = "https://miniwob.invalid/"
_SCRIPT = re.compile(rb'<script src="([^"]+)"></script>')
_STYLE = re.compile(rb'<link rel="stylesheet" [^>]*href="([^"]+)">')
_SEED = b"uirlSeedOfTheEpisode"  # where the seed belongs in what is read once for all episodes

# Of these something outlasts the beginning of another episode, or follows a clock: always a fresh
# page.
_ALWAYS_FRESH = frozenset(
    MINIWOB_PREFIX + name
    for name in (
        *("ascending-numbers", "book-flight", "book-flight-nodelay", "button-delay"),
        *("chase-circle", "choose-date", "choose-date-easy", "choose-date-medium"),
        *("choose-date-nodelay", "click-menu", "click-menu-2", "click-pie", "click-pie-nodelay"),
        *("copy-paste-2", "drag-box", "drag-cube", "drag-items", "drag-items-grid"),
        *("drag-sort-numbers", "draw-circle", "draw-line", "enter-date", "find-word"),
        *("form-sequence", "hot-cold", "hover-shape", "moving-items", "navigate-tree"),
        *("resize-textarea", "scroll-text", "search-engine", "simon-says", "stock-market"),
        *("terminal", "text-editor", "tic-tac-toe", "use-autocomplete", "use-autocomplete-nodelay"),
        *("use-colorwheel", "use-colorwheel-2", "use-slider", "use-slider-2", "use-spinner"),
    )
)

# Seeded once when core.js has been read, for what a page draws from while it loads, and again here,
# as the package does. The longest time that setTimeout takes is 24 days. The first lines are for a
# page that has been played: what of an episode genProblem leaves standing.
_START = """(() => {
  document.activeElement.blur();
  for (const touched of document.querySelectorAll("[data-tampered]")) {
    touched.removeAttribute("data-tampered");
  }
  delete window.expertState;  // the demonstrator's
  [WOB_EPISODE_ID, core.wob_latest, core.wob_scores] = [0, "-", []];
  document.getElementById("reward-display").innerHTML = core.DISPLAY_HTML;
  Math.seedrandom(SEED);
  core.EPISODE_MAX_TIME = 2147483647;
  core.countdownTimer = () => {};
  core.startEpisodeReal();
  core.startEpisode = () => {};  // the end would cover the page with a button for another episode
  return core.getUtterance();
})()"""
_PROGRESS = """({done: WOB_DONE_GLOBAL, raw_reward: WOB_RAW_REWARD_GLOBAL,
  reason: WOB_REWARD_REASON})"""


def find_pages() -> Path:
    """Where the package keeps its pages. Raises BrowserError where it is not installed."""
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise BrowserError("miniwob/<task> needs the package miniwob: pip install -e '.[browser]'")
    return Path(spec.submodule_search_locations[0]) / "html"


@functools.cache
def task_names() -> tuple[str, ...]:
    """Every task of the package: "miniwob/click-test", ..."""
    return tuple(
        sorted(MINIWOB_PREFIX + path.stem for path in (find_pages() / "miniwob").glob("*.html"))
    )


@functools.cache
def _read_script() -> str:
    """The demonstrator, one function of the task and of `careless` for all of its files."""
    folder = importlib.resources.files("uirl_jax") / "assets/pages/miniwob"
    files = sorted(folder.iterdir(), key=lambda file: (file.name != "page.js", file.name))
    parts = [file.read_text(encoding="utf-8") for file in files]
    return "\n".join(
        ["((name, careless) => {", *parts, "return experts[name] ? experts[name]() : null;", "})"]
    )


def parse_variant(name: str, variant: str) -> int:
    """The scale. Raises VerifierError for an unknown task or variant."""
    if name not in task_names():
        raise VerifierError(f"unknown task {name!r}{variants.nearest(name, task_names())}")
    return int(variants.read(name, variant, VARIANTS).get("scale", 1))


@functools.lru_cache(maxsize=64)
def _read(path: Path) -> bytes:
    """A file of the package; a page has its scripts and style sheets in it.

    A page of six requests costs Chromium a quarter more CPU time than a page of one
    (docs/notes/performance.md).
    """
    body = path.read_bytes()
    if path.name == "core.js":
        body += b"\nMath.seedrandom(" + _SEED + b");\n"
    elif path.name == "core.css":
        body += b"\n* { caret-animation: manual; }\n"  # one that blinks is there by chance
    elif path.suffix == ".html":
        body = _SCRIPT.sub(lambda of: _inlined(path, of, b"script", unfit=b"</script"), body)
        body = _STYLE.sub(lambda of: _inlined(path, of, b"style", unfit=b"url("), body)
    return body


def _inlined(page: Path, reference: re.Match[bytes], tag: bytes, *, unfit: bytes) -> bytes:
    """What a page refers to, in its place; with `unfit` in it, it would be another thing there."""
    part = _read((page.parent / reference[1].decode()).resolve())
    return reference[0] if unfit in part else b"<%b>%b</%b>" % (tag, part, tag)


class MiniWob:
    """A running session (server.session_types.RunningTask)."""

    renderer = ""  # the server sets it
    judges_every_action = False
    is_still = False

    def __init__(self, pool: BrowserPool, tab: Tab, task: TaskSpec) -> None:
        self._pool = pool
        self._tab = tab
        self._task = task
        self._pages = find_pages().resolve()
        self._scale = parse_variant(task.name, task.variant)
        self._done = False
        self._careless: bool | None = None  # the demonstrator, once it has begun
        self._aim: float | None = None  # its reward, if 1 is out of reach
        self.instruction = ""
        self.width_px, self.height_px = (side * self._scale for side in AREA_PX)
        self.delay_s = 0.0  # `act` returns when the page has settled

    @classmethod
    async def open(cls, pool: BrowserPool, task: TaskSpec) -> "MiniWob":
        url = f"{_URL}{task.name}.html"
        scale = parse_variant(task.name, task.variant)
        page = None if task.name in _ALWAYS_FRESH else (url, scale)
        tab = await pool.acquire(page)
        try:
            session = cls(pool, tab, task)
            if page is None or not tab.resume(page):
                await tab.load(
                    url,
                    session._files,
                    screen_px=(session.width_px, session.height_px),
                    viewport_px=_VIEWPORT_PX,
                    scale=session._scale,
                    trusted=True,
                    restarts=page is not None,
                )
            said = await tab.evaluate(_START.replace("SEED", json.dumps(str(task.seed))))
            await tab.settle()
            session.instruction = said if isinstance(said, str) else said["utterance"]
        except BaseException:
            tab.restarts = None  # it does not
            await pool.release(tab)
            raise
        return session

    async def act(self, action: Action) -> None:
        if not self._done:
            await self._tab.act(action)

    async def screenshot(self, image_format: str) -> bytes:
        return await self._tab.screenshot(image_format)

    async def evaluate(self, expression: str) -> Any:
        """As Tab.evaluate, for whoever reads the page (tools/grounding)."""
        return await self._tab.evaluate(expression)

    async def progress(self) -> dict[str, Any]:
        """done, reward (None before), and raw_reward and reason as the page has them.

        With a script that cannot reach 1 also aimed_reward (demonstrations.recording).

        A wrong end pays 0, as no end does. If it paid less, an invalid action or a click that hits
        nothing would pay better than an attempt.
        """
        counts = await self._tab.evaluate(_PROGRESS)
        self._done = bool(counts["done"])
        reward = max(0.0, float(counts["raw_reward"] or 0.0)) if self._done else None
        aim = {} if self._aim is None else {AIMED_REWARD: self._aim}
        return {**counts, "done": self._done, "reward": reward, **aim}

    async def close(self) -> None:
        await self._pool.release(self._tab)

    async def scripted_action(
        self, rng: np.random.Generator, quality: float = 1.0
    ) -> Action | None:
        """What a demonstrator does next; None where it knows nothing (any more).

        It looks into the page, and acts by mouse and keyboard alone.

        Args:
          rng: decides at the session's first action whether this demonstrator is a careless one.
          quality: with probability 1 - quality it is: every click takes the next thing of the same
            sort, the one before where there is none, and misses where there is no other. Only
            into a field that it fills in it clicks rightly. By the session, not by the click: of
            several clicks, all right, hardly any would be.
        """
        name = json.dumps(self._task.name.removeprefix(MINIWOB_PREFIX))
        if self._careless is None:
            self._careless = bool(rng.random() >= quality)
        careless = json.dumps(self._careless)
        fields = await self._tab.evaluate(f"{_read_script()}({name}, {careless})")
        if fields is None:
            return None
        self._aim = fields.pop("aim", self._aim)
        for key in ("x", "y", "x2", "y2", "amount"):
            if key in fields:
                fields[key] = round(fields[key] * self._scale)
        return Action(**fields)

    def _files(self, url: str) -> tuple[bytes, str] | None:
        path = (self._pages / url.partition("?")[0].removeprefix(_URL)).resolve()
        if not path.is_relative_to(self._pages) or not path.is_file():
            return None
        body = _read(path).replace(_SEED, json.dumps(str(self._task.seed)).encode())
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return body, f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
