"""GUI-R1-3K: parquet with a screen, an instruction, what was done before, and the right action.

`gt_bbox` has two numbers (a point) or four (two corners), as fractions; `gt_action` is click, type,
scroll, ...; `gt_input_text` is the text, or a scroll's direction. The history is put behind the
instruction, because it is part of what is asked. `select`, `open_app`, `close/delete` and `hotkey`,
whose keys the set does not name, are none of our actions: such rows are left out. train.parquet is
split train, all others test.

Source: ritzz-ai/GUI-R1 d43eea2, verl/utils/dataset.py (columns, fractions of the resized picture),
verl/utils/reward_score/r1gui.py (two or four numbers; its 140 pixels are `rules`' to know) and
guir1/inference/inference_vllm_android.py (long_press, wait, open_app).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gui_data import columns
from tools.gui_data.android_control import WAIT_S, scroll
from tools.gui_data.pictures import Picture, look
from tools.gui_data.places import FRACTIONS, centre, read_box, read_point
from tools.gui_data.reading import labels_of, value_of
from tools.gui_data.rows import step_on
from tools.gui_data.source import Draft, Source, UnsayableError
from uirl_jax.errors import RecordError
from uirl_jax.types import Action
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded.row import Box, Row

_TOUCHES = {
    "click": "click",
    "long_press": "long_press",
    "doubleclick": "double_click",
    "rightclick": "right_click",
    "moveto": "move",
}
_PLAIN = {
    "press_home": Action("system_button", text="home"),
    "press_back": Action("navigate_back"),
    "enter": Action("keys", keys="enter"),
    **{f"press_{key}": Action("keys", keys=key) for key in ("enter", "tab", "space", "down")},
    "complete": Action("terminate", text="success"),
    "wait": Action("wait", seconds=WAIT_S),
}
_UNSAYABLE = ("select", "open_app", "close/delete", "hotkey")


def read(source: Source) -> Iterator[Draft]:

    def items(path: Path) -> Iterator[Draft]:
        split = "train" if path.stem.startswith("train") else "test"
        wanted = ("image", "instruction", "gt_bbox", "gt_action", "gt_input_text")
        for number, item in enumerate(columns.rows(path, wanted, ("history", "task_type"))):
            row_id = source.row_id(path, number)
            yield Draft(
                f"{path.name} row {number}",
                lambda item=item, row_id=row_id: _row(item(), row_id, split),
            )

    yield from source.over(source.files("*.parquet"), items)


def _row(item: Mapping[str, Any], row_id: str, split: str) -> Row:
    instruction, history = value_of(item, "instruction", str), item.get("history")
    if isinstance(history, str) and history.strip() not in ("", "None"):
        instruction = f"{instruction}\nDone before: {history.strip()}"
    picture = look(columns.picture_bytes(item["image"]))
    action, box = _action(item, picture)
    labels = labels_of(item, ["task_type"])
    return Row(row_id, "gui_r1", split, instruction, (step_on(picture, action, box),), labels)


def _action(item: Mapping[str, Any], picture: Picture) -> tuple[Action, Box | None]:
    word = value_of(item, "gt_action", str).lower()
    if word in _TOUCHES:
        values = value_of(item, "gt_bbox", list)
        if len(values) == 2:
            (x, y), box = read_point(values, FRACTIONS, picture.size), None
        else:
            box = read_box(values, FRACTIONS, picture.size)
            x, y = centre(box, picture.size)
        return Action(_TOUCHES[word], x=x, y=y), box
    if word in _PLAIN:
        return _PLAIN[word], None
    if word == "type":
        return Action("type", text=value_of(item, "gt_input_text", str)), None
    if word == "scroll":
        return scroll(value_of(item, "gt_input_text", str), picture), None
    if word in _UNSAYABLE:
        raise UnsayableError(f"no action of ours is {word}")
    raise RecordError(f"gt_action={printable(word, 40)!r} is unknown")
