"""PaliGemma in Flax NNX: a SigLIP as vision tower, a linear projector, a Gemma (`models.decoder`).

Its text tower is Gemma or Gemma 2. A context is read as a whole, forwards and backwards (`masks`).
Methods are pure; callers jit them. Screens and positions come from `inputs`, names of tensors from
`names`.

Source: arXiv:2407.07726, arXiv:2412.03555 and transformers, models/paligemma/modeling_paligemma.py,
models/siglip/, models/gemma/, models/gemma2/.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.border import TokenRows
from uirl_jax.families.paligemma import masks
from uirl_jax.families.paligemma.config import PaliGemmaConfig
from uirl_jax.families.paligemma.images import ImageConfig
from uirl_jax.families.paligemma.names import WEIGHTS
from uirl_jax.families.pixel_levels import level_values
from uirl_jax.models import decoder, layers
from uirl_jax.models.attention import masked_attention
from uirl_jax.models.blocks import Remat, checkpointed, layer_keys, stack
from uirl_jax.models.decoder import Attend, Decoder, DecoderBlock, DecoderConfig, Rotary
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain
from uirl_jax.models.siglip import SiglipBlock


class VisionTower(nnx.Module):
    """Patches -> visual tokens of the text tower's width, by SigLIP and the projector."""

    def __init__(
        self,
        cfg: PaliGemmaConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        vision = cfg.vision
        dim = vision.hidden_size
        # The reference's Conv2d with stride = kernel size is a matrix product on flat patches.
        self.patch_embed = Linear(
            vision.patch_features,
            dim,
            axes=(None, None),
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        # Of the reference's scale.
        table_pd = jax.random.normal(rngs.params(), (vision.patches, dim), jnp.float32) * dim**-0.5
        self.position_table = nnx.Param(table_pd.astype(param_dtype))
        self.blocks = stack(
            lambda key: SiglipBlock(
                vision, lora=lora, table=WEIGHTS, rngs=nnx.Rngs(key), param_dtype=param_dtype
            ),
            vision.num_hidden_layers,
            rngs,
        )
        self.post_norm = layers.LayerNorm(dim, eps=vision.layer_norm_eps, param_dtype=param_dtype)
        self.projector = adapted_linear(
            "projector",
            dim,
            cfg.hidden_size,
            axes=("wide", None),
            use_bias=True,
            lora=lora,
            table=WEIGHTS,
            rngs=rngs,
            param_dtype=param_dtype,
        )


class PaliGemma(nnx.Module):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args:
      lora: targets of the adapters; None: no adapters.
      rngs: of the random initial weights.
      param_dtype: of the base weights; adapters are float32.
      compute_dtype: of activations; None: param_dtype. Softmax, norms, angles and logprobs are
        always float32.
      remat: what the backward pass recomputes of a block.
    """

    def __init__(
        self,
        cfg: PaliGemmaConfig,
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
        self.text = Decoder(
            decoder_config(cfg),
            lora=lora,
            table=WEIGHTS,
            rngs=rngs,
            param_dtype=param_dtype,
            compute_dtype=self.compute_dtype,
            remat=remat,
        )

    def encode_images(
        self,
        vision: Mapping[str, jax.Array],
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The table of visual tokens.

        Args:
          vision: of `PaliGemmaInputs.pack_screens` or `PaliGemmaInputs.from_processor`:
            patches_ipc: uint8[I,P,C], or pixels_ipf: float32[I,P,F]; a row is one image.
          adapters, dropout_key: see border.Model; for adapters of the vision tower.
        Returns: visual_md, [I * P, D]; rows without an image are undefined.
        """
        blocks_key, projector_key = split_key(dropout_key, 2)
        x_ipd, _ = _vision_blocks(
            self, vision, adapters=adapters, dropout_key=blocks_key, collect=False
        )
        tower = self.visual
        visual_ipd = tower.projector(
            tower.post_norm(x_ipd), adapters=adapters, dropout_key=projector_key
        )
        return constrain(visual_ipd.reshape(-1, self.cfg.hidden_size), "visual", None)

    def hidden(
        self,
        rows: TokenRows,
        visual_md: jax.Array | None,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """See border.Model.hidden; a context sees all of itself (`masks`)."""
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
        tokens, span = token_ids_bt.shape[1], span or cache.positions

        def mask_of(window: jax.Array | int) -> jax.Array:
            return masks.cache_mask(start_b, prefix_b, tokens=tokens, span=span, window=window)

        return self.text.extend(
            self.text.embed(token_ids_bt, visual_md, vision_index_bt),
            _rotary(self.cfg, positions_abt),
            cache,
            start_b,
            slot_b=slot_b,
            span=span,
            blocks=blocks,
            attend=_attend(self.cfg, mask_of, span),
        )

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """float32[B,T,V]."""
        logits_btv, softcap = self.text.logits(x_btd), self.cfg.final_logit_softcapping
        return logits_btv if softcap is None else softcap * jnp.tanh(logits_btv / softcap)


def _rotary(cfg: PaliGemmaConfig, positions_1bt: jax.Array) -> Rotary:
    sections = (cfg.head_dim // 2,)  # one axis of positions
    return Rotary(*layers.mrope_angles(positions_1bt, cfg.head_dim, cfg.rope_theta, sections))


def _attend(
    cfg: PaliGemmaConfig, mask_of: Callable[[jax.Array | int], jax.Array], longest: int
) -> Attend:
    """The text tower's attention.

    Args:
      mask_of: window -> mask.
      longest: no token sees more than so many; wider windows play no role.
    """
    scalar = cfg.query_pre_attn_scalar or cfg.head_dim
    window = cfg.sliding_window

    def attend(
        q_btnh: jax.Array, k_bksh: jax.Array, v_bksh: jax.Array, layer: jax.Array | int
    ) -> jax.Array:
        if scalar != cfg.head_dim:  # masked_attention divides by the root of head_dim
            q_btnh = q_btnh * (cfg.head_dim / scalar) ** 0.5
        reach: jax.Array | int = longest
        if window is not None and window < longest:
            # The first layer slides, the second does not, and so on.
            reach = jnp.where(jnp.asarray(layer) % 2 == 0, window, longest)
        softcap = cfg.attn_logit_softcapping
        return masked_attention(q_btnh, k_bksh, v_bksh, mask_of(reach), softcap=softcap)

    return attend


def _text_rows(
    model: PaliGemma, rows: TokenRows, visual_md: jax.Array | None, **options: Any
) -> tuple[jax.Array, jax.Array | None]:
    def mask_of(window: jax.Array | int) -> jax.Array:
        return masks.row_mask(rows, window)

    return model.text.rows(
        model.text.embed(rows.token_ids_bt, visual_md, rows.vision_index_bt, in_parts=True),
        _rotary(model.cfg, rows.positions_abt),
        rows.segment_ids_bt,
        attend=_attend(model.cfg, mask_of, rows.token_ids_bt.shape[1]),
        **options,
    )


def _vision_blocks(
    model: PaliGemma,
    vision: Mapping[str, jax.Array],
    *,
    adapters: bool,
    dropout_key: jax.Array | None,
    collect: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """x_ipd behind the last block, [I,P,D]; with `collect`, [L,I,P,D] behind every block."""
    tower, dtype = model.visual, model.compute_dtype
    pixels_ipf = vision.get("pixels_ipf")
    if pixels_ipf is None:
        pixels_ipf = pixel_values(vision["patches_ipc"], model.cfg.images)
    pixels_ipf = constrain(pixels_ipf.astype(dtype), "images", None, None)
    x_ipd = tower.patch_embed(pixels_ipf) + tower.position_table[...].astype(dtype)
    x_ipd = constrain(x_ipd, "images", None, None)
    whole_ip = jnp.ones(x_ipd.shape[:2], jnp.int32)  # a row is one image

    def body(
        x_ipd: jax.Array, layer: tuple[SiglipBlock, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        block, key = layer
        x_ipd = block(x_ipd, whole_ip, adapters=adapters, dropout_key=key)
        return x_ipd, x_ipd if collect else None

    stacked = (tower.blocks, layer_keys(dropout_key, model.cfg.vision.num_hidden_layers))
    return jax.lax.scan(checkpointed(body, model.remat), x_ipd, stacked)


def pixel_values(patches_ipc: jax.Array, images: ImageConfig) -> jax.Array:
    """float32[I,P,F] of uint8[I,P,C]: the processor's values bit for bit."""
    return layers.level_lookup(patches_ipc, level_values(images))


def vision_block_outputs(model: PaliGemma, vision: Mapping[str, jax.Array]) -> jax.Array:
    """The residual stream after every vision block, [L,I,P,D]; for tests."""
    x_lipd = _vision_blocks(model, vision, adapters=True, dropout_key=None, collect=True)[1]
    assert x_lipd is not None  # collect=True
    return x_lipd


def block_outputs(model: PaliGemma, rows: TokenRows, visual_md: jax.Array | None) -> jax.Array:
    """The residual stream after every text block, [L,B,T,D]; for tests."""
    x_lbtd = _text_rows(model, rows, visual_md, collect=True)[1]
    assert x_lbtd is not None  # collect=True
    return x_lbtd


def decoder_config(cfg: PaliGemmaConfig) -> DecoderConfig:
    """The sizes of the text tower."""
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
        activation="gelu_tanh",
        norms_from_one=True,
        output_norms=cfg.is_gemma2,
        embedding_scale=cfg.hidden_size**0.5,
    )


def init_cache(cfg: PaliGemmaConfig, slots: int, positions: int, dtype: jnp.dtype) -> KVCache:
    return decoder.init_cache(decoder_config(cfg), slots, positions, dtype)
