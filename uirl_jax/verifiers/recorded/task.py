"""A recorded row as a session of the bundled server (`session_types.RunningTask`).

By default one step is shown and one action ends the episode. With `walk=1` the session walks along
the row's steps: the right action (`rules.match`) shows the next screen, a wrong one stays on the
screen and costs a turn, `terminate` ends it wherever it is said. Its states are those of verl's GUI
agent loop:

    pending --first screenshot--> generating --act--> processing_action --> generating | terminated

Nothing is drawn and no process runs: what is shown are the set's own pictures. `draw` picks the
row, `rules` judges, `history` words the instruction, `sets` opens the files.
"""

import asyncio
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from uirl_jax.errors import ImageError, VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.client.image_header import image_size
from uirl_jax.verifiers.recorded import history, rules
from uirl_jax.verifiers.recorded.checks import MAX_PIXELS
from uirl_jax.verifiers.recorded.draw import Drawn, pick_step
from uirl_jax.verifiers.recorded.row import Row, Step
from uirl_jax.verifiers.screenshots import encode_again
from uirl_jax.verifiers.tasks import variants

# walk: 1 walks along all steps. level: low also tells what the shown step shall do.
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "step": ("one",),
    "walk": ("0", "1"),
    "level": ("high", "low"),
}
MAX_TURNS = 20  # of a walk: gui_agent.max_turns of verl's GUI agent example
MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff", "webp": b"RIFF"}


class State(enum.StrEnum):
    """Of a session, as in verl's GUI agent loop."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_ACTION = "processing_action"
    TERMINATED = "terminated"


def walks(task: TaskSpec) -> bool:
    """Whether an episode goes along all steps of its row. Raises: VerifierError."""
    return variants.read(task.name, task.variant, VARIANTS).get("walk", 0) == 1


class RecordedTask:
    """One episode on a row.

    Raises:
      VerifierError: an unknown variant, or a row whose pictures are not what it says of them.
    """

    renderer = ""
    delay_s = 0.0  # everything is there at once
    judges_every_action = True  # a recorded step may be an answer, or the end
    is_still = True  # so a `wait` takes no time

    def __init__(self, task: TaskSpec, row: Row, drawn: Drawn) -> None:
        options = variants.read(task.name, task.variant, VARIANTS)
        walking = walks(task)
        if walking and "step" in options:
            raise VerifierError(f"variant {task.variant!r} of {task.name}: step=one or walk=1")
        if walking and options.get("level") == "low":
            raise VerifierError(
                f"variant {task.variant!r} of {task.name}: level=low tells what one step shall do; "
                "a walk has one instruction for all, so leave it out, or walk=1"
            )
        if not row.steps:
            raise VerifierError(f"{task.name}: row {row.row_id!r} has no step")
        shown = None if walking else pick_step(row, drawn)
        self._row = row
        self._steps = row.steps if shown is None else row.steps[shown : shown + 1]
        self._first = 0 if shown is None else shown  # index in the row of the first of _steps
        self._max_turns = MAX_TURNS if walking else 1
        self.instruction = history.instruction(row, shown, low=options.get("level") == "low")
        if not self.instruction.strip():
            raise VerifierError(f"{task.name}: row {row.row_id!r} has no instruction")
        self.width_px, self.height_px = self._steps[0].width_px, self._steps[0].height_px
        self._at = 0  # the step that is shown; len(_steps) once all were walked
        self._turns = 0
        self._values: list[dict[str, float]] = []  # of each step so far, of its latest action
        self.state = State.PENDING
        self._encoded: tuple[tuple[str, bytes], bytes] | None = None  # what of, and as which format
        self._shown = self._fitted(self._steps[0])

    async def act(self, action: Action) -> None:
        """Judges an action beside the shown step. After the end nothing changes any more."""
        if self.state is State.TERMINATED:
            return
        self.state = State.PROCESSING_ACTION
        self._turns += 1
        values = rules.parts(action, self._shown)
        self._values[self._at :] = [values]
        if values["match"] == 1.0:
            self._at += 1
        over = self._at == len(self._steps) or self._turns >= self._max_turns
        if over or action.kind == "terminate":
            self.state = State.TERMINATED
            return
        if values["match"] == 1.0:
            self._shown = self._fitted(self._steps[self._at])
        self.state = State.GENERATING

    def picture(self) -> bytes:
        """The shown screen as it is stored: PNG, JPEG or WebP."""
        if self.state is State.PENDING:
            self.state = State.GENERATING
        return self._shown.image

    async def screenshot(self, image_format: str) -> bytes:
        """The shown screen; as stored if that is the format, else encoded anew."""
        data = self.picture()
        if data.startswith(MAGIC[image_format]):
            return data
        # A phone's screen takes 0.2 s, and is looked at again after the action that ends a step.
        wanted = (image_format, data)
        if self._encoded is None or self._encoded[0] != wanted:
            self._encoded = wanted, await asyncio.to_thread(_encoded, data, image_format)
        return self._encoded[1]

    async def progress(self) -> dict[str, Any]:
        """done, reward (1 for success; None before the end), success and `parts`.

        A part is a rule's value; of a walk the mean over all steps of the row, those that were not
        reached with 0, and of each other one its latest action's.
        """
        done = self.state is State.TERMINATED
        walked = self._at == len(self._steps)
        parts = {
            name: sum(values[name] for values in self._values) / len(self._steps)
            for name in rules.RULES
        }
        return {
            "done": done,
            "reward": float(walked) if done else None,
            "success": walked,
            "state": str(self.state),
            "parts": {**parts, rules.COMPLETION: float(walked)},
            "row": self._row.row_id,
            "source": self._row.source,
            "labels": dict(self._row.labels),
            "step": self._first + min(self._at, len(self._steps) - 1),
            "steps": len(self._row.steps),
            "walked": self._at,
            "turns": self._turns,
        }

    async def close(self) -> None:
        pass

    async def scripted_action(
        self, rng: np.random.Generator, quality: float = 1.0
    ) -> Action | None:
        """What the recording did; with probability 1 - quality a click anywhere."""
        if rng.random() >= quality:
            x, y = int(rng.integers(self.width_px)), int(rng.integers(self.height_px))
            return Action("click", x=x, y=y)
        return self._shown.action

    def _fitted(self, step: Step) -> Step:
        """The step, its picture checked; in the size that the session announced.

        A phone that was turned has screens of another size: they are scaled with their places.
        """
        where = f"row {self._row.row_id!r} of {self._row.source}"
        try:
            size = image_size(step.image, max_pixels=MAX_PIXELS)
        except ImageError as error:
            raise VerifierError(f"{where}: {error}") from error
        if size != (step.width_px, step.height_px):
            raise VerifierError(
                f"{where}: a picture of {size[0]}x{size[1]} pixels, the row says "
                f"{step.width_px}x{step.height_px}"
            )
        wanted = (self.width_px, self.height_px)
        return step if size == wanted else step.resized(wanted, _encoded(step.image, "png", wanted))


def _encoded(data: bytes, image_format: str, size: tuple[int, int] | None = None) -> bytes:
    """Raises: VerifierError: the picture cannot be decoded."""
    try:
        return encode_again(data, image_format, size)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise VerifierError(f"a recorded picture cannot be decoded: {error}") from error
