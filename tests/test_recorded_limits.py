"""What recorded sets and their servers may cost: memory of nulls, kept rows, waits, encodings."""

import asyncio

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recorded_rows import InMemory, click, picture, row, step
from tests.test_recorded_task import HIT, opened, progress_after, task
from uirl_jax import evaluation
from uirl_jax.errors import RecordError, VerifierError
from uirl_jax.evaluation.recorded import Cell, RecordedResult
from uirl_jax.types import Action
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.recorded import pages, parquet, sets, tables
from uirl_jax.verifiers.recorded import task as recorded_task
from uirl_jax.verifiers.recorded.checks import MAX_ROW_ELEMENTS, check_row
from uirl_jax.verifiers.recorded.row import Box, Row
from uirl_jax.verifiers.recorded.sets import RecordedSets
from uirl_jax.verifiers.server.open_session import OpenSession
from uirl_jax.verifiers.server.server import serve


def write(path, steps: list, elements: int = 0) -> parquet.RowFile:
    if elements:
        steps = [{"elements": [None] * elements} for _ in steps]
    record = {"row_id": "r", "source": "s", "split": "train", "instruction": "i", "steps": steps}
    table = pa.Table.from_pylist([{**record, "labels": []}], schema=parquet.schema())
    pq.write_table(table, path, use_dictionary=False, compression="snappy")
    return parquet.RowFile(path)


