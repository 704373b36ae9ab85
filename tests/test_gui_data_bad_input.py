"""Broken rows and files of every kind: each is one line that says what and where, and costs only
itself."""

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests import gui_data_files as files
from tests.gui_data_files import prepared
from tools.gui_data import columns as gui_columns
from tools.gui_data import reading, sets
from tools.gui_data.source import Source
from uirl_jax.errors import ConfigError, RecordError
from uirl_jax.verifiers.recorded.row import Box

BOX = Box(6, 8, 30, 20)
NAN = float("nan")


# ---- rows of a JSON list: ScreenSpot


def item(**other) -> dict:
    changed = files.screenspot_item("a.png", BOX)
    for name, value in other.items():
        if value is MISSING:
            del changed[name]
        else:
            changed[name] = value
    return changed


MISSING = object()
LIST_ROWS: dict[str, tuple[object, str]] = {
    "no bbox": (item(bbox=MISSING), "expected 4 numbers"),
    "null bbox": (item(bbox=None), "expected 4 numbers"),
    "bbox as text": (item(bbox="6,8,24,12"), "'6,8,24,12': expected 4 numbers"),
    "bbox as object": (item(bbox={"x": 1}), "dict: expected 4 numbers"),
    "three numbers": (item(bbox=[1, 2, 3]), "[1, 2, 3]: expected 4 numbers"),
    "five numbers": (item(bbox=[1, 2, 3, 4, 5]), "expected 4 numbers"),
    "no numbers": (item(bbox=[]), "[]: expected 4 numbers"),
    "text among numbers": (item(bbox=[1, "2", 3, 4]), "'2' is not a number"),
    "true among numbers": (item(bbox=[1, True, 3, 4]), "True is not a number"),
    "null among numbers": (item(bbox=[1, None, 3, 4]), "NoneType is not a number"),
    "list among numbers": (item(bbox=[1, [2], 3, 4]), "[2] is not a number"),
    "NaN": (item(bbox=[NAN, 2, 3, 4]), "holds NaN"),
    "infinity": (item(bbox=[1, 2, float("inf"), 4]), "holds Infinity"),
    "infinite by its digits": (b'{"bbox": [1e999]}', "1e999, which is infinite"),
    "a place that is none": (item(bbox=[1, 2, 3e200, 4]), "3e+200 is no place on a screen"),
    "an integer of 40 digits": (item(bbox=[10**40, 2, 3, 4]), "integer of 41 digits"),
    "no width": (item(bbox=[6, 8, 0, 12]), "has no size"),
    "turned": (item(bbox=[6, 8, -4, 12]), "has no size"),
    "outside": (item(bbox=[6, 8, 70, 12]), "outside of a picture of 60x40"),
    "far outside": (item(bbox=[600, 800, 7, 12]), "outside of a picture of 60x40"),
    "before": (item(bbox=[-6, 8, 20, 12]), "outside of a picture of 60x40"),
    "no picture": (item(img_filename=MISSING), "None is no name of a picture"),
    "picture as a number": (item(img_filename=3), "3 is no name of a picture"),
    "empty name": (item(img_filename=""), "'' is no name"),
    "NUL in the name": (item(img_filename="a\0.png"), "is no name of a picture"),
    "long name": (item(img_filename="a" * 5000), "a name of 5000 characters"),
    "name too long for a file": (item(img_filename="a" * 900), "File name too long"),
    "picture that is not there": (item(img_filename="b.png"), "'b.png' is not in"),
    "a folder": (item(img_filename="folder"), "is not a file"),
    "the folder itself": (item(img_filename="."), "is not a file"),
    "a link to itself": (item(img_filename="circle.png"), "circle.png"),
    "a pipe": (item(img_filename="pipe.png"), "is not a file"),
    "out of the folder": (item(img_filename="../secret.png"), "lies outside of"),
    "out by a link": (item(img_filename="link.png"), "lies outside of"),
    "a path of the system": (item(img_filename="/etc/passwd"), "lies outside of"),
    "up and down again": (item(img_filename="x/../../secret.png"), "lies outside of"),
    "surrogate in the name": (b'{"img_filename": "\\ud800.png"}', "lone surrogate"),
    "no picture at all": (item(img_filename="text.png"), "are not a readable PNG"),
    "an empty picture": (item(img_filename="empty.png"), "0 bytes are not a readable"),
    "a cut picture": (item(img_filename="cut.png"), "are not a readable PNG"),
    "a damaged picture": (item(img_filename="damaged.png"), "are not a readable PNG"),
    "a picture of fewer pixels than it says": (item(img_filename="lies.png"), "not a readable PNG"),
    "a picture of 3.6 billion pixels": (
        item(img_filename="bomb.png"),
        "(3600000000 pixels) exceeds limit",
    ),
    "a picture with a text that expands": (item(img_filename="text_bomb.png"), "not a readable"),
    "a GIF": (item(img_filename="a.gif"), "are not a readable PNG"),
    "an animation": (item(img_filename="moving.png"), "2 frames, expected a still image"),
    "no instruction": (item(instruction=MISSING), "instruction is missing"),
    "null instruction": (item(instruction=None), "instruction is missing"),
    "number as instruction": (item(instruction=7), "instruction is a int, expected str"),
    "list as instruction": (item(instruction=["a"]), "instruction is a list, expected str"),
    "empty instruction": (item(instruction=" "), "instruction is empty"),
    "long instruction": (item(instruction="a" * 10_001), "10001 characters"),
    "NUL in the instruction": (item(instruction="a\0"), "a lone surrogate or a NUL"),
    "surrogate in the instruction": (b'{"instruction": "\\udfff"}', "lone surrogate"),
    "a number": (7, "is a JSON int, expected an object"),
    "text": ("row", "is a JSON str, expected an object"),
    "null": (None, "is a JSON NoneType, expected an object"),
    "a list": ([1, 2], "is a JSON list, expected an object"),
    "a key twice": (b'{"bbox": [1], "bbox": [2]}', "holds the key 'bbox' twice"),
    "nested too deep": (b'{"a":' * 50 + b"1" + b"}" * 50, "nested deeper"),
    "no UTF-8": (b'{"instruction": "\xff"}', "is not UTF-8"),
    "no JSON": (b'{"instruction": nothing}', "is not JSON"),
    "python's quotes": (b"{'bbox': [1]}", "is not JSON"),
    "nothing between commas": (b"", "is not JSON"),
}


