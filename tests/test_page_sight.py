"""What the small page model's vision tower is taught before it answers."""

import itertools
import string
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tools import make_base_model, make_page_model
from tools.page_model import drawn_pages, module_training, page_sight
from tools.page_model.drawn_pages import Item, Letter, Page
from tools.page_model.module_training import Run
from uirl_jax.errors import TrainingError

GRID = (13, 10)  # tokens of 16 pixels, down and across 160x208


def test_letters_are_where_they_are_written():
    """Each has ink of another colour than the ground around its middle.

    A large one may have a hole there.
    """
    written = 0
    for seed in range(30):
        page = drawn_pages.draw_page(np.random.default_rng(seed), 4, 8)
        image_yxc = np.asarray(page.image, int)
        width, height = page.image.size
        large = {
            (item.text, *drawn_pages.centre(item.box)): (item.box[2] - item.box[0]) // 2
            for item in page.items
            if item.kind in ("letter", "digit")
        }
        for letter in itertools.chain(*page.words):
            reach = max(6, large.get(letter, 0))
            assert 0 <= letter.y < height
            if not reach < letter.x < width - reach - 1:
                continue
            around = image_yxc[letter.y - 5 : letter.y + 6, letter.x - reach : letter.x + reach + 1]
            assert np.ptp(around, axis=(0, 1)).max() > 40, (seed, letter)
            written += 1
        single = {word for word in page.words if len(word) == 1}
        for item in page.items:
            if item.kind in ("letter", "digit"):
                assert (Letter(item.text, *drawn_pages.centre(item.box)),) in single
        texts = [item.text for item in page.items if item.letters_x]
        said = {"".join(letter.sign for letter in word) for word in page.words}
        assert said.issuperset(word for text in texts for word in text.split())
    assert written > 1000


def letters_of(text: str, *places: tuple[int, int]) -> tuple[Letter, ...]:
    return tuple(Letter(sign, x, y) for sign, (x, y) in zip(text, places, strict=True))


def found(page: Page, kind: str) -> dict[int, str | int | dict[int, str | int]]:
    """Signs by token, and by slot where there are several."""
    signs, slots = page_sight.KINDS[kind]
    of_page = page_sight.signs_of(page, GRID)[kind]
    assert of_page.shape == (130, slots)
    by_token = {
        token: {slot: signs[number - 1] for slot, number in enumerate(of_token) if number}
        for token, of_token in enumerate(of_page)
    }
    return {t: s[0] if slots == 1 else s for t, s in by_token.items() if s}


def test_signs_of_things():
    page = Page(
        Image.new("RGB", (160, 208)),
        (
            Item("button", (20, 100, 60, 124), "ab"),  # its middle: 40, 112
            Item("shape", (1, 1, 9, 9), "circle", "lime", large=True),
            Item("digit", (140, 190, 150, 200), "7", "pink"),
            Item("colour", (64, 0, 96, 31), color="red"),
        ),
    )
    assert found(page, "things") == {
        0: "large circle",
        72: "button",
        129: "small digit",
        5: "colour",
    }
    assert found(page, "colors") == {0: "lime", 129: "pink", 5: "red"}
    # As the point tokens of a click on its middle, from 0.
    assert found(page, "things_x") == {0: 2, 72: 16, 129: 58, 5: 32}
    assert found(page, "things_y") == {0: 1, 72: 34, 129: 60, 5: 4}
    assert found(page, "words") == {72: {0: "a", 1: "b"}}
    columns, rows = found(page, "columns"), found(page, "rows")
    assert (columns[37], rows[37]) == (7, 3)
    assert len(columns) == len(rows) == 130


def test_signs_of_letters():
    page = Page(
        Image.new("RGB", (160, 208)),
        (Item("check", (0, 160, 12, 172), "Longer99x"),),
        (
            letters_of("aZ9!", (33, 105), (36, 113), (47, 120), (2, 2)),
            letters_of("kk", (79, 10), (81, 10)),
            letters_of("Q", (154, 200)),
        ),
    )
    # x 33 lies in the first quarter of token 2, y 105 in the lower half of row 6.
    letters = {62: {4: "a"}, 72: {1: "Z", 7: "9"}, 4: {7: "k"}, 5: {4: "k"}, 129: {6: "Q"}}
    assert found(page, "letters") == letters
    assert found(page, "right") == {t - 1: s for t, s in letters.items()}
    # Nothing is left of the first column, nor right of the last.
    assert found(page, "left") == {t + 1: s for t, s in letters.items() if t != 129}
    a_z_9 = {0: "a", 1: "Z", 2: "9"}  # the place of what is no letter stays empty
    assert found(page, "words") == {
        0: a_z_9,  # the "!" stands there
        62: a_z_9,
        72: a_z_9,
        4: {0: "k", 1: "k"},
        5: {0: "k", 1: "k"},
        100: dict(enumerate("Longer99")),  # a box to tick, the first eight letters beside it
        129: {0: "Q"},
    }


