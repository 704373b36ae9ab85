"""Any value in any place of a row: it is a row, or one of the errors that the tool counts."""

import contextlib
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import gui_data_files as files
from tools.gui_data import reading, sets
from tools.gui_data.source import ROW_ERRORS, LeftOut, Source
from uirl_jax.errors import RecordError
from uirl_jax.verifiers.recorded.checks import check_row
from uirl_jax.verifiers.recorded.row import Box

BOX = Box(6, 8, 30, 20)
JSON_KINDS: dict[str, tuple[str, Any]] = {
    "screenspot": ("screenspot_web.json", [files.screenspot_item("a.png", BOX)]),
    "screenspot_v2": ("screenspot_web_v2.json", [files.screenspot_item("a.png", BOX)]),
    "screenspot_pro": ("annotations/x.json", [files.pro_item("a.png", BOX, (60, 40))]),
    "seeclick": (
        "web.json",
        [
            {
                **{"img_filename": "a.png", "url": "u"},
                "elements": [{"instruction": "a", "bbox": [0.1, 0.2, 0.3, 0.4], "data_type": "t"}],
            }
        ],
    ),
    "ui_r1": (
        "train.json",
        [
            {"img_filename": "a.png", "bbox": list(BOX), "instruction": "a"},
            {"image": "a.png", "gt": {"action_type": "click", "x": 1, "y": 2}, "task": "a"},
            {"image": "a.png", "gt": {"action_type": "scroll", "direction": "up"}, "task": "a"},
            {"img_filename": "a.png", "action": "navigate_back", "instruction": "a"},
        ],
    ),
    "gui_odyssey": (
        "annotations/1.json",
        files.odyssey_episode(
            [
                files.odyssey_step(0, "CLICK", [[1, 2]], [0, 0, 9, 9], screenshot="a.png"),
                files.odyssey_step(1, "SCROLL", [[1, 2], [3, 4]], screenshot="a.png"),
                files.odyssey_step(2, "TEXT", "a", screenshot="a.png"),
            ]
        ),
    ),
    "jsonl": (
        "mine.jsonl",
        {
            **{"id": "a", "split": "test", "labels": {"a": "b"}, "instruction": "Go"},
            **{"coordinates": "0-1000", "box_form": "size"},
            "steps": [
                {
                    **{"image": "a.png", "box": [1, 2, 3, 4], "elements": [[1, 2, 3, 4]]},
                    **{"action": {"kind": "drag", "x": 1, "y": 2, "x2": 3, "y2": 4}},
                    "instruction": "tap",
                },
                {"image": "a.png", "action": {"action": "swipe", "coordinate": [1, 2]}},
                {"image": "a.png", "action": {"kind": "scroll", "direction": "up", "amount": 1}},
            ],
        },
    ),
}
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**19), 10**19),
        st.floats(),
        st.text(max_size=9),
        st.sampled_from(["a.png", "click", "KEY_HOME", "..", "\ud800", "\0", "0-1", "train"]),
    ),
    lambda below: st.one_of(
        st.lists(below, max_size=5), st.dictionaries(st.text(max_size=5), below, max_size=3)
    ),
    max_leaves=8,
)


def places_in(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all values inside, and of the whole."""
    found = [path]
    if isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in inside:
            found += places_in(below, (*path, key))
    return found


def with_value(base: Any, path: tuple, value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(base)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def read(kind: str, folder: Path) -> None:
    """Makes every row, and checks it as the tool does; anything but ROW_ERRORS fails the test."""
    left_out = LeftOut()
    with contextlib.suppress(*ROW_ERRORS):
        for draft in sets.READERS[kind](Source(folder, left_out=left_out)):
            with contextlib.suppress(*ROW_ERRORS):
                row = draft.make()
                check_row(dataclasses.replace(row, split=row.split or "train"))
    assert left_out.first.isprintable()


@pytest.mark.parametrize("kind", JSON_KINDS)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_value_in_any_place_is_a_row_or_counted(tmp_path_factory, kind, data):
    name, base = JSON_KINDS[kind]
    folder = tmp_path_factory.getbasetemp() / f"fuzz-{kind}"
    if not folder.exists():
        for where in (".", "screenshots"):
            files.write_picture(folder / where / "a.png")
    path = data.draw(st.sampled_from(places_in(base)))
    files.write_json(folder / name, with_value(base, path, data.draw(values)))
    read(kind, folder)


FEATURES = {
    "aitw": files.aitw_step(boxes=((0.1, 0.1, 0.2, 0.2),)),
    "android_control": files.control_episode(7, ({"action_type": "click", "x": 1, "y": 2},)),
}
lists = st.one_of(
    st.tuples(st.lists(st.binary(max_size=8), max_size=3), st.just("byte")),
    st.tuples(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.just("int")),
    st.tuples(st.lists(st.floats(width=32), max_size=5), st.just("float")),
)


@pytest.mark.parametrize("kind", FEATURES)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_feature_is_a_row_or_counted(tmp_path_factory, kind, data):
    base = FEATURES[kind]
    names = data.draw(st.lists(st.sampled_from(sorted(base)), min_size=1, max_size=2))
    changed = {**base, **{name: data.draw(lists) for name in names}}
    folder = tmp_path_factory.getbasetemp() / f"fuzz-{kind}"
    files.write_tfrecord(folder / "android_control-00000-of-00001", [changed])
    read(kind, folder)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(values, max_size=5), st.sampled_from([None, 0, 2]), st.integers(1, 40))
def test_a_list_is_cut_where_json_says(tmp_path_factory, items, indent, chunk):
    """Against json itself, whatever stands in the items and wherever a chunk ends."""
    path = tmp_path_factory.getbasetemp() / "list.json"
    path.write_text(json.dumps(items, indent=indent), encoding="utf-8")
    before = reading._CHUNK_BYTES
    reading._CHUNK_BYTES = chunk
    try:
        found = [json.loads(item) for _, item in reading.list_items(path)]
    finally:
        reading._CHUNK_BYTES = before
    assert json.dumps(found) == json.dumps(items)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=60), st.integers(1, 20))
def test_any_bytes_are_items_or_one_error(tmp_path_factory, data, chunk):
    path = tmp_path_factory.getbasetemp() / "bytes.json"
    path.write_bytes(b"[" + data)
    before = reading._CHUNK_BYTES
    reading._CHUNK_BYTES = chunk
    try:
        with contextlib.suppress(RecordError):
            list(reading.list_items(path))
    finally:
        reading._CHUNK_BYTES = before