def write_pictures(folder: Path) -> None:
    good = files.picture()
    (folder / "folder").mkdir(parents=True)
    for name in ("a.png", "z.png"):
        (folder / name).write_bytes(good)
    (folder.parent.parent / "secret.png").write_bytes(good)
    (folder.parent / "secret.png").write_bytes(good)
    (folder / "circle.png").symlink_to(folder / "circle.png")
    (folder / "link.png").symlink_to(folder.parent.parent / "secret.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "text.png").write_text("no picture")
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.png").write_bytes(good[: len(good) // 2])
    (folder / "damaged.png").write_bytes(good[:60] + b"XXXX" + good[64:])
    (folder / "lies.png").write_bytes(with_size(good, 600, 400))
    (folder / "bomb.png").write_bytes(with_size(good, 60_000, 60_000))
    text = zlib.compress(b" " * 100_000_000, 9)
    chunk = b"zTXt" + b"a\0\0" + text
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (folder / "text_bomb.png").write_bytes(good[:33] + chunk + good[33:])
    images = [Image.fromarray(files.pixels(shade=shade)) for shade in (1, 2)]
    images[0].save(folder / "a.gif")
    images[0].save(folder / "moving.png", save_all=True, append_images=images[1:])


def with_size(png: bytes, width: int, height: int) -> bytes:
    head = b"IHDR" + struct.pack(">II", width, height) + png[24:29]
    return png[:12] + head + struct.pack(">I", zlib.crc32(head)) + png[33:]


def encoded(row: object) -> bytes:
    return row if isinstance(row, bytes) else json.dumps(row).encode()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "source" / "screenspot_imgs"
    write_pictures(folder)
    return folder


@pytest.mark.parametrize("name", LIST_ROWS)
def test_a_broken_row_of_a_list_is_named_and_the_others_stay(tmp_path, pictures, name):
    broken, reason = LIST_ROWS[name]
    good = [encoded(item(img_filename=name)) for name in ("a.png", "z.png")]
    source = pictures.parent / "screenspot_web.json"
    source.write_bytes(b"[" + good[0] + b", " + encoded(broken) + b",\n" + good[1] + b"]\n")
    ids, left_out = prepared("screenspot", source, tmp_path / "out")
    assert ids == ["screenspot_web-0", "screenspot_web-2"]
    assert [(line["what"], line["where"]) for line in left_out] == [
        ("row", "screenspot_web.json row 1")
    ]
    assert reason in left_out[0]["reason"]


# ---- files that are JSON lists


def first_row() -> bytes:
    return encoded(item())


LISTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "an object": (lambda: b'{"rows": []}', "expected a JSON list"),
    "empty": (lambda: b"", "expected a JSON list"),
    "binary": (lambda: bytes(range(256)), "expected a JSON list"),
    "cut in a row": (lambda: b"[" + first_row() + b', {"img', "ends within row 1"),
    "cut behind a row": (lambda: b"[" + first_row(), "ends within row 0"),
    "cut in a string": (lambda: b'["' + b"a" * 100, "ends within row 0"),
    "garbage behind it": (lambda: b"[" + first_row() + b"] x", "after the list comes b'x'"),
    "two lists": (lambda: b"[" + first_row() + b"][]", "after the list comes b'[]'"),
    "a row of 100 MB": (lambda: b'[{"a": "' + b"a" * 100_000_000 + b'"}]', "longer than 8388608"),
    "100 MB of brackets": (lambda: b"[" * 100_000_000, "longer than 100000 bytes"),
    "100 MB of nothing": (lambda: b"[" + b" " * 100_000_000, "longer than 8388608"),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_broken_list_costs_its_rest_and_the_next_file_is_read(tmp_path, monkeypatch, name):
    make, reason = LISTS[name]
    if "brackets" in name:
        monkeypatch.setattr(reading, "MAX_ITEM_BYTES", 100_000)
    source = tmp_path / "source"
    files.write_picture(source / "images/a.png")
    (source / "screenspot_mobile.json").write_bytes(make())
    files.write_json(source / "screenspot_web.json", [item()])
    ids, left_out = prepared("screenspot", source, tmp_path / "out")
    assert ids[-1] == "screenspot_web-0"
    found = [line for line in left_out if line["what"] == "file"]
    assert len(found) == 1 and found[0]["where"].endswith("screenspot_mobile.json")
    assert reason in found[0]["reason"] and "what follows is left out" in found[0]["reason"]


@pytest.mark.parametrize(
    ("text", "before"),
    [('[{"a": 1}, {"b": 2}}', 1), ('[{"a": 1}}', 0), ('[{"a": 1}, "b"}, {"c": 3}]', 1)],
)
def test_a_list_that_another_bracket_ends_is_an_error_after_its_rows(tmp_path, text, before):
    (tmp_path / "rows.json").write_text(text)
    found = []
    with pytest.raises(RecordError, match=f"row {before}: '}}' stands where a list ends"):
        found.extend(reading.list_items(tmp_path / "rows.json"))
    assert len(found) == before


def test_a_long_list_is_read_in_the_memory_of_a_row(tmp_path):
    """Thirty megabytes of good rows: a size is no fault, if it is not read at once."""
    import tracemalloc

    path = tmp_path / "rows.json"
    row = encoded({**item(), "note": 'a "quoted" [text] {of} \\ its own' * 300})
    with path.open("wb") as file:
        file.write(b"\xef\xbb\xbf [")
        file.write(b",\n".join([row] * 3000))
        file.write(b"] \n")
    assert path.stat().st_size > 30_000_000
    tracemalloc.start()
    count = 0
    for number, found in reading.list_items(path):
        count += 1
        assert number == count - 1 and len(found) == len(row)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 3000 and peak < 8 * 2**20


# ---- JSON lines


def line(**other) -> dict:
    return {"instruction": "Go", "image": "a.png", "box": [6, 8, 30, 20], **other}


def steps(*, action: object = None, **other) -> dict:
    step = {"image": "a.png", "action": action or {"kind": "click", "x": 1, "y": 2}, **other}
    return {"instruction": "Go", "steps": [step]}


LINES: dict[str, tuple[object, str]] = {
    "an unknown key": (line(boxes=[1]), "unknown key 'boxes'"),
    "an unknown key of a step": (steps(point=[1, 2]), "step 0: unknown key 'point'"),
    "a box beside steps": ({**steps(), "box": [6, 8, 30, 20]}, "box stands beside steps: give it"),
    "an action beside steps": ({**steps(), "action": {"kind": "wait"}}, "action stands beside"),
    "elements beside steps": ({**steps(), "elements": []}, "elements stands beside steps"),
    "a picture beside steps": ({**steps(), "image": "a.png"}, "image stands beside steps"),
    "an unknown key of an action": (steps(action={"kind": "wait", "s": 1}), "unknown key 's'"),
    "a click beside its box": (
        line(action={"kind": "click", "x": 32, "y": 10}),
        "step 0: the click at (32, 10) is outside of its box (6, 8, 30, 20)",
    ),
    "a press in a step far from its box": (
        steps(action={"kind": "long_press", "x": 10, "y": 39}, box=[6, 8, 30, 20]),
        "step 0: the long_press at (10, 39) is outside of its box",
    ),
    "an unknown unit": (line(coordinates="0-100"), "expected pixels, 0-1 or 0-1000"),
    "a unit that is a list": (line(coordinates=[1]), "expected pixels, 0-1 or 0-1000"),
    "an unknown form": (line(box_form="xywh"), "box_form='xywh'"),
    "pixels as fractions": (line(coordinates="0-1"), "expected fractions of the picture"),
    "nothing that is right": ({"instruction": "Go", "image": "a.png"}, "neither an action nor"),
    "no steps": ({"instruction": "Go", "steps": []}, "0 steps"),
    "steps that are text": ({"instruction": "Go", "steps": "a"}, "steps is a str"),
    "a step that is text": ({"instruction": "Go", "steps": ["a"]}, "step 0: a str"),
    "201 steps": ({**steps(), "steps": steps()["steps"] * 201}, "201 steps, expected 1 to 200"),
    "an action that is text": (steps(action="click"), "action is a str, expected dict"),
    "an action without a kind": (steps(action={"x": 1, "y": 2}), "kind is missing"),
    "an unknown action": (steps(action={"kind": "fly"}), "unknown action 'fly'"),
    "a click without y": (steps(action={"kind": "click", "x": 1}), "NoneType is not a number"),
    "a click as text": (steps(action={"kind": "click", "x": "1", "y": 2}), "'1' is not a number"),
    "a click outside": (steps(action={"kind": "click", "x": 99, "y": 2}), "outside of a picture"),
    "a wait of a year": (steps(action={"kind": "wait", "seconds": 3e7}), "outside 0-60"),
    "a text of another type": (steps(action={"kind": "type", "text": 5}), "5 is not text"),
    "a text that no key types": (steps(action={"kind": "type", "text": "\x1b"}), "no key types"),
    "a key that is none": (steps(action={"kind": "keys", "keys": "boom"}), "'boom' is not a key"),
    "too many arguments": (steps(action={"kind": "wait", "seconds": 1, "text": "a"}), "takes no"),
    "an unknown call": (steps(action={"action": "fly"}), "knows no action 'fly'"),
    "a call outside": (
        steps(action={"action": "click", "coordinate": [1200, 3]}),
        "x=1200 is off the screen",
    ),
    "elements that are none": (line(elements="a"), "elements is a str"),
    "an element of three": (line(elements=[[1, 2, 3]]), "expected 4 numbers"),
    "labels that are a list": (line(labels=["a"]), "labels is a list"),
    "a label that is a number": (line(labels={"a": 1}), "a is a int, expected str"),
    "40 labels": (line(labels={str(n): "a" for n in range(40)}), "40 labels"),
    "an unknown split": (line(split="dev"), "split='dev' is none of train"),
    "a split that is a number": (line(split=1), "split is a int"),
    "an id of two lines": (line(id="a\nb"), "expected printable text on one line"),
    "an id that was there": (line(id="mine-1"), "a row with the id 'mine-1' before"),
    "a list": ([line()], "is a JSON list, expected an object"),
    "half a line": (b'{"instruction": "Go", "im', "is not JSON"),
    "step instruction that is a number": (steps(instruction=3), "step instruction is a int"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_broken_line_is_named_and_the_others_stay(tmp_path, name):
    broken, reason = LINES[name]
    source = tmp_path / "mine.jsonl"
    source.write_bytes(b"\n".join(map(encoded, (line(), broken, line()))))
    files.write_picture(tmp_path / "a.png")
    ids, left_out = prepared("jsonl", source, tmp_path / "out")
    assert ids == ["mine-1", "mine-3"]
    assert [(one["what"], one["where"]) for one in left_out] == [("row", "mine.jsonl line 2")]
    assert reason in left_out[0]["reason"]


def test_a_click_a_pixel_beside_its_box_is_taken_and_a_drag_beside_it_too(tmp_path):
    drag = {"kind": "drag", "x": 50, "y": 30, "x2": 50, "y2": 2}
    lines = [
        line(action={"kind": "click", "x": 31, "y": 7}),
        steps(action=drag, box=[6, 8, 30, 20]),
    ]
    (tmp_path / "mine.jsonl").write_bytes(b"\n".join(map(encoded, lines)))
    files.write_picture(tmp_path / "a.png")
    assert prepared("jsonl", tmp_path / "mine.jsonl", tmp_path / "out") == (
        ["mine-1", "mine-2"],
        [],
    )


def test_pictures_in_hugging_faces_cache_are_told_how_to_be_had(tmp_path):
    files.write_picture(tmp_path / "blobs/0a1b.png")
    folder = tmp_path / "snapshots/main"
    files.write_picture(folder / "b.png")
    (folder / "a.png").symlink_to("../../blobs/0a1b.png")
    (folder / "mine.jsonl").write_bytes(b"\n".join(map(encoded, (line(), line(image="b.png")))))
    ids, left_out = prepared("jsonl", folder / "mine.jsonl", tmp_path / "out")
    assert ids == ["mine-2"] and "hf download --local-dir" in left_out[0]["reason"]


def test_a_line_that_does_not_end_costs_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_ITEM_BYTES", 1000)
    source = tmp_path / "mine.jsonl"
    source.write_bytes(encoded(line()) + b"\n" + b"a" * 100_000)
    files.write_picture(tmp_path / "a.png")
    ids, left_out = prepared("jsonl", source, tmp_path / "out")
    assert ids == ["mine-1"] and "line 2 is longer than 1000 bytes" in left_out[0]["reason"]


# ---- GUI-Odyssey, parquet, tables of splits

ODYSSEY: dict[str, tuple[object, str]] = {
    "a list": ([], "is a JSON list"),
    "no task": (files.odyssey_episode([], task_info=None), "task_info is missing"),
    "no steps": (files.odyssey_episode([]), "no step is left: the episode has none"),
    "steps that are text": (files.odyssey_episode("a"), "steps is a str"),
    "a step that is none": (files.odyssey_episode([7]), "step 0: a int, expected an object"),
    **{
        name: (files.odyssey_episode([{**files.odyssey_step(0, *how), **other}]), reason)
        for name, how, other, reason in (
            ("no info", ("CLICK", ""), {}, "expected 1 points"),
            ("an unknown key", ("CLICK", "KEY_POWER"), {}, "expected 1 points"),
            ("a scroll with one end", ("SCROLL", [[1, 2]]), {}, "expected 2 points"),
            ("a place beyond 1000", ("CLICK", [[1300, 2]]), {}, "expected thousandths"),
            ("a place as text", ("CLICK", [["1", 2]]), {}, "'1' is not a number"),
            ("a box beyond", ("CLICK", [[1, 2]]), {"sam2_bbox": [0, 0, 1, 1300]}, "thousandths"),
            ("an unknown action", ("FLY", ""), {}, "action='FLY' is unknown"),
            ("a text that is a list", ("TEXT", [1]), {}, "info is a list"),
            ("no screen", ("COMPLETE", ""), {"screenshot": "b.png"}, "'b.png' is not in"),
            ("a screen above", ("COMPLETE", ""), {"screenshot": "../../a"}, "lies outside of"),
        )
    },
}


@pytest.mark.parametrize("name", ODYSSEY)
def test_a_broken_episode_file_is_named(tmp_path, name):
    episode, reason = ODYSSEY[name]
    good = files.odyssey_episode([files.odyssey_step(0, "COMPLETE", "")], episode="2")
    files.write_json(tmp_path / "annotations/1.json", episode)
    files.write_json(tmp_path / "annotations/2.json", good)
    files.write_picture(tmp_path / "screenshots/0001_0.png")
    ids, left_out = prepared("gui_odyssey", tmp_path, tmp_path / "out")
    assert ids == ["gui_odyssey-2"]
    assert [one["where"] for one in left_out] == ["1.json"]
    assert reason in left_out[0]["reason"]


def test_an_episode_file_of_100_mb_is_not_read(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(RecordError, match="100000000 bytes, at most 67108864 are read"):
        reading.document(tmp_path / "a.json")


IMAGE = {"bytes": files.picture(), "path": None}
TABLE_ROWS: dict[str, tuple[dict, str]] = {
    "no box": (files.gui_r1_row(None), "gt_bbox is missing"),
    "three numbers": (files.gui_r1_row([0.1, 0.2, 0.3]), "expected 4 numbers"),
    "NaN": (files.gui_r1_row([0.1, NAN]), "nan is no place"),
    "pixels": (files.gui_r1_row([10.0, 20.0, 30.0, 35.0]), "expected fractions"),
    "turned": (files.gui_r1_row([0.5, 0.5, 0.4, 0.6]), "is no box"),
    "no action": (files.gui_r1_row([0.5, 0.5], None), "gt_action is missing"),
    "an unknown action": (files.gui_r1_row([0.5, 0.5], "fly"), "gt_action='fly' is unknown"),
    "hotkey": (files.gui_r1_row([-1, -1], "hotkey"), "no action of ours is hotkey"),
    "select": (files.gui_r1_row([0.5, 0.5], "select", "a"), "no action of ours is select"),
    "a scroll to nowhere": (files.gui_r1_row([0.5, 0.5], "scroll"), "direction='no input text'"),
    "no text": (files.gui_r1_row([0.5, 0.5], "type", None), "gt_input_text is missing"),
    "no picture": (files.gui_r1_row([0.5, 0.5], image=None), "a picture that is a NoneType"),
    "no bytes": (
        files.gui_r1_row([0.5, 0.5], image={"bytes": None, "path": None}),
        "a picture that is a NoneType",
    ),
    "no PNG": (
        files.gui_r1_row([0.5, 0.5], image={"bytes": b"GIF89a", "path": None}),
        "not a readable PNG",
    ),
    "no instruction": (files.gui_r1_row([0.5, 0.5], instruction=None), "instruction is missing"),
}


@pytest.mark.parametrize("name", TABLE_ROWS)
def test_a_broken_row_of_a_table_is_named(tmp_path, name):
    broken, reason = TABLE_ROWS[name]
    path = tmp_path / "train.parquet"
    good = files.gui_r1_row([0.5, 0.5])
    files.write_gui_r1(path, [good, broken, good])
    ids, left_out = prepared("gui_r1", path, tmp_path / "out")
    assert ids == ["train-0", "train-2"]
    assert [(one["what"], one["where"]) for one in left_out] == [("row", "train.parquet row 1")]
    assert reason in left_out[0]["reason"]


def test_a_text_that_is_not_utf_8_costs_its_row_alone(tmp_path):
    path = tmp_path / "train.parquet"
    files.write_gui_r1(path, [files.gui_r1_row([0.5, 0.5]) for _ in range(10)])
    table = pq.read_table(path)
    texts = pa.array([b"go on"] * 4 + [b"go \xff"] + [b"go on"] * 5).view(pa.string())
    place = table.column_names.index("instruction")
    pq.write_table(table.set_column(place, "instruction", texts), path)
    ids, left_out = prepared("gui_r1", path, tmp_path / "out")
    assert ids == [f"train-{number}" for number in range(10) if number != 4]
    (one,) = left_out
    assert (one["what"], one["where"]) == ("row", "train.parquet row 4")
    assert "can't decode byte 0xff in position 3" in one["reason"]


def test_tables_that_are_none_cost_themselves(tmp_path):
    source = tmp_path / "source"
    files.write_gui_r1(source / "train.parquet", [files.gui_r1_row([0.5, 0.5])])
    whole = (source / "train.parquet").read_bytes()
    row = files.screenspot_table_row(BOX, (60, 40))
    files.write_screenspot_table(source / "other.parquet", [row])
    (source / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (source / "text.parquet").write_bytes(b"hello")
    long = files.gui_r1_row([0.5, 0.5], history="a" * 90_000_000)
    files.write_gui_r1(source / "bomb.parquet", [long], compression="zstd")
    ids, left_out = prepared("gui_r1", source, tmp_path / "out")
    assert ids == ["train-0"]
    reasons = {Path(one["where"]).stem: one["reason"] for one in left_out}
    assert "would become 9" in reasons["bomb"]
    assert "column gt_bbox, gt_action, gt_input_text is missing" in reasons["other"]
    assert "no parquet file or one that was cut" in reasons["cut"]
    assert "no parquet file or one that was cut" in reasons["text"]


def test_tables_that_expand_are_refused_before_they_are_read(tmp_path, monkeypatch):
    numbers, texts = pa.list_(pa.float64()), pa.list_(pa.string())
    nested = {"image": pa.struct([("bytes", pa.list_(pa.binary()))])}
    wide = {"gt_bbox": pa.list_(pa.float32(), 10_000_000)}
    kinds = {"history": texts, **nested, "gt_bbox": texts}
    path = tmp_path / "train.parquet"

    def never(*_, **__):
        raise AssertionError("a page was read")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", never)
    columns = ("image", "instruction", "gt_bbox", "gt_action", "gt_input_text")
    structs = {"gt_bbox": pa.list_(pa.struct([("left", pa.int8())]))}
    for name, kind in [*kinds.items(), *wide.items(), *structs.items()]:
        table = pa.table({one: pa.nulls(1, pa.string()) for one in columns})
        value = ["a" * 100_000] * 500 if kind == texts else None  # a dictionary has it once
        made = pa.array([value], kind)
        if name in columns:
            table = table.set_column(columns.index(name), name, made)
        else:
            table = table.append_column(name, made)
        pq.write_table(table, path)
        assert path.stat().st_size < 200_000
        with pytest.raises(RecordError, match=f"column {name} is of type .*, expected numbers, on"):
            list(gui_columns.rows(path, columns, ("history",)))
    monkeypatch.setattr(gui_columns, "_MAX_VALUES", 3)
    pq.write_table(pa.table({"gt_bbox": pa.array([[0.5] * 4], numbers)}), path)
    with pytest.raises(RecordError, match=r"gt_bbox.* has 4 values, at most 3 are read"):
        list(gui_columns.rows(path, ["gt_bbox"]))


@pytest.mark.parametrize("encoding", ["RLE_DICTIONARY", "DELTA_BYTE_ARRAY"])
def test_a_text_that_is_repeated_is_in_memory_once(tmp_path, encoding):
    text, path = "a" * 1_000_000, tmp_path / "train.parquet"
    how = {} if encoding == "RLE_DICTIONARY" else {"column_encoding": {"instruction": encoding}}
    pq.write_table(pa.table({"instruction": [text] * 50}), path, use_dictionary=not how, **how)
    before, held, count = pa.total_allocated_bytes(), 0, 0
    for row in gui_columns.rows(path, ["instruction"]):
        assert row()["instruction"] == text
        held, count = max(held, pa.total_allocated_bytes() - before), count + 1
    assert count == 50
    assert held < 6_000_000  # eight rows at a time would be more


SPLIT_TABLES: dict[str, tuple[object, str]] = {
    "a list": ([], "is a JSON list"),
    "an unknown split": ({"dev": []}, "'dev', expected lists of ids named train"),
    "no ids": ({"train": "1"}, "expected lists of ids"),
    "an id that is a list": ({"train": [[1]]}, "train has a list, expected ids"),
    "an id in two": ({"train": [1], "test": [1]}, "1 is in two splits"),
}


@pytest.mark.parametrize("name", SPLIT_TABLES)
def test_a_broken_table_of_splits_is_one_error(tmp_path, name):
    table, reason = SPLIT_TABLES[name]
    files.write_tfrecord(tmp_path / "a-00000-of-00001", [files.aitw_step("1")])
    splits = files.write_json(tmp_path / "table.json", table)
    with pytest.raises(RecordError, match=r"table.json: ") as told:
        list(sets.READERS["aitw"](Source(tmp_path / "a-00000-of-00001", splits=splits)))
    assert reason in str(told.value)


def test_folders_of_pictures_and_tables_that_are_not_there_are_one_error(tmp_path):
    with pytest.raises(ConfigError, match=r"--images=.*: there is no such folder"):
        Source(tmp_path, images=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"--splits=.*: there is no such file"):
        Source(tmp_path, splits=tmp_path)


def test_there_are_more_than_a_hundred_of_them():
    tables = (LIST_ROWS, LISTS, LINES, ODYSSEY, TABLE_ROWS)
    assert sum(map(len, tables)) > 120