def test_nulls_of_a_small_file_do_not_become_objects(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    made = []
    monkeypatch.setattr(parquet, "from_record", lambda record: made.append(record) or None)
    read = write(path, [None] * 600_000)
    assert path.stat().st_size < 10_000
    assert "600000 steps, at most 200 are allowed" in str(read.faults[0])
    read = write(path, [None] * 100, elements=2_001)
    assert "200100 elements, at most 200000 are allowed in a row" in str(read.faults[0])
    assert made == []


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("nested", [False, True])
def test_pages_that_repeat_values_though_the_footer_says_plain_are_refused(
    tmp_path, nested, version
):
    long, rows = "x" * 2**12, 64
    column = pa.array([[long] * 9] * rows if nested else [long] * rows)
    options = {"compression": "snappy", "data_page_version": version}
    plain, repeated = tmp_path / "plain", tmp_path / "repeated"
    pq.write_table(pa.table({"a": column, "b": column}), plain, use_dictionary=False, **options)
    pq.write_table(pa.table({"a": column, "b": column}), repeated, use_dictionary=["b"], **options)
    if nested:
        leaf = "b.list.element"
        table = pa.table({"a": column, "b": column})
        pq.write_table(table, repeated, use_dictionary=[leaf], **options)
    content = bytearray(repeated.read_bytes())
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = bytes(content[start:-8])  # its list of encodings, of which 8 is RLE_DICTIONARY
    content[start:-8] = footer.replace(b"\x00\x06\x10", b"\x00\x06\x06")
    repeated.write_bytes(content)
    with tables.open_parquet(plain) as file, tables.open_parquet(repeated) as forged:
        told = forged.metadata.row_group(0).column(1).encodings
        assert not {"RLE_DICTIONARY", "PLAIN_DICTIONARY"} & set(told)
        tables.check_groups(repeated, forged.metadata)
        expected = tables.read_group(plain, file, 0, ["a", "b"])
        assert expected.column("b").to_pylist() == column.to_pylist()
        assert tables.read_group(repeated, forged, 0, ["a"]).column("a") == expected.column("a")
        with pytest.raises(RecordError, match="row group 0: a page is no data, as that of a dic"):
            tables.read_group(repeated, forged, 0, ["b"])


@pytest.mark.parametrize(
    ("encoding", "kind"),
    [("DELTA_BYTE_ARRAY", pa.string()), ("DELTA_BINARY_PACKED", pa.int64())],
)
def test_pages_of_another_encoding_than_the_footer_says_are_refused(encoding, kind):
    """Of the header of a page, without the footer."""
    sink = pa.BufferOutputStream()
    values = pa.array(["a" * 9] * 9 if kind == pa.string() else [7] * 9, kind)
    table = pa.table({"a": values})
    pq.write_table(table, sink, use_dictionary=False, column_encoding={"a": encoding})
    content = sink.getvalue().to_pybytes()
    group = pq.ParquetFile(pa.BufferReader(content)).metadata.row_group(0)
    ((first, size_bytes),) = pages.chunk_places(group, ["a"], 2**20)
    with pytest.raises(pages.PageError, match=f"a has {size_bytes} bytes at {first}"):
        pages.chunk_places(group, ["a"], size_bytes - 1)
    chunk = content[first : first + size_bytes]
    with pytest.raises(pages.PageError, match="a page has the encoding"):
        pages.check_pages(chunk)
    with pytest.raises(pages.PageError):
        pages.check_pages(chunk[:3])


def test_elements_of_a_row_are_counted_before_it_is_written():
    step_of_many = click(elements=[Box(0, 0, 1, 1)] * 5000)
    with pytest.raises(RecordError, match=f"at most {MAX_ROW_ELEMENTS} are allowed in a row"):
        check_row(row(0, [step_of_many] * 41))
    check_row(row(0, [step_of_many] * 2))


def test_kept_rows_are_bounded_by_their_bytes(monkeypatch):
    rows = InMemory([row(number, [click(shade=number)]) for number in range(8)])
    monkeypatch.setattr(sets, "KEPT_BYTES", 3 * len(rows[0].steps[0].image) + 50)
    read: list[int] = []

    class Counted(InMemory):
        def __getitem__(self, index: int) -> Row:
            read.append(index)
            return super().__getitem__(index)

    kept = sets._Set(Counted([rows[number] for number in range(8)]))

    async def run():
        for index in (0, 1, 2, 0, 1, 2, 3, 4, 0, 0):
            assert (await kept.row(index)).row_id == f"r{index}"

    asyncio.run(run())
    assert read == [0, 1, 2, 3, 4, 0]


def test_a_recorded_wait_takes_no_time_on_a_server(monkeypatch):
    rows = InMemory([row(0, [step(Action("wait", seconds=9.0))])])
    waited: list[float] = []

    async def pause(self: OpenSession, seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(OpenSession, "pause", pause)

    async def run():
        async with (
            serve(recorded=RecordedSets({"made": rows})) as port,
            VerifierClient(f"http://127.0.0.1:{port}") as client,
        ):
            session = await client.create(task())
            await client.act(session.id, Action("wait", seconds=9.0))
            assert waited == [0.0]
            progress = await client.progress(session.id)
            await client.delete(session.id)
        assert progress["parts"]["match"] == 1.0

    asyncio.run(run())


def test_a_screen_is_encoded_once_for_all_looks_at_it(monkeypatch):
    session = opened(InMemory([row(0, [click(image=picture(image_format="JPEG"))])]))
    encoded = []
    again = recorded_task._encoded
    monkeypatch.setattr(recorded_task, "_encoded", lambda *a: encoded.append(a) or again(*a))

    async def look():
        screens = [await session.screenshot("png"), await session.screenshot("png")]
        await session.act(HIT)
        return [*screens, await session.screenshot("png"), await session.screenshot("webp")]

    screens = asyncio.run(look())
    assert screens[0] == screens[1] == screens[2] != screens[3] and len(encoded) == 2


def test_a_walk_has_no_instruction_of_a_step():
    with pytest.raises(VerifierError, match="level=low tells what one step shall do"):
        opened(InMemory([row(0, [click()])]), variant="walk=1,level=low")


@pytest.mark.parametrize(
    ("recorded", "said", "pays"),
    [
        ("ctrl+shift+t", "shift+ctrl+t", 1.0),
        ("ctrl+shift+t", "ctrl+shift+s", 0.0),
        ("ctrl+shift", "shift+ctrl", 0.0),
    ],
)
def test_modifiers_of_a_chord_have_no_order(recorded, said, pays):
    rows = InMemory([row(0, [step(Action("keys", keys=recorded))])])
    parts = progress_after(opened(rows), Action("keys", keys=said))["parts"]
    assert parts["match"] == parts["aitw"] == pays


def test_labels_of_others_cannot_write_to_the_terminal():
    labels = {"platform": "\x1b[2Jweb\nall  100%", "ui_type": "text\u202e"}
    told = ({name: 0.0 for name in evaluation.recorded.rules.NAMES}, {"labels": labels, "row": 1})
    result = evaluation.recorded._result([told])
    assert isinstance(result, RecordedResult) and isinstance(result.cells[0], Cell)
    table = evaluation.format_recorded({"recorded/x": result})
    assert "?[2Jweb?all  100%" in table and not set("\x1b\u202e") & set(table)
    assert not [line for line in table.splitlines() if line.startswith("all  100%")]
