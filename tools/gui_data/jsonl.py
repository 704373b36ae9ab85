"""JSON lines of one's own: a line a task. The schema is in docs/gui_data.md.

    {"instruction": "Open the cart", "image": "shop.png", "box": [10, 20, 90, 48]}
    {"id": "a", "split": "test", "labels": {"platform": "web"}, "instruction": "Search for lime",
     "coordinates": "0-1000", "steps": [
       {"image": "a0.png", "action": {"kind": "click", "x": 500, "y": 60}, "instruction": "..."},
       {"image": "a1.png", "action": {"kind": "type", "text": "lime"}}]}

An action is ours (`actions.kinds`), or a call of Qwen's mobile_use, {"action": "click",
"coordinate": [500, 300]}, whose coordinates are always 0-999. A box without an action is to be
clicked. `coordinates` (pixels, 0-1 or 0-1000) and `box_form` (corners or size) hold for a line.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gui_data.pictures import Picture, Pictures
from tools.gui_data.places import Form, centre, read_box, read_point
from tools.gui_data.reading import lines, parse, value_of
from tools.gui_data.rows import step_on
from tools.gui_data.source import NO_SPLIT, Draft, Source
from uirl_jax import actions
from uirl_jax.actions import tool_call
from uirl_jax.errors import RecordError
from uirl_jax.types import Action
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded.row import Row, Step

_LINE = {"id", "split", "labels", "instruction", "coordinates", "box_form", "steps"}
_SHOWN = {"image", "action", "box", "elements"}  # of a step, or of a line that is one
_STEP = {*_SHOWN, "instruction"}
_ACTION = {field.name for field in dataclasses.fields(Action)}


def read(source: Source) -> Iterator[Draft]:
    pictures = source.pictures("images")

    def items(path: Path) -> Iterator[Draft]:
        for number, line in lines(path):
            row_id = source.row_id(path, number)
            yield Draft(
                f"{path.name} line {number}",
                lambda line=line, row_id=row_id: _row(parse(line), row_id, pictures),
            )

    yield from source.over(source.files("*.jsonl"), items)


def _row(line: Mapping[str, Any], row_id: str, pictures: Pictures) -> Row:
    _refuse_others(line, _LINE | _STEP)
    if "steps" in line and (beside := sorted(line.keys() & _SHOWN)):
        raise RecordError(f"{beside[0]} stands beside steps: give it in each step that it is of")
    form = _form(line)
    steps = value_of(line, "steps", list) if "steps" in line else [line]
    labels = value_of(line, "labels", dict) if "labels" in line else {}
    made = []
    for number, step in enumerate(steps):
        try:
            if not isinstance(step, dict):
                raise RecordError(f"a {type(step).__name__}, expected an object")
            made.append(_step(step, form, pictures, is_line=step is line))
        except RecordError as error:
            raise RecordError(
                f"step {number}: {error}" if "steps" in line else str(error)
            ) from None
    return Row(
        row_id=value_of(line, "id", str) if "id" in line else row_id,
        source="jsonl",
        split=value_of(line, "split", str) if "split" in line else NO_SPLIT,
        instruction=value_of(line, "instruction", str),
        steps=tuple(made),
        labels={name: value_of(labels, name, str) for name in labels},
    )


def _form(line: Mapping[str, Any]) -> Form:
    unit, box_form = line.get("coordinates", "pixels"), line.get("box_form", "corners")
    if unit not in ("pixels", "0-1", "0-1000") or box_form not in ("corners", "size"):
        raise RecordError(
            f"coordinates={printable(repr(unit), 40)}, box_form={printable(repr(box_form), 40)}; "
            "expected pixels, 0-1 or 0-1000, and corners or size"
        )
    return Form(unit, has_size=box_form == "size")


def _step(step: dict[str, Any], form: Form, pictures: Pictures, *, is_line: bool) -> Step:
    if not is_line:
        _refuse_others(step, _STEP)
    picture = pictures.find(step.get("image"))
    size = picture.size
    box = read_box(step["box"], form, size) if "box" in step else None
    elements = value_of(step, "elements", list) if "elements" in step else []
    if "action" in step:
        action = _action(value_of(step, "action", dict), form, picture)
    elif box is not None:
        x, y = centre(box, size)
        action = Action("click", x=x, y=y)
    else:
        raise RecordError("neither an action nor a box: nothing says what is right")
    said = step.get("instruction", "")
    return step_on(
        picture,
        action,
        box,
        tuple(read_box(element, form, size) for element in elements),
        "" if is_line else said,
    )


def _action(said: dict[str, Any], form: Form, picture: Picture) -> Action:
    if "action" in said:
        call = json.dumps({"name": "mobile_use", "arguments": said})
        text = f"{tool_call.OPEN}{call}{tool_call.CLOSE}"
        return actions.parse(text, picture.size, actions.FORMATS["mobile_use"])
    _refuse_others(said, _ACTION)
    fields = {"kind": value_of(said, "kind", str), **said}
    for x, y in (("x", "y"), ("x2", "y2")):
        if x in said or y in said:
            place = read_point([said.get(x), said.get(y)], form, picture.size)
            fields |= dict(zip((x, y), place, strict=True))
    return Action(**fields)


def _refuse_others(given: Mapping[str, Any], known: set[str]) -> None:
    if others := sorted(given.keys() - known):
        raise RecordError(f"unknown key {printable(others[0], 40)!r}; known: {sorted(known)}")
