"""The hermetic desktop: opens a session of a task, and demonstrates how it is solved.

A `TaskSpec` goes in, pixels come out, actions go in. Everything follows from (name, seed, variant):
two equal specs give the same pixels and instruction on every machine with the same Pillow. There
are no processes, browsers or clocks. The tasks are in `desktop_tasks`, HTTP is in `server`.
"""

import dataclasses
import hashlib
from typing import Any

import numpy as np
from PIL import Image

from uirl_jax.errors import VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.tasks import desktop_tasks, variants
from uirl_jax.verifiers.tasks.drawing import Box
from uirl_jax.verifiers.tasks.window import Window

TASKS = {
    "desktop/click_button": desktop_tasks.ClickButton,
    "desktop/enter_text": desktop_tasks.EnterText,
    "desktop/data_entry": desktop_tasks.DataEntry,
}
_EVERYWHERE: dict[str, tuple[str, ...]] = {"popup": ("0", "1"), "shift": ("0", "1")}
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "desktop/click_button": {
        "buttons": ("1", "2", "3", "4", "5", "6"),
        "colors": ("2", "3", "4", "5", "6", "7", "8"),
        "by": ("color", "label"),
        "misses": tuple("0123456789"),
        **_EVERYWHERE,
    },
    "desktop/enter_text": {
        "words": tuple(str(count) for count in range(1, len(desktop_tasks.WORDS) + 1)),
        **_EVERYWHERE,
    },
    "desktop/data_entry": {"rows": tuple("12345678"), "columns": ("1", "2", "3"), **_EVERYWHERE},
}


def _told(options: desktop_tasks.Options) -> tuple[int | str, ...]:
    """What instances follow from. An option that came later counts only where it is used: the
    instances of everybody else stay what they were."""
    values = dataclasses.asdict(options)
    if options.words == len(desktop_tasks.WORDS):
        del values["words"]
    return tuple(values.values())


def parse_variant(name: str, variant: str) -> desktop_tasks.Options:
    """Reads "buttons=5,by=label,popup=1".

    Raises:
      VerifierError: unknown task, key or value; the nearest known one is named.
    """
    if name not in VARIANTS:
        raise VerifierError(f"unknown task {name!r}{variants.nearest(name, VARIANTS)}")
    values = variants.read(name, variant, VARIANTS[name])
    options = desktop_tasks.Options(**values)
    if options.buttons > options.colors:
        raise VerifierError(
            f"variant {variant!r} of {name}: {options.buttons} buttons of {options.colors} colors, "
            "but no two have the same"
        )
    return options


class Session:
    """One running task: its window and its judge."""

    def __init__(self, task: TaskSpec) -> None:
        options = parse_variant(task.name, task.variant)
        # A hash and not Python's own: that one is salted per process.
        text = f"{task.name}|{_told(options)}|{task.seed}"
        self._rng = np.random.default_rng(
            int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        )
        self.task = task
        self.judge = TASKS[task.name](self._rng, options)
        self.instruction: str = self.judge.instruction
        self.goal: str = self.judge.goal  # click_button: name of the right target
        self.width_px: int = self.judge.width_px
        self.height_px: int = self.judge.height_px
        screen = (self.width_px, self.height_px)
        widgets = self.judge.layout(self._rng)
        popup = desktop_tasks.popup_widgets(self._rng, screen) if options.popup else []
        self.window = Window(*screen, widgets, popup)
        self._shift_pending = bool(options.shift)

    @property
    def targets(self) -> dict[str, Box]:
        """Where every widget is now: name -> (x0, y0, x1, y1), x1 and y1 outside."""
        return self.window.boxes()

    def screenshot(self) -> Image.Image:
        """The screen as it stands, RGB, width_px x height_px."""
        return self.window.image()

    def act(self, action: Action) -> None:
        """Applies one action. After the end of the episode nothing changes any more."""
        if self.judge.done:
            return
        event = self.window.apply(action)
        if event is not None:
            self.judge.handle(event, self.window)
        if self._shift_pending and not self.judge.done:
            self._shift_pending = False
            self.window.widgets = self.judge.layout(self._rng)

    def progress(self) -> dict[str, Any]:
        """What the task counts, and done: bool, reward: float or None while nothing is decided."""
        return {**self.judge.counts(), "done": self.judge.done, "reward": self.judge.reward}


def open_session(task: TaskSpec) -> Session:
    """Starts a task.

    Raises:
      VerifierError: the name or the variant is unknown.
    """
    return Session(task)


def scripted_action(session: Session, rng: np.random.Generator, quality: float = 1.0) -> Action:
    """The next action of a scripted demonstrator; the session itself is left as it is.

    Args:
      session: not done yet.
      rng: decides when a mistake is made, and where it goes.
      quality: with probability 1 - quality the task's characteristic mistake is made instead.
    """
    wrong = bool(rng.random() >= quality)
    if session.window.popup:
        name = "popup_title" if wrong else "popup_close"
        return desktop_tasks.click_middle(session.targets[name])
    return session.judge.script(session.window, rng, wrong)
