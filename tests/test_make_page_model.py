"""The drawn pages that a small model learns to read by, and the tool that trains it, cut down."""

import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tools import make_base_model, make_page_model, supervised_rows
from tools.base_models import qwen_tokenizer
from tools.base_models.point_tokenizer import PointTokens
from tools.page_model import drawn_pages, page_questions
from tools.page_model.drawn_pages import Item, Page
from uirl_jax import actions
from uirl_jax.families import loading
from uirl_jax.families.border import TokenRows
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.models import scoring

ROOT = Path(__file__).parents[1]


def pages(level: int, count: int = 60) -> list[Page]:
    return [drawn_pages.draw_page(np.random.default_rng([level, n]), level) for n in range(count)]


@pytest.mark.parametrize("level", drawn_pages.LEVELS)
def test_things_are_on_the_page_and_not_over_each_other(level):
    for page in pages(level):
        width, height = page.image.size
        for item in page.items:
            left, top, right, bottom = item.box
            assert 0 <= left < right < width and 0 <= top < bottom < height
        # A cross lies on its window, and nothing else does.
        for one, other in itertools.combinations(page.items, 2):
            assert (
                one.box[2] < other.box[0]
                or other.box[2] < one.box[0]
                or one.box[3] < other.box[1]
                or other.box[3] < one.box[1]
            )


@pytest.mark.parametrize("level", drawn_pages.LEVELS)
def test_a_page_has_at_most_so_many_things(level):
    counts = [
        len(drawn_pages.draw_page(np.random.default_rng(n), level, 3).items) for n in range(40)
    ]
    assert max(counts) == (2 if level == 0 else 3)


def test_equal_generators_give_equal_pages_and_questions():
    for page, again in zip(pages(3, 10), pages(3, 10), strict=True):
        assert page.items == again.items
        assert page.image.tobytes() == again.image.tobytes()
        asked, repeated = (
            page_questions.ask(p, np.random.default_rng(1), 8) for p in (page, again)
        )
        assert asked == repeated


def test_no_instruction_of_a_page_means_two_things():
    said = 0
    for level in drawn_pages.LEVELS:
        for page in pages(level):
            meant: dict[str, tuple[int, ...]] = {}
            for seed in range(6):
                for question in page_questions.ask(page, np.random.default_rng(seed), 8):
                    assert meant.setdefault(question.instruction, question.box) == question.box
                    said += 1
    assert said > 2000


def test_what_could_be_meant_twice_is_not_asked():
    one = Item("colour", (10, 60, 40, 90), color="red")
    two = dataclasses.replace(one, box=(60, 60, 90, 90))
    image = drawn_pages.draw_page(np.random.default_rng(0), 0).image
    assert page_questions.ask(Page(image, (one, two)), np.random.default_rng(0), 8) == []
    small = Item("shape", (10, 60, 18, 68), "circle", "blue", large=False)
    large = Item("shape", (40, 60, 60, 80), "circle", "blue", large=True)
    rng = np.random.default_rng(0)
    asked = page_questions.ask(Page(image, (small, large)), rng, 50)
    assert {question.box for question in asked} == {small.box, large.box}
    for question in asked:
        assert ("small" in question.instruction) == (question.box == small.box)
        assert ("large" in question.instruction) == (question.box == large.box)
    same = tuple(Item("button", (10, top, 90, top + 20), "Save") for top in (60, 120))
    other = Item("link", (10, 150, 40, 160), "save")  # in lower case the same word
    named = Item("link", (10, 180, 40, 190), "Open")
    asked = page_questions.ask(Page(image, (*same, other, named)), rng, 50)
    assert {question.box for question in asked} == {named.box}
    fields = tuple(Item("field", (10, top, 90, top + 20)) for top in (60, 120, 90))
    boxes = {q.instruction: q.box for q in page_questions.ask(Page(image, fields), rng, 50)}
    assert boxes == {
        "Focus into the 1st input textbox.": fields[0].box,
        "Focus into the 2nd input textbox.": fields[2].box,
        "Focus into the 3rd input textbox.": fields[1].box,
    }


