"""A user's own tasks: a folder with task.py, and with page.html if the task is a page.

    python -m uirl_jax.verifiers.server --task-dir examples/own_tasks/thermostat

The folders named at the server's start are loaded and checked once; a request names a task
(own/<folder's name>), never a path. task.py is executed: it is trusted like any program. It has a
class `Task` that extends DrawnTask or PageTask below. docs/own_task.md says how to write one.
Sessions are in `server.session_types`, browsers in `browser.own_page`. Once a folder is loaded, an
exception of its task.py is a UserCodeError: a ValueError would be taken for a caller's mistake.
"""

import dataclasses
import hashlib
import importlib.util
import inspect
import json
import math
import mimetypes
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from uirl_jax import user_code
from uirl_jax.errors import ConfigError, UserCodeError, VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.untrusted.text import readable
from uirl_jax.verifiers.tasks import variants

PREFIX = "own/"
DATA_MARK = '"TASK"'  # in a page: the data of the instance are put in its place
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_MAX_FILES_BYTES = 64 * 1024 * 1024
_MAX_SIDE_PX = 4096
_MAX_INSTRUCTION_CHARS = 4096  # what the client reads

Variants = Mapping[str, tuple[str, ...]]


class DrawnTask:
    """A task that draws its own screen; no browser. Subclass it as `Task`.

    `__init__(self, rng, options)` sets the three attributes below. All that differs between
    instances comes from `rng` (np.random.Generator, from the seed) and `options` (what the variant
    says, keys and values as in `variants`, numbers as int).
    """

    instruction: str
    width_px: int
    height_px: int

    def __init__(self, rng: np.random.Generator, options: dict[str, Any]) -> None:
        raise NotImplementedError

    variants: ClassVar[Variants] = {}  # key -> the values that it may have

    def draw(self) -> Image.Image:
        """The screen as it stands, width_px x height_px."""
        raise NotImplementedError

    def act(self, action: Action) -> None:
        """Applies an action, in pixels of the screen. It is not called after the end."""
        raise NotImplementedError

    def progress(self) -> dict[str, Any]:
        """What the task counts, done: bool, and reward: float or None while nothing is decided.
        Success is a reward of 1 when done."""
        raise NotImplementedError

    def script(self, rng: np.random.Generator, wrong: bool) -> Action | None:
        """A demonstrator's next action; with `wrong` its typical mistake. None: there is none."""
        return None


class PageTask:
    """A task that is a page in Chromium: page.html beside task.py. Subclass it as `Task`.

    `__init__` as of DrawnTask. The page has `data` as JSON where it says "TASK" (in double quotes),
    and a function `state()` that says what the judge has to know.
    """

    instruction: str
    width_px: int
    height_px: int
    data: Any  # of the instance; JSON

    def __init__(self, rng: np.random.Generator, options: dict[str, Any]) -> None:
        raise NotImplementedError

    variants: ClassVar[Variants] = {}

    def progress(self, state: Any) -> dict[str, Any]:
        """As DrawnTask's, from what the page's `state()` returns."""
        raise NotImplementedError

    def script(self, state: Any, rng: np.random.Generator, wrong: bool) -> Action | None:
        """As DrawnTask's."""
        return None


@dataclasses.dataclass(frozen=True)
class OwnTask:
    """A loaded folder."""

    name: str  # own/<folder's name>
    kind: type[DrawnTask] | type[PageTask]
    files: Mapping[str, bytes]  # what its page may ask for, by the path below the folder

    @property
    def has_script(self) -> bool:
        return self.kind.script not in (DrawnTask.script, PageTask.script)

    def make(self, task: TaskSpec) -> DrawnTask | PageTask:
        """An instance.

        Raises:
          VerifierError: an unknown variant.
          UserCodeError: its `__init__` raised, or made data that are not JSON.
        """
        options = variants.read(self.name, task.variant, self.kind.variants)
        text = f"{self.name}|{sorted(options.items())}|{task.seed}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        with user_code.blamed(self.name):
            instance = self.kind(np.random.default_rng(seed), options)
            if isinstance(instance, PageTask):
                _json(instance.data)  # here: the browser would wait for a page that cannot be sent
            return instance

    def page_file(self, path: str, instance: PageTask) -> tuple[bytes, str] | None:
        """A file of the page as (body, content type); "" is the page itself."""
        if path in ("", "page.html"):
            page = self.files["page.html"].decode("utf-8")
            return page.replace(DATA_MARK, _json(instance.data)).encode(), "text/html;charset=utf-8"
        if path not in self.files:
            return None
        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        charset = ";charset=utf-8" if kind.startswith("text/") else ""
        return self.files[path], kind + charset


def load(task_dirs: Sequence[str | Path]) -> dict[str, OwnTask]:
    """Name -> task, of folders.

    Raises:
      ConfigError: a folder is not a task, or its task does not do what it must; all faults at once.
    """
    loaded: dict[str, OwnTask] = {}
    faults = []
    for folder in map(Path, task_dirs):
        try:
            own = _load_one(folder.resolve())
            if own.name in loaded:
                raise ConfigError(f"there is another folder of the name {own.name}")
            loaded[own.name] = own
        except (UnicodeDecodeError, OSError, ConfigError) as error:
            faults.append(f"{folder}: {error}")
    if faults:
        raise ConfigError("own task " + "; ".join(faults))
    return loaded


