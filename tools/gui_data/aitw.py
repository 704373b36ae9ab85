"""Android in the Wild: gzipped TFRecord, a step an Example, the steps of an episode in a row.

The screenshot is raw uint8 pixels, height x width x channels; it becomes a PNG. Places are
fractions, y before x; the boxes of elements are (y, x, height, width), flattened. A gesture is
where the finger came down and where it was lifted: at most 0.04 apart it is a tap, else a swipe.
Splits are JSON tables of episode ids, published apart from the records: --splits.

    action_type  3 type, 4 gesture, 5 back, 6 home, 7 enter, 10 complete, 11 impossible

Source: google-research/google-research, android_in_the_wild: README.md (6faa0b7: fields, splits),
visualization_utils.py (5b09c22: raw pixels, float lists), action_type.py (4c42994) and
action_matching.py (1d49f2c: taps and swipes).
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from tools.gui_data.pictures import Picture, encode_png, look
from tools.gui_data.places import AITW, read_box, read_point
from tools.gui_data.rows import step_on
from tools.gui_data.source import ROW_ERRORS, Draft, Source, split_of
from tools.gui_data.tfrecords import Features, features, payloads
from uirl_jax.errors import RecordError
from uirl_jax.types import Action
from uirl_jax.verifiers.recorded.checks import MAX_PIXELS, MAX_STEPS
from uirl_jax.verifiers.recorded.row import Box, Row, Step
from uirl_jax.verifiers.recorded.rules import SWIPE_LENGTH

_FEATURES = (
    *("episode_id", "episode_length", "step_id", "goal_info", "device_type", "android_api_level"),
    *(f"image/{name}" for name in ("encoded", "height", "width", "channels")),
    "image/ui_annotations_positions",
    *(f"results/{name}" for name in ("action_type", "type_action", "yx_touch", "yx_lift")),
)
_GESTURE, _TYPE = 4, 3
_ACTIONS = {
    5: Action("navigate_back"),
    6: Action("system_button", text="home"),
    7: Action("keys", keys="enter"),
    10: Action("terminate", text="success"),
    11: Action("terminate", text="failure"),
}


class _Found(NamedTuple):
    """A step, and what it says of its episode."""

    number: int
    length: int
    instruction: str
    labels: dict[str, str]
    step: Step


def read(source: Source) -> Iterator[Draft]:
    files = source.files("*.tfrecord*", "*-of-*", "*/*.tfrecord*", "*/*-of-*")
    splits = source.splits("standard.json", "splits.json")
    episodes = _Episodes(source, splits)
    yield from source.over(files, episodes.read)
    yield from episodes.finish()


class _Episodes:
    """Steps with one episode id, one behind the other, over the borders of files."""

    def __init__(self, source: Source, splits: dict[str, str] | None) -> None:
        self._source, self._splits = source, splits
        self._id, self._where = "", ""
        self._steps: list[_Found | Exception] = []

    def read(self, path: Path) -> Iterator[Draft]:
        for number, payload in payloads(path):
            where = f"{path.name} record {number}"
            try:
                example = features(payload, _FEATURES)
                episode = example.text("episode_id")
            except ROW_ERRORS as error:
                self._source.left_out.add("row", where, error)
                continue
            if episode != self._id or len(self._steps) >= MAX_STEPS:
                yield from self.finish()
                self._id, self._where = episode, f"{where} episode {episode}"
            try:
                self._steps.append(_step(example, self._source, where))
            except ROW_ERRORS as error:
                self._steps.append(RecordError(f"{where}: {error}"))

    def finish(self) -> Iterator[Draft]:
        """The episode whose steps were read."""
        if self._steps:
            episode, steps = self._id, tuple(self._steps)
            self._steps.clear()
            yield Draft(self._where, lambda: _row(episode, steps, self._splits))


def _row(episode: str, steps: tuple[_Found | Exception, ...], splits: dict[str, str] | None) -> Row:
    split = split_of(splits, episode)
    found: list[_Found] = []
    for step in steps:
        if isinstance(step, Exception):
            raise step
        found.append(step)
    first = found[0]
    numbers = [step.number for step in found]
    # The length is the file's word: it is compared before it becomes a list.
    if len(numbers) != first.length or numbers != list(range(len(numbers))):
        raise RecordError(
            f"steps {numbers[:20]} of an episode of {first.length}; they are expected in order, "
            "one behind the other"
        )
    if any(step.instruction != first.instruction for step in found):
        raise RecordError("its steps have other instructions")
    return Row(
        f"aitw-{episode}",
        "aitw",
        split,
        first.instruction,
        tuple(step.step for step in found),
        first.labels,
    )


def _step(example: Features, source: Source, where: str) -> _Found:
    picture = look(_png(example))
    elements: list[Box] = []
    flat = example.all("image/ui_annotations_positions", float)
    if len(flat) % 4:
        raise RecordError(f"{len(flat)} numbers for boxes of four")
    for start in range(0, len(flat), 4):
        try:
            elements.append(read_box(flat[start : start + 4], AITW, picture.size))
        except RecordError as error:  # of many, and no rule needs them all
            source.left_out.add("element", where, error)
    labels = {"device_type": example.text("device_type")}
    labels["android_api_level"] = str(example.one("android_api_level", int))
    return _Found(
        number=example.one("step_id", int),
        length=example.one("episode_length", int),
        instruction=example.text("goal_info"),
        labels=labels,
        step=step_on(picture, _action(example, picture), elements=tuple(elements)),
    )


def _png(example: Features) -> bytes:
    """The raw pixels as PNG."""
    height, width, channels = (
        example.one(f"image/{name}", int) for name in ("height", "width", "channels")
    )
    pixels = example.one("image/encoded", bytes)
    if channels != 3 or width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise RecordError(f"a screen of {width}x{height} pixels and {channels} channels")
    if len(pixels) != width * height * channels:
        raise RecordError(
            f"{len(pixels)} bytes of pixels, {width}x{height}x{channels} are "
            f"{width * height * channels}"
        )
    return encode_png(Image.frombytes("RGB", (width, height), pixels))


def _action(example: Features, picture: Picture) -> Action:
    kind = example.one("results/action_type", int)
    if kind in _ACTIONS:
        return _ACTIONS[kind]
    if kind == _TYPE:
        return Action("type", text=example.text("results/type_action"))
    if kind != _GESTURE:
        raise RecordError(f"results/action_type={kind} is none of 3, 4, 5, 6, 7, 10, 11")
    touch, lift = (_place(example, name, picture) for name in ("yx_touch", "yx_lift"))
    if math.dist(touch[0], lift[0]) <= SWIPE_LENGTH:
        return Action("click", x=touch[1][0], y=touch[1][1])
    return Action("drag", x=touch[1][0], y=touch[1][1], x2=lift[1][0], y2=lift[1][1])


def _place(example: Features, name: str, picture: Picture) -> tuple[Any, tuple[int, int]]:
    """The (y, x) as it was written, and the pixel."""
    values = example.all(f"results/{name}", float)
    try:
        return values, read_point(values, AITW, picture.size)
    except RecordError as error:
        raise RecordError(f"results/{name}: {error}") from None