def test_of_several_texts_the_first_named_is_meant():
    texts = ("Save", "Open", "Close")
    buttons = tuple(
        Item("button", (10, 60 + 30 * n, 90, 80 + 30 * n), t) for n, t in enumerate(texts)
    )
    # Its label is also a button's text: only "field" says which of them is meant.
    field = Item("field", (10, 160, 90, 180), "Send")
    send = Item("button", (10, 185, 90, 205), "Send")
    image = drawn_pages.draw_page(np.random.default_rng(0), 0).image
    page = Page(image, (*buttons, field, send))
    box_of = {item.text: item.box for item in buttons}
    several = 0
    for question in page_questions.ask(page, np.random.default_rng(1), 400):
        named = [text for text in re.findall(r"\w+", question.instruction) if text in texts]
        if question.box == field.box:
            assert not named and re.search("Focus|field", question.instruction)
        elif named:
            assert question.box == box_of[named[0]]
            assert len(set(named)) == len(named)
        several += len(named) > 1
    assert 40 < several < 80  # a fifth of what is asked about the three texts


def test_the_word_for_a_figure_is_asked_for():
    """What a figure is, and its colour, by any of its names; of two figures neither is meant."""
    image = drawn_pages.draw_page(np.random.default_rng(0), 0).image
    figure = Item("digit", (10, 60, 40, 90), "7", "cyan", large=True)
    texts = ("Letter", "Number", "Circle", "Aqua", "Red")
    words = [Item("link", (60, 60 + 20 * n, 99, 75 + 20 * n), text) for n, text in enumerate(texts)]
    rng = np.random.default_rng(1)
    meant = {
        question.instruction: question.box
        for question in page_questions.ask(Page(image, (figure, *words)), rng, 200)
        if re.search("figure|word|the color", question.instruction)
    }
    assert set(meant.values()) == {words[1].box, words[3].box}
    assert all(("color" in said) == (box == words[3].box) for said, box in meant.items())
    both = dataclasses.replace(words[0], text="Digit")  # beside Number
    asked = page_questions.ask(Page(image, (figure, both, *words[1:])), rng, 200)
    boxes = {q.box for q in asked if re.search("figure|word|the color", q.instruction)}
    assert boxes == {words[3].box}
    another = dataclasses.replace(figure, box=(10, 120, 40, 150))
    asked = page_questions.ask(Page(image, (figure, another, *words)), rng, 200)
    assert not [q for q in asked if re.search("figure|word|the color", q.instruction)]


@pytest.mark.parametrize(
    ("level", "fewest", "most"),
    # A quarter, and all; less those where the word found no room.
    [(drawn_pages.LEVELS[-1], 30, 70), (drawn_pages.DESCRIBED, 150, 200)],
)
def test_some_pages_show_a_figure_and_the_word_for_it(level, fewest, most):
    found = 0
    for page in pages(level, 200):
        figures = [item for item in page.items if item.kind in drawn_pages.FIGURES]
        others = {item.kind for item in page.items} - {*drawn_pages.FIGURES}
        if len(figures) == 1 and others in ({"button"}, {"link"}):
            texts = [item.text for item in page.items if item not in figures]
            assert len(set(texts)) == len(texts)
            colors = drawn_pages.color_names(figures[0].color)
            assert sum(text.lower() in colors for text in texts) <= 1
            asked = page_questions.ask(page, np.random.default_rng(0), 60)
            found += any(re.search("figure|color", q.instruction) for q in asked)
    assert fewest < found < most


def test_labels_stand_beside_their_boxes_or_a_little_lower():
    """In pixels, of a label's small letters; lines of 10 to 12 pixels are not centred to one."""
    lower = []
    for page in pages(3, 200):
        start_of = {word[0].x: word[0].y for word in page.words}
        for item in page.items:
            if item.kind in ("check", "radio") and item.letters_x[0] in start_of:
                label_y = start_of[item.letters_x[0]]
                if abs(label_y - drawn_pages.centre(item.box)[1]) < 8:  # else another word's
                    lower.append(label_y - drawn_pages.centre(item.box)[1])
    assert len(lower) > 200
    assert set(lower) == {0, 1, 2, 3, 4, 5}


