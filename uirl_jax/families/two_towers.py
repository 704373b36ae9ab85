"""What the families share on the device: a vision tower before `models.decoder`.

A family's model is a `TwoTowers` that names its parts and has `encode_images`. Positions count
along one axis unless it says otherwise. Methods are pure; callers jit them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.border import TokenRows
from uirl_jax.families.pixel_levels import Normalisation, level_values
from uirl_jax.models import decoder, layers
from uirl_jax.models.blocks import Remat
from uirl_jax.models.decoder import (
    Attend,
    Decoder,
    DecoderBlock,
    DecoderConfig,
    Rotary,
    VisualLevels,
)
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import LoraConfig
from uirl_jax.models.weight_table import WeightTable


class TwoTowers(nnx.Module):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args:
      cfg: of the family.
      lora: targets of the adapters; None: no adapters.
      rngs: of the random initial weights; the vision tower is made first.
      param_dtype: of the base weights; adapters are float32.
      compute_dtype: of activations; None: param_dtype. Softmax, norms, angles and logprobs are
        always float32.
      remat: what the backward pass recomputes of a block.

    Attributes:
      table: of the family.
      make_visual: (cfg, *, lora, rngs, param_dtype) -> the vision tower.
      decoder_config: cfg -> the sizes of the text tower.
    """

    table: ClassVar[WeightTable]
    make_visual: ClassVar[Callable[..., nnx.Module]]
    decoder_config: ClassVar[Callable[[Any], DecoderConfig]]
    cfg: Any
    visual: Any

    def __init__(
        self,
        cfg: Any,
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
        own = type(self)
        self.visual = own.make_visual(cfg, lora=lora, rngs=rngs, param_dtype=param_dtype)
        self.text = Decoder(
            own.decoder_config(cfg),
            lora=lora,
            table=own.table,
            rngs=rngs,
            param_dtype=param_dtype,
            compute_dtype=self.compute_dtype,
            remat=remat,
        )

    @classmethod
    def init_cache(cls, cfg: Any, slots: int, positions: int, dtype: jnp.dtype) -> KVCache:
        """See border.Family."""
        return decoder.init_cache(cls.decoder_config(cfg), slots, positions, dtype)

    def rotary(self, positions_abt: jax.Array) -> Rotary:
        """The angles of positions."""
        cfg = self.cfg
        sections = (cfg.head_dim // 2,)  # one axis of positions
        return Rotary(*layers.mrope_angles(positions_abt, cfg.head_dim, cfg.rope_theta, sections))

    def attend_rows(self, rows: TokenRows) -> Attend | None:
        """Attention in whole rows; None: causal within a segment and its shared prefix."""
        del rows
        return None

    def attend_cache(
        self, start_b: jax.Array, prefix_b: jax.Array | None, *, tokens: int, span: int
    ) -> Attend | None:
        """Attention of `tokens` new tokens to `span` positions of the cache; None: causal.

        Other arguments: see border.Model.extend.
        """
        del start_b, prefix_b, tokens, span
        return None

    def hidden(
        self,
        rows: TokenRows,
        visual_md: jax.Array | None,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The text tower over whole rows.

        Args:
          visual_md: the table of encode_images; None: no row holds an image.
          adapters: False computes the base exactly, without the adapters' matrix products.
          dropout_key: for the adapters' inputs (LoraConfig.dropout) in this forward pass; None, as
            for scoring and sampling, drops nothing.
        Returns: x_btd in the compute dtype, after the final norm.
        """
        x_btd, _ = _text_rows(self, rows, visual_md, adapters=adapters, dropout_key=dropout_key)
        return self.text.final_norm(x_btd)

    def extend(
        self,
        token_ids_bt: jax.Array,
        visual_md: jax.Array | None,
        vision_index_bt: jax.Array | None,
        positions_abt: jax.Array,
        cache: KVCache,
        start_b: jax.Array,
        *,
        prefix_b: jax.Array | None = None,
        slot_b: jax.Array | None = None,
        span: int | None = None,
        blocks: Sequence[DecoderBlock] | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """See border.Model.extend."""
        attend = self.attend_cache(
            start_b, prefix_b, tokens=token_ids_bt.shape[1], span=span or cache.positions
        )
        return self.text.extend(
            self.text.embed(token_ids_bt, visual_md, vision_index_bt),
            self.rotary(positions_abt),
            cache,
            start_b,
            slot_b=slot_b,
            span=span,
            blocks=blocks,
            visual=_levels(visual_md, vision_index_bt),
            attend=attend,
        )

    def logits(self, x_btd: jax.Array, *, adapters: bool = True) -> jax.Array:
        """float32[B,T,V]."""
        return self.text.logits(x_btd, adapters=adapters)


def _text_rows(
    model: TwoTowers,
    rows: TokenRows,
    visual_md: jax.Array | None,
    *,
    adapters: bool = True,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    x_btd = model.text.embed(
        rows.token_ids_bt, visual_md, rows.vision_index_bt, in_parts=True, adapters=adapters
    )
    return model.text.rows(
        x_btd,
        model.rotary(rows.positions_abt),
        rows.segment_ids_bt,
        rows.prefix_segments_bt,
        _levels(visual_md, rows.vision_index_bt),
        attend=model.attend_rows(rows),
        adapters=adapters,
        **options,
    )


def _levels(visual_md: jax.Array | None, vision_index_bt: jax.Array | None) -> VisualLevels | None:
    """A table as wide as the text tower has no levels, and adds nothing."""
    if visual_md is None or vision_index_bt is None:
        return None
    return VisualLevels(visual_md, vision_index_bt)


def block_outputs(model: TwoTowers, rows: TokenRows, visual_md: jax.Array | None) -> jax.Array:
    """The residual stream after every text block and what is added there, [L,B,T,D]."""
    x_lbtd = _text_rows(model, rows, visual_md, collect=True)[1]
    assert x_lbtd is not None  # collect=True
    return x_lbtd


def image_pixels(vision: Mapping[str, jax.Array], images: Normalisation) -> jax.Array:
    """float32[I,P,F]: pixels_ipf where they were given, else the processor's values of the bytes
    patches_ipc, bit for bit."""
    pixels_ipf = vision.get("pixels_ipf")
    if pixels_ipf is not None:
        return pixels_ipf
    return layers.level_lookup(vision["patches_ipc"], level_values(images))
