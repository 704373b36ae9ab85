"""What the small page model is taught about finding what a question names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tools import make_base_model, make_page_model
from tools.page_model import page_answers, page_pointing, page_questions, page_sight
from tools.page_model.drawn_pages import Item, Letter, Page
from tools.page_model.module_training import Run
from tools.page_model.page_questions import Question
from uirl_jax import actions
from uirl_jax.families import two_towers
from uirl_jax.families.border import TokenRows
from uirl_jax.models.attention import attention

SIGNS = page_sight.KINDS["words"].signs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Setting and model."""
    workdir = tmp_path_factory.mktemp("pointing")
    setting, _, split = make_base_model.new_model(make_page_model.base_model(), (), 0, workdir)
    return setting, split


def new_pointing(made) -> page_pointing.Pointing:
    setting, split = made
    model = nnx.clone(nnx.merge(*split))
    return page_pointing.Pointing(page_sight.Sight(model, setting.inputs))


def as_text(setting, ids) -> str:
    return setting.chat.decode(np.asarray(ids))


def test_places_are_those_of_answers_and_of_what_is_named(made, monkeypatch):
    """A page by hand: a button of two tokens' width, a box to tick with its text, a square."""
    setting, _ = made
    ok = tuple(Letter(sign, x, 105) for sign, x in zip("Ok", (30, 36), strict=True))
    beside = tuple(Letter(sign, x, 152) for sign, x in zip("zip", (85, 90, 99), strict=True))
    items = (
        Item("button", (20, 96, 60, 120), "Ok"),  # its middle: 40, 108
        Item("check", (64, 146, 76, 158), "zip"),  # its middle: 70, 152
        Item("colour", (0, 176, 33, 200), color="red"),
    )
    shown = (None, items[2].box, None)
    questions = [Question(f"Click {n}.", items[n].box, shown[n]) for n in range(3)]
    page = Page(Image.new("RGB", (160, 208)), items, (ok, beside))
    monkeypatch.setattr(page_answers, "drawn", lambda *args: (page, questions))
    monkeypatch.setattr(page_answers, "TYPING", 0.0)
    arrays, asked, signs = page_pointing.draw(setting, None, 0, 2, 1)
    ids_bt = arrays["token_ids_bt"]
    for row in range(2):
        for number, item in enumerate(items):
            at = asked.at_bq[row, number]
            answer = as_text(setting, ids_bt[row, at + 1 : at + 4])
            action = actions.parse(answer, (160, 208), setting.chat.action_format)
            left, top, right, bottom = item.box
            assert left <= action.x <= right
            assert top <= action.y <= bottom
            assert f"Click {number}." in as_text(setting, ids_bt[row, at - 20 : at])
        first = asked.first_b[row]
        visual_t = arrays["vision_index_bt"][row] >= 0
        assert list(np.flatnonzero(visual_t)) == list(range(first, first + 130))
        things = [list(np.flatnonzero(thing_v)) for thing_v in asked.thing_bqv[row]]
        assert things == [[62], [94], [111], [], [], []]
        # Both letters of "Ok" stand in tokens 61 and 62, those of "zip" in 95 and 96.
        texts = [list(np.flatnonzero(text_v)) for text_v in asked.text_bqv[row]]
        assert texts[:2] == [[61, 62], [94, 95, 96]]
        assert texts[2:] == [[110, 111, 112, 120, 121, 122], [], [], []]
        figures = [list(np.flatnonzero(shown_v)) for shown_v in asked.shown_bqv[row]]
        assert figures == [[], things[2], [], [], [], []]
        letters = [[SIGNS[n - 1] for n in named if n] for named in asked.named_bqs[row]]
        assert letters == [["O", "k"], ["z", "i", "p"], [], [], [], []]
    assert signs["letters"].shape == (2, 130, 8)


def test_what_is_typed_is_nowhere_on_the_page(made, monkeypatch):
    setting, _ = made
    monkeypatch.setattr(page_answers, "TYPING", 1.0)
    arrays, asked, _ = page_pointing.draw(setting, None, 0, 8, 1)
    for row in range(8):
        places = asked.at_bq[row][asked.at_bq[row] > 0]
        answers = [as_text(setting, arrays["token_ids_bt"][row, at + 1 : at + 40]) for at in places]
        assert answers[-1].startswith('"')
        assert all(answer.startswith("<x_") for answer in answers[:-1])
        last = len(places) - 1
        assert not asked.thing_bqv[row, last:].any()
        assert not asked.named_bqs[row, last:].any()
        assert (asked.thing_bqv[row, :last].sum(-1) == 1).all()