def test_labels_stay_where_nothing_else_is_drawn(monkeypatch):
    columns, ends = 0, []

    def write(place: tuple[int, int], text: str, font_px: int) -> tuple[int, ...]:
        ends.append(place[1] + font_px + 2)
        return ()

    for seed in range(200):
        painter = drawn_pages._Painter(np.random.default_rng(seed), 3, 6)
        ends.clear()
        monkeypatch.setattr(painter, "_write", write)
        painter.checks()
        if ends:
            assert ends[-1] <= painter._taken[-1][3] + 1  # a line more than a box is centred
            columns += len(ends) > 1
    assert columns > 50


def test_figures_are_as_large_as_those_of_real_pages():
    sides: dict[bool, set[int]] = {False: set(), True: set()}
    for page in pages(2, 400):
        for item in page.items:
            if item.kind in drawn_pages.FIGURES:
                left, top, right, bottom = item.box
                assert 0 <= left < right < drawn_pages.WIDTH_PX
                assert drawn_pages.BAND_PX <= top < bottom < drawn_pages.HEIGHT_PX
                sides[item.large].add(right - left)
    assert sides == {False: {9, 10, 11}, True: {*range(17, 39)}}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    base, directory = make_page_model.base_model(), tmp_path_factory.mktemp("tokenizer")
    tokenizer = base.tokenizer.train_tokenizer((), 512)
    base.tokenizer.save(tokenizer, directory)
    chat = Chat(directory, base.chat, base.family.chat)
    return make_page_model.Setting(base, chat, base.family.make_inputs(base.config(tokenizer)))


def drawn_and_asked(seed: int, level: int) -> tuple[Page, list[page_questions.Question]]:
    """What `page_example` draws with the same seed."""
    rng = np.random.default_rng(seed)
    questions: list[page_questions.Question] = []
    while not questions:
        page = drawn_pages.draw_page(rng, level, make_page_model.MOST[level])
        questions = page_questions.ask(page, rng, make_page_model.QUESTIONS)
    return page, questions


def examples(setting, count: int):
    """(page, questions, pairs of the instruction's and the answer's text) for seeds and levels."""
    for seed, level in itertools.product(range(count), drawn_pages.LEVELS):
        most = make_page_model.MOST[level]
        example = make_page_model.page_example(setting, np.random.default_rng(seed), level, most)
        page, questions = drawn_and_asked(seed, level)
        decode = setting.chat.decode
        asked = [
            (decode(ids_t[:-answer]), decode(ids_t[-answer:])) for ids_t, answer in example.asked
        ]
        assert len(asked) == 1 + len(questions)  # none was cut off: the page is read, too
        yield page, questions, asked


def inside(box: drawn_pages.Box, action) -> bool:
    left, top, right, bottom = box
    return left <= action.x <= right and top <= action.y <= bottom


def test_answers_hit_what_was_asked_for(setting):
    typed = 0
    for page, questions, (_, *asked) in examples(setting, 8):
        for question, (instruction, answer) in zip(questions, asked, strict=True):
            action = actions.parse(answer, page.image.size, setting.chat.action_format)
            if action.kind == "type":  # takes the place of the last question
                typed += 1
                assert question is questions[-1]
                assert f'"{action.text}"' in instruction
                assert "Type " in instruction
            else:
                assert question.instruction in instruction
                assert inside(question.box, action)
    assert 4 <= typed <= 16  # a quarter of 40


def test_a_page_is_read_from_top_to_bottom_each_place_with_what_it_shows(setting):
    shown, spelt = set(), 0
    for page, _, ((instruction, answer), *_) in examples(setting, 8):
        spells = "Spell the page." in instruction
        assert spells or "Read the page." in instruction
        pieces = re.findall(r'(<x_\d+><y_\d+>)("[^"]*"|[^<]*)', answer)
        assert len(pieces) == len(page.items)
        tops = []
        for place, words in pieces:
            action = actions.parse(f"{place} click", page.image.size, setting.chat.action_format)
            (item,) = (item for item in page.items if inside(item.box, action))
            tops.append(drawn_pages.centre(item.box)[1])
            shown.add(item.kind)
            if item.kind in ("shape", "letter", "digit", "colour", "close") or not item.text:
                assert words == f" {item.shows}"
                continue
            letters = re.findall(r"(?:<x_(\d+)>)?([^<>\"])", words)
            assert "".join(letter for _, letter in letters) == item.text
            columns = [int(column) for column, _ in letters if column]
            assert len(columns) == (len(letters) if spells else 0)
            for column, x in zip(columns, item.letters_x, strict=spells):
                assert column * 2.5 <= x < (column + 1) * 2.5  # one of 64, of 160 pixels
            spelt += len(columns)
        assert tops == sorted(tops)
    kinds = "button link check radio field colour shape letter digit close"
    assert shown == set(kinds.split())
    assert spelt > 100


