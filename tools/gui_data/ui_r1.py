"""UI-R1: JSON lists in pixels, of grounding and of AndroidControl's actions.

    train.json     {img_filename, instruction, bbox: [x1, y1, x2, y2]}; without bbox: action
    ac_test.json   {image, task, gt: {action_type: click, x, y, ...}}

Without a box the training rows name an action and nothing about it: `navigate_back` is one, a
scroll without direction or a text that is not there is left out. Files that begin with train are
split train, those with test in their name test.

Source: lll6gg/UI-R1 2fe9bf0, README.md (Data: the box is two corners),
src/ui_r1/src/open_r1/grpo_json_action_coord.py (fields, pictures in a folder of their own) and
dataset/ac_test.json; huggingface.co/datasets/LZXzju/UI-R1-3B-Train (train.json, train_imgs).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gui_data.android_control import read_action
from tools.gui_data.pictures import Pictures
from tools.gui_data.places import PIXELS, read_box
from tools.gui_data.reading import list_items, parse, value_of
from tools.gui_data.rows import click_row, step_on
from tools.gui_data.source import NO_SPLIT, Draft, Source, UnsayableError
from uirl_jax.errors import RecordError
from uirl_jax.types import Action
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded.row import Row


def read(source: Source) -> Iterator[Draft]:
    pictures = source.pictures("train_imgs", "images", "screenshots", "screenspot_imgs")

    def items(path: Path) -> Iterator[Draft]:
        split = "train" if path.stem.startswith("train") else NO_SPLIT
        split = "test" if "test" in path.stem else split
        for number, item in list_items(path):
            row_id = source.row_id(path, number)
            yield Draft(
                f"{path.name} row {number}",
                lambda item=item, row_id=row_id: _row(parse(item), row_id, split, pictures),
            )

    yield from source.over(source.files("*.json"), items)


def _row(item: Mapping[str, Any], row_id: str, split: str, pictures: Pictures) -> Row:
    if "gt" in item:
        picture = pictures.find(item.get("image"))
        action, instruction = read_action(value_of(item, "gt", dict), picture), "task"
    else:
        picture, instruction = pictures.find(item.get("img_filename")), "instruction"
        if "bbox" in item:
            box = read_box(item["bbox"], PIXELS, picture.size)
            said = value_of(item, "instruction", str)
            return click_row(row_id, "ui_r1", split, said, picture, box, {})
        action = _bare_action(value_of(item, "action", str))
    said = value_of(item, instruction, str)
    return Row(row_id, "ui_r1", split, said, (step_on(picture, action),), {})


def _bare_action(word: str) -> Action:
    if word == "navigate_back":
        return Action("navigate_back")
    if word in ("open_app", "scroll", "input_text"):
        raise UnsayableError(f"the row says {word} and nothing about it")
    raise RecordError(f"action={printable(word, 40)!r} is unknown, and there is no bbox")
