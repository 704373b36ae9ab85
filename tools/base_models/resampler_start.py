"""Initial weights with which a small Idefics2, made from nothing, reads places from the start.

A resampler's latents are drawn at random and so is what they attend to: each of them averages the
whole screen, and a model that sees 48 averages is slow to tell places and colours (docs/notes/
results.md). Here every latent is the code of one patch of an empty screen, and the first block
compares codes: latent n reads nearly all from patch n, as a LLaVA's text tower would. The connector
before it multiplies two projections of a patch, so that a colour would be written differently at
every place; here one of the two is nearly constant. The tower keeps these weights (`BaseModel.
trains_vision`): trained, latents lose their patches within a thousand steps.
"""

from typing import Any

import jax.numpy as jnp
from PIL import Image

from uirl_jax.families.border import Inputs, PlacedScreen
from uirl_jax.families.idefics2.model import Idefics2, VisionTower, context

_POSITIONS = 50.0  # times the reference's 0.02: as large as what patches look like
_SHARPNESS = 3.0  # of what latents read
_LESS_OF_PLACES = 0.5  # in what they read: colours are then as much of a token as in a LLaVA's
_GATE, _GATE_SPREAD = 2.0, 0.5  # mean and spread of what opens the connector
_SHARED = 0.7  # of what tells a latent from the others
_LATENTS = 0.1  # root of the mean square; most of a visual token is what was read


def read_a_patch_each(model: Idefics2, inputs: Inputs) -> None:
    """Writes positions, connector, latents and first keys of a model with a latent for each patch.

    Raises:
      ValueError: the numbers differ, or the resampler shares keys among heads.
    """
    tower = model.visual
    tower.position_table[...] *= _POSITIONS
    _copy_colours(tower)
    grey = Image.new("RGB", (model.cfg.images.longest_px, model.cfg.images.shortest_px), "#808080")
    screen = inputs.cut_screen(grey)
    packed = inputs.pack_screens([PlacedScreen(screen, 0, start=0, segment=1)], 1, screen.patches)
    vision: dict[str, Any] = {name: jnp.asarray(value) for name, value in packed.arrays.items()}
    codes_ed = context(model, vision)[0]
    queries_ldf = tower.latent_blocks.latent_q.kernel[...]
    keys_ldf = tower.latent_blocks.latent_k.kernel[...]
    if codes_ed.shape != tower.latents.shape or keys_ldf.shape != queries_ldf.shape:
        raise ValueError(
            f"latents {tower.latents.shape}, keys {keys_ldf.shape}: expected {codes_ed.shape}, a "
            f"latent for each patch of a screen, and {queries_ldf.shape}"
        )
    codes_ed /= jnp.linalg.norm(codes_ed, axis=1, keepdims=True)
    basis_dd = jnp.linalg.svd(codes_ed, full_matrices=True)[2]
    places_ed, shared_d = basis_dd[: len(codes_ed)], basis_dd[-1]  # no patch has the last
    latents_ed = codes_ed + _SHARED * shared_d
    latents_ed *= _LATENTS / jnp.sqrt(jnp.mean(jnp.square(latents_ed)))
    tower.latents[...] = latents_ed.astype(tower.latents.dtype)
    # Keys have it with the other sign: a latent would read itself before its patch.
    mirrored_df = queries_ldf[0] - 2 * jnp.outer(shared_d, shared_d @ queries_ldf[0])
    tower.latent_blocks.latent_k.kernel[...] = keys_ldf.at[0].set(mirrored_df)
    tower.latent_blocks.latent_q.kernel[...] = queries_ldf.at[0].multiply(_SHARPNESS)
    values_ldf = tower.latent_blocks.latent_v.kernel[...]
    of_places_df = places_ed.T @ (places_ed @ values_ldf[0])
    tower.latent_blocks.latent_v.kernel[...] = values_ldf.at[0].add(-_LESS_OF_PLACES * of_places_df)


def _copy_colours(tower: VisionTower) -> None:
    """down(silu(gate) * up) begins as nearly down(up).

    A LayerNorm's output has the mean 0 before its bias, so that the mean is free to carry what
    opens the gate.
    """
    tower.post_norm.bias[...] = jnp.ones_like(tower.post_norm.bias[...])
    gate, up = tower.connector_gate.kernel, tower.connector_up.kernel
    gate_df = gate[...] - jnp.mean(gate[...], axis=0)
    gate[...] = _GATE_SPREAD * gate_df + _GATE / len(gate_df)
    up[...] -= jnp.mean(up[...], axis=0)
