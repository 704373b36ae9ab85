"""SeeClick's grounding data, on Rico's screens and on pages of the web: JSON lists, fractions.

    widget captions, RICOSCA (Rico)   {img_filename, instruction, bbox}
    web pages                         {img_filename, url, elements: [{instruction, bbox, ...}]}

A box is [left, top, right, bottom], each 0-1. An element is a row of its own; those of a page share
its picture, and so its split. The screen summaries of the same release say no place: such rows are
left out.

Source: njucckevin/SeeClick 0ef37ac, readme_data.md and pretrain/pretrain_process.py.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gui_data.pictures import Pictures
from tools.gui_data.places import FRACTIONS, read_box
from tools.gui_data.reading import labels_of, list_items, parse, value_of
from tools.gui_data.rows import click_row
from tools.gui_data.source import NO_SPLIT, ROW_ERRORS, Draft, Source
from uirl_jax.errors import RecordError
from uirl_jax.verifiers.recorded.row import Row

_FOLDERS = ("combined", "rico_imgs", "seeclick_web_imgs", "images")


def read(source: Source) -> Iterator[Draft]:
    pictures = source.pictures(*_FOLDERS)

    def items(path: Path) -> Iterator[Draft]:
        for number, item in list_items(path):
            where, row_id = f"{path.name} row {number}", source.row_id(path, number)
            try:
                parsed = parse(item)
                elements = value_of(parsed, "elements", list) if "elements" in parsed else None
            except ROW_ERRORS as error:
                source.left_out.add("row", where, error)
                continue
            image = parsed.get("img_filename")
            for place, element in enumerate([parsed] if elements is None else elements):
                name = row_id if elements is None else f"{row_id}-{place}"
                yield Draft(
                    where if elements is None else f"{where} element {place}",
                    lambda element=element, name=name, image=image: _row(
                        element, name, image, pictures
                    ),
                )

    yield from source.over(source.files("*.json"), items)


def _row(element: Any, row_id: str, image: Any, pictures: Pictures) -> Row:
    if not isinstance(element, Mapping):
        raise RecordError(f"a {type(element).__name__}, expected an object")
    instruction, bbox = value_of(element, "instruction", str), value_of(element, "bbox", list)
    picture = pictures.find(image)
    return click_row(
        row_id,
        "seeclick",
        NO_SPLIT,
        instruction,
        picture,
        read_box(bbox, FRACTIONS, picture.size),
        {"ui_type": value} if (value := labels_of(element, ["data_type"]).get("data_type")) else {},
    )
