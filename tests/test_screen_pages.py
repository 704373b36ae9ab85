"""Screens of `tools.make_grounding_data` as pages for `tools.make_page_model`."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tools import make_base_model, make_page_model
from tools.grounding.dataset import Folder, Settings
from tools.grounding.questions import ask
from tools.grounding.screens import Element, Screen, Word
from tools.grounding.sources import Plan
from tools.page_model import page_pointing, page_sight
from tools.page_model.screen_pages import Screens
from uirl_jax.errors import ConfigError

BAND = Word("Save", ((4, 8), (10, 8), (16, 8), (22, 8)))  # in the instruction of MiniWoB++
SAVE = Word("Save", ((24, 88), (30, 88), (36, 88), (42, 88)))


def element(kind: str, box, text="", label="", *, askable=True, cut=False) -> Element:
    return Element(kind, box, text, label, "", askable, cut)


SAVE_BUTTON = element("button", (20, 80, 60, 100), "Save")
ELEMENTS = (
    SAVE_BUTTON,
    element("checkbox", (20, 120, 32, 132), label="zip"),
    element("text field", (20, 140, 90, 160), "Ada", "Name"),
    element("heading", (20, 60, 80, 75), "House"),
    element("link", (20, 170, 60, 180), "covered", askable=False),
    element("button", (100, 170, 140, 180), "cut off", cut=True),
)


def write(
    folder: Path,
    elements: tuple[Element, ...] = ELEMENTS,
    *,
    component: str = "plain",
    words: tuple[Word, ...] = (SAVE,),
    texts: tuple[str, ...] = ("Save", "zip", "Name", "House"),
    size: tuple[int, int] = (160, 210),
) -> Path:
    """A folder with one screen."""
    file = io.BytesIO()
    Image.new("RGB", size, "white").save(file, "PNG")
    screen = Screen(
        *(Plan(0, 0, component, 7), file.getvalue(), elements, texts, words),
        unread=((20, 140, 90, 160),),
    )
    about = Settings(0, "train", size, 4, {"plain": ["plain"]}, [], "renderer")
    questions = ask(screen, np.random.default_rng(0), 4)
    Folder(folder, about).write(0, [(screen, questions)])
    return folder


def instructions(folder: Path, most: int = 300) -> dict[str, tuple[int, int, int, int]]:
    """Everything that is asked about its screen, with the box of the answer."""
    rng = np.random.default_rng(0)
    screens = Screens(folder)
    asked = [q for _ in range(60) for q in screens.asked(rng, most)[1]]
    return {question.instruction: question.box for question in asked}


def test_a_screen_is_read_as_it_was_written(tmp_path):
    page = Screens(write(tmp_path)).page(np.random.default_rng(0))
    assert page.image.size == (160, 210)
    assert ["".join(letter.sign for letter in word) for word in page.words] == ["Save"]
    assert [letter[1:] for letter in page.words[0]] == list(SAVE.letters)
    assert page.unread == ((20, 140, 90, 160),) and not page.is_whole
    # Neither the heading nor what is covered or cut off; a label names what has no text.
    assert [(item.kind, item.text) for item in page.items] == [
        *(("button", "Save"), ("check", "zip"), ("field", "Name"))
    ]


def test_texts_and_labels_are_asked_for_in_both_wordings(tmp_path):
    asked = instructions(write(tmp_path, words=(SAVE, Word("zip", ((40, 126),) * 3))))
    assert asked['Click on the "Save" button.'] == SAVE_BUTTON.box
    assert asked["Select zip."] == (20, 120, 32, 132)
    assert asked["Focus into the Name field."] == (20, 140, 90, 160)
    assert asked['Click the checkbox "zip".'] == (20, 120, 32, 132)
    assert not any("House" in text or "cover" in text or "cut" in text for text in asked)
    assert not any("only" in text or "topmost" in text for text in asked)


def test_a_text_that_stands_there_twice_is_asked_for_with_its_kind_alone(tmp_path):
    twice = {"words": (SAVE, SAVE), "texts": ("Save", "Save")}
    asked = instructions(write(tmp_path, **twice))
    of_save = {text for text, box in asked.items() if box == SAVE_BUTTON.box}
    assert of_save == {'Click the "Save" button.', 'Click the button "Save".'}


def test_the_instruction_of_miniwob_is_no_second_text(tmp_path):
    """Of another page a text at the same place is one."""
    for component, asked_for in (("miniwob/click-button", True), ("plain", False)):
        asked = instructions(write(tmp_path / component, component=component, words=(BAND, SAVE)))
        assert ("Click button Save." in asked) == asked_for


def test_fields_are_counted_where_all_of_them_can_be_asked_for(tmp_path):
    fields = tuple(
        element("text field", (20, top, 90, top + 20), label=name)
        for top, name in ((60, "one"), (90, "two"))
    )
    there = instructions(write(tmp_path / "all", fields))
    assert there["Focus into the 2nd input textbox."] == (20, 90, 90, 110)
    hidden = element("text field", (20, 120, 90, 140), label="three", askable=False)
    there = instructions(write(tmp_path / "some", (*fields, hidden)))
    assert there and not any("2nd" in text for text in there)


def test_a_step_has_pages_of_both_kinds(tmp_path, tmp_path_factory):
    screens = Screens(write(tmp_path))
    workdir = tmp_path_factory.mktemp("model")
    setting, *_ = make_base_model.new_model(make_page_model.base_model(), (), 0, workdir)
    for draw, given in ((page_sight.draw, setting.inputs), (page_pointing.draw, setting)):
        *_, signs = draw(given, screens, 0, 24, 1)
        is_screen = (signs["colors"] < 0).all((1, 2))
        assert 6 <= is_screen.sum() <= 18
        *_, again = draw(given, screens, 0, 24, 1)
        np.testing.assert_array_equal(signs["words"], again["words"])
    arrays, asked, _ = page_pointing.draw(setting, screens, 0, 24, 1)
    row = int(np.flatnonzero(is_screen)[0])
    answers = asked.at_bq[row]
    assert (answers > 0).any()
    assert asked.thing_bqv[row].any() and asked.named_bqs[row].any()
    assert np.isfinite(arrays["weights_bt"]).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": (320, 420)}, "screens of 320x420, expected 160x210: make them with --size"),
        ({"elements": ELEMENTS[3:4]}, "on none of its screens is a text that can be clicked"),
    ],
)
def test_screens_that_teach_nothing_are_refused(tmp_path, given, said):
    with pytest.raises(ConfigError, match=said):
        Screens(write(tmp_path, **given))


def test_dense_screens_are_for_dense_pages(tmp_path):
    """A word in the instruction's band, which is twice as high, too, is no second text."""
    element_2 = element("button", (40, 200, 120, 240), "Save")
    in_band, there = (Word("Save", tuple((x, y) for x in range(50, 90, 10))) for y in (80, 220))
    write(
        tmp_path,
        (element_2,),
        component="miniwob/click-button",
        words=(in_band, there),
        size=(320, 420),
    )
    _, questions = Screens(tmp_path, density=2).asked(np.random.default_rng(0), 300)
    assert "Click button Save." in {question.instruction for question in questions}
    with pytest.raises(ConfigError, match="screens of 320x420, expected 640x840"):
        Screens(tmp_path, density=4)


