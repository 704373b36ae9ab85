"""Rows as verl's RLHFDataset reads them, with the GUI agent's columns.

    data_source, ability                  the set, "gui"
    prompt                                [{role, content}], an <image> for every one of `images`
    images                                [{bytes, path}], the first screen
    reward_model, ground_truth            {style: rule, ground_truth}: the first action as JSON
    raw_prompt                            [{role, content: [{type, text}]}], of the GUI agent
    extra_info                            index, split, row_id, instruction, expected_actions,
                                          boxes, screen_width, screen_height (999), image_width ...
    extra_info.tools_kwargs.mobile_use    create_kwargs: what a tool needs to play the row: the
                                          actions as JSON, the screens after the first

Actions are those of Qwen3-VL's mobile_use, in 0-999; a scroll is the swipe against it. What that
tool cannot say (a right click) leaves the row out, by name. verl joins the prompt of `__getitem__`
from `prompt` and `images`, and puts it where `raw_prompt` stands; other readers of the GUI agent's
files read that column.

Source: verl-project/verl b178a3c, verl/utils/dataset/rl_dataset.py (_build_messages, __getitem__)
and examples/data_preprocess/geo3k_multiturn_w_tool.py (tools_kwargs).
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from uirl_jax import actions
from uirl_jax.actions import coordinates, tool_call
from uirl_jax.errors import ActionError
from uirl_jax.types import Action
from uirl_jax.verifiers.recorded.checks import Faults, check_row
from uirl_jax.verifiers.recorded.row import Box, Row, Step
from uirl_jax.verifiers.recorded.tables import require_pyarrow, write_records

SCREEN = 999  # both sides of the screen whose pixels the actions' coordinates are
_TOOL = "mobile_use"
_SWIPE_PART = 0.25  # of the screen's side, on either side of its middle
_MARK = re.compile("<(image|video)>")


def verl_schema() -> Any:
    """pyarrow.Schema of a file."""
    pa = require_pyarrow()
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    part = pa.struct([("type", pa.string()), ("text", pa.string())])
    raw_message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    numbers = pa.list_(pa.int32())
    action = pa.struct(
        [
            *(("action", pa.string()), ("coordinate", numbers), ("coordinate2", numbers)),
            *((name, pa.string()) for name in ("text", "button", "status")),
            ("time", pa.float64()),
        ]
    )
    create = pa.struct(
        [
            ("instruction", pa.string()),
            ("expected_actions", pa.string()),  # JSON: a list without the nulls of the columns
            ("later_screens", pa.list_(image)),
        ]
    )
    tool = pa.struct([("create_kwargs", create)])
    extra_info = pa.struct(
        [
            *(("index", pa.int64()), ("split", pa.string()), ("row_id", pa.string())),
            ("instruction", pa.string()),
            *(("expected_actions", pa.list_(action)), ("boxes", pa.list_(numbers))),
            *((f"screen_{side}", pa.int32()) for side in ("width", "height")),
            *((f"image_{side}", pa.int32()) for side in ("width", "height")),
            *(("need_tools_kwargs", pa.bool_()), ("tools_kwargs", pa.struct([(_TOOL, tool)]))),
        ]
    )
    return pa.schema(
        [
            *(("data_source", pa.string()), ("prompt", pa.list_(message))),
            *(("images", pa.list_(image)), ("ability", pa.string())),
            (
                "reward_model",
                pa.struct([("style", pa.string()), ("ground_truth", pa.string())]),
            ),
            ("ground_truth", pa.string()),
            *(("raw_prompt", pa.list_(raw_message)), ("extra_info", extra_info)),
        ]
    )


def write_verl(path: Path, rows: Iterable[Row]) -> Faults:
    """Writes a file whole. Returns the rows that were left out: mobile_use cannot say them.

    Raises: RecordError: a row that `check_row` refuses. UirlError: it cannot be written.
    """
    faults = Faults()

    def records() -> Iterator[dict[str, Any]]:
        index = 0
        for row in rows:
            check_row(row)
            try:
                record = to_verl(row, index)
            except ActionError as error:
                faults.add(row.row_id, error)
            else:
                yield record
                index += 1

    write_records(path, verl_schema(), records())
    return faults


def to_verl(row: Row, index: int) -> dict[str, Any]:
    """The row as `verl_schema` has it. Raises: ActionError: mobile_use cannot say an action."""
    said = [mobile_use(step) for step in row.steps]
    first, truth = row.steps[0], json.dumps(said[0], ensure_ascii=False)
    text = f"Task: {row.instruction}"
    pictures = [{"bytes": step.image, "path": None} for step in row.steps]
    create = {
        "instruction": row.instruction,
        "expected_actions": json.dumps(said, ensure_ascii=False),
        "later_screens": pictures[1:],
    }
    return {
        "data_source": row.source,
        # A mark in the instruction itself would be taken for a picture's.
        "prompt": [{"role": "user", "content": "<image>" + _MARK.sub(r"< \1>", text)}],
        "images": pictures[:1],
        "ability": "gui",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "ground_truth": truth,
        "raw_prompt": [
            {
                "role": "user",
                "content": [{"type": "image", "text": None}, {"type": "text", "text": text}],
            }
        ],
        "extra_info": {
            **{"index": index, "split": row.split, "row_id": row.row_id},
            **{"instruction": row.instruction, "expected_actions": said},
            "boxes": [_box(step.box, step) for step in row.steps],
            **{"screen_width": SCREEN, "screen_height": SCREEN},
            **{"image_width": first.width_px, "image_height": first.height_px},
            **{"need_tools_kwargs": True, "tools_kwargs": {_TOOL: {"create_kwargs": create}}},
        },
    }


def mobile_use(step: Step) -> dict[str, Any]:
    """The arguments of the call: {"action": "click", "coordinate": [500, 300]}. Raises ActionError.

    A swipe's points are `coordinate` and `coordinate2`, a button's name is `button`.
    """
    size = (step.width_px, step.height_px)
    action = _swipe(step.action, size) if step.action.kind == "scroll" else step.action
    text = actions.format_action(action, size, actions.FORMATS[_TOOL])
    call = json.loads(text.removeprefix(tool_call.OPEN).removesuffix(tool_call.CLOSE))
    return call["arguments"]


def _swipe(scroll: Action, size: tuple[int, int]) -> Action:
    """The finger's way that shows what lies in the scroll's direction."""
    width, height = size
    middle = [
        width // 2 if scroll.x is None else scroll.x,
        height // 2 if scroll.y is None else scroll.y,
    ]
    axis = 1 if scroll.direction in ("up", "down") else 0
    reach = round(size[axis] * _SWIPE_PART)
    start, end = list(middle), list(middle)
    forward = scroll.direction in ("down", "right")
    start[axis] += reach if forward else -reach
    end[axis] -= reach if forward else -reach
    x, y, x2, y2 = [
        min(max(place, 0), side - 1) for place, side in zip((*start, *end), size * 2, strict=True)
    ]
    return Action("drag", x=x, y=y, x2=x2, y2=y2)


def _box(box: Box | None, step: Step) -> list[int] | None:
    """[left, top, right, bottom] in 0-999, or None."""
    if box is None:
        return None
    sides = zip(box, (step.width_px, step.height_px) * 2, strict=True)
    return [int(coordinates.convert(at, "0-999", px, px, to_screen=False)) for at, px in sides]
