"""Coordinates of every published form, there and back, and worked by hand."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import gui_data_files as files
from tools.gui_data import places, sets
from tools.gui_data.places import AITW, FRACTIONS, PIXELS, PIXELS_WITH_SIZE, THOUSANDTHS
from tools.gui_data.source import Source
from uirl_jax.errors import RecordError
from uirl_jax.types import Action
from uirl_jax.verifiers.recorded.row import Box, Row, Size, scale_action

FORMS = {
    "pixels": PIXELS,
    "pixels, size": PIXELS_WITH_SIZE,
    "0-1": FRACTIONS,
    "0-1000": THOUSANDTHS,
    "aitw": AITW,
    "0-1000, size, y first": places.Form("0-1000", has_size=True, y_first=True),
}
sides = st.integers(20, 5000)
SIZE = (640, 360)


@st.composite
def boxes(draw, size: tuple[int, int]) -> Box:
    """At least a hundredth of either axis: thousandths cannot say less than one of theirs."""
    width, height = size
    left = draw(st.integers(0, width - width // 50 - 1))
    top = draw(st.integers(0, height - height // 50 - 1))
    right = draw(st.integers(left + width // 50 + 1, width))
    bottom = draw(st.integers(top + height // 50 + 1, height))
    return Box(left, top, right, bottom)


def write_box(
    box: Box, form: places.Form, size: Size, *, counted: Size | None = None
) -> list[float]:
    """What `read_box` reads as this box; thousandths are rounded to whole ones."""
    spans = form.spans(size, counted)
    sides = [at * span / px for at, px, span in zip(box, size * 2, spans * 2, strict=True)]
    if form.unit == "0-1000":
        sides = [float(round(side)) for side in sides]
    a, b, c, d = sides
    if form.has_size:
        c, d = c - a, d - b
    return [b, a, d, c] if form.y_first else [a, b, c, d]


def write_point(
    point: tuple[int, int], form: places.Form, size: Size, *, counted: Size | None = None
) -> list[float]:
    """What `read_point` reads as this pixel: its middle, in pixels itself; whole thousandths."""
    spans = form.spans(size, counted)
    if form.unit == "pixels" and counted in (None, size):
        found = [float(at) for at in point]
    else:
        found = [(at + 0.5) * span / px for at, px, span in zip(point, size, spans, strict=True)]
    if form.unit == "0-1000":
        found = [float(round(at)) for at in found]
    return found[::-1] if form.y_first else found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), sides, sides, st.sampled_from(sorted(FORMS)))
def test_boxes_come_back_within_a_pixel_or_half_a_thousandth(data, width, height, name):
    size, form = (width, height), FORMS[name]
    box = data.draw(boxes(size))
    back = places.read_box(write_box(box, form, size), form, size)
    unit = max(1.0, max(size) / 1000) if form.unit == "0-1000" else 1e-6
    assert all(abs(a - b) <= unit for a, b in zip(box, back, strict=True))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), sides, sides, st.sampled_from(sorted(FORMS)))
def test_points_come_back_as_the_same_pixel(data, width, height, name):
    size, form = (width, height), FORMS[name]
    point = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    back = places.read_point(write_point(point, form, size), form, size)
    if form.unit == "0-1000":
        assert all(abs(a - b) <= 1 + px / 2000 for a, b, px in zip(point, back, size, strict=True))
    else:
        assert back == point


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), sides, sides, st.integers(20, 5000), st.integers(20, 5000))
def test_pixels_of_a_picture_that_was_resized_are_scaled(data, width, height, was_w, was_h):
    size, counted = (width, height), (was_w, was_h)
    box = data.draw(boxes(size))
    for form in (PIXELS, PIXELS_WITH_SIZE):
        said = write_box(box, form, size, counted=counted)
        back = places.read_box(said, form, size, counted=counted)
        assert all(abs(a - b) < 1e-6 for a, b in zip(box, back, strict=True))
    point = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    said = write_point(point, PIXELS, size, counted=counted)
    assert places.read_point(said, PIXELS, size, counted=counted) == point


def test_forms_by_hand():
    size = (200, 100)
    box = Box(20, 30, 60, 80)
    assert places.read_box([20, 30, 60, 80], PIXELS, size) == box
    assert places.read_box([20, 30, 40, 50], PIXELS_WITH_SIZE, size) == box
    assert places.read_box([0.1, 0.3, 0.3, 0.8], FRACTIONS, size) == pytest.approx(box)
    assert places.read_box([100, 300, 300, 800], THOUSANDTHS, size) == box
    assert places.read_box([0.3, 0.1, 0.5, 0.2], AITW, size) == pytest.approx(box)
    assert places.read_box([10, 15, 30, 40], PIXELS, size, counted=(100, 50)) == box
    assert places.read_point([0.29, 0.55], FRACTIONS, (100, 100)) == (29, 55)
    assert places.read_point([0.55, 0.29], AITW, (100, 100)) == (29, 55)
    assert places.read_point([1000, 1000], THOUSANDTHS, size) == (199, 99)
    assert places.read_point([199.6, 99.9], PIXELS, size) == (199, 99)
    assert places.centre(Box(0, 0, 200, 100), size) == (100, 50)
    assert places.without_far_edge([4, 5, 10, 11]) == Box(4, 5, 9, 10)


def test_what_is_off_by_rounding_is_kept_and_more_is_not():
    assert places.read_box([-0.9, 0, 60, 40.9], PIXELS, (60, 40)) == Box(0, 0, 60, 40)
    assert places.read_point([60, 40], PIXELS, (60, 40)) == (59, 39)
    for values in ([-1.1, 0, 60, 40], [0, 0, 61.1, 40], [0, 0, 60, 41.2]):
        with pytest.raises(RecordError, match="outside of a picture of 60x40; expected pixels"):
            places.read_box(values, PIXELS, (60, 40))
    with pytest.raises(RecordError, match="expected fractions of the picture"):
        places.read_box([10, 20, 30, 40], FRACTIONS, (60, 40))  # pixels where fractions belong
    with pytest.raises(RecordError, match="expected thousandths"):
        places.read_point([1200, 3], THOUSANDTHS, (60, 40))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data(), sides, sides, sides, sides)
def test_shrinking_moves_boxes_and_clicks_together(data, width, height, to_w, to_h):
    old, new = (width, height), (to_w, to_h)
    box = data.draw(boxes(old))
    x, y = places.centre(box, old)
    moved = box.scaled(old, new)
    action = scale_action(Action("click", x=x, y=y), old, new)
    assert 0 <= action.x < to_w and 0 <= action.y < to_h
    assert moved.left - 1 <= action.x <= moved.right + 1
    assert moved.top - 1 <= action.y <= moved.bottom + 1
    assert moved.scaled(new, old) == pytest.approx(box)
    scroll = scale_action(Action("scroll", direction="up", amount=height), old, new)
    assert scroll.amount == to_h


# Each set in its own files: box and click through the reader, not through `places` alone.


def rows_of(kind: str, folder: Path) -> list[Row]:
    return [draft.make() for draft in sets.READERS[kind](Source(folder))]


def write_screenspot(folder: Path, box: Box, point: tuple[int, int]) -> None:
    files.write_json(folder / "screenspot_web.json", [files.screenspot_item("a.png", box)])
    files.write_picture(folder / "screenspot_imgs/a.png", *SIZE)


def write_screenspot_v2(folder: Path, box: Box, point: tuple[int, int]) -> None:
    files.write_json(folder / "screenspot_web_v2.json", [files.screenspot_item("a.png", box)])
    files.write_picture(folder / "screenspotv2_image/a.png", *SIZE)


def write_pro(folder: Path, box: Box, point: tuple[int, int]) -> None:
    files.write_json(folder / "annotations/x.json", [files.pro_item("x/a.png", box, SIZE)])
    files.write_picture(folder / "images/x/a.png", *SIZE)


def write_pro_resized(folder: Path, box: Box, point: tuple[int, int]) -> None:
    bigger = Box(*(3 * side for side in box))
    item = files.pro_item("a.png", bigger, (3 * SIZE[0], 3 * SIZE[1]))
    files.write_json(folder / "annotations/x.json", [item])
    files.write_picture(folder / "images/a.png", *SIZE)


def write_table(folder: Path, box: Box, point: tuple[int, int]) -> None:
    row = files.screenspot_table_row(box, SIZE)
    files.write_screenspot_table(folder / "data/test-00000-of-00001.parquet", [row])


def write_seeclick(folder: Path, box: Box, point: tuple[int, int]) -> None:
    item = {"img_filename": "a.jpg", "instruction": "go", "bbox": files.fractions(box, SIZE)}
    files.write_json(folder / "widget_captioning.json", [item])
    files.write_picture(folder / "combined/a.jpg", *SIZE)


def write_gui_r1(folder: Path, box: Box, point: tuple[int, int]) -> None:
    image = {"bytes": files.picture(*SIZE), "path": None}
    row = files.gui_r1_row(files.fractions(box, SIZE), image=image)
    files.write_gui_r1(folder / "train.parquet", [row])


def write_ui_r1(folder: Path, box: Box, point: tuple[int, int]) -> None:
    item = {"img_filename": "a.png", "instruction": "go", "bbox": list(box)}
    files.write_json(folder / "train.json", [item])
    files.write_picture(folder / "train_imgs/a.png", *SIZE)


def write_odyssey(folder: Path, box: Box, point: tuple[int, int]) -> None:
    width, height = SIZE
    said = [box.left / width, box.top / height, box.right / width, box.bottom / height]
    step = files.odyssey_step(
        0,
        "CLICK",
        [[round((point[0] + 0.5) * 1000 / width), round((point[1] + 0.5) * 1000 / height)]],
        [round(side * 1000) for side in said],
    )
    files.write_json(folder / "annotations/0001.json", files.odyssey_episode([step]))
    files.write_picture(folder / "screenshots/0001_0.png", *SIZE)


def write_control(folder: Path, box: Box, point: tuple[int, int]) -> None:
    action = {"action_type": "click", "x": point[0], "y": point[1]}
    files.write_tfrecord(
        folder / "android_control-00000-of-00020",
        [files.control_episode(7, (action,), size=SIZE)],
    )


def write_aitw(folder: Path, box: Box, point: tuple[int, int]) -> None:
    width, height = SIZE
    step = files.aitw_step(
        size=SIZE,
        touch=((point[1] + 0.5) / height, (point[0] + 0.5) / width),
        boxes=(
            (
                *(box.top / height, box.left / width),
                *((box.bottom - box.top) / height, (box.right - box.left) / width),
            ),
        ),
    )
    files.write_tfrecord(folder / "general-00000-of-00321", [step])


HAS_BOX, HAS_POINT, HAS_ELEMENT = "box", "point", "element"
WRITERS = {
    "screenspot": (write_screenspot, {HAS_BOX}),
    "screenspot_v2": (write_screenspot_v2, {HAS_BOX}),
    "screenspot_pro": (write_pro, {HAS_BOX}),
    "screenspot_pro, resized": (write_pro_resized, {HAS_BOX}),
    "screenspot, parquet": (write_table, {HAS_BOX}),
    "seeclick": (write_seeclick, {HAS_BOX}),
    "rico": (write_seeclick, {HAS_BOX}),
    "gui_r1": (write_gui_r1, {HAS_BOX}),
    "ui_r1": (write_ui_r1, {HAS_BOX}),
    "gui_odyssey": (write_odyssey, {HAS_BOX, HAS_POINT}),
    "android_control": (write_control, {HAS_POINT}),
    "aitw": (write_aitw, {HAS_POINT, HAS_ELEMENT}),
}


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_place_of_a_set_becomes_our_pixels_within_a_pixel(name, data):
    write, has = WRITERS[name]
    box = data.draw(boxes(SIZE))
    point = data.draw(st.integers(0, SIZE[0] - 1)), data.draw(st.integers(0, SIZE[1] - 1))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), box, point)
        (row,) = rows_of(name.partition(",")[0], Path(folder))
    step = row.steps[0]
    assert (step.width_px, step.height_px) == SIZE
    found = {HAS_BOX: step.box, HAS_ELEMENT: step.elements[0] if step.elements else None}
    for what in has - {HAS_POINT}:
        assert all(abs(a - b) <= 1 for a, b in zip(found[what], box, strict=True))
    expected = point if HAS_POINT in has else places.centre(box, SIZE)
    assert abs(step.action.x - expected[0]) <= 1 and abs(step.action.y - expected[1]) <= 1


@pytest.mark.parametrize("name", WRITERS)
def test_a_source_is_found_by_a_relative_path(name, tmp_path, monkeypatch):
    write, _ = WRITERS[name]
    write(tmp_path / "data/set", Box(10, 10, 30, 30), (20, 20))
    monkeypatch.chdir(tmp_path)
    (row,) = rows_of(name.partition(",")[0], Path("data/set"))
    assert (row.steps[0].width_px, row.steps[0].height_px) == SIZE
    monkeypatch.chdir(tmp_path / "data/set")
    assert rows_of(name.partition(",")[0], Path(".")) == [row]


def test_a_file_of_odyssey_is_found_by_a_relative_path(tmp_path, monkeypatch):
    write_odyssey(tmp_path, Box(10, 10, 30, 30), (20, 20))
    monkeypatch.chdir(tmp_path)
    rows = rows_of("gui_odyssey", Path("annotations/0001.json"))
    monkeypatch.chdir(tmp_path / "annotations")
    assert len(rows) == 1 and rows_of("gui_odyssey", Path("0001.json")) == rows
