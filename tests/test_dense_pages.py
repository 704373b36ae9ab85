"""Drawn pages with more pixels, and a model of them that goes on from one that saw fewer."""

import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tools import make_base_model, make_page_model
from tools.page_model import drawn_pages, page_pointing, page_sight
from uirl_jax.errors import ModelError
from uirl_jax.families import loading
from uirl_jax.families.border import PlacedScreen


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image, np.float32)


@pytest.fixture(scope="module")
def coarse(tmp_path_factory):
    """A model of single density as it begins, written."""
    directory = tmp_path_factory.mktemp("coarse")
    base = make_page_model.base_model()
    _, tokenizer, split = make_base_model.new_model(base, (), 0, directory / "work")
    make_base_model.write_model(base, nnx.merge(*split), tokenizer, directory / "model")
    return directory / "model"


@pytest.mark.parametrize("level", [*drawn_pages.LEVELS, drawn_pages.DESCRIBED])
def test_a_dense_page_is_the_same_page_with_more_pixels(level):
    for seed in range(20):
        page, dense = (
            drawn_pages.draw_page(np.random.default_rng([level, seed]), level, density=density)
            for density in (1, 2)
        )
        assert dense.image.size == (320, 420)
        for item, was in zip(dense.items, page.items, strict=True):
            assert item.shows == was.shows
            assert item.box == tuple(2 * side for side in was.box)
        for word, was in zip(dense.words, page.words, strict=True):
            assert [letter.sign for letter in word] == [letter.sign for letter in was]
            np.testing.assert_allclose(places(word), 2 * places(was), atol=4)  # hinting moves it
        # In parts of 8 x 8 pixels: edges and letters alone differ.
        parts = [
            pixels(image)[:208].reshape(26, 8, 20, 8, 3).mean((1, 3))
            for image in (page.image, dense.image.reduce(2))
        ]
        np.testing.assert_allclose(parts[1], parts[0], atol=50)


def places(word: tuple[drawn_pages.Letter, ...]) -> np.ndarray:
    return np.array([(letter.x, letter.y) for letter in word])


def test_going_on_with_denser_pages_sees_what_it_saw(coarse, tmp_path):
    """A picture of which each pixel became four."""
    kept = loading.load(coarse, lora=None, seed=0)
    dense = make_page_model.base_model(2)
    setting, _, (graphdef, *parts) = make_base_model.new_model(dense, (), 1, tmp_path, coarse)
    page = drawn_pages.draw_page(np.random.default_rng(3), 3).image.crop((0, 0, 160, 208))
    features = []
    for model, inputs, image in (
        (nnx.merge(kept.graphdef, kept.trainable, kept.frozen), kept.inputs, page),
        (nnx.merge(graphdef, *parts), setting.inputs, page.resize((320, 416), 0)),
    ):
        screen = inputs.cut_screen(image)
        packed = inputs.pack_screens([PlacedScreen(screen, 0, 0, 1)], 1, screen.patches)
        features.append(np.asarray(model.encode_images(packed.arrays), np.float32))
    # Sums of four quarters in another order: 3e-6 here.
    np.testing.assert_allclose(features[1], features[0], atol=1e-5 * np.abs(features[0]).max())


def test_a_model_of_denser_pages_is_not_gone_on_with_on_coarser_ones(coarse, tmp_path):
    dense = make_page_model.base_model(2)
    _, tokenizer, split = make_base_model.new_model(dense, (), 0, tmp_path / "w", coarse)
    make_base_model.write_model(dense, nnx.merge(*split), tokenizer, tmp_path / "dense")
    with pytest.raises(ModelError, match="16 pixels, which does not divide the 8 of --density=1"):
        make_base_model.new_model(
            make_page_model.base_model(), (), 0, tmp_path / "w", tmp_path / "dense"
        )


def test_every_stage_draws_at_the_density_of_the_model(tmp_path):
    """520 patches of 16 x 16 pixels: a page of 160x210 would be 130."""
    setting, *_ = make_base_model.new_model(make_page_model.base_model(2), (), 0, tmp_path)
    sight, _ = page_sight.draw(setting.inputs, None, 0, 1, 1)
    pointing, *_ = page_pointing.draw(setting, None, 0, 1, 1)
    answers = make_page_model.draw(setting, 0, 1, 1)
    for vision in (sight, pointing["vision"], answers.vision):
        assert vision["patches_ipc"].shape == (1, 520, 3 * 16 * 16)


def test_checkpoints_of_another_density_are_apart(tmp_path):
    names = {
        make_page_model.stage_name(start, density)
        for start in (None, tmp_path / "one", tmp_path / "other")
        for density in (1, 2)
    }
    assert len(names) == 6