def test_screens_of_which_nothing_can_be_asked_do_not_go_on_for_ever(tmp_path):
    """Two buttons of one name."""
    twins = tuple(element("button", (20, top, 60, top + 20), "Save") for top in (80, 120))
    heading = element("heading", (20, 60, 80, 75), "House")  # a record needs one question
    screens = Screens(write(tmp_path, (*twins, heading)))
    with pytest.raises(ConfigError, match="no question has one answer on any of 1000 screens"):
        screens.asked(np.random.default_rng(0), 6)


def test_a_folder_without_layouts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no layout-\*\.jsonl; make the data with"):
        Screens(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("layout-000000.jsonl", b'{"screen": 0}', "not as tools.make_grounding_data writes it"),
        ("layout-000000.jsonl", b'{"screen": 5}', "not as tools.make_grounding_data writes it"),
        ("layout-000000.jsonl", b"[]", "not as tools.make_grounding_data writes it"),
        ("layout-000000.jsonl", b"{", "delete it and run the command again"),
        ("screens-000000.tfrecord", b"nothing", "screens-000000.tfrecord"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, said):
    (write(tmp_path) / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        Screens(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_layout_whose_shard_was_never_written_is_left_out(tmp_path):
    """A run that was killed between the two."""
    write(tmp_path)
    (tmp_path / "layout-000001.jsonl").write_text('{"screen": 100}\n')
    assert Screens(tmp_path).page(np.random.default_rng(0)).words


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("--sight_steps=1", "error: --screens: {folder}: has no layout"),
        ("--steps=1", "error: --screens: is used by --sight_steps and --pointing_steps"),
    ],
)
def test_the_command_refuses_what_it_cannot_use(tmp_path, monkeypatch, capsys, steps, said):
    given = ["make_page_model", f"--out={tmp_path}/out", f"--screens={tmp_path}", steps]
    monkeypatch.setattr("sys.argv", given)
    with pytest.raises(SystemExit):
        make_page_model.main()
    assert said.format(folder=tmp_path) in capsys.readouterr().err
