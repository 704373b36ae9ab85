"""Grounding data: instructions name one element, test is held out, archives are the pinned ones."""

import asyncio
import base64
import dataclasses
import hashlib
import importlib.util
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tools.grounding import dataset, libraries, sources, stream
from tools.grounding.dataset import Folder, Settings, shard_path
from tools.grounding.pages import FILLS, compose
from tools.grounding.questions import Question, ask, colour_name
from tools.grounding.screens import Element, Screen
from tools.grounding.sources import Plan
from tools.grounding.stream import Stream
from tools.grounding.themes import THEMES
from tools.make_grounding_data import find_sources, read_size
from uirl_jax.errors import ConfigError
from uirl_jax.seeds import TRAIN_SEEDS
from uirl_jax.shards.reader import read_shard

RNG_SEEDS = range(40)


def element(kind: str, box=(10, 10, 40, 30), **fields) -> Element:
    plain = {"text": "", "label": "", "shape": "", "askable": True, "cut": False}
    return Element(kind=kind, box=box, **plain | fields)


def screen(*elements: Element, texts=(), fills=(), number=0) -> Screen:
    image = Image.new("RGB", (160, 210), "white")
    for one, fill in zip(elements, fills, strict=False):
        left, top, right, bottom = one.box
        ImageDraw.Draw(image).rectangle((left, top, right - 1, bottom - 1), fill=fill)
    file = io.BytesIO()
    image.save(file, "PNG")
    return Screen(Plan(number, 0, "plain", 1), file.getvalue(), elements, tuple(texts))


def instructions(shown: Screen) -> set[str]:
    """All that is ever asked of it."""
    asked = (ask(shown, np.random.default_rng(seed), 9) for seed in RNG_SEEDS)
    return {question.instruction for questions in asked for question in questions}


LOW, HIGH = (10, 10, 60, 30), (10, 50, 60, 70)


def test_name_that_two_elements_have_is_not_asked():
    twice = screen(element("button", LOW, text="OK"), element("button", HIGH, text="ok:"))
    assert instructions(twice) == {"Click the topmost button.", "Click the bottommost button."}


def test_name_that_is_read_elsewhere_is_asked_with_its_kind():
    shown = screen(
        element("button", LOW, text="Save"), element("heading", HIGH, text="Save"), texts=["Save"]
    )
    asked = instructions(shown)
    assert 'Click the "Save" button.' in asked and 'Click "Save".' not in asked
    said = screen(element("link", text="et"), texts=["dolor et magna", "et"])
    assert 'Click the link "et".' in instructions(said)
    assert 'Click "et".' not in instructions(said)


def test_hidden_and_cut_elements_are_not_asked_but_count():
    hidden = element("button", HIGH, text="Go", askable=False)
    asked = ask(screen(element("button", LOW, text="Go"), hidden), np.random.default_rng(0), 9)
    assert [question.by for question in asked] == ["position"]
    assert instructions(screen(element("link", text="Trunca", cut=True))) == {"Click the link."}


@pytest.mark.parametrize("text", ['a "b"', "two\nlines", "\u202eabc", "", "x" * 41, "→", "\x1b[2J"])
def test_names_that_break_an_instruction_are_not_asked(text):
    shown = screen(element("cell", text=text), element("button", label=text))
    assert instructions(shown) == {"Click the button."}


def test_hostile_text_is_only_text():
    text = "<|im_end|></script>"
    asked = instructions(screen(element("cell", text=text), texts=[text]))
    assert asked == {f'Click "{text}".', f'Click on "{text}".'}


def test_colours_are_asked_where_one_is_alone():
    buttons = [element("button", (10, y, 60, y + 20)) for y in (10, 50, 90)]
    asked = instructions(screen(*buttons, fills=["#d92626", "#1f5fd6", "#1a4fb8"]))
    assert {text for text in asked if "most" not in text} == {"Click the red button."}
    unclear = screen(*buttons, fills=["#d92626", "#1f5fd6", "#c06060"])  # the last one is reddish
    assert not any("red" in text for text in instructions(unclear))


def test_shapes_are_asked_by_form_and_colour():
    shapes = [element("shape", (x, 10, x + 20, 30), shape="square") for x in (10, 50, 90)]
    shown = screen(*shapes, fills=["#d92626", "#1f5fd6", "#fafafa"])
    assert instructions(shown) == set()  # the third is a square of no clear colour
    shapes[2] = dataclasses.replace(shapes[2], shape="circle")
    shown = screen(*shapes, fills=["#d92626", "#1f5fd6", "#1f5fd6"])
    expected = {"Click the circle.", "Click the blue circle."}
    expected |= {"Click the red square.", "Click the blue square."}
    assert instructions(shown) == expected
    faint = screen(element("shape", shape="circle"), fills=["#fafafa"])
    assert instructions(faint) == set()


def test_positions_are_asked_where_they_are_clear():
    beside = screen(
        element("text field", (10, 10, 60, 30)), element("text field", (70, 20, 120, 40))
    )
    expected = {"Click the leftmost text field.", "Click the rightmost text field."}
    assert instructions(beside) == expected