def test_no_question_of_a_page_is_cut_off(made):
    """Rows have room for all, and for all of their answers."""
    setting, _ = made
    for step in range(6):
        arrays, asked, _ = page_pointing.draw(setting, None, 5, 16, step)
        assert (asked.at_bq > 0).all()
        sampled = (arrays["sampled_index_bs"] >= 0).sum()
        assert sampled == np.count_nonzero(arrays["weights_bt"])


def test_a_third_of_what_is_asked_is_the_word_for_a_figure(made):
    """Three in four questions about half of the pages, less those where the word has no room."""
    setting, _ = made
    _, asked, _ = page_pointing.draw(setting, None, 0, 64, 1)
    described_bq = asked.shown_bqv.any(-1)
    assert 0.2 < described_bq.mean() < 0.5
    assert (asked.shown_bqv[described_bq].sum(-1) == 1).all()
    assert asked.named_bqs[described_bq].any(-1).all()


def test_every_step_has_pages_of_its_own(made):
    setting, _ = made
    one, again, other = (page_pointing.draw(setting, None, 0, 2, step) for step in (4, 4, 5))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert not np.array_equal(one[0]["token_ids_bt"], other[0]["token_ids_bt"])


@pytest.mark.parametrize("losses_of", ["_attention", "_shown"])
def test_attention_is_that_of_the_block(made, losses_of):
    """The loss from attention's own weights: its values are one-hot, so that it returns them."""
    setting, _ = made
    pointing = new_pointing(made)
    model = pointing.sight.model
    # Larger weights: attention that is not nearly even.
    model.text.blocks.q_proj.kernel[...] *= 3
    arrays, asked, _ = page_pointing.draw(setting, None, 2, 2, 0)
    # As if a figure were shown at every other question, left of what is asked for.
    shown_bqv = np.roll(asked.text_bqv, -1, -1)
    shown_bqv[:, ::2] = False
    asked = asked._replace(shown_bqv=shown_bqv)
    heads, block_at = {
        "_attention": ((("text", 0, asked.text_bqv), ("thing", -1, asked.thing_bqv)), 2),
        "_shown": ((("shown", -1, shown_bqv),), 1),
    }[losses_of]
    rows = TokenRows(**{name: arrays[name] for name in TokenRows._fields})
    x_lbtd = two_towers.block_outputs(model, rows, model.encode_images(arrays["vision"]))
    x_btd = x_lbtd[block_at - 1]
    loss, found = getattr(page_pointing, losses_of)(model, rows, x_btd, asked)
    block = jax.tree.map(lambda leaf: leaf[block_at], model.text.blocks)
    q, k, _ = block.qkv(x_btd, model.rotary(rows.positions_abt))
    length, keys = q.shape[1], k.shape[2]
    one_hot = jnp.broadcast_to(jnp.eye(length)[None, :, None], (2, length, keys, length))
    padding = [(0, 0)] * 3 + [(0, length - k.shape[-1])]
    scale = np.sqrt(length / k.shape[-1])  # of the longer vectors
    weights = attention(
        jnp.pad(q * scale, padding),
        jnp.pad(k, padding),
        one_hot,
        rows.segment_ids_bt,
        causal=True,
        prefix_segments_bt=rows.prefix_segments_bt,
        implementation="xla",
    )
    losses, hits = [], {}
    for name, head, targets in heads:
        for axis, shift in (("x", 0), ("y", 1)):
            of_place, hit = [], []
            for row, question in np.ndindex(asked.at_bq.shape):
                target = targets[row, question]
                if not target.any():
                    continue
                to_all = np.asarray(weights[row, asked.at_bq[row, question] + shift, head])
                first = asked.first_b[row]
                on_screen = to_all[first : first + 130]
                of_all = 1 if name == "shown" else on_screen.sum()
                of_place.append(-np.log(on_screen[target].sum() / of_all))
                if name == "shown" or asked.named_bqs[row, question].any():
                    hit.append(target[on_screen.argmax()])
            losses.append(np.mean(of_place))
            hits[f"{name}_{axis}"] = np.mean(hit)
    assert loss == pytest.approx(np.mean(losses), rel=1e-4)
    assert {name: float(share) for name, share in found.items()} == pytest.approx(hits, abs=1e-6)


def test_an_untrained_head_names_nothing(made):
    setting, _ = made
    arrays, asked, signs = page_pointing.draw(setting, None, 0, 2, 0)
    asked.shown_bqv[0, 0] = asked.thing_bqv[0, 0]
    loss, metrics = page_pointing.loss_of(new_pointing(made), arrays, asked, signs)
    for name in ("names", "described"):
        assert metrics[name] == pytest.approx(np.log(1 + len(SIGNS)), rel=1e-5)
    names = ("answers", "attention", "shown", "names", "described", "sight")
    parts = [float(metrics[name]) for name in names]
    assert min(parts) > 0
    assert loss == pytest.approx(np.dot(parts, (1.0, 0.5, 0.15, 0.3, 0.3, 0.15)), rel=1e-5)


