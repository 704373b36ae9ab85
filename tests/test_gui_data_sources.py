"""Every set, as it is published and written by tests/gui_data_files, read as rows."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
from tfrecord.writer import TFRecordWriter

from tests import gui_data_files as files
from tools.gui_data import demo, examples, sets
from tools.gui_data.source import LeftOut, Source
from uirl_jax.errors import ConfigError, RecordError
from uirl_jax.families.screens import decode_image
from uirl_jax.shards import example, framing
from uirl_jax.types import Action
from uirl_jax.verifiers.recorded.checks import check_row
from uirl_jax.verifiers.recorded.row import Box, Row
from uirl_jax.verifiers.tasks import desktop

BOX = Box(6, 8, 30, 20)


def read(kind: str, path: Path, *, left_out: LeftOut | None = None, **how) -> list[Row]:
    """All rows, each as the tool checks it; a broken one raises."""
    rows = []
    for draft in sets.READERS[kind](Source(path, left_out=left_out, **how)):
        assert draft.where
        row = draft.make()
        check_row(dataclasses.replace(row, split=row.split or "train"))
        rows.append(row)
    return rows


# ---- TFRecord


def test_tfrecords_are_tensorflows_byte_for_byte(tmp_path):
    """The file of the package tfrecord is our frames around the same message, gzipped."""
    step = files.aitw_step()
    path = files.write_tfrecord(tmp_path / "a", [step, step])
    payload = TFRecordWriter.serialize_tf_example(step)
    assert gzip.decompress(path.read_bytes()) == framing.frame(payload) * 2
    read_back = examples.decode(payload, list(step))
    assert set(read_back) == set(step)
    assert read_back["results/yx_touch"] == [0.5, 0.25] and read_back["episode_id"] == [b"4"]


def test_floats_of_others_are_read_and_ours_still_have_none():
    payload = TFRecordWriter.serialize_tf_example(
        {"a": ([1.5, -2.25], "float"), "b": ([-3, 2**40], "int"), "c": ([], "byte")}
    )
    assert examples.decode(payload, "abc") == {"a": [1.5, -2.25], "b": [-3, 2**40], "c": []}
    with pytest.raises(RecordError):
        example.decode(payload)
    unpacked = bytes.fromhex("0a0e0a0c0a0161120712050d0000803f")  # float_list{1.0}, not packed
    assert examples.decode(unpacked, "a") == {"a": [1.0]}
    with pytest.raises(RecordError, match=r"not a tf\.train\.Example"):
        examples.decode(b"\xff\xff", "a")


# ---- AITW


def test_aitw_episodes_become_rows(tmp_path):
    steps = [
        files.aitw_step(step=0, length=5, touch=(0.5, 0.25), boxes=((0.1, 0.2, 0.3, 0.4),)),
        files.aitw_step(step=1, length=5, touch=(0.75, 0.5), lift=(0.25, 0.5)),
        files.aitw_step(step=2, length=5, kind=3, text="lime", touch=(-1, -1)),
        files.aitw_step(step=3, length=5, kind=7, touch=(-1, -1)),
        files.aitw_step(step=4, length=5, kind=10, touch=(-1, -1)),
    ]
    other = [files.aitw_step("9", kind=11), files.aitw_step("10", kind=5, goal="go back")]
    files.write_tfrecord(tmp_path / "general-00000-of-00002", [*steps, other[0]])
    files.write_tfrecord(tmp_path / "general-00001-of-00002", [other[1]])
    rows = read("aitw", tmp_path)
    assert [row.row_id for row in rows] == ["aitw-4", "aitw-9", "aitw-10"]
    assert [step.action for step in rows[0].steps] == [
        Action("click", x=15, y=20),
        Action("drag", x=30, y=30, x2=30, y2=10),
        Action("type", text="lime"),
        Action("keys", keys="enter"),
        Action("terminate", text="success"),
    ]
    assert rows[0].steps[0].elements[0] == pytest.approx(Box(12, 4, 36, 16), abs=1e-4)
    assert rows[0].instruction == "open the clock" and rows[0].split == ""
    assert rows[0].labels == {"device_type": "pixel_4", "android_api_level": "30"}
    shown = decode_image(rows[0].steps[1].image)
    assert shown.tobytes() == files.pixels(60, 40, 4 * 50 + 1).tobytes()
    assert rows[1].steps[0].action == Action("terminate", text="failure")
    assert rows[2].steps[0].action == Action("navigate_back")


def test_aitw_taps_are_those_of_its_own_matching(tmp_path):
    """At most 0.04 apart is a tap, in fractions of either axis (action_matching.py)."""
    files.write_tfrecord(
        tmp_path / "single-00000-of-00001",
        [
            files.aitw_step("1", touch=(0.5, 0.5), lift=(0.5, 0.539)),
            files.aitw_step("2", touch=(0.5, 0.5), lift=(0.529, 0.531)),
            files.aitw_step("3", touch=(0.5, 0.5), lift=(0.5, 0.541)),
        ],
    )
    assert [row.steps[0].action.kind for row in read("aitw", tmp_path)] == [
        *("click", "drag", "drag"),
    ]


def test_aitw_splits_come_from_their_table(tmp_path):
    steps = [files.aitw_step(episode) for episode in ("1", "2", "3")]
    files.write_tfrecord(tmp_path / "data" / "general-00000-of-00001", steps[:2])
    table = {"train": ["2"], "validation": ["1"], "test": []}
    splits = files.write_json(tmp_path / "splits.json", table)
    rows = read("aitw", tmp_path / "data", splits=splits)
    assert [row.split for row in rows] == ["validation", "train"]
    files.write_tfrecord(tmp_path / "data" / "general-00000-of-00001", steps)
    with pytest.raises(RecordError, match="episode '3' is in no split"):
        read("aitw", tmp_path / "data", splits=splits)


def test_an_aitw_episode_goes_on_in_the_next_file_and_is_whole_or_nothing(tmp_path):
    steps = [files.aitw_step("4", step, 3) for step in range(3)]
    files.write_tfrecord(tmp_path / "a-00000-of-00002", steps[:2])
    files.write_tfrecord(tmp_path / "a-00001-of-00002", steps[2:])
    (row,) = read("aitw", tmp_path)
    assert len(row.steps) == 3
    files.write_tfrecord(tmp_path / "a-00000-of-00002", steps[:1])
    with pytest.raises(RecordError, match=r"steps \[0, 2\] of an episode of 3"):
        read("aitw", tmp_path)


def test_aitw_elements_that_are_no_boxes_are_counted_and_the_step_stays(tmp_path):
    boxes = ((0.1, 0.1, 0.2, 0.2), (0.1, 0.1, 0.0, 0.2), (0.1, 0.9, 0.2, 0.9))
    files.write_tfrecord(tmp_path / "a-00000-of-00001", [files.aitw_step(boxes=boxes)])
    left_out = LeftOut()
    (row,) = read("aitw", tmp_path, left_out=left_out)
    assert len(row.steps[0].elements) == 1 and left_out.counts == {"element": 2}


# ---- AndroidControl


def test_android_control_episodes_become_rows(tmp_path):
    actions = (
        {"action_type": "click", "x": 12, "y": 30},
        {"action_type": "long_press", "x": 59, "y": 39},
        {"action_type": "scroll", "direction": "down"},
        {"action_type": "input_text", "text": "7:30"},
        {"action_type": "navigate_back"},
        {"action_type": "navigate_home"},
        {"action_type": "wait"},
    )
    episodes = [files.control_episode(7, actions), files.control_episode(8, actions[:1])]
    files.write_tfrecord(tmp_path / "android_control-00000-of-00020", episodes)
    files.write_json(tmp_path / "splits.json", {"train": [8], "validation": [], "test": [7]})
    rows = read("android_control", tmp_path)
    assert [(row.row_id, row.split) for row in rows] == [
        ("android_control-7", "test"),
        ("android_control-8", "train"),
    ]
    assert [step.action for step in rows[0].steps] == [
        Action("click", x=12, y=30),
        Action("long_press", x=59, y=39),
        Action("scroll", direction="down", amount=20),
        Action("type", text="7:30"),
        Action("navigate_back"),
        Action("system_button", text="home"),
        Action("wait", seconds=1.0),
    ]
    assert rows[0].instruction == "set an alarm"
    assert [step.instruction for step in rows[0].steps][:2] == ["step 0", "step 1"]
    assert rows[0].steps[3].image == files.picture(60, 40, 7 * 50 + 3)


def test_android_control_steps_that_are_none_of_ours_are_left_out_by_name(tmp_path):
    actions = (
        {"action_type": "open_app", "app_name": "Clock"},
        {"action_type": "click", "x": 1, "y": 2},
        {"action_type": "type", "x": 1, "y": 2, "text": "a"},
    )
    files.write_tfrecord(tmp_path / "a.tfrecord", [files.control_episode(7, actions)])
    left_out = LeftOut()
    (row,) = read("android_control", tmp_path, left_out=left_out)
    assert [step.instruction for step in row.steps] == ["step 1"]
    assert left_out.counts == {"step": 2}
    assert left_out.first == (
        "a.tfrecord record 0 episode 7 step 0: no action of ours is open_app('Clock')"
    )
    files.write_tfrecord(tmp_path / "a.tfrecord", [files.control_episode(7, actions[:1])])
    with pytest.raises(RecordError, match=r"no step is left: no action of ours is open_app"):
        read("android_control", tmp_path)


# ---- GUI-Odyssey


def odyssey(folder: Path, steps: list[dict], name: str = "0001", shots: str = "screenshots"):
    files.write_json(folder / f"annotations/{name}.json", files.odyssey_episode(steps))
    for step in steps:
        shade = step["step"]
        files.write_picture(folder / shots / step["screenshot"], shade=shade)


def test_odyssey_episodes_become_rows(tmp_path):
    step = files.odyssey_step
    steps = [
        step(0, "CLICK", [[500, 250]], [400, 200, 600, 300]),
        step(1, "CLICK", "KEY_HOME"),
        step(2, "CLICK", "KEY_BACK"),
        step(3, "CLICK", "KEY_APPSELECT"),
        step(4, "LONG_PRESS", [[0, 1000]]),
        step(5, "SCROLL", [[500, 800], [500, 200]]),
        step(6, "TEXT", "7:30"),
        step(7, "TYPE", "7:31"),
        step(8, "COMPLETE", ""),
    ]
    odyssey(tmp_path, steps)
    files.write_json(tmp_path / "splits/random_split.json", {"train": [], "test": ["0001.json"]})
    (row,) = read("gui_odyssey", tmp_path)
    assert [step.action for step in row.steps] == [
        Action("click", x=30, y=10),
        Action("system_button", text="home"),
        Action("navigate_back"),
        Action("system_button", text="menu"),
        Action("long_press", x=0, y=39),
        Action("drag", x=30, y=32, x2=30, y2=8),
        Action("type", text="7:30"),
        Action("type", text="7:31"),
        Action("terminate", text="success"),
    ]
    assert row.steps[0].box == Box(24, 8, 36, 12) and row.steps[1].box is None
    assert row.split == "test" and row.row_id == "gui_odyssey-0001"
    assert row.labels == {
        **{"platform": "mobile", "category": "General_Tool", "device_name": "Pixel Tablet"}
    }
    assert row.steps[0].instruction == "step 0"


def test_odyssey_pictures_are_found_as_downloaded_and_without_a_table_there_is_no_split(tmp_path):
    odyssey(tmp_path, [files.odyssey_step(0, "INCOMPLETE", "")], shots="screenshots/data_3")
    (row,) = read("gui_odyssey", tmp_path)
    assert row.split == "" and row.steps[0].action == Action("terminate", text="failure")


# ---- ScreenSpot


def test_screenspot_lists_become_rows(tmp_path):
    items = [
        files.screenspot_item("pc_a.png", BOX),
        files.screenspot_item("pc_a.png", BOX, data_type="text", data_source="tool"),
    ]
    files.write_json(tmp_path / "screenspot_desktop.json", items)
    item = files.screenspot_item("m.png", BOX, data_source="ios")
    files.write_json(tmp_path / "screenspot_mobile.json", [item])
    for name in ("pc_a.png", "m.png"):
        files.write_picture(tmp_path / "screenspot_imgs" / name)
    rows = read("screenspot", tmp_path)
    assert [row.row_id for row in rows] == [
        *("screenspot_desktop-0", "screenspot_desktop-1", "screenspot_mobile-0"),
    ]
    assert [row.labels for row in rows] == [
        {"data_source": "windows", "platform": "desktop", "ui_type": "icon"},
        {"data_source": "tool", "platform": "web", "ui_type": "text"},
        {"data_source": "ios", "platform": "mobile", "ui_type": "icon"},
    ]
    assert {row.split for row in rows} == {"test"}
    assert rows[0].steps[0].box == BOX
    assert rows[0].steps[0].action == Action("click", x=18, y=14)
    assert rows[0].instruction == "close the window"


def test_screenspot_tables_and_lists_say_the_same(tmp_path):
    rows = [files.screenspot_table_row(BOX, (60, 40)) for _ in range(20)]
    files.write_screenspot_table(tmp_path / "data/test-00000-of-00001.parquet", rows)
    found = read("screenspot", tmp_path)
    assert len(found) == 20 and found[0].steps[0].box == pytest.approx(BOX)
    assert found[3].labels["platform"] == "mobile" and found[3].labels["ui_type"] == "text"


def test_screenspot_versions_do_not_read_each_others_lists(tmp_path):
    for name in ("screenspot_web.json", "screenspot_web_v2.json"):
        files.write_json(tmp_path / name, [files.screenspot_item("a.png", BOX)])
    files.write_picture(tmp_path / "images/a.png")
    assert [row.source for row in read("screenspot", tmp_path)] == ["screenspot"]
    (row,) = read("screenspot_v2", tmp_path)
    assert (row.row_id, row.source) == ("screenspot_web_v2-0", "screenspot_v2")


def test_screenspot_pro_becomes_rows(tmp_path):
    item = files.pro_item("ps/a.png", BOX, (60, 40))
    files.write_json(tmp_path / "annotations/photoshop_windows.json", [item])
    files.write_picture(tmp_path / "images/ps/a.png")
    (row,) = read("screenspot_pro", tmp_path)
    assert row.row_id == "photoshop_1" and row.split == "test" and row.steps[0].box == BOX
    assert row.labels == {
        **{"platform": "windows", "ui_type": "icon"},
        **{"application": "photoshop", "group": "Creative"},
    }


# ---- SeeClick, GUI-R1, UI-R1


def test_seeclick_lists_become_rows(tmp_path):
    said = files.fractions(BOX, (60, 40))
    rico = [{"img_filename": "1.jpg", "instruction": "go back", "bbox": said}]
    files.write_json(tmp_path / "widget_captioning.json", rico)
    elements = [
        {"instruction": "cart", "bbox": said, "data_type": "text"},
        {"instruction": "menu", "bbox": said, "data_type": "hover"},
    ]
    page = {"img_filename": "p/2.png", "url": "https://a", "elements": elements}
    files.write_json(tmp_path / "seeclick_web.json", [page])
    files.write_picture(tmp_path / "combined/1.jpg")
    files.write_picture(tmp_path / "seeclick_web_imgs/p/2.png")
    rows = read("seeclick", tmp_path)
    assert [row.row_id for row in rows] == [
        *("seeclick_web-0-0", "seeclick_web-0-1", "widget_captioning-0"),
    ]
    assert [row.labels for row in rows] == [{"ui_type": "text"}, {"ui_type": "hover"}, {}]
    assert all(row.steps[0].box == pytest.approx(BOX) for row in rows)
    assert {row.split for row in rows} == {""}


def test_gui_r1_becomes_rows(tmp_path):
    row = files.gui_r1_row
    rows = [
        row(files.fractions(BOX, (60, 40)), task_type="low"),
        row([0.5, 0.5], history="click the search bar"),
        row([-100, -100], "type", "lime"),
        row([-100, -100], "scroll", "UP"),
        row([-100, -100], "complete"),
        row([-100, -100], "press_back"),
        row([-100, -100], "press_home"),
        row([-100, -100], "enter"),
        row([0.5, 0.5], "long_press"),
        row([-100, -100], "wait"),
        row(files.fractions(BOX, (60, 40)), "moveto"),
        row([0.5, 0.5], "doubleclick"),
        row([0.5, 0.5], "rightclick"),
        *(row([-100, -100], f"press_{key}") for key in ("enter", "tab", "space", "down")),
    ]
    files.write_gui_r1(tmp_path / "train.parquet", rows)
    files.write_gui_r1(tmp_path / "screenspot_test.parquet", rows[:1])
    found = read("gui_r1", tmp_path)
    assert [one.row_id for one in found][:2] == ["screenspot_test-0", "train-0"]
    assert [one.split for one in found][:2] == ["test", "train"]
    assert [one.steps[0].action for one in found[1:]] == [
        Action("click", x=18, y=14),
        Action("click", x=30, y=20),
        Action("type", text="lime"),
        Action("scroll", direction="up", amount=20),
        Action("terminate", text="success"),
        Action("navigate_back"),
        Action("system_button", text="home"),
        Action("keys", keys="enter"),
        Action("long_press", x=30, y=20),
        Action("wait", seconds=1.0),
        Action("move", x=18, y=14),
        Action("double_click", x=30, y=20),
        Action("right_click", x=30, y=20),
        *(Action("keys", keys=key) for key in ("enter", "tab", "space", "down")),
    ]
    assert found[1].steps[0].box == pytest.approx(BOX) and found[2].steps[0].box is None
    assert found[1].instruction == "go on"
    assert found[2].instruction == "go on\nDone before: click the search bar"
    assert found[1].labels == {"task_type": "low"}


def test_a_parquet_file_of_one_group_is_read_a_row_at_a_time(tmp_path):
    """Any compression, dictionaries, a single row group: as pandas would write it."""
    rows = [files.gui_r1_row([0.5, 0.5]) for _ in range(100)]
    for number, codec in enumerate(("snappy", "zstd", "gzip")):
        name = f"train_{number}.parquet"
        files.write_gui_r1(tmp_path / name, rows, compression=codec, row_group_size=10_000)
    assert len(read("gui_r1", tmp_path)) == 300


def test_ui_r1_becomes_rows(tmp_path):
    items = [
        {"img_filename": "a.png", "bbox": list(BOX), "instruction": "search bar"},
        {"img_filename": "a.png", "action": "navigate_back", "instruction": "go back"},
    ]
    files.write_json(tmp_path / "train.json", items)
    files.write_picture(tmp_path / "train_imgs/a.png")
    steps = [
        {"image": "a.png", "gt": {"action_type": "click", "x": 9, "y": 8}, "task": "tap share"},
        {"image": "a.png", "gt": {"action_type": "scroll", "direction": "up"}, "task": "up"},
    ]
    files.write_json(tmp_path / "ac_test.json", steps)
    rows = read("ui_r1", tmp_path)
    assert [(row.row_id, row.split) for row in rows] == [
        *(("ac_test-0", "test"), ("ac_test-1", "test"), ("train-0", "train"), ("train-1", "train"))
    ]
    assert rows[0].steps[0].action == Action("click", x=9, y=8)
    assert rows[0].instruction == "tap share"
    assert rows[2].steps[0].box == BOX and rows[2].steps[0].action == Action("click", x=18, y=14)
    assert rows[3].steps[0].action == Action("navigate_back")


# ---- our own


def test_lines_become_rows(tmp_path):
    lines = [
        {"instruction": "Open the cart", "image": "a.png", "box": [6, 8, 30, 20]},
        {
            **{"id": "b", "split": "validation", "labels": {"platform": "web"}},
            **{"instruction": "Search", "coordinates": "0-1000", "box_form": "size"},
            "steps": [
                {
                    **{"image": "a.png", "action": {"kind": "click", "x": 500, "y": 250}},
                    **{"box": [100, 200, 400, 300], "instruction": "tap"},
                    "elements": [[0, 0, 500, 500]],
                },
                {"image": "b.jpg", "action": {"kind": "type", "text": "lime"}},
                {"image": "b.jpg", "action": {"action": "click", "coordinate": [999, 0]}},
                {"image": "b.jpg", "action": {"action": "system_button", "button": "Home"}},
            ],
        },
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    files.write_picture(tmp_path / "images/a.png")
    files.write_picture(tmp_path / "b.jpg", shade=9)
    first, second = read("jsonl", path)
    assert first.row_id == "mine-1" and first.split == "" and first.steps[0].box == BOX
    assert first.steps[0].action == Action("click", x=18, y=14)
    assert (second.row_id, second.split, second.labels) == ("b", "validation", {"platform": "web"})
    assert [step.action for step in second.steps] == [
        Action("click", x=30, y=10),
        Action("type", text="lime"),
        Action("click", x=59, y=0),
        Action("system_button", text="home"),
    ]
    assert second.steps[0].box == Box(6, 8, 30, 20)
    assert second.steps[0].elements == (Box(0, 0, 30, 20),)
    assert second.steps[0].instruction == "tap" and second.steps[1].instruction == ""


def test_the_demo_is_the_desktop_solved_by_its_script():
    rows = [draft.make() for draft in demo.read(15, seed=3)]
    assert len({row.row_id for row in rows}) == 15
    assert {row.labels["task"] for row in rows} == set(desktop.TASKS)
    assert [row.split for row in rows] == ["train"] * 12 + ["test"] * 3
    assert rows == [draft.make() for draft in demo.read(15, seed=3)]
    for row in rows:
        check_row(row)
        clicks = [step for step in row.steps if step.action.kind == "click"]
        assert clicks and all(s.box and s.box.contains(s.action.x, s.action.y) for s in clicks)
    assert len(rows[0].steps) == 1 and len(rows[1].steps) == 3 and len(rows[2].steps) > 10


def test_a_source_that_is_not_there_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match="no such file or folder"):
        Source(tmp_path / "none")
    for kind in sets.READERS:
        with pytest.raises(ConfigError, match=r"no files like|missing; give a folder"):
            read(kind, tmp_path)
    with pytest.raises(ConfigError, match="100 tasks to be played online"):
        sets.refuse_online("mobileagent_bench")
