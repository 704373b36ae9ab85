"""PaliGemma in Flax NNX: a SigLIP as vision tower, a linear projector, a Gemma (`models.decoder`).

Its text tower is Gemma or Gemma 2. A context is read as a whole, forwards and backwards (`masks`).
Screens and positions come from `inputs`, names of tensors from `names`, the rest of the text tower
from `two_towers`.

Source: arXiv:2407.07726, arXiv:2412.03555 and transformers, models/paligemma/modeling_paligemma.py,
models/siglip/, models/gemma/, models/gemma2/.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.border import TokenRows
from uirl_jax.families.paligemma import masks
from uirl_jax.families.paligemma.config import PaliGemmaConfig
from uirl_jax.families.paligemma.names import WEIGHTS
from uirl_jax.families.two_towers import TwoTowers, image_pixels
from uirl_jax.models import layers
from uirl_jax.models.attention import masked_attention
from uirl_jax.models.decoder import Attend, DecoderConfig
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain
from uirl_jax.models.vision_block import make_blocks, run_blocks


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
        self.blocks = make_blocks(
            vision,
            vision.num_hidden_layers,
            layers.gelu_tanh,
            lora=lora,
            table=WEIGHTS,
            rngs=rngs,
            param_dtype=param_dtype,
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


class PaliGemma(TwoTowers):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args: see TwoTowers.
    """

    cfg: PaliGemmaConfig
    visual: VisionTower
    table = WEIGHTS
    make_visual = VisionTower

    @staticmethod
    def decoder_config(cfg: PaliGemmaConfig) -> DecoderConfig:
        return DecoderConfig.from_config(
            cfg,
            activation="gelu_tanh",
            norms_from_one=True,
            output_norms=cfg.is_gemma2,
            embedding_scale=cfg.hidden_size**0.5,
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
        x_ipd, _ = _vision_blocks(self, vision, adapters=adapters, dropout_key=blocks_key)
        tower = self.visual
        visual_ipd = tower.projector(
            tower.post_norm(x_ipd), adapters=adapters, dropout_key=projector_key
        )
        return constrain(visual_ipd.reshape(-1, self.cfg.hidden_size), "visual", None)

    def attend_rows(self, rows: TokenRows) -> Attend:
        """A context sees all of itself."""

        def mask_of(window: jax.Array | int) -> jax.Array:
            return masks.row_mask(rows, window)

        return _attend(self.cfg, mask_of, rows.token_ids_bt.shape[1])

    def attend_cache(
        self, start_b: jax.Array, prefix_b: jax.Array | None, *, tokens: int, span: int
    ) -> Attend:
        """A context sees all of itself."""

        def mask_of(window: jax.Array | int) -> jax.Array:
            return masks.cache_mask(start_b, prefix_b, tokens=tokens, span=span, window=window)

        return _attend(self.cfg, mask_of, span)

    def logits(self, x_btd: jax.Array, *, adapters: bool = True) -> jax.Array:
        """float32[B,T,V]."""
        logits_btv = self.text.logits(x_btd, adapters=adapters)
        softcap = self.cfg.final_logit_softcapping
        return logits_btv if softcap is None else softcap * jnp.tanh(logits_btv / softcap)


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


def _vision_blocks(
    model: PaliGemma, vision: Mapping[str, jax.Array], **options: Any
) -> tuple[jax.Array, jax.Array | None]:
    """x_ipd behind the last block, [I,P,D]; with `collect`, [L,I,P,D] behind every block."""
    tower, dtype = model.visual, model.compute_dtype
    pixels_ipf = image_pixels(vision, model.cfg.images).astype(dtype)
    pixels_ipf = constrain(pixels_ipf, "images", None, None)
    x_ipd = tower.patch_embed(pixels_ipf) + tower.position_table[...].astype(dtype)
    x_ipd = constrain(x_ipd, "images", None, None)
    return run_blocks(
        tower.blocks,
        x_ipd,
        None,
        depth=model.cfg.vision.num_hidden_layers,
        remat=model.remat,
        **options,
    )


def vision_block_outputs(model: PaliGemma, vision: Mapping[str, jax.Array]) -> jax.Array:
    """The residual stream after every vision block, [L,I,P,D]; for tests."""
    x_lipd = _vision_blocks(model, vision, collect=True)[1]
    assert x_lipd is not None  # collect=True
    return x_lipd
