"""tools.prepare_gui_data, the command: sets, splits, what it says, and what a kill leaves."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests import gui_data_files as files
from tests.command_world import ROOT
from tools.grounding.dataset import Folder, Settings
from tools.grounding.questions import Question
from tools.grounding.screens import Screen
from tools.grounding.sources import Plan
from tools.gui_data import sets
from tools.gui_data import source as source_module
from tools.gui_data.pictures import look
from tools.gui_data.preparing import Wanted, make_set, prepare
from tools.gui_data.source import Draft, LeftOut, Source
from tools.gui_data.splitting import Splitter
from uirl_jax.errors import ConfigError, RecordError, UirlError
from uirl_jax.types import Action
from uirl_jax.verifiers.recorded.parquet import RowFile
from uirl_jax.verifiers.recorded.row import Box, Row, Step

BOX = [6, 8, 30, 20]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tools.prepare_gui_data", *map(str, arguments)]


def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def write_lines(folder: Path, rows: list[dict], pictures: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(pictures):
        files.write_picture(folder / f"{number}.png", shade=number)
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def line(picture: int = 0, **other) -> dict:
    return {"instruction": "Go", "image": f"{picture}.png", "box": BOX, **other}


def test_the_demo_set_is_made_from_nothing(tmp_path):
    out = tmp_path / "demo"
    done = run("--kind=demo", "--rows=15", f"--out={out}")
    assert f"{out}/rows.parquet: 15 rows (train 12, test 3)" in done.stdout
    assert f"--recorded-set=NAME={out}/rows.parquet" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == [
        *("left_out.jsonl", "rows.parquet", "summary.json", "verl"),
    ]
    rows = RowFile(out / "rows.parquet")
    assert len(rows) == 15 and not len(rows.faults)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["splits"] == {"train": 12, "test": 3} and summary["rows"] == 15
    # The sheet is copied with keys that a phone has not: verl's files are without it, by name.
    assert summary["left_out"] == {"verl row": 5}
    left_out = [json.loads(one) for one in (out / "left_out.jsonl").read_text().splitlines()]
    assert {one["reason"] for one in left_out} == {"mobile_use has no key 'ctrl+c', only enter"}
    assert sorted(path.name for path in (out / "verl").iterdir()) == [
        *("test.parquet", "train.parquet"),
    ]


def test_what_is_left_out_is_said_and_the_exit_code_is_0(tmp_path):
    source = write_lines(tmp_path / "a", [line(), line(box=[1, 2, 3]), line(7), line()])
    done = run(source, "--kind=jsonl", f"--out={tmp_path / 'out'}", "--noverl")
    assert "2 rows (train 2), 2 steps" in done.stdout
    assert "warning: left out: 2 rows; " in done.stdout
    assert "the first: mine.jsonl line 2: [1, 2, 3]: expected 4 numbers" in done.stdout
    assert "warning: every row is in split train" in done.stdout
    assert not (tmp_path / "out" / "verl").exists()


def test_files_of_one_name_in_two_sources_are_sources_of_their_own(tmp_path):
    first = write_lines(tmp_path / "day1", [line(), line()], pictures=2)
    second = write_lines(tmp_path / "day2", [line(1), line(1), line(1) | {"id": "given"}], 2)
    summary, left_out = make_set("jsonl", [str(first), str(second)], tmp_path / "out", Wanted())
    assert summary["rows"] == 5 and not left_out.counts["row"]
    rows = RowFile(tmp_path / "out" / "rows.parquet")
    ids = [rows[number].row_id for number in range(5)]
    assert ids == ["mine-1", "mine-2", "2-mine-1", "2-mine-2", "given"]


def test_tables_of_one_name_in_two_sources_keep_all_rows(tmp_path):
    sources = []
    for number in range(2):
        good = files.screenspot_table_row(Box(*BOX), (60, 40))
        broken = files.screenspot_table_row(Box(*BOX), (60, 40), bbox=[1.0])
        path = tmp_path / f"day{number}" / "data" / "test-00000-of-00001.parquet"
        files.write_screenspot_table(path, [good, broken])
        sources.append(path.parent.parent)
    out = tmp_path / "out"
    summary, left_out = make_set("screenspot", list(map(str, sources)), out, Wanted())
    assert summary["rows"] == 2 and left_out.counts["row"] == 2
    lines = [json.loads(one) for one in (out / "left_out.jsonl").read_text().splitlines()]
    where = "test-00000-of-00001.parquet row 1"
    assert [one["where"] for one in lines[:2]] == [f"{source}: {where}" for source in sources]


def test_files_of_screenspot_v2_are_told_their_kind(tmp_path):
    files.write_json(tmp_path / "screenspot_web_v2.json", [])
    with pytest.raises(ConfigError, match="ScreenSpot-v2's files; give --kind=screenspot_v2"):
        make_set("screenspot", [str(tmp_path)], tmp_path / "out", Wanted())


def test_a_set_without_its_table_of_splits_says_so(tmp_path):
    files.write_tfrecord(
        tmp_path / "a.tfrecord",
        [files.control_episode(actions=({"action_type": "navigate_back"},))],
    )
    done = run(tmp_path, "--kind=android_control", f"--out={tmp_path / 'out'}", "--noverl")
    assert "has no table of splits (splits.json), and --splits names none" in done.stdout
    files.write_json(tmp_path / "splits.json", {"train": [7], "test": []})
    done = run(tmp_path, "--kind=android_control", f"--out={tmp_path / 'other'}", "--noverl")
    assert "no table" not in done.stdout


def test_lines_of_what_is_left_out_are_bounded_and_it_is_told_meanwhile(monkeypatch):
    monkeypatch.setattr(source_module, "MAX_LINES", 3)
    file, told = io.BytesIO(), []
    left_out = LeftOut(file)
    left_out.on_add = told.append
    for number in range(9):
        left_out.add("element", f"e{number}", "no size")
    assert left_out.first == "e0: no size"
    left_out.add("row", "r", "broken")
    assert left_out.first == "r: broken" and len(told) == 10
    assert left_out.counts == {"element": 9, "row": 1}
    assert len(file.getvalue().splitlines()) == 4


def test_nothing_left_is_an_error_and_leaves_nothing(tmp_path):
    source = write_lines(tmp_path / "a", [line(box=[1, 2, 3])])
    done = run(source, "--kind=jsonl", f"--out={tmp_path / 'out'}", code=1)
    assert done.stderr.count("\n") == 1
    assert "no row is left; the first: mine.jsonl line 1: [1, 2, 3]" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize(
    ("kind", "paths", "wanted", "reason"),
    [
        ("demo", ["x.jsonl"], {}, "takes no source, got x.jsonl"),
        ("jsonl", [], {}, "needs a source"),
        ("jsonl", ["none.jsonl"], {}, "no such file or folder"),
        ("mobileagent_bench", ["x"], {}, "no recorded screens: it is 100 tasks"),
        ("aitw", [ROOT / "docs"], {}, "no files like *.tfrecord*"),
        ("jsonl", ["x"], {"splits": Path("x.json")}, "--splits: --kind=jsonl does not read it; "),
        ("demo", [], {"splits": Path("x.json")}, "those that do: aitw, android_control, gui_odyss"),
        ("gui_r1", ["x"], {"images": Path("x")}, "--images: --kind=gui_r1 does not read it"),
        ("grounding", [ROOT / "docs"], {}, "give a folder of tools.make_grounding_data"),
        ("demo", [], {"test_share": 0.9, "validation_share": 0.2}, "more than everything"),
    ],
)
def test_a_wrong_call_is_one_error_and_leaves_nothing(tmp_path, kind, paths, wanted, reason):
    with pytest.raises(UirlError) as told:
        make_set(kind, list(map(str, paths)), tmp_path / "out", Wanted(**wanted))
    assert reason in str(told.value) and "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["exists", "glob"])
def test_a_source_that_cannot_be_read_is_named_and_not_the_set(tmp_path, monkeypatch, where):
    """Also the second of two, which is read while the set is being written."""
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        write_lines(path, [line()])
    once = getattr(Path, where)

    def refused(path, *args, **options):
        if path == paths[1]:
            raise PermissionError(13, "Permission denied", str(path))
        return once(path, *args, **options)

    monkeypatch.setattr(Path, where, refused)
    with pytest.raises(UirlError) as told:
        make_set("jsonl", list(map(str, paths)), tmp_path / "out", Wanted())
    assert str(told.value) == f"{paths[1]}: Permission denied"
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_or_cannot_be_made_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match="is there already; give another, or delete it"):
        make_set("demo", [], tmp_path, Wanted())
    with pytest.raises(UirlError, match="--out=/proc/none/x: No such file or directory"):
        make_set("demo", [], Path("/proc/none/x"), Wanted())
    assert "--kind or --out is missing" in run("--kind=demo", code=1).stderr


def test_a_killed_run_leaves_nothing_and_the_next_one_is_whole(tmp_path):
    out = tmp_path / "demo"
    given = command("--kind=demo", "--rows=100000", f"--out={out}", "--noverl")
    running = subprocess.Popen(given, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        half = tmp_path / ".demo.tmp"
        deadline_s = time.monotonic() + 60
        while not (half.is_dir() and any(f.stat().st_size > 10**4 for f in half.iterdir())):
            assert running.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        os.kill(running.pid, signal.SIGKILL)
    finally:
        running.kill()
        running.wait()
    assert not out.exists() and half.exists()
    run("--kind=demo", "--rows=3", f"--out={out}", "--noverl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo"]
    assert len(RowFile(out / "rows.parquet")) == 3


def test_screens_of_our_own_become_a_set_and_some_of_the_training_ones_are_held_out(tmp_path):
    """Two folders as tools.make_grounding_data writes them, with screens that need no browser."""
    for split, screens in (("train", 9), ("test", 2)):
        size = (160, 210)
        about = Settings(0, split, size, 4, {"plain": ["plain"]}, [], "renderer")
        folder = Folder(tmp_path / split, about)
        asked = []
        for number in range(screens):
            png = files.picture(*size, shade=number + 10 * (split == "test"))
            shown = Screen(Plan(number, 0, "plain", number), png, (), ())
            questions = [
                Question("Click Save.", (20, 30, 60, 50), "button", "text"),
                Question("Click the red box.", (0, 0, 160, 210), "field", "colour"),
            ]
            asked.append((shown, questions))
        folder.write(0, asked)
    out = tmp_path / "out"
    folders = [str(tmp_path / split) for split in ("train", "test")]
    summary, _ = make_set("grounding", folders, out, Wanted(test_share=0.5))
    assert sum(summary["splits"].values()) == 2 * 11 and summary["screens_in_two_splits"] == 0
    rows = RowFile(out / "rows.parquet")
    by_screen: dict[bytes, set[str]] = {}
    for number in range(2 * 9):
        row = rows[number]
        by_screen.setdefault(row.steps[0].image, set()).add(row.split)
    assert sorted(map(len, by_screen.values())) == [1] * 9
    assert {split for one in by_screen.values() for split in one} == {"train", "test"}
    assert {rows[number].split for number in range(2 * 9, 2 * 11)} == {"test"}
    first = rows[0]
    assert first.instruction == "Click Save." and first.source == "grounding"
    assert first.steps[0].box == Box(20, 30, 59, 49)  # the far edge is outside there
    assert first.steps[0].action == Action("click", x=39, y=39)
    assert rows[1].steps[0].box == Box(0, 0, 159, 209)
    named = {"kind": "button", "by": "text", "component": "plain"}
    assert first.labels == {**named, "platform": "plain", "ui_type": "text"}


def test_larger_pictures_are_shrunk_with_their_places(tmp_path):
    rows = [line(), line(action={"kind": "drag", "x": 0, "y": 0, "x2": 59, "y2": 39})]
    source = write_lines(tmp_path / "a", rows)
    out = tmp_path / "out"
    make_set("jsonl", [str(source)], out, Wanted(longest_px=30))
    first, second = (RowFile(out / "rows.parquet")[number] for number in range(2))
    step = first.steps[0]
    assert (step.width_px, step.height_px) == (30, 20) and step.box == Box(3, 4, 15, 10)
    assert Image.open(io.BytesIO(step.image)).size == (30, 20)
    assert step.action == Action("click", x=9, y=7)
    assert second.steps[0].action == Action("drag", x=0, y=0, x2=29, y2=19)


def test_pictures_may_lie_elsewhere(tmp_path):
    item = {"img_filename": "0.png", "instruction": "Go", "bbox": BOX}
    files.write_json(tmp_path / "a/train.json", [item])
    files.write_picture(tmp_path / "b/0.png")
    make_set("ui_r1", [str(tmp_path / "a")], tmp_path / "out", Wanted(images=tmp_path / "b"))
    assert len(RowFile(tmp_path / "out/rows.parquet")) == 1


# ---- splits


def draft(number: int, shades: list[int], split: str = "") -> Draft:
    steps = [Step(files.picture(shade=s), 60, 40, Action("wait", seconds=1.0)) for s in shades]
    row = Row(f"r{number}", "made", split, "Go", tuple(steps))
    return Draft(f"row {number}", lambda: row)


def made(tmp_path: Path, drafts: list[Draft], **wanted) -> tuple[RowFile, dict]:
    tmp_path.mkdir(exist_ok=True)
    summary = prepare(iter(drafts), LeftOut(), tmp_path, Wanted(has_verl=False, **wanted))
    return RowFile(tmp_path / "rows.parquet"), summary


def screens_by_split(rows: RowFile) -> dict[str, set[bytes]]:
    found: dict[str, set[bytes]] = {}
    for split, numbers in rows.splits.items():
        digests = {look(step.image).digest for n in numbers for step in rows[n].steps}
        found[split] = digests
    return found


def test_no_screen_is_in_two_splits_and_the_shares_are_about_right(tmp_path):
    rng = np.random.default_rng(0)
    drafts = [draft(n, [int(rng.integers(300))]) for n in range(600)]
    rows, summary = made(tmp_path, drafts, test_share=0.2, validation_share=0.1)
    assert len(rows) == 600 and summary["screens_in_two_splits"] == 0
    screens = screens_by_split(rows)
    assert not screens["train"] & screens["test"] and not screens["train"] & screens["validation"]
    assert not screens["test"] & screens["validation"]
    count = sum(map(len, screens.values()))
    assert 0.13 < len(screens["test"]) / count < 0.27
    assert 0.05 < len(screens["validation"]) / count < 0.16


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4), min_size=1, max_size=40))
def test_episodes_that_share_screens_are_in_one_split_or_left_out(episodes):
    splitter = Splitter(0.2, 0.3)
    of_screen: dict[int, set[str]] = {}
    for episode in episodes:
        digests = [bytes([shade]) * 16 for shade in episode]
        try:
            split = splitter.assign("", digests)
        except RecordError as error:
            assert "its screens are in" in str(error)
            there = {one for shade in episode for one in of_screen.get(shade, ())}
            assert len(there) > 1
            continue
        for shade in episode:
            of_screen.setdefault(shade, set()).add(split)
    assert all(len(splits) == 1 for splits in of_screen.values())


def test_the_same_picture_in_another_encoding_is_the_same_screen(tmp_path):
    png = files.picture(shade=3)
    image = Image.open(io.BytesIO(png))
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=0)
    assert file.getvalue() != png and look(file.getvalue()).digest == look(png).digest


def test_splits_of_the_source_are_kept_and_shared_screens_counted(tmp_path):
    drafts = [draft(0, [1], "train"), draft(1, [1], "test"), draft(2, [2], "validation")]
    rows, summary = made(tmp_path, drafts)
    assert rows.splits == {"train": [0], "test": [1], "validation": [2]}
    assert summary["screens_in_two_splits"] == 1


def test_rows_without_a_split_follow_those_that_have_one(tmp_path):
    rows, _ = made(tmp_path, [draft(0, [1], "validation"), draft(1, [1])])
    assert rows.splits == {"validation": [0, 1]}


def test_the_same_source_gives_the_same_file(tmp_path):
    drafts = [draft(n, [n % 7]) for n in range(40)]
    made(tmp_path / "a", drafts)
    made(tmp_path / "b", drafts)
    assert (tmp_path / "a/rows.parquet").read_bytes() == (tmp_path / "b/rows.parquet").read_bytes()


def test_a_limit_stops_reading(tmp_path):
    def drafts():
        yield from (draft(n, [n]) for n in range(5))
        raise AssertionError("read on")

    rows, _ = made(tmp_path, drafts(), limit=5)  # type: ignore[arg-type]
    assert len(rows) == 5


def test_every_kind_is_in_the_docs():
    page = (ROOT / "docs" / "gui_data.md").read_text()
    for kind in sets.KINDS:
        assert f"`{kind}`" in page
    assert Source(ROOT / "docs").folder == ROOT / "docs"