def test_pages_without_texts_have_gradients(made):
    """All of a step may be asked for looks, or for what is typed."""
    setting, _ = made
    arrays, asked, signs = page_pointing.draw(setting, None, 0, 2, 0)
    empty = asked._replace(
        named_bqs=np.zeros_like(asked.named_bqs),
        thing_bqv=np.zeros_like(asked.thing_bqv),
        text_bqv=np.zeros_like(asked.text_bqv),
        shown_bqv=np.zeros_like(asked.shown_bqv),
    )
    graphdef, state = nnx.split(new_pointing(made))

    def loss(state):
        return page_pointing.loss_of(nnx.merge(graphdef, state), arrays, empty, signs)[0]

    grads = jax.grad(loss)(state)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))


def test_all_of_the_model_learns_and_the_loss_falls(made, tmp_path, capfd):
    setting, split = made
    pointing = new_pointing(made)
    page_pointing.train(pointing.sight, setting, None, Run(8, 2, 3, tmp_path))
    after = dict(nnx.to_flat_state(nnx.state(pointing.sight.model, nnx.Param)))
    before = dict(nnx.to_flat_state(split[1]))
    kept = {path for path in before if np.array_equal(before[path][...], after[path][...])}
    assert not kept
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("stage=pointing step=8/8 answers=")
    # Means of all eight steps; 65 classes are equally likely at first.
    assert float(last.split("sight=")[1].split()[0]) < 28


def test_names_are_told_once_they_were_taught(made):
    """A head that is the least-squares answer tells the first letters: places and signs agree."""
    setting, _ = made
    pointing = new_pointing(made)
    arrays, asked, _ = page_pointing.draw(setting, None, 1, 4, 0)
    x_btd = jax.random.normal(jax.random.key(0), (*arrays["token_ids_bt"].shape, 192))
    is_text = asked.named_bqs.any(-1)
    x = np.asarray(x_btd)[np.arange(4)[:, None], asked.at_bq][is_text].astype(np.float64)
    x /= np.sqrt((x**2).mean(-1, keepdims=True))
    wanted = np.eye(1 + len(SIGNS))[asked.named_bqs[is_text]].reshape(len(x), -1)
    head = np.linalg.lstsq(x, 30 * wanted, rcond=None)[0]
    pointing.name_head[...] = jnp.asarray(head, jnp.float32)
    is_described = asked.shown_bqv.any(-1)
    assert is_described.any() and (is_text & ~is_described).any()
    losses, shares = page_pointing._names(pointing, x_btd, asked)
    assert shares == {"first_letters_names": 1.0, "first_letters_described": 1.0}
    assert max(losses.values()) < 1e-3
    asked.named_bqs[is_described] = 5
    losses, shares = page_pointing._names(pointing, x_btd, asked)
    assert shares == {"first_letters_names": 1.0, "first_letters_described": 0.0}
    assert losses["names"] < 1e-3 < 1 < losses["described"]


def test_clicks_count_within_one_part_of_the_answer(made):
    setting, _ = made
    model = new_pointing(made).sight.model
    arrays, asked, _ = page_pointing.draw(setting, None, 2, 2, 0)
    asked.shown_bqv[0, 0] = asked.thing_bqv[0, 0]
    rows = TokenRows(**{name: arrays[name] for name in TokenRows._fields})
    embedding_vd = np.asarray(model.text.embedding[...])
    for away, share in ((0, 1.0), (1, 1.0), (2, 0.0)):
        hidden_btd = np.zeros((*rows.token_ids_bt.shape, 192), np.float32)
        for row, question in np.ndindex(asked.at_bq.shape):
            for at in asked.at_bq[row, question] + np.arange(2):
                wanted = rows.token_ids_bt[row, at + 1] + away
                hidden_btd[row, at] = embedding_vd[wanted] / np.square(embedding_vd[wanted]).sum()
        shares = page_pointing._clicked(model, rows, jnp.asarray(hidden_btd), asked)
        assert {float(value) for value in shares.values()} == {share}, (away, shares)


def test_drawn_questions_name_one_thing(monkeypatch):
    """`_place` takes the item by its box. A page of which nothing can be asked is drawn again."""
    ask, pages = page_questions.ask, []

    def every_third(page, rng, most):
        pages.append(page)
        return ask(page, rng, most) if len(pages) % 3 == 0 else []

    monkeypatch.setattr(page_questions, "ask", every_third)
    for seed in range(20):
        page, questions = page_answers.drawn(np.random.default_rng(seed), 4, 8, 6)
        assert page is pages[-1]
        boxes = [item.box for item in page.items]
        assert len(set(boxes)) == len(boxes)
        assert {question.box for question in questions} <= set(boxes)
        assert len(questions) == 6
    assert len(pages) == 60