def test_of_two_words_in_a_token_the_nearest_to_its_middle_is_told():
    near, far = letters_of("n", (8, 9)), letters_of("f", (3, 3))
    for words in ((near, far), (far, near)):
        page = Page(Image.new("RGB", (160, 208)), (), words)
        assert found(page, "words") == {0: {0: "n"}}


def test_what_is_not_known_of_a_page_is_neither_there_nor_absent():
    """Of a screen texts are known, but for those of its fields, and things that have a text."""
    page = Page(
        Image.new("RGB", (160, 208)),
        (Item("button", (20, 100, 60, 124), "ab"), Item("tab", (0, 0, 16, 16), "t")),
        (letters_of("a", (34, 113)),),
        unread=((0, 144, 40, 160),),  # tokens 90 to 92 and, below, 100 to 102
        is_whole=False,
    )
    signs = page_sight.signs_of(page, GRID)
    unread = {*range(90, 93), *range(100, 103)}
    for kind in ("letters", "words"):
        assert {int(token) for token, _ in np.argwhere(signs[kind] == -1)} == unread
    known = {
        kind: set(np.flatnonzero(signs[kind] >= 0))
        for kind in ("things", "things_x", "things_y", "colors")
    }
    # A tab is no kind of thing that is told.
    assert known == {"things": {72}, "things_x": {0, 72}, "things_y": {0, 72}, "colors": set()}
    assert [list(where) for where in np.argwhere(signs["letters"] > 0)] == [[72, 0]]


def test_letters_beside_the_page_are_none():
    page = Page(Image.new("RGB", (160, 208)), (), (letters_of("ab", (160, 5), (159, 5)),))
    assert found(page, "letters") == {9: {3: "b"}}


def test_every_drawn_thing_has_a_class_and_few_letters_share_a_slot():
    lost = written = 0
    for seed in range(20):
        for level in drawn_pages.LEVELS:
            page = drawn_pages.draw_page(np.random.default_rng([seed, level]), level, 20)
            signs = page_sight.signs_of(page, GRID)
            assert np.count_nonzero(signs["things"]) >= 0.9 * len(page.items)
            known = string.ascii_letters + string.digits
            letters = [a for a in itertools.chain(*page.words) if a.sign in known and a.x < 160]
            written += len(letters)
            lost += len(letters) - np.count_nonzero(signs["letters"])
    assert written > 5000
    assert lost < 0.04 * written


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("sight")
    setting, _, split = make_base_model.new_model(make_page_model.base_model(), (), 0, workdir)
    return setting, split


