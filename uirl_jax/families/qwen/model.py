"""What the Qwen-VL families share on the device: the text tower, and bytes of patches as floats.

A family's model is a `QwenVL` with a vision tower and `encode_images`. Methods are pure; callers
jit them.

Source: transformers, models/qwen2_vl/modeling_qwen2_vl.py.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen.config import QwenConfig
from uirl_jax.families.qwen.images import ImageConfig, level_values
from uirl_jax.models import decoder, layers
from uirl_jax.models.blocks import Remat
from uirl_jax.models.decoder import Decoder, DecoderBlock, DecoderConfig, Rotary, VisualLevels
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import LoraConfig
from uirl_jax.models.weight_table import WeightTable


class QwenVL(nnx.Module):
    """The text tower, `models.decoder` with M-RoPE, behind a family's vision tower.

    Args:
      cfg: of the family.
      text: the sizes of the text tower.
      visual: the vision tower; it is made first, with the same `rngs`.
      table: of the family.
      lora: targets of the adapters; None: no adapters.
      rngs: of the random initial weights.
      param_dtype: of the base weights; adapters are float32.
      compute_dtype: of activations; None: param_dtype. Softmax, norms, angles and logprobs are
        always float32.
      remat: what the backward pass recomputes of a block.
    """

    def __init__(
        self,
        cfg: Any,
        text: DecoderConfig,
        visual: nnx.Module,
        table: WeightTable,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
        compute_dtype: jnp.dtype | None,
        remat: Remat,
    ) -> None:
        self.cfg = cfg
        self.lora = lora
        self.compute_dtype = jnp.dtype(param_dtype if compute_dtype is None else compute_dtype)
        self.remat: Remat = remat
        self.visual = visual
        self.text = Decoder(
            text,
            lora=lora,
            table=table,
            rngs=rngs,
            param_dtype=param_dtype,
            compute_dtype=self.compute_dtype,
            remat=remat,
        )

    def rotary(self, positions_3bt: jax.Array) -> Rotary:
        """The angles of positions: by sections of a head, as of Qwen2-VL."""
        cfg = self.cfg
        return Rotary(
            *layers.mrope_angles(positions_3bt, cfg.head_dim, cfg.rope_theta, cfg.mrope_section)
        )

    def hidden(
        self,
        rows: TokenRows,
        visual_md: jax.Array | None,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The text tower over whole rows, causal within a segment and its shared prefix.

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
        slot_b: jax.Array | None = None,
        span: int | None = None,
        blocks: Sequence[DecoderBlock] | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """See border.Model.extend."""
        return self.text.extend(
            self.text.embed(token_ids_bt, visual_md, vision_index_bt),
            self.rotary(positions_abt),
            cache,
            start_b,
            slot_b=slot_b,
            span=span,
            blocks=blocks,
            visual=_levels(visual_md, vision_index_bt),
        )

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """float32[B,T,V]."""
        return self.text.logits(x_btd)


def _text_rows(
    model: QwenVL, rows: TokenRows, visual_md: jax.Array | None, **options: Any
) -> tuple[jax.Array, jax.Array | None]:
    return model.text.rows(
        model.text.embed(rows.token_ids_bt, visual_md, rows.vision_index_bt, in_parts=True),
        model.rotary(rows.positions_abt),
        rows.segment_ids_bt,
        rows.prefix_segments_bt,
        _levels(visual_md, rows.vision_index_bt),
        **options,
    )


def _levels(visual_md: jax.Array | None, vision_index_bt: jax.Array | None) -> VisualLevels | None:
    if visual_md is None or vision_index_bt is None:
        return None
    return VisualLevels(visual_md, vision_index_bt)


def block_outputs(model: QwenVL, rows: TokenRows, visual_md: jax.Array | None) -> jax.Array:
    """The residual stream after every text block and what is added there, [L,B,T,D]; for tests."""
    x_lbtd = _text_rows(model, rows, visual_md, collect=True)[1]
    assert x_lbtd is not None  # collect=True
    return x_lbtd


def decoder_config(cfg: QwenConfig) -> DecoderConfig:
    """The sizes of the text tower of Qwen2-VL and Qwen2.5-VL."""
    return DecoderConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=cfg.num_hidden_layers,
        num_attention_heads=cfg.num_attention_heads,
        num_key_value_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        rms_norm_eps=cfg.rms_norm_eps,
        initializer_range=cfg.initializer_range,
        tie_word_embeddings=cfg.tie_word_embeddings,
        qkv_bias=True,
    )


def init_cache(cfg: QwenConfig, slots: int, positions: int, dtype: jnp.dtype) -> KVCache:
    return decoder.init_cache(decoder_config(cfg), slots, positions, dtype)


def pixel_values(patches_ipc: jax.Array, image_cfg: ImageConfig) -> jax.Array:
    """The vision tower's input, of patches that were transferred as bytes: an eighth of the floats.

    A lookup in a table equals images.pixel_values bit for bit. Arithmetic would be rounded
    differently in every program that the compiler fuses it into, and gradients of equal screens
    would then differ by 1e-5.

    Args:
      patches_ipc: uint8[I,P,C], see images.cut_image.
    Returns: float32[I,P,F], the still image repeated in time.
    """
    shape_ip = patches_ipc.shape[:2]
    levels_ipcx = patches_ipc.reshape(*shape_ip, 3, -1)
    table_cl = jnp.asarray(level_values(image_cfg))
    values_ipcx = jnp.stack([table_cl[c][levels_ipcx[:, :, c]] for c in range(3)], axis=2)
    values_ipctx = jnp.repeat(values_ipcx[:, :, :, None], image_cfg.temporal_patch_size, axis=3)
    return values_ipctx.reshape(*shape_ip, -1)