@pytest.mark.parametrize("seed", range(4))
def test_letters_stand_where_they_are_said_to(seed):
    page = drawn_pages.draw_page(np.random.default_rng([2, seed]), 3, 8)
    said = [item for item in page.items if item.text]
    assert said
    for item in said:
        assert len(item.letters_x) == len(item.text)
        assert list(item.letters_x) == sorted(item.letters_x)
        if item.kind in ("button", "link"):
            assert all(item.box[0] <= x <= item.box[2] + 2 for x in item.letters_x)
        else:
            assert all(x > item.box[2] for x in item.letters_x)


def test_what_things_show():
    box = (10, 60, 40, 90)
    assert Item("button", box, "Save").shows == "Save"
    assert Item("colour", box, color="red").shows == "red"
    assert Item("letter", box, "k", "blue", large=True).shows == "large blue k"
    assert Item("digit", box, "7", "blue").shows == "small blue 7"
    assert (Item("field", box).shows, Item("close", box).shows) == ("field", "close")


def test_questions_of_a_page_are_as_if_each_were_asked_alone(setting):
    """The loss of a page's questions is that of the same questions in rows of their own."""
    rng = np.random.default_rng(5)
    example = make_page_model.page_example(setting, rng, drawn_pages.LEVELS[-1], 8)
    cfg = dataclasses.replace(
        setting.base.config(tokenizer_of(setting)), num_hidden_layers=2, vocab_size=640
    )
    model = setting.base.family.make_model(
        cfg, lora=None, rngs=nnx.Rngs(0), param_dtype=jnp.float32, remat="none"
    )

    def logprobs(batch):
        rows = TokenRows(
            batch.token_ids_bt,
            batch.positions_abt,
            batch.segment_ids_bt,
            batch.vision_index_bt,
            batch.prefix_segments_bt,
        )
        hidden_btd = model.hidden(rows, model.encode_images(batch.vision))
        found_bt = scoring.token_logprobs(model, hidden_btd, batch.token_ids_bt)
        return np.asarray(found_bt)[batch.completion_mask_bt > 0]

    inputs = setting.inputs
    rows = supervised_rows.question_rows([example], row_tokens=512, sampled=176, inputs=inputs)
    together = logprobs(rows)
    alone = []  # whole sequences in rows of their own, without a shared prefix
    for ids_t, answer in example.asked:
        whole_t = np.concatenate([example.prefix_t, ids_t])
        mask_t = (np.arange(len(whole_t)) >= len(whole_t) - answer).astype(np.int32)
        alone.append(supervised_rows.Conversation(whole_t, mask_t, (example.screen,)))
    rows = supervised_rows.conversation_rows(alone, row_tokens=256, images_a_row=1, inputs=inputs)
    apart = logprobs(rows)
    assert together.size == sum(answer for _, answer in example.asked) > 4 * 8
    np.testing.assert_allclose(together, apart, atol=2e-5)


def test_half_of_the_pages_are_of_the_newest_level_a_quarter_of_the_one_before(
    setting, monkeypatch
):
    levels = []
    page_example = make_page_model.page_example

    def watched(setting, rng, level, most):
        assert most == make_page_model.MOST[level]
        levels.append(level)
        return page_example(setting, rng, level, most)

    monkeypatch.setattr(make_page_model, "page_example", watched)
    make_page_model.draw(setting, 0, 12, make_page_model.LEVELS[1] - 1)
    assert set(levels) == {0}
    levels.clear()
    make_page_model.draw(setting, 0, 200, make_page_model.LEVELS[3])
    shares = [levels.count(level) / len(levels) for level in drawn_pages.LEVELS]
    # And 1/16 of each of four levels. Three standard deviations of a share of 200 are 0.1.
    np.testing.assert_allclose(shares[:4], [1 / 16, 1 / 16, 5 / 16, 9 / 16], atol=0.1)
    assert shares[4] == 0


