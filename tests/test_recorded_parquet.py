"""Rows in parquet: round trips, and files and rows that must not get through."""

import dataclasses
import io
import random
import struct
import threading
import zlib

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from uirl_jax.errors import ConfigError, RecordError, UirlError
from uirl_jax.types import Action
from uirl_jax.verifiers.recorded import parquet, sets, tables
from uirl_jax.verifiers.recorded.checks import Faults, check_row
from uirl_jax.verifiers.recorded.row import Box, Row, Step


def picture(width: int = 40, height: int = 30, kind: str = "PNG", shade: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (shade % 256, 80, 120)).save(file, kind)
    return file.getvalue()


def row(number: int = 0, **other) -> Row:
    taps = Step(
        picture(shade=number),
        40,
        30,
        Action("click", x=5, y=6),
        Box(0, 1.5, 10, 30),
        (Box(0, 0, 1, 1),),
    )
    types = Step(picture(33, 21, "JPEG"), 33, 21, Action("type", text="à 漢"), instruction="type")
    given = {
        **{"row_id": f"r{number}", "source": "demo", "split": ("train", "test")[number % 2]},
        **{"instruction": "Click the button.", "steps": (taps, types)},
        **{"labels": {"platform": "web", "ui_type": "icon"}},
    }
    return Row(**{**given, **other})


def changed(first_step: dict, **other) -> Row:
    whole = row(**other)
    return dataclasses.replace(
        whole, steps=(dataclasses.replace(whole.steps[0], **first_step), *whole.steps[1:])
    )


def write_raw(path, records, **how) -> None:
    """Records that `write_rows` would refuse."""
    table = pa.Table.from_pylist(records, schema=how.pop("schema", parquet.schema()))
    pq.write_table(table, path, **{"use_dictionary": False, **how})


def test_rows_round_trip_over_many_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "GROUP_ROWS", 7)
    rows = [row(number) for number in range(50)]
    path = tmp_path / "deep" / "rows.parquet"
    assert parquet.write_rows(path, iter(rows)) == 50
    read = parquet.RowFile(path, kept_bytes=20_000)
    assert len(read) == 50 and not len(read.faults)
    assert pq.ParquetFile(path).num_row_groups == 8
    order = list(range(50))
    random.Random(0).shuffle(order)
    assert [read[number] for number in order] == [rows[number] for number in order]
    assert read.splits == {"train": list(range(0, 50, 2)), "test": list(range(1, 50, 2))}
    assert read[3].labels == {"platform": "web", "ui_type": "icon"}
    assert read.sizes(3) == ((40, 30), (33, 21))
    assert [file.name for file in path.parent.iterdir()] == ["rows.parquet"]