@pytest.mark.parametrize("name", FILLS)
def test_fills_of_composed_pages_have_their_names(name):
    for fill in FILLS[name]:
        assert colour_name(*(int(fill[at : at + 2], 16) for at in (1, 3, 5))) == name


def test_unclear_colours_have_no_name():
    for colour in ((255, 255, 255), (200, 120, 120), (220, 90, 30), (40, 160, 170)):
        assert colour_name(*colour) is None


# --------------------------------------------------------------------------------- sources


needs_pages = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("playwright", "miniwob"))), reason="the extra `browser`"
)


def every_source(split: str) -> dict[str, tuple[str, ...]]:
    return {
        name: sources.miniwob_tasks(split) if name == "miniwob" else (name,)
        for name in sources.source_names(split)
    }


@needs_pages
def test_splits_share_no_component():
    train, test = (
        {one for group in every_source(split).values() for one in group} for split in sources.SPLITS
    )
    assert not train & test
    assert sources.HELD_OUT_LIBRARY in test and "miniwob/click-menu-2" in test
    from uirl_jax.verifiers.browser import miniwob

    assert miniwob.AREA_PX == sources.MINIWOB_PX
    left_out = {name.removeprefix("miniwob/") for name in miniwob.task_names()} - {
        name.removeprefix("miniwob/") for name in train | test
    }
    assert left_out == {"chase-circle", "moving-items", "simon-says", "stock-market", "terminal"}
    assert 20 < sum(name.startswith("miniwob/") for name in test) < 40


@needs_pages
@pytest.mark.parametrize("split", sources.SPLITS)
def test_plans_are_reproducible_and_of_their_split(split):
    own = every_source(split)
    allowed = {one for group in own.values() for one in group}
    plans = [sources.plan(5, split, number, 0, own) for number in range(300)]
    assert plans == [sources.plan(5, split, number, 0, own) for number in range(300)]
    assert {one.component for one in plans} <= allowed
    assert len({one.seed for one in plans}) == 300
    assert all(plan.seed in TRAIN_SEEDS for plan in plans)  # no page of a held-out episode
    others = [sources.plan(6, split, number, 0, own) for number in range(300)]
    assert not {one.seed for one in plans} & {one.seed for one in others}


@pytest.mark.parametrize("theme", THEMES)
def test_composed_pages_are_filled_and_reproducible(theme):
    for seed in range(12):
        pages = [compose(np.random.default_rng(seed), THEMES[theme], (160, 210)) for _ in "ab"]
        assert pages[0] == pages[1]
        assert "{" not in pages[0].body and "<button" in pages[0].body + "<button"


@pytest.mark.parametrize("text", ["160", "0x0", "63x210", "9999x9999", "160x210x3", "ax b", "-1x5"])
def test_bad_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="expected WIDTHxHEIGHT"):
        read_size(text)


# --------------------------------------------------------------------------------- libraries


def archive(path: Path, licence: str = "MIT", text: str = "Permission is hereby granted") -> bytes:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in (
            ("package/package.json", json.dumps({"license": licence})),
            ("package/LICENSE", text),
            ("package/a.css", "a { color: red }"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content.encode()))
    return path.read_bytes()


def library(data: bytes) -> libraries.Library:
    sha512 = base64.b64encode(hashlib.sha512(data).digest()).decode()
    return libraries.Library("x", "@a/x", "1.0.0", sha512, "package/a.css", "package/LICENSE")


def test_library_comes_from_the_cache(tmp_path):
    one = library(archive(tmp_path / "a-x-1.0.0.tgz"))
    assert libraries.read_css(one, tmp_path) == "a { color: red }"


def test_wrong_archives_are_refused(tmp_path, monkeypatch):
    data = archive(tmp_path / "a-x-1.0.0.tgz")
    (tmp_path / "a-x-1.0.0.tgz").write_bytes(data + b"\0")
    with pytest.raises(libraries.LibraryError, match="its sha512 is"):
        libraries.read_css(library(data), tmp_path)
    closed = library(archive(tmp_path / "a-x-1.0.0.tgz", licence="UNLICENSED"))
    with pytest.raises(libraries.LibraryError, match="licence is 'UNLICENSED'"):
        libraries.read_css(closed, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(libraries.LibraryError, match="no npm"):
        libraries.read_css(library(b""), tmp_path / "empty")


def test_a_library_that_is_asked_for_and_cannot_be_had_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"left out: bulma: .*there is no npm"):
        find_sources("test", ["bulma"], (160, 210), tmp_path / "empty")


def test_failing_download_is_one_line(tmp_path, monkeypatch):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'npm error ENOTFOUND \033[2J' >&2\necho more >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(libraries.LibraryError, match="npm pack: npm error ENOTFOUND") as caught:
        libraries.read_css(library(b""), tmp_path / "empty")
    assert str(caught.value).isprintable()


# --------------------------------------------------------------------------------- streams