def tokenizer_of(setting):
    return setting.base.tokenizer.train_tokenizer((), 512)


def test_positions_begin_as_large_as_patches_and_unlike_each_other():
    table = nnx.Param(jnp.zeros((26 * 26, 128)))
    model = SimpleNamespace(visual=SimpleNamespace(position_table=table))
    make_page_model.start_positions(model, None)
    rows = np.asarray(table[...]).reshape(26, 26, 128)
    assert 0.5 < rows.std() < 1.0
    np.testing.assert_array_equal(rows[3, :, :64], np.broadcast_to(rows[3, 0, :64], (26, 64)))
    np.testing.assert_array_equal(rows[:, 3, 64:], np.broadcast_to(rows[0, 3, 64:], (26, 64)))
    flat = rows.reshape(-1, 128)
    distances = np.linalg.norm(flat[:, None] - flat[None], axis=2) + 99 * np.eye(len(flat))
    assert distances.min() > 0.5


def run_tool(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.make_page_model", "--batch_rows=2", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    process = run_tool(
        f"--out={directory / 'model'}",
        "--sight_steps=2",
        "--pointing_steps=2",
        "--steps=2",
        f"--workdir={directory / 'work'}",
    )
    assert process.returncode == 0, process.stderr[-2000:]
    stages = {path.name for path in (directory / "work").iterdir() if path.is_dir()}
    assert stages == {"tokenizer", "sight_pages", "pointing_pages", "pages"}
    assert [line.split()[0] for line in process.stdout.splitlines()[1:]] == [
        *("stage=sight", "stage=pointing", "stage=pages")
    ]
    return directory / "model"


def test_a_few_steps_write_a_model_that_loads(made):
    model = loading.load(made, lora=None, seed=0)
    assert model.family.model_type == "qwen3_vl"
    table = model.trainable["visual"]["position_table"][...]
    assert np.asarray(table, np.float32).std() > 0.5  # its positions began as waves
    cfg = ChatConfig().completed(made)
    assert (cfg.action_format, cfg.coordinates) == ("points_64", "points_64")
    chat = Chat(made, cfg, model.family.chat)
    assert chat.vocab_size <= model.cfg.vocab_size
    assert len(chat.completion_ids("<x_12><y_30> click")) == 4
    assert model.inputs.plan_screen((160, 210)).tokens == 130


def test_the_stage_goes_on_from_what_the_vision_tower_learnt(tmp_path):
    """With the learning rate 0 the stage keeps it; the rest is as the model began."""
    for sight, steps in ((0, 0), (3, 1)):
        stage = make_page_model.Stage("pages", steps, 1, 0.0, 1.0, "cosine")
        out, work = tmp_path / f"{sight}", tmp_path / f"work-{sight}"
        make_page_model.train(stage, make_page_model.Before(sight=sight), 2, 0, out, work)
    without, taught = (loading.load(tmp_path / f"{n}", lora=None, seed=0) for n in (0, 3))
    before, after = (dict(nnx.to_flat_state(model.trainable)) for model in (without, taught))
    moved = {path[0] for path, v in after.items() if not jnp.array_equal(v[...], before[path][...])}
    assert moved == {"visual"}


def test_a_model_is_gone_on_with(made, tmp_path):
    """With the learning rate 0 it is the same model, with the same tokenizer."""
    flags = [f"--start_from={made}", f"--workdir={tmp_path / 'work'}", "--steps=1", "--lr=0"]
    process = run_tool(f"--out={tmp_path / 'on'}", *flags)
    assert process.returncode == 0, process.stderr[-2000:]
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "on" / name).read_bytes() == (made / name).read_bytes()
    # Apart from the checkpoints of the model's own training in the same workdir.
    assert (tmp_path / "work" / "from_model").is_dir()


