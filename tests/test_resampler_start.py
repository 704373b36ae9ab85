"""A small Idefics2 made from nothing begins by reading each patch with a latent of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tools import make_base_model
from tools.base_models import resampler_start
from tools.base_models.tiny_architectures import BASES
from uirl_jax.families.border import PlacedScreen
from uirl_jax.families.idefics2 import model as idefics2_model
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.tasks import desktop


@pytest.fixture(scope="module")
def built():
    base = BASES["idefics2"]
    tokenizer = base.tokenizer.train_tokenizer(make_base_model.tokenizer_texts(base), 512)
    return base, base.config(tokenizer)


def make_model(base, cfg):
    return base.family.make_model(
        cfg, lora=None, rngs=nnx.Rngs(0), param_dtype=jnp.float32, remat="none"
    )


def shares_of_own_patch(model, inputs) -> np.ndarray:
    """[heads, latents]: of what a latent of the first block reads of a screen, written in numpy."""
    session = desktop.open_session(TaskSpec("desktop/click_button", 5, "buttons=4,colors=8"))
    screen = inputs.cut_screen(session.screenshot())
    packed = inputs.pack_screens([PlacedScreen(screen, 0, 0, 1)], 1, screen.patches)
    vision = {name: jnp.asarray(array) for name, array in packed.arrays.items()}
    context_pd = np.asarray(idefics2_model.context(model, vision)[0], np.float64)
    latents_ed = np.asarray(model.visual.latents[...], np.float64)

    def normed(x):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)

    block = model.visual.latent_blocks
    read_sd = np.concatenate([normed(context_pd), normed(latents_ed)])
    q_enh = (normed(latents_ed) @ np.asarray(block.latent_q.kernel[...][0])).reshape(48, 3, 64)
    k_snh = (read_sd @ np.asarray(block.latent_k.kernel[...][0])).reshape(96, 3, 64)
    scores_nes = np.einsum("enh,snh->nes", q_enh, k_snh) / 8
    shares_nes = np.asarray(jax.nn.softmax(scores_nes, axis=-1))
    return np.diagonal(shares_nes[:, :, :48], axis1=1, axis2=2)


def test_latents_read_a_patch_each_and_before_they_read_themselves(built):
    base, cfg = built
    model, inputs = make_model(base, cfg), base.family.make_inputs(cfg)
    assert shares_of_own_patch(model, inputs).mean() < 0.05  # 1 of 96 by chance
    resampler_start.read_a_patch_each(model, inputs)
    shares = shares_of_own_patch(model, inputs)
    assert shares.mean() > 0.9 and np.mean(shares > 0.5) > 0.95


def colours_explained(model, inputs) -> float:
    """R squared of a patch's colour from its visual token, by one linear map for all places."""
    count = 40
    images = [
        desktop.open_session(
            TaskSpec("desktop/click_button", seed, "buttons=4,colors=8")
        ).screenshot()
        for seed in range(count)
    ]
    screens = [inputs.cut_screen(image) for image in images]
    placed = [PlacedScreen(screen, row, 0, 1) for row, screen in enumerate(screens)]
    packed = inputs.pack_screens(placed, count, screens[0].patches)
    vision = {name: jnp.asarray(array) for name, array in packed.arrays.items()}
    tokens_ned = np.asarray(model.encode_images(vision), np.float64).reshape(count, 48, -1)
    pixels = np.stack([np.asarray(image.convert("RGB"), np.float64) for image in images])
    colours_nec = pixels.reshape(count, 6, 28, 8, 28, 3).mean(axis=(2, 4)).reshape(count, 48, 3)
    seen, new = slice(0, 30), slice(30, count)
    tokens_ned -= tokens_ned[seen].mean(axis=0)
    colours_nec -= colours_nec[seen].mean(axis=0)
    x_sd, y_sc = (array[seen].reshape(30 * 48, -1) for array in (tokens_ned, colours_nec))
    ridge = 0.01 * len(x_sd) * x_sd.var() * np.eye(x_sd.shape[1])
    map_dc = np.linalg.solve(x_sd.T @ x_sd + ridge, x_sd.T @ y_sc)
    return 1 - (tokens_ned[new] @ map_dc - colours_nec[new]).var() / colours_nec[new].var()


def test_colours_are_written_alike_at_every_place(built):
    base, cfg = built
    model, inputs = make_model(base, cfg), base.family.make_inputs(cfg)
    assert colours_explained(model, inputs) < 0.3
    resampler_start.read_a_patch_each(model, inputs)
    assert colours_explained(model, inputs) > 0.6


def test_resampler_of_other_sizes_is_refused(built):
    base, cfg = built
    for changes in ({"resampler_n_latents": 40}, {"num_key_value_heads": 1}):
        other = dataclasses.replace(cfg, perceiver=dataclasses.replace(cfg.perceiver, **changes))
        with pytest.raises(ValueError, match="a latent for each patch"):
            resampler_start.read_a_patch_each(
                make_model(base, other), base.family.make_inputs(other)
            )
