"""tools.make_grounding_data in a real Chromium: boxes are where the pixels are, seeds repeat."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.chromium import needs_chromium, open_page, pool_and_runner
from tests.command_world import ROOT, SHIPPED_MODEL
from tools.grounding import sources
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.table import family_of
from uirl_jax.learner import recorded_demonstrations
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import Action
from uirl_jax.verifiers import own_tasks

pytest.importorskip("playwright")
from tools.grounding.browser import elements_of, reading, words_of
from tools.page_model.screen_pages import Screens

pytestmark = needs_chromium
SCREENS = 20
SOURCES = "plain,miniwob,simple_data_entry"  # what needs no network


def make(out: Path | str, *arguments: str, screens: int = SCREENS):
    command = [sys.executable, "-m", "tools.make_grounding_data", f"--out={out}"]
    return subprocess.run(
        [*command, f"--screens={screens}", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=600,
    )


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


# ------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--screens=0"], "--screens=0: expected 1 to"),
        (["--size=160"], "--size=160: expected WIDTHxHEIGHT"),
        (["--sources=bulma"], "--sources=bulma: not of --split=train"),
        (["--size=200x200", "--sources=miniwob"], "left out: miniwob: its screens are 160x210"),
        (
            ["--size=640x840", "--density=2", "--sources=miniwob"],
            "left out: miniwob: its screens are 160x210",
        ),
    ],
)
def test_wrong_flags_are_one_line(tmp_path, arguments, said):
    done = make(tmp_path / "out", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1


def test_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    done = make(tmp_path / "file" / "out")
    assert done.returncode == 1
    assert done.stderr == f"error: --out={tmp_path}/file/out: Not a directory\n"


# ------------------------------------------------------------------------------- in Chromium


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("grounding") / "data"
    done = make(out, f"--sources={SOURCES}")
    assert done.returncode == 0, done.stderr
    assert f"{out}: {SCREENS} screens, " in done.stdout
    return out


@pytest.fixture(scope="module")
def browser():
    with pool_and_runner(warm=1, max_browsers=2) as both:
        yield both


class TestFolder:
    def test_examples_are_of_the_split_and_inside_the_screen(self, folder):
        rows = rows_of(folder)
        assert {row["screen"] for row in rows} == set(range(SCREENS))
        allowed = {"plain", "simple_data_entry", *sources.miniwob_tasks("train")}
        assert {row["component"] for row in rows} <= allowed
        assert len({row["digest"] for row in rows}) == SCREENS
        for row in rows:
            left, top, right, bottom = row["box"]
            assert 0 <= left < right <= 160 and 0 <= top < bottom <= 210
        assert len({(row["screen"], row["instruction"]) for row in rows}) == len(rows)
        with Image.open(folder / "contact_sheet.png") as sheet:
            assert min(sheet.size) > 200

    def test_same_seed_gives_same_pixels_and_boxes(self, folder, tmp_path):
        for screens in (7, SCREENS):  # in two goes, and one browser in place of two
            done = make(tmp_path, f"--sources={SOURCES}", "--browsers=1", screens=screens)
            assert done.returncode == 0, done.stderr
        for name in (
            "manifest.jsonl",
            "layout-000000.jsonl",
            "screens-000000.tfrecord",
            "contact_sheet.png",
        ):
            assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name

    def test_a_denser_screen_shows_the_same_page(self, folder, tmp_path):
        done = make(tmp_path, f"--sources={SOURCES}", "--density=2")
        assert done.returncode == 0, done.stderr
        plain, dense = (
            [json.loads(line) for line in (one / "layout-000000.jsonl").read_text().splitlines()]
            for one in (folder, tmp_path)
        )
        assert [row["component"] for row in dense] == [row["component"] for row in plain]
        # Chromium rounds lines to whole pixels of the screen: the last one may fall off its edge.
        elements = shared = 0
        for was, row in zip(plain, dense, strict=True):
            one, other = (
                {(e["kind"], e["text"]): e["box"] for e in r["elements"]} for r in (was, row)
            )
            elements += len(one)
            for name in one.keys() & other.keys():
                shared += 1
                np.testing.assert_allclose(other[name], 2 * np.array(one[name]), atol=8)
        assert shared > 0.95 * elements
        assert {tuple(row["size"]) for row in rows_of(tmp_path)} == {(320, 420)}
        screens = Screens(tmp_path, density=2)
        page = screens.page(np.random.default_rng(0))
        assert page.image.size == (320, 420)
        done = make(tmp_path, f"--sources={SOURCES}", "--density=1")
        assert "has other density" in done.stderr

    def test_cold_start_reads_it(self, folder):
        family = family_of(SHIPPED_MODEL)
        inputs = family.make_inputs(family.read_config(SHIPPED_MODEL))
        chat = Chat(SHIPPED_MODEL, ChatConfig(action_format="ui_tars"), family.chat)
        told = recorded_demonstrations.load([str(folder)], chat, inputs)
        rows = rows_of(folder)
        assert [one.instruction for one in told] == [row["instruction"] for row in rows]
        assert all(one.success and "click(start_box=" in one.turns[0].text for one in told)
        assert "tasks: grounding" in recorded_demonstrations.describe(told)

    def test_pointing_is_a_task_of_its_own(self, folder):
        own = own_tasks.load([folder / "pointing"])["own/pointing"]
        pictures = {
            record.task.seed: next(iter(record.images.values()))
            for record in read_shard(folder / "screens-000000.tfrecord")[1]
        }
        for seed in range(5):
            for wrong in (False, True):
                rng = np.random.default_rng(seed)
                task = own.kind(rng, {})
                assert isinstance(task, own_tasks.DrawnTask)
                row = task.progress()
                assert not row["done"] and row["reward"] is None
                seen = np.asarray(task.draw()).astype(int)
                assert np.array_equal(seen, pixels(pictures[row["screen"]]))
                left, top, right, bottom = row["box"]
                middle = ((left + right) // 2, (top + bottom) // 2)
                x, y = (right, bottom) if wrong else middle  # the box is half open
                task.act(Action("click", x=x, y=y))
                assert task.progress()["reward"] == (0.0 if wrong else 1.0)

    def test_composed_colours_lie_in_their_boxes(self, folder):
        """Every question by colour: most of the box has that colour, and the row beside has not."""
        screens = {
            record.task.seed: pixels(next(iter(record.images.values())))
            for record in read_shard(folder / "screens-000000.tfrecord")[1]
        }
        for row in rows_of(folder):
            if row["by"] != "colour" or row["kind"] != "button":
                continue
            left, top, right, bottom = row["box"]
            shown = screens[row["screen"]]
            colour = shown[top + 3, (left + right) // 2]
            inside = np.abs(shown[top:bottom, left:right] - colour).sum(axis=2) < 30
            assert inside.mean() > 0.4


PAGE = """<!DOCTYPE html><html><body style="margin:0;background:white;overflow:hidden">
<style>* {{ position: absolute; border: 0; padding: 0; font: 12px Arial }} {more}</style>
{body}</body></html>"""


def look(browser, body: str, more: str = ""):
    """(elements, texts, pixels) of a page of 320x200."""
    seen, shown = read_page(browser, body, more)
    return elements_of(seen), seen["texts"], shown


def read_page(browser, body: str, more: str = ""):
    pool, runner = browser

    async def read():
        tab = await open_page(pool, PAGE.format(body=body, more=more))
        try:
            seen = await tab.evaluate(reading((320, 200)))
            return seen, pixels(await tab.screenshot("png"))
        finally:
            await pool.release(tab)

    return runner.run(read())


def button(left: int, top: int, width: int, height: int, style: str = "", text: str = "") -> str:
    at = f"left:{left}px;top:{top}px;width:{width}px;height:{height}px"
    return f'<button style="{at};background:#00f;{style}">{text}</button>'


class TestBoxes:
    @pytest.mark.parametrize("box", [(10, 20, 70, 45), (100, 150, 320, 200), (0, 0, 40, 12)])
    def test_box_is_where_the_pixels_are(self, browser, box):
        left, top, right, bottom = box
        (found,), _, shown = look(browser, button(left, top, right - left, bottom - top))
        blue_yx = np.argwhere((shown == (0, 0, 255)).all(axis=2))
        (y0, x0), (y1, x1) = blue_yx.min(axis=0), blue_yx.max(axis=0) + 1
        assert found.box == (x0, y0, x1, y1) == box
        assert found.kind == "button" and found.askable

    def test_box_is_cut_at_the_screen_and_at_scrolling_parents(self, browser):
        held = "<div style='left:100px;top:20px;width:50px;height:50px;overflow:{}'>{}</div>"
        for overflow, box in (("scroll", (110, 30, 150, 70)), ("visible", (110, 30, 170, 90))):
            (found,), _, _ = look(browser, held.format(overflow, button(10, 10, 60, 60)))
            left, top, right, bottom = found.box
            assert (left, top) == box[:2] and right <= box[2] and bottom <= box[3]
            assert found.askable == (overflow == "visible")
        (found,), _, _ = look(browser, button(300, 20, 60, 20))
        assert found.box == (300, 20, 320, 40) and not found.askable

    @pytest.mark.parametrize(
        ("style", "there"),
        [
            ("display:none", False),
            ("visibility:hidden", False),
            ("opacity:0.2", False),
            ("left:400px", False),
            ("opacity:0.9", True),
        ],
    )
    def test_what_cannot_be_seen_is_left_out(self, browser, style, there):
        found, texts, _ = look(browser, button(10, 10, 60, 20, style, text="Go"))
        assert bool(found) == there and texts == (["Go"] if there else [])

    def test_what_is_covered_or_disabled_is_not_asked(self, browser):
        cover = "<div style='left:0;top:0;width:50px;height:200px;background:gray'></div>"
        found, _, _ = look(browser, button(10, 10, 60, 20) + cover)
        assert [one.askable for one in found] == [False]
        disabled = button(10, 10, 60, 20).replace("<button", "<button disabled")
        found, _, _ = look(browser, disabled)
        assert [one.askable for one in found] == [False]

    def test_link_over_two_lines_is_not_asked(self, browser):
        body = "<div style='left:10px;top:10px;width:90px'>x <a href='#'>a long link</a></div>"
        for width, askable in (("90px", True), ("40px", False)):
            (found,), _, _ = look(browser, body.replace("90px", width), "a { position: static }")
            assert found.kind == "link" and found.askable == askable

    def test_names_are_what_can_be_read(self, browser):
        body = (
            "<label style='top:10px;left:10px' for=a>Your name</label>"
            "<input id=a style='top:30px;left:10px;width:90px;height:20px' value=Ada>"
            "<a href='#' style='top:60px;left:10px'>more &lt;|im_end|&gt;</a>"
            "<button style='top:90px;left:10px;text-transform:uppercase'>send</button>"
            "<button style='top:120px;left:10px;width:80px;height:20px;font-size:0'>secret</button>"
            "<select style='top:150px;left:10px'><option>One<option selected>Two</select>"
            "<select style='top:150px;left:90px;width:50px'><option>Everything else</select>"
            "<textarea style='top:10px;left:200px;width:60px;height:20px'>one two three four "
            "five six seven</textarea>"
        )
        found, texts, _ = look(browser, body)
        names = {(one.kind, one.text, one.label, one.cut) for one in found}
        assert names == {
            ("text field", "Ada", "Your name", False),
            ("link", "more <|im_end|>", "", False),
            ("button", "SEND", "", False),
            ("button", "secret", "", True),
            ("dropdown", "Two", "", False),
            ("dropdown", "Everything else", "", True),
            ("text area", "one two three four five six seven", "", True),
        }
        assert "secret" not in texts

    def test_shapes_of_a_drawing_have_their_form(self, browser):
        body = (
            "<svg width=300 height=60 style='left:0;top:0;position:absolute'>"
            "<circle cx=20 cy=20 r=10 /><rect x=50 y=10 width=20 height=20 />"
            "<polygon points='90,30 100,10 110,30' /><rect x=130 y=10 width=40 height=20 /></svg>"
        )
        found, _, _ = look(browser, body)
        shapes = {one.shape: one.box for one in found}
        assert shapes == {
            "circle": (10, 10, 30, 30),
            "square": (50, 10, 70, 30),
            "triangle": (90, 10, 110, 30),
            "rectangle": (130, 10, 170, 30),
        }


class TestWords:
    def test_letters_are_where_the_ink_is(self, browser):
        """Of letters that stand apart."""
        style = "left:20px;top:30px;font:40px Arial;letter-spacing:4px;white-space:pre"
        seen, shown = read_page(browser, f"<p style='{style};margin:0'>xov  zsx</p>")
        words = words_of(seen)
        assert [word.text for word in words] == ["xov", "zsx"]
        inked_x = np.flatnonzero((shown.sum(axis=2) < 600).any(axis=0))
        parts = np.split(inked_x, 1 + np.flatnonzero(np.diff(inked_x) > 1))
        inked_y = np.flatnonzero((shown.sum(axis=2) < 600).any(axis=1))
        letters = [letter for word in words for letter in word.letters]
        for part, (x, y) in zip(parts, letters, strict=True):
            assert abs(x - (part[0] + part[-1]) / 2) < 4
            assert abs(y - (inked_y[0] + inked_y[-1]) / 2) < 3  # all of them are small ones

    @pytest.mark.parametrize(
        ("body", "words", "unread"),
        [
            ("<p style='top:50px'>one two</p>", ["one", "two"], 0),
            ("<p style='top:50px;text-transform:uppercase'>one</p>", ["ONE"], 0),
            ("<p style='top:50px;text-transform:capitalize'>one two</p>", ["One", "Two"], 0),
            ("<p style='top:50px;visibility:hidden'>one</p>", [], 0),
            ("<p style='top:50px;left:400px'>one</p>", [], 0),
            ("<p style='top:50px;left:305px'>one</p>", [], 1),  # the screen ends within it
            ("<p style='top:50px;color:rgba(0,0,0,0.2)'>one</p>", [], 1),
            ("<p style='top:50px'>\U0001f600</p>", [], 0),  # two units of UTF-16, no letter
            ("<input value=one><button style='top:60px'>two</button>", ["two"], 1),
            ("<input type=checkbox>", [], 0),
            (
                "<p style='top:50px'>one</p>"
                "<div style='left:0;top:0;width:90px;height:90px;background:gray'></div>",
                [],
                0,
            ),
        ],
    )
    def test_words_are_those_that_can_be_read(self, browser, body, words, unread):
        seen, _ = read_page(browser, body)
        assert [word.text for word in words_of(seen)] == words
        assert len(seen["unread"]) == unread

    def test_places_are_pixels_of_the_screen(self, browser):
        seen, _ = read_page(browser, "<p style='top:50px;left:20px'>ab</p>")
        ((_, at),), ((_, twice),) = words_of(seen), words_of(seen, 2)
        for (x, y), (far_x, far_y) in zip(at, twice, strict=True):
            assert 0 <= far_x - 2 * x <= 1 and 0 <= far_y - 2 * y <= 1