def trained(made, steps: int, checkpoint_dir: Path) -> dict:
    """The weights after so many steps, by path."""
    setting, split = made
    model = nnx.clone(nnx.merge(*split))
    sight = page_sight.Sight(model, setting.inputs)
    page_sight.train(sight, setting.inputs, None, Run(steps, 2, 3, checkpoint_dir))
    return {path: np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def untrained_loss() -> float:
    """Half of what is there and half of what is not; a token always has its place."""
    losses = {kind: np.log(1 + len(signs)) for kind, (signs, _) in page_sight.KINDS.items()}
    return sum(losses.values()) - (losses["columns"] + losses["rows"]) / 2


def test_an_untrained_head_says_that_all_is_equally_likely(made):
    setting, split = made
    sight = page_sight.Sight(nnx.merge(*split), setting.inputs)
    loss, right = page_sight.loss_of(sight, *page_sight.draw(setting.inputs, None, 0, 2, 0))
    assert loss == pytest.approx(untrained_loss())
    assert not any(map(float, right.values()))


def test_pages_without_colours_have_a_loss(made):
    """A step may have none."""
    setting, split = made
    vision, signs = page_sight.draw(setting.inputs, None, 0, 2, 0)
    signs = {**signs, "colors": np.zeros_like(signs["colors"])}
    sight = page_sight.Sight(nnx.merge(*split), setting.inputs)
    loss, right = page_sight.loss_of(sight, vision, signs)
    assert np.isfinite(loss)
    assert right["colors"] == 0


def test_the_loss_is_half_of_what_is_there_and_half_of_what_is_not(made, monkeypatch):
    setting, split = made
    vision, signs = page_sight.draw(setting.inputs, None, 1, 4, 0)
    sight = page_sight.Sight(nnx.merge(*split), setting.inputs)
    assert all(np.any(of_kind) for of_kind in signs.values())
    for head in sight.heads.values():
        head[...] = 0.1 * jax.random.normal(jax.random.key(0), head[...].shape)
    loss, right = page_sight.loss_of(sight, vision, signs)
    expected, told = 0.0, {}
    for kind, logp in sight(sight.model.encode_images(vision), 4, 130).items():
        logp = np.asarray(logp, np.float64)
        np.testing.assert_allclose(np.exp(logp).sum(-1), 1, rtol=1e-5)
        there, nothing, hits = [], [], []
        for place, sign in np.ndenumerate(signs[kind]):
            (there if sign else nothing).append(-logp[place][sign])
            if sign:
                hits.append(logp[place].argmax() == sign)
        expected += (np.mean(there) + (np.mean(nothing) if nothing else 0)) / 2
        told[kind] = np.mean(hits)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert {k: float(v) for k, v in right.items()} == pytest.approx(told, abs=1e-6)


def test_what_is_not_known_teaches_nothing(made):
    setting, split = made
    vision, signs = page_sight.draw(setting.inputs, None, 1, 2, 0)
    graphdef, state = nnx.split(page_sight.Sight(nnx.merge(*split), setting.inputs))

    def grads(letters: np.ndarray) -> nnx.State:
        def loss(state: nnx.State) -> jax.Array:
            sight = nnx.merge(graphdef, state)
            return page_sight.loss_of(sight, vision, {**signs, "letters": letters})[0]

        return jax.grad(loss)(state)["heads"]["letters"][...]

    unknown = np.full_like(signs["letters"], -1)
    assert np.any(grads(signs["letters"]))
    assert not np.any(grads(unknown))


def test_only_the_vision_tower_learns_and_the_loss_falls(made, tmp_path, capfd):
    _, split = made
    after = trained(made, 12, tmp_path / "whole")
    before = {path: np.asarray(v[...]) for path, v in nnx.to_flat_state(split[1])}
    moved = {path[0] for path, value in after.items() if not np.array_equal(value, before[path])}
    assert moved == {"visual"}
    assert after.keys() == before.keys()
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("stage=sight step=12/12 ")
    assert float(last.split("loss=")[1].split()[0]) < 0.8 * untrained_loss()


def test_a_loss_that_is_not_finite_ends_the_training(made, tmp_path, monkeypatch):
    def broken(sight, vision, signs):
        loss, right = loss_of(sight, vision, signs)
        return loss * jnp.nan, right

    loss_of = page_sight.loss_of
    monkeypatch.setattr(page_sight, "loss_of", broken)
    with pytest.raises(TrainingError, match=r"step 1: loss=nan"):
        trained(made, 1, tmp_path)


def test_it_goes_on_where_it_was_interrupted(made, tmp_path, monkeypatch):
    monkeypatch.setattr(module_training, "_CHECKPOINT_EVERY", 2)
    whole = trained(made, 4, tmp_path / "whole")
    draw = page_sight.draw

    def failing(inputs, screens, seed, rows, step):
        if step == 3:
            raise KeyboardInterrupt
        return draw(inputs, screens, seed, rows, step)

    monkeypatch.setattr(page_sight, "draw", failing)
    with pytest.raises(KeyboardInterrupt):
        trained(made, 4, tmp_path / "parts")
    monkeypatch.setattr(page_sight, "draw", draw)
    parts = trained(made, 4, tmp_path / "parts")
    for path, value in whole.items():
        np.testing.assert_allclose(parts[path], value, atol=1e-6, err_msg=str(path))


def test_pages_of_a_step_are_always_the_same(made):
    inputs = made[0].inputs
    (one, signs), (again, same), (other, _) = (
        page_sight.draw(inputs, None, 0, 2, step) for step in (4, 4, 5)
    )
    np.testing.assert_array_equal(one["patches_ipc"], again["patches_ipc"])
    jax.tree.map(np.testing.assert_array_equal, signs, same)
    assert not np.array_equal(one["patches_ipc"], other["patches_ipc"])
    assert jnp.shape(signs["letters"]) == (2, 130, 8)
