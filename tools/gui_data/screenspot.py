"""ScreenSpot, ScreenSpot-v2 and ScreenSpot-Pro: an instruction and the box that it means.

    set              files                                  box
    ScreenSpot       screenspot_{mobile,desktop,web}.json   left, top, width, height in pixels
    ScreenSpot       parquet (rootsautomation)              two corners, 0-1
    ScreenSpot-v2    screenspot_{...}_v2.json               left, top, width, height in pixels
    ScreenSpot-Pro   annotations/*.json                     two corners in pixels of img_size

Everything is split `test`: these are benchmarks. The tables are made by `platform` (mobile,
desktop, web; of ScreenSpot-Pro windows, macos, linux) and `ui_type` (text, icon).

Source: njucckevin/SeeClick 0ef37ac, readme.md and pretrain/screenspot_test.py (box + size);
huggingface.co/datasets/rootsautomation/ScreenSpot (columns); OS-Copilot/ScreenSpot-v2 (files; said
to be as ScreenSpot's); likaixin2000/ScreenSpot-Pro-GUI-Grounding bd8bbbb, eval_screenspot_pro.py
(x1, y1, x2, y2 divided by img_size).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gui_data import columns
from tools.gui_data.pictures import Picture, Pictures, look
from tools.gui_data.places import FRACTIONS, PIXELS, PIXELS_WITH_SIZE, numbers, read_box
from tools.gui_data.reading import labels_of, list_items, parse, value_of
from tools.gui_data.rows import click_row
from tools.gui_data.source import Draft, Source
from uirl_jax.errors import ConfigError, RecordError
from uirl_jax.verifiers.recorded.row import Row

_PLATFORMS = {
    **dict.fromkeys(("ios", "android"), "mobile"),
    **dict.fromkeys(("macos", "windows"), "desktop"),
    **dict.fromkeys(("gitlab", "shop", "forum", "tool"), "web"),
}


def read(source: Source) -> Iterator[Draft]:
    files = source.files("screenspot_*.json", "*.parquet", "data/*.parquet")
    tables = [file for file in files if file.suffix == ".parquet"]
    listed = [file for file in files if file not in tables and "_v2" not in file.stem]
    if not tables and not listed:
        raise ConfigError(f"{source.path}: ScreenSpot-v2's files; give --kind=screenspot_v2")
    yield from _lists(source, listed, "screenspot", "screenspot_imgs", "images")
    yield from source.over(tables, lambda path: _table(source, path))


def read_v2(source: Source) -> Iterator[Draft]:
    files = source.files("screenspot_*_v2.json")
    yield from _lists(source, files, "screenspot_v2", "screenspotv2_image", "images")


def read_pro(source: Source) -> Iterator[Draft]:
    pictures = source.pictures("images", "../images")

    def items(path: Path) -> Iterator[Draft]:
        for number, item in list_items(path):
            where = f"{path.name} row {number}"
            yield Draft(where, lambda item=item: _pro_row(parse(item), pictures))

    yield from source.over(source.files("annotations/*.json"), items)


def _lists(source: Source, files: list[Path], name: str, *folders: str) -> Iterator[Draft]:
    pictures = source.pictures(*folders)

    def items(path: Path) -> Iterator[Draft]:
        for number, item in list_items(path):
            row_id = source.row_id(path, number)
            yield Draft(
                f"{path.name} row {number}",
                lambda item=item, row_id=row_id: _row(parse(item), row_id, name, pictures),
            )

    yield from source.over(files, items)


def _row(item: Mapping[str, Any], row_id: str, name: str, pictures: Pictures) -> Row:
    picture = pictures.find(item.get("img_filename"))
    box = read_box(item.get("bbox"), PIXELS_WITH_SIZE, picture.size)
    return _screenspot_row(item, row_id, name, picture, box)


def _screenspot_row(
    item: Mapping[str, Any], row_id: str, name: str, picture: Picture, box: Any
) -> Row:
    labels = labels_of(item, ["data_source"])
    of_source = _PLATFORMS.get(labels.get("data_source", "").lower())
    of_file = next((p for p in _PLATFORMS.values() if p in row_id), "")
    labels["platform"] = of_source or of_file or "unknown"
    labels["ui_type"] = labels_of(item, ["data_type"]).get("data_type", "unknown")
    instruction = value_of(item, "instruction", str)
    return click_row(row_id, name, "test", instruction, picture, box, labels)


def _table(source: Source, path: Path) -> Iterator[Draft]:
    wanted = ("bbox", "instruction", "image")

    def row(item: Mapping[str, Any], row_id: str) -> Row:
        picture = look(columns.picture_bytes(item["image"]))
        box = read_box(item["bbox"], FRACTIONS, picture.size)
        return _screenspot_row(item, row_id, "screenspot", picture, box)

    for number, item in enumerate(columns.rows(path, wanted, ("data_type", "data_source"))):
        where = f"{path.name} row {number}"
        yield Draft(where, lambda i=item, n=number: row(i(), source.row_id(path, n)))


def _pro_row(item: Mapping[str, Any], pictures: Pictures) -> Row:
    picture = pictures.find(item.get("img_filename"))
    width, height = (int(side) for side in numbers(item.get("img_size"), 2))
    if width < 1 or height < 1:
        raise RecordError(f"img_size={width}x{height}")
    box = read_box(item.get("bbox"), PIXELS, picture.size, counted=(width, height))
    return click_row(
        value_of(item, "id", str),
        "screenspot_pro",
        "test",
        value_of(item, "instruction", str),
        picture,
        box,
        labels_of(item, ["platform", "ui_type", "application", "group"]),
    )