def check_progress(name: str, progress: object) -> dict[str, Any]:
    """What a task's progress() returned; a VerifierError that says what is wrong with it."""
    where = f"{name}: progress()"
    if not isinstance(progress, dict) or not all(isinstance(key, str) for key in progress):
        raise VerifierError(
            f"{where} is a {type(progress).__name__}, expected a dict with str keys"
        )
    done, reward = progress.get("done"), progress.get("reward")
    if not isinstance(done, bool):
        raise VerifierError(f"{where} has done={done!r}, expected True or False")
    if reward is None and "reward" in progress and not done:
        return progress
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise VerifierError(
            f"{where} has reward={reward!r} and done={done}, expected a number"
            + ("" if done else ", or None while nothing is decided")
        )
    return progress


def _load_one(folder: Path) -> OwnTask:
    name = folder.name
    if not _NAME.fullmatch(name):
        raise ConfigError(f"the folder's name is {name!r}, expected a-z, 0-9, _ and -")
    source = folder / "task.py"
    if not source.is_file():
        raise ConfigError("there is no task.py in it; docs/own_task.md says how to write one")
    try:
        kind = _run(source, name)
        files = _read_files(folder) if issubclass(kind, PageTask) else {}
        own = OwnTask(PREFIX + name, kind, files)
        _check(own)
    except (ConfigError, VerifierError, UserCodeError, OSError) as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # whatever somebody's program raises is told with its line
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(source)
        ]
        line = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"task.py{line}: {type(error).__name__}: {error}") from error
    return own


def _run(source: Path, name: str) -> type[DrawnTask] | type[PageTask]:
    """Runs task.py; its class Task."""
    module_name = f"uirl_jax_own_task.{name}"
    spec = importlib.util.spec_from_file_location(module_name, source)
    assert spec is not None and spec.loader is not None  # a .py file has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    kind = vars(module).get("Task")
    if not inspect.isclass(kind) or not issubclass(kind, DrawnTask | PageTask):
        raise ConfigError(
            "task.py has no class Task that extends own_tasks.DrawnTask or own_tasks.PageTask"
        )
    base, wanted = (DrawnTask, ("draw", "act")) if issubclass(kind, DrawnTask) else (PageTask, ())
    if lacks := [
        name
        for name in ("__init__", *wanted, "progress")
        if getattr(kind, name) is getattr(base, name)
    ]:
        raise ConfigError(f"task.py: class Task has no {', '.join(lacks)} of its own")
    return kind


def _read_files(folder: Path) -> dict[str, bytes]:
    """All that a page may ask for: no programs, nothing hidden, nothing outside the folder."""
    files: dict[str, bytes] = {}
    size_bytes = 0
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith((".", "__")) for part in parts)
        if hidden or path.suffix == ".py" or not path.is_file():
            continue
        if not path.resolve().is_relative_to(folder):
            raise ConfigError(f"{'/'.join(parts)} is a link out of the folder")
        size_bytes += path.stat().st_size
        if size_bytes > _MAX_FILES_BYTES:
            raise ConfigError(f"its files have more than {_MAX_FILES_BYTES} bytes")
        files["/".join(parts)] = path.read_bytes()
    if "page.html" not in files:
        raise ConfigError("a PageTask has a page.html beside its task.py")
    if DATA_MARK not in files["page.html"].decode("utf-8"):
        raise ConfigError(f"page.html has {DATA_MARK} nowhere: the data of the task go there")
    return files


def _check(own: OwnTask) -> None:
    """One instance, as far as it goes without a browser."""
    instance = own.make(TaskSpec(own.name, seed=0))
    said = instance.instruction
    if (
        not isinstance(said, str)
        or not 1 <= len(said) <= _MAX_INSTRUCTION_CHARS
        or not said.strip()
        or readable(said) != said
    ):
        raise ConfigError(
            f"instruction is {said!r:.80}, expected 1-{_MAX_INSTRUCTION_CHARS} characters, without "
            "control characters"
        )
    size = (instance.width_px, instance.height_px)
    if not all(isinstance(px, int) and 1 <= px <= _MAX_SIDE_PX for px in size):
        raise ConfigError(f"width_px, height_px are {size}, expected 1-{_MAX_SIDE_PX} pixels")
    if isinstance(instance, PageTask):
        return
    check_screen(own.name, instance)
    _json(check_progress(own.name, instance.progress()))


def check_screen(name: str, instance: DrawnTask) -> Image.Image:
    """The screen, RGB.

    Raises:
      VerifierError: it is not as large as announced.
      UserCodeError: `draw` raised, or what it returned cannot be read.
    """
    with user_code.blamed(name):
        image = instance.draw()
        if isinstance(image, Image.Image):
            image = image.convert("RGB")  # of a file that was opened, this reads it
    size = (instance.width_px, instance.height_px)
    if not isinstance(image, Image.Image) or image.size != size:
        got = image.size if isinstance(image, Image.Image) else type(image).__name__
        raise VerifierError(f"{name}: draw() returned {got}, expected an image of {size} pixels")
    return image


def _json(value: object) -> str:
    """As it may stand in a script of a page."""
    try:
        return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{value!r:.80} is not JSON: {error}") from error