def test_going_on_from_other_tokens_each_is_the_mean_of_what_its_text_was(made, tmp_path):
    """An earlier tokenizer had merges of its own, and "<x_3>" another id."""
    maker = PointTokens(qwen_tokenizer)
    texts = ["Read the page and click on the red button.", "close all, click"] * 20
    base = dataclasses.replace(make_page_model.base_model(), tokenizer=maker)
    _, merged, split = make_base_model.new_model(base, texts, 1, tmp_path / "merged")
    make_base_model.write_model(base, nnx.merge(*split), merged, tmp_path / "old")
    _, spelt, (_, trainable, _) = make_base_model.new_model(
        make_page_model.base_model(), (), 0, tmp_path / "new", tmp_path / "old"
    )
    old_vd = np.asarray(split[1]["text"]["embedding"][...].astype(jnp.bfloat16), np.float32)
    new_vd = np.asarray(trainable["text"]["embedding"][...])
    assert len(new_vd) == 640 != len(old_vd)
    assert not new_vd[spelt.get_vocab_size() :].any()

    def row(token: str) -> np.ndarray:
        return new_vd[spelt.token_to_id(token)]

    for token in ("k", "\u0120click", "<x_3>", "<|im_end|>", "\u0120the"):
        np.testing.assert_array_equal(row(token), old_vd[merged.token_to_id(token)])
    assert merged.token_to_id("\u0120yellow") is None
    ids = merged.encode(" yellow").ids
    assert len(ids) > 1
    np.testing.assert_allclose(row("\u0120yellow"), old_vd[ids].mean(0), atol=1e-6)


def test_going_on_begins_with_pages_of_all_levels(made, tmp_path, monkeypatch):
    drawn = []
    draw = make_page_model.draw

    def watched(setting, seed, rows, step):
        drawn.append(step)
        return draw(setting, seed, rows, step)

    monkeypatch.setattr(make_page_model, "draw", watched)
    stage = make_page_model.Stage("more", 1, 1, 0.0, 1.0, "cosine")
    before = make_page_model.Before()
    make_page_model.train(stage, before, 2, 0, tmp_path / "on", tmp_path / "work", made)
    assert drawn[0] == make_page_model.LEVELS[-1]


@pytest.mark.parametrize(
    ("start", "says"),
    [("nothing", "nothing: "), ("uirl_jax/assets/tiny-ui-base", "is a qwen2_vl that answers in")],
)
def test_what_is_no_model_of_the_tool_is_refused_in_one_line(start, says, tmp_path):
    flags = (f"--start_from={start}", f"--workdir={tmp_path / 'work'}")
    process = run_tool(f"--out={tmp_path / 'out'}", *flags)
    assert process.returncode == 2
    last = process.stderr.splitlines()[-1]
    assert "error: --start_from: " in last
    assert says in last
    assert not (tmp_path / "out").exists()


def test_texts_to_type_are_the_named_ones():
    for seed in range(60):
        instruction, text = page_questions.to_type(np.random.default_rng(seed))
        if instruction.startswith("Type"):
            assert instruction == f'Type "{text}".'
            continue
        pattern = r'The (\w+) is "(\w+)" and the (\w+) is "(\w+)"\. Type the (\w+)\.'
        found = re.fullmatch(pattern, instruction)
        assert found is not None
        first, one, second, other, named = found.groups()
        assert first != second
        assert text == {first: one, second: other}[named]


def test_colours_have_all_their_names():
    item = Item("colour", (10, 60, 40, 90), color="cyan")
    page = Page(drawn_pages.draw_page(np.random.default_rng(0), 0).image, (item,))
    said = {q.instruction for q in page_questions.ask(page, np.random.default_rng(0), 60)}
    assert said == {
        f"Click on the {name} {noun}"
        for name in ("cyan", "aqua")
        for noun in ("box.", "colored box.")
    }


def test_boxes_to_tick_stand_in_columns():
    columns = 0
    for page in pages(3):
        lefts = [item.box[0] for item in page.items if item.kind in ("check", "radio")]
        columns += any(lefts.count(left) > 2 for left in lefts)
    assert columns > 5


@pytest.mark.parametrize("tool", [make_base_model, make_page_model])
def test_folder_that_cannot_be_made_is_told_before_the_training(
    tool, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", [tool.__name__, f"--out={tmp_path}/file/model"])
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    said = f"--out={tmp_path}/file/model: {tmp_path}/file is no folder that can be written to\n"
    assert capsys.readouterr().err.endswith(said)