class Drawn:
    """In place of browsers: a button whose text is the seed, or what `looks` says of a plan."""

    def __init__(self, looks=None) -> None:
        self.plans: list[Plan] = []
        self._looks = looks or (lambda plan: str(plan.seed))

    async def draw(self, plan: Plan) -> Screen:
        self.plans.append(plan)
        text = self._looks(plan)
        colour = "#" + hashlib.sha256(text.encode()).hexdigest()[:6]
        shown = screen(element("button", text=text), fills=[colour], number=plan.number)
        return dataclasses.replace(shown, plan=plan)


def settings(**changes) -> Settings:
    plain = Settings(3, "train", (160, 210), 4, {"plain": ["plain"]}, [], "renderer")
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def small_shards(monkeypatch):
    """Ten screens in a shard."""
    for module in (dataset, stream):
        monkeypatch.setattr(module, "SCREENS_PER_SHARD", 10)


def fill(out: Path, screens: int, drawn: Drawn, **changes) -> list[dict]:
    folder = Folder(out, settings(**changes))
    folder.refuse_more_than(screens)
    filler = Stream(drawn, {"plain": ("plain",)}, seed=3, split="train", questions=4)  # type: ignore[arg-type]
    asyncio.run(filler.fill(folder, screens, lambda number: None))
    return folder.finish(-(-screens // dataset.SCREENS_PER_SHARD), "")


def test_a_folder_that_does_not_say_its_density_is_of_single_density(tmp_path, small_shards):
    """As folders were written before there was another."""
    fill(tmp_path, 3, Drawn())
    file = tmp_path / dataset.SETTINGS
    older = json.loads(file.read_text())
    assert older.pop("density") == 1
    file.write_text(json.dumps(older))
    assert len(fill(tmp_path, 5, Drawn())) > 3
    with pytest.raises(ConfigError, match="has other density; continue with the same flags"):
        fill(tmp_path, 7, Drawn(), density=2)


def test_stream_continues_where_it_stopped(tmp_path, small_shards):
    whole = fill(tmp_path / "whole", 23, Drawn())
    assert [row["screen"] for row in whole] == list(range(23))
    parts = tmp_path / "parts"
    fill(parts, 13, Drawn())
    drawn = Drawn()
    assert fill(parts, 23, drawn) == whole
    # The second shard was not full; of the third nothing was there.
    assert [plan.number for plan in drawn.plans] == list(range(10, 23))
    for name in [shard_path(parts, n).name for n in range(3)] + ["manifest.jsonl"]:
        assert (parts / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_killed_run_leaves_no_half_shard(tmp_path, small_shards):
    whole = fill(tmp_path, 13, Drawn())
    shard_path(tmp_path, 1).unlink()  # killed between the lines and the shard
    (tmp_path / ".screens-000001.tfrecord.x.tmp").write_bytes(b"half")
    assert fill(tmp_path, 13, Drawn()) == whole


def test_screens_that_repeat_or_show_nothing_are_replaced(tmp_path):
    def looks(plan: Plan) -> str:
        return "same" if plan.attempt == 0 else f"{plan.number}-{plan.attempt}"

    rows = fill(tmp_path, 12, Drawn(looks))
    assert len({row["digest"] for row in rows}) == 12
    with pytest.raises(ConfigError, match="30 attempts showed nothing new"):
        fill(tmp_path / "same", 3, Drawn(lambda plan: "same"))


def test_another_stream_is_refused(tmp_path):
    fill(tmp_path, 5, Drawn())
    with pytest.raises(ConfigError, match="has other seed, renderer"):
        fill(tmp_path, 5, Drawn(), seed=4, renderer="other")
    with pytest.raises(ConfigError, match="has 5 screens of this stream, more than --screens=2"):
        fill(tmp_path, 2, Drawn())


def test_record_says_what_the_manifest_says(tmp_path):
    rows = fill(tmp_path, 3, Drawn())
    records = read_shard(shard_path(tmp_path, 0))[1]
    for row, record in zip(rows, records, strict=True):
        (turn,) = record.turns
        assert (record.task.name, record.task.seed) == ("grounding", row["screen"])
        assert record.instruction == row["instruction"] and record.success
        assert turn.progress["box"] == row["box"] == [10, 10, 40, 30]
        assert (turn.action.kind, turn.action.x, turn.action.y) == ("click", 24, 19)
        assert turn.text == "click(24, 19)"
    assert Question(rows[0]["instruction"], (10, 10, 40, 30), "button", rows[0]["by"])


@pytest.mark.parametrize(
    "changes",
    [
        {"size": (320, 210)},
        {"density": 2},
        {"sources": {"plain": ["plain"], "pico": ["pico"]}},
        {"libraries": ["bulma@1"]},
        {"renderer": "other"},
        {"questions": 5},
        {"split": "test"},
        {"seed": 4},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_records_of_two_folders_have_ids_of_their_own(tmp_path, changes):
    """Both may be in one set, where a row whose id was there before is dropped."""
    fill(tmp_path / "one", 3, Drawn())
    fill(tmp_path / "other", 3, Drawn(), **changes)
    ids = [
        record.episode_id
        for name in ("one", "other")
        for record in read_shard(shard_path(tmp_path / name, 0))[1]
    ]
    assert len(set(ids)) == len(ids)
