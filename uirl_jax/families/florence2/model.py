"""Florence-2 in Flax NNX: a DaViT as vision tower, BART's encoder and decoder.

Screens and positions come from `inputs`, names of tensors from `names`.

Source: arXiv:2311.06242 and transformers, models/florence2/modeling_florence2.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.border import TokenRows
from uirl_jax.families.florence2 import text
from uirl_jax.families.florence2.config import Florence2Config
from uirl_jax.families.florence2.inputs import DECODER, OPENING
from uirl_jax.families.florence2.text import DecoderBlock, Roles, SlotCache, Text
from uirl_jax.families.florence2.vision import VisionTower
from uirl_jax.families.two_towers import image_pixels
from uirl_jax.models.blocks import Remat
from uirl_jax.models.lora import LoraConfig, split_key
from uirl_jax.models.sharding import constrain


class Florence2(nnx.Module):
    """All towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args: see two_towers.TwoTowers.
    """

    def __init__(
        self,
        cfg: Florence2Config,
        *,
        lora: LoraConfig | None = None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
        remat: Remat = "full",
    ) -> None:
        self.cfg, self.lora = cfg, lora
        self.compute_dtype = jnp.dtype(param_dtype if compute_dtype is None else compute_dtype)
        self.remat: Remat = remat
        self.visual = VisionTower(cfg, lora=lora, rngs=rngs, param_dtype=param_dtype)
        self.text = Text(
            cfg,
            lora=lora,
            rngs=rngs,
            param_dtype=param_dtype,
            compute_dtype=self.compute_dtype,
            remat=remat,
        )

    @staticmethod
    def init_cache(cfg: Florence2Config, slots: int, positions: int, dtype: jnp.dtype) -> SlotCache:
        """See border.Family."""
        return text.init_cache(cfg, slots, positions, dtype)

    def encode_images(
        self,
        vision: Mapping[str, jax.Array],
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The table of visual tokens.

        Args:
          vision: of `Florence2Inputs.pack_screens` or `Florence2Inputs.from_processor`:
            patches_ipc: uint8[I,P,C], or pixels_ipf: float32[I,P,F]; a row is one image.
          adapters, dropout_key: see border.Model; for adapters of the vision tower.
        Returns: visual_md, [I * (1 + P), D]; rows without an image are undefined.
        """
        stages_key, projector_key = split_key(dropout_key, 2)
        x_iyxd, _ = self.visual.stages(
            _pictures(self, vision), remat=self.remat, adapters=adapters, dropout_key=stages_key
        )
        visual_itd = self.visual.project(x_iyxd, adapters=adapters, dropout_key=projector_key)
        return constrain(visual_itd.reshape(-1, self.cfg.hidden_size), "visual", None)

    def hidden(
        self,
        rows: TokenRows,
        visual_md: jax.Array | None,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The decoder's output, undefined at the encoder's tokens; see border.Model.hidden.

        Positions say which tokens are whose (`inputs`).
        """
        x_btd, _, _ = _text_rows(self, rows, visual_md, adapters=adapters, dropout_key=dropout_key)
        return x_btd

    def extend(
        self,
        token_ids_bt: jax.Array,
        visual_md: jax.Array | None,
        vision_index_bt: jax.Array | None,
        positions_abt: jax.Array,
        cache: SlotCache,
        start_b: jax.Array,
        *,
        prefix_b: jax.Array | None = None,
        slot_b: jax.Array | None = None,
        span: int | None = None,
        blocks: Sequence[DecoderBlock] | None = None,
    ) -> tuple[jax.Array, SlotCache]:
        """See border.Model.extend. What is returned of the encoder's tokens is undefined.

        A single token a row is the decoder's: contexts are longer.
        """
        tower = self.text
        x_btd = tower.embed(token_ids_bt, visual_md, vision_index_bt)
        position_bt = positions_abt[0]
        encoder_1c111, memory_btd = cache.encoder_1c111, None
        tokens = token_ids_bt.shape[1]
        if tokens > 1 and prefix_b is not None:
            encoder_b = jnp.maximum(prefix_b - OPENING, 0)
            is_encoder_bt = start_b[:, None] + jnp.arange(tokens) < encoder_b[:, None]
            memory_btd, _ = tower.encode(x_btd, position_bt, is_encoder_bt.astype(jnp.int32))
            at_b = jnp.arange(len(start_b)) if slot_b is None else slot_b
            encoder_1c111 = encoder_1c111.at[0, at_b, 0, 0, 0].set(encoder_b, mode="drop")
        else:
            held_c = encoder_1c111[0, :, 0, 0, 0]
            encoder_b = held_c if slot_b is None else held_c[slot_b]
        x_btd, kv = tower.extend(
            x_btd,
            jnp.maximum(position_bt - DECODER, 0),
            memory_btd,
            encoder_b,
            cache.kv,
            start_b,
            slot_b=slot_b,
            span=span or cache.positions,
            blocks=blocks,
        )
        return x_btd, SlotCache(kv, encoder_1c111)

    def logits(self, x_btd: jax.Array, *, adapters: bool = True) -> jax.Array:
        """float32[B,T,V]."""
        del adapters  # none is on the head
        return self.text.logits(x_btd)


def _pictures(model: Florence2, vision: Mapping[str, jax.Array]) -> jax.Array:
    """float[I,Y,X,3] in the compute dtype."""
    pixels_ipf = image_pixels(vision, model.cfg.images)
    pixels_ipf = constrain(pixels_ipf.astype(model.compute_dtype), "images", None, None)
    images, side = len(pixels_ipf), model.cfg.grid_side
    blocks = pixels_ipf.reshape(images, side, side, 3, model.cfg.vision.patch_px, -1)
    side_px = model.cfg.images.side_px
    return blocks.transpose(0, 1, 4, 2, 5, 3).reshape(images, side_px, side_px, 3)


def _text_rows(
    model: Florence2,
    rows: TokenRows,
    visual_md: jax.Array | None,
    *,
    adapters: bool = True,
    dropout_key: jax.Array | None = None,
    collect: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The decoder's output and, with `collect`, [L,B,T,D] after every block of either tower."""
    tower = model.text
    encoder_key, decoder_key = split_key(dropout_key, 2)
    x_btd = tower.embed(rows.token_ids_bt, visual_md, rows.vision_index_bt, in_parts=True)
    position_bt = jnp.asarray(rows.positions_abt[0])
    roles = Roles.of(
        position_bt >= DECODER,
        jnp.asarray(rows.segment_ids_bt),
        None if rows.prefix_segments_bt is None else jnp.asarray(rows.prefix_segments_bt),
    )
    options: dict[str, Any] = {"adapters": adapters, "collect": collect}
    memory_btd, encoder_lbtd = tower.encode(
        x_btd, position_bt, roles.encoder_bt, dropout_key=encoder_key, **options
    )
    position_bt = jnp.maximum(position_bt - DECODER, 0)
    x_btd, decoder_lbtd = tower.decode_rows(
        x_btd, position_bt, memory_btd, roles, dropout_key=decoder_key, **options
    )
    return x_btd, encoder_lbtd, decoder_lbtd


def vision_block_outputs(model: Florence2, vision: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Of every stage the picture after every block, [L,I,P,D]; for tests."""
    pictures = _pictures(model, vision)
    return model.visual.stages(pictures, remat=model.remat, collect=True)[1]


def text_block_outputs(
    model: Florence2, rows: TokenRows, visual_md: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """[L,B,T,D] after every block of the encoder and of the decoder; for tests."""
    _, encoder_lbtd, decoder_lbtd = _text_rows(model, rows, visual_md, collect=True)
    return cast(jax.Array, encoder_lbtd), cast(jax.Array, decoder_lbtd)