def test_groups_are_closed_by_bytes(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (200, 700, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    step = Step(file.getvalue(), 700, 200, Action("wait", seconds=1.0))
    rows = [row(number, steps=(step,)) for number in range(6)]
    parquet.write_rows(tmp_path / "rows.parquet", rows)
    footer = pq.ParquetFile(tmp_path / "rows.parquet").metadata
    assert [footer.row_group(n).num_rows for n in range(footer.num_row_groups)] == [3, 3]
    assert parquet.RowFile(tmp_path / "rows.parquet")[5] == rows[5]
    # A picture of 420 kB is in its page alone: statistics would put it into the footer too.
    assert footer.serialized_size < 20_000


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
actions = st.one_of(
    st.builds(Action, st.just("click"), st.integers(0, 39), st.integers(0, 29)),
    st.builds(Action, st.just("type"), text=st.text("abc à漢", max_size=9)),
    st.builds(Action, st.just("wait"), seconds=st.sampled_from([0.0, 0.125, 60.0])),
    st.builds(Action, st.just("scroll"), direction=st.just("up"), amount=st.integers(1, 10_000)),
    st.just(Action("terminate", text="success")),
)
boxes = st.builds(Box, st.floats(0, 9), st.floats(0, 9), st.floats(10, 40), st.floats(10, 30))
steps = st.builds(
    Step,
    image=st.sampled_from([picture(), picture(kind="JPEG"), picture(kind="WEBP")]),
    width_px=st.just(40),
    height_px=st.just(30),
    action=actions,
    box=st.none() | boxes,
    elements=st.lists(boxes, max_size=3).map(tuple),
    instruction=texts,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.builds(
            Row,
            row_id=st.just("-"),
            source=st.just("demo"),
            split=st.sampled_from(["train", "validation", "test"]),
            instruction=texts.filter(str.strip),
            steps=st.lists(steps, min_size=1, max_size=3).map(tuple),
            labels=st.dictionaries(st.sampled_from(["platform", "ui_type"]), texts),
        ),
        max_size=5,
    )
)
def test_whatever_is_written_is_read(tmp_path_factory, drawn):
    rows = [dataclasses.replace(one, row_id=f"r{n}") for n, one in enumerate(drawn)]
    path = tmp_path_factory.getbasetemp() / "drawn.parquet"
    parquet.write_rows(path, rows)
    read = parquet.RowFile(path)
    assert [read[number] for number in range(len(read))] == rows and not len(read.faults)


def test_nested_columns_come_whole_in_datasets(tmp_path):
    parquet.write_rows(tmp_path / "rows.parquet", [row(0), row(1)])
    read = datasets.Dataset.from_parquet(
        str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache")
    )
    first = read[0]
    assert first["steps"][0]["image"] == row().steps[0].image
    assert first["steps"][0]["box"] == {"left": 0, "top": 1.5, "right": 10, "bottom": 30}
    assert first["steps"][1]["action"]["text"] == "à 漢" and first["steps"][1]["box"] is None
    assert first["labels"][1] == {"name": "ui_type", "value": "icon"}


def png_of(width: int, height: int) -> bytes:
    """A PNG that says this size and has the pixels of another."""
    data = bytearray(picture())
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


BROKEN = {
    "no steps": (row(steps=()), "0 steps"),
    "too many steps": (row(steps=row().steps * 101), "202 steps"),
    "no instruction": (row(instruction=" "), "instruction is empty"),
    "long instruction": (row(instruction="a" * 10_001), "10001 characters"),
    "other split": (row(split="dev"), "split='dev' is none of train"),
    "no source": (row(source=""), "source=''"),
    "id of two lines": (row(row_id="a\nb"), "row_id"),
    "many labels": (row(labels={str(n): "" for n in range(40)}), "40 labels"),
    "long label": (row(labels={"a": "b" * 301}), "label a has 301"),
    "picture of another size": (
        changed({"image": picture(41, 30)}),
        "41x30 pixels, the row says 40x30",
    ),
    "no picture": (changed({"image": b""}), "not a readable PNG"),
    "cut picture": (changed({"image": picture()[:-9]}), "not a readable PNG"),
    "damaged picture": (changed({"image": picture()[:40] + b"x" + picture()[41:]}), "checksum"),
    "a GIF": (changed({"image": picture(kind="GIF")}), "not a readable PNG"),
    "huge picture": (
        changed({"image": png_of(60_000, 60_000), "width_px": 60_000, "height_px": 60_000}),
        "at most 32000000 pixels",
    ),
    "no width": (changed({"width_px": 0}), "width_px=0"),
    "click outside": (changed({"action": Action("click", x=40, y=0)}), "off the screen"),
    "unknown action": (changed({"action": Action("fly")}), "unknown action 'fly'"),
    "click without place": (changed({"action": Action("click", x=1)}), "lacks an argument"),
    "box outside": (changed({"box": Box(0, 0, 40.5, 30)}), "outside of a screen of 40x30"),
    "box before": (changed({"box": Box(-1, 0, 4, 3)}), "outside of a screen"),
    "turned box": (changed({"box": Box(9, 0, 4, 3)}), "empty or turned"),
    "empty box": (changed({"box": Box(9, 4, 9, 5)}), "empty or turned"),
    "box of NaN": (changed({"box": Box(0, 0, float("nan"), 3)}), "finite"),
    "element of infinity": (changed({"elements": (Box(0, 0, float("inf"), 3),)}), "finite"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_refused_by_the_writer_and_left_out_by_the_reader(tmp_path, name):
    broken, reason = BROKEN[name]
    path = tmp_path / "rows.parquet"
    with pytest.raises(RecordError, match="row 1") as told:
        parquet.write_rows(path, [row(7), broken])
    assert reason in str(told.value) and "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == []
    write_raw(path, [parquet.to_record(one) for one in (row(7), broken, row(8))])
    read = parquet.RowFile(path)
    assert [read[n].row_id for n in range(len(read))] == ["r7", "r8"]
    assert len(read.faults) == 1 and reason in read.faults[0].reason
    assert "row 1" in read.faults[0].where and "\n" not in str(read.faults[0])


def test_a_process_says_how_many_rows_of_a_set_it_left_out(tmp_path, capsys):
    path = tmp_path / "rows.parquet"
    broken, reason = BROKEN["empty box"]
    write_raw(path, [parquet.to_record(one) for one in (row(7), broken, broken)])
    assert sets.load({"mine": str(path)}).names == ("recorded/mine",)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("event=recorded_rows_left_out set=mine rows=2 first=")
    assert reason in line
    parquet.write_rows(tmp_path / "whole.parquet", [row(7)])
    sets.load({"mine": str(tmp_path / "whole.parquet")})
    assert capsys.readouterr().out == ""


MISSING = {
    "steps": lambda record: record.update(steps=None),
    "a step": lambda record: record["steps"].append(None),
    "an action": lambda record: record["steps"][0].update(action=None),
    "a kind": lambda record: record["steps"][0]["action"].update(kind=None),
    "a picture": lambda record: record["steps"][0].update(image=None),
    "a width": lambda record: record["steps"][0].update(width_px=None),
    "a side": lambda record: record["steps"][0]["box"].update(left=None),
    "an element": lambda record: record["steps"][0]["elements"].append(None),
    "an id": lambda record: record.update(row_id=None),
    "a split": lambda record: record.update(split=None),
    "an instruction": lambda record: record.update(instruction=None),
    "a label": lambda record: record["labels"].append(None),
    "a value": lambda record: record["labels"][0].update(value=None),
    "nothing, a label is there twice": lambda record: record["labels"].append(record["labels"][0]),
}


@pytest.mark.parametrize("missing", MISSING)
def test_a_row_without_a_value_is_left_out(tmp_path, missing):
    record = parquet.to_record(row(0))
    record["steps"][0]["action"] = dict(record["steps"][0]["action"])
    MISSING[missing](record)
    write_raw(tmp_path / "rows.parquet", [record, parquet.to_record(row(1))])
    read = parquet.RowFile(tmp_path / "rows.parquet")
    assert len(read) == 1 == len(read.faults) and read[0].row_id == "r1"


def test_an_id_comes_once(tmp_path):
    path = tmp_path / "rows.parquet"
    with pytest.raises(RecordError, match="with this id before"):
        parquet.write_rows(path, [row(), row()])
    write_raw(path, [parquet.to_record(row())] * 3)
    read = parquet.RowFile(path)
    assert len(read) == 1 and len(read.faults) == 2


def test_text_that_is_not_utf_8_is_left_out(tmp_path):
    path = tmp_path / "rows.parquet"
    records = [parquet.to_record(row(number)) for number in range(2)]
    table = pa.Table.from_pylist(records, schema=parquet.schema())
    broken = pa.array([b"Click \xff\xfe", b"Click."], pa.binary()).view(pa.string())
    table = table.set_column(3, "instruction", broken)
    pq.write_table(table, path, use_dictionary=False)
    read = parquet.RowFile(path)
    assert len(read) == 1 == len(read.faults)


def test_a_column_of_another_type_is_one_error(tmp_path):
    path = tmp_path / "rows.parquet"
    for column, values in {"steps": ["click"], "row_id": [3], "labels": [{"a": "b"}]}.items():
        table = pa.table({**{"x": [1]}, column: values})
        pq.write_table(table, path, use_dictionary=False)
        with pytest.raises(RecordError, match=r"column .* convert the file with it"):
            parquet.RowFile(path)
    wrong = parquet.schema().remove(3)
    write_raw(path, [], schema=wrong)
    with pytest.raises(RecordError, match="column instruction is missing"):
        parquet.RowFile(path)
    write_raw(path, [], schema=parquet.schema().with_metadata({parquet.VERSION_KEY: b"9"}))
    with pytest.raises(RecordError, match="version b'9', this reader knows 1"):
        parquet.RowFile(path)


def test_files_that_expand_are_refused_before_they_are_read(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    records = [parquet.to_record(row(number)) for number in range(9)]
    for codec in ("zstd", "gzip", "brotli"):
        write_raw(path, records, compression=codec)
        with pytest.raises(RecordError, match=f"compressed with {codec.upper()}, expected"):
            parquet.RowFile(path)
    write_raw(path, records, use_dictionary=True)
    with pytest.raises(RecordError, match="encoded as RLE_DICTIONARY, expected PLAIN"):
        parquet.RowFile(path)

    def never(*_):
        raise AssertionError("a page was read")

    monkeypatch.setattr(parquet, "read_group", never)
    repeated = [{**records[0], "instruction": "a" * 300_000} for _ in range(100)]
    write_raw(path, repeated, column_encoding={"instruction": "DELTA_BYTE_ARRAY"})
    assert path.stat().st_size < 400_000  # of 30 million characters
    with pytest.raises(RecordError, match="instruction is encoded as DELTA_BYTE_ARRAY, expected"):
        parquet.RowFile(path)
    monkeypatch.setattr(tables, "MAX_GROUP_BYTES", 1_000_000)
    write_raw(path, [{**records[0], "instruction": "a" * 3_000_000}], compression="snappy")
    assert path.stat().st_size < 200_000
    with pytest.raises(RecordError, match=r"holds 3\d* bytes, at most 1000000 "):
        parquet.RowFile(path)
    monkeypatch.setattr(tables, "MAX_VALUES", 8)
    write_raw(path, records)
    with pytest.raises(RecordError, match="holds 468 values"):
        parquet.RowFile(path)
    monkeypatch.setattr(tables, "MAX_ROWS", 8)
    with pytest.raises(RecordError, match="9 rows, at most 8"):
        parquet.RowFile(path)


def test_damaged_files_are_one_line(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_rows(path, [row(number) for number in range(20)])
    whole = path.read_bytes()
    damaged = [b"", b"PAR1", b"x" * 100, whole[: len(whole) // 2], whole[:-1]]
    damaged.append(whole[:-8] + struct.pack("<I", 2**31) + b"PAR1")
    damaged.append(b"PAR1" + whole[-8:])
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(RecordError, match=r"rows.parquet: ") as told:
            parquet.RowFile(path)
        assert "\n" not in str(told.value)
    with pytest.raises(RecordError, match="No such file"):
        parquet.RowFile(tmp_path / "none.parquet")
    with pytest.raises(RecordError):
        parquet.RowFile(tmp_path)


def test_flipped_bits_never_give_a_row_that_cannot_be_played(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_rows(path, [row(number) for number in range(4)])
    whole = path.read_bytes()
    rng = random.Random(1)
    read = 0
    for _ in range(150):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            rows = parquet.RowFile(path)
            for number in range(len(rows)):
                check_row(rows[number])
                read += 1
        except RecordError as error:
            assert "\n" not in str(error)
    assert read > 100


def test_threads_share_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "GROUP_ROWS", 3)
    rows = [row(number) for number in range(30)]
    parquet.write_rows(tmp_path / "rows.parquet", rows)
    read = parquet.RowFile(tmp_path / "rows.parquet", kept_bytes=1)
    wrong: list[int] = []

    def look(seed: int) -> None:
        order = random.Random(seed).sample(range(30), 30)
        wrong.extend(number for number in order if read[number] != rows[number])

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_failing_source_leaves_the_old_file(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_rows(path, [row(5)])

    def rows():
        yield row(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parquet.write_rows(path, rows())
    assert parquet.RowFile(path)[0].row_id == "r5" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UirlError, match="cannot be written"):
        parquet.write_rows(tmp_path / "file" / "rows.parquet", [row()])


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"need pyarrow .*pip install -e '.\[data\]'"):
        parquet.RowFile(tmp_path / "rows.parquet")


def test_a_thousand_faults_are_named_and_all_are_counted():
    faults = Faults()
    for number in range(1500):
        faults.add(f"line {number}\n", "é" * 1000)
    assert len(faults) == 1500 and len(list(faults)) == 1000
    assert all("\n" not in str(fault) and len(str(fault)) < 600 for fault in faults)
