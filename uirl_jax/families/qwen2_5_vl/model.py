"""Qwen2.5-VL in Flax NNX: its vision tower, before the text tower of `qwen.model`.

Most vision blocks attend inside windows; the patches come in the order of windows (`inputs`), so
that a window is a run of patches. Methods are pure; callers jit them. The blocks of a tower are
stacked and run by `blocks.through`.

Source: arXiv:2502.13923 and transformers, models/qwen2_5_vl/modeling_qwen2_5_vl.py.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.families.qwen.config import VISION_ROPE_THETA
from uirl_jax.families.qwen.model import QwenVL, image_pixels
from uirl_jax.families.qwen.vision import MergingTower
from uirl_jax.families.qwen2_5_vl.config import Qwen25VLConfig, VisionConfig
from uirl_jax.families.qwen2_5_vl.names import WEIGHTS
from uirl_jax.models import layers
from uirl_jax.models.attention import attention, window_attention
from uirl_jax.models.blocks import layer_keys, stack, through
from uirl_jax.models.decoder import DecoderConfig, Rotary
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain

_VISION_NORM_EPS = 1e-6  # a constant in the reference, too

# (q, k, v), each [I,P,N,H] -> [I,P,N,H]
_Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class VisionBlock(nnx.Module):
    """Pre-norm attention over an image's or a window's patches, then a gated MLP with biases."""

    def __init__(
        self,
        cfg: VisionConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        dim, wide = cfg.hidden_size, cfg.intermediate_size
        norm = functools.partial(layers.RMSNorm, dim, eps=_VISION_NORM_EPS, param_dtype=param_dtype)
        linear = functools.partial(
            adapted_linear,
            lora=lora,
            table=WEIGHTS,
            use_bias=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.norm1 = norm()
        self.qkv = linear("qkv", dim, 3 * dim)
        self.proj = linear("proj", dim, dim, axes=("wide", None))
        self.norm2 = norm()
        self.fc_gate = linear("fc_gate", dim, wide)
        self.fc_up = linear("fc_up", dim, wide)
        self.fc_down = linear("fc_down", wide, dim, axes=("wide", None))
        self.num_heads = cfg.num_heads

    def __call__(
        self,
        x_ipd: jax.Array,
        rotary: Rotary,
        attend: _Attend,
        *,
        adapters: bool,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        images, patches, dim = x_ipd.shape
        qkv_key, proj_key, gate_key, up_key, down_key = split_key(dropout_key, 5)
        qkv_ipe = self.qkv(self.norm1(x_ipd), adapters=adapters, dropout_key=qkv_key)
        qkv_ip3nh = qkv_ipe.reshape(images, patches, 3, self.num_heads, -1)
        q_ipnh, k_ipnh, v_ipnh = (qkv_ip3nh[:, :, i] for i in range(3))
        q_ipnh, k_ipnh = (layers.rotate(x, *rotary) for x in (q_ipnh, k_ipnh))
        out_ipd = attend(q_ipnh, k_ipnh, v_ipnh).reshape(images, patches, dim)
        x_ipd = x_ipd + self.proj(out_ipd, adapters=adapters, dropout_key=proj_key)
        h_ipd = self.norm2(x_ipd)
        gate_ipf = jax.nn.silu(self.fc_gate(h_ipd, adapters=adapters, dropout_key=gate_key))
        up_ipf = self.fc_up(h_ipd, adapters=adapters, dropout_key=up_key)
        x_ipd = x_ipd + self.fc_down(gate_ipf * up_ipf, adapters=adapters, dropout_key=down_key)
        return constrain(x_ipd, "images", None, None)


class VisionTower(MergingTower):
    """Patches -> visual tokens of the text tower's width."""

    def __init__(
        self,
        cfg: VisionConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        # The reference's Conv3d with stride = kernel size is a matrix product on flat patches.
        self.patch_embed = Linear(
            cfg.patch_features,
            cfg.hidden_size,
            axes=(None, None),
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.blocks = stack(
            lambda key: VisionBlock(cfg, lora=lora, rngs=nnx.Rngs(key), param_dtype=param_dtype),
            cfg.depth,
            rngs,
        )
        self.merger_norm = layers.RMSNorm(
            cfg.hidden_size, eps=_VISION_NORM_EPS, param_dtype=param_dtype
        )
        self._add_merger(
            cfg.merged_size,
            cfg.out_hidden_size,
            table=WEIGHTS,
            lora=lora,
            rngs=rngs,
            param_dtype=param_dtype,
        )


class Qwen25VL(QwenVL):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args: see TwoTowers.
    """

    cfg: Qwen25VLConfig
    visual: VisionTower
    table = WEIGHTS
    decoder_config = staticmethod(lambda cfg: DecoderConfig.from_config(cfg, qkv_bias=True))

    @staticmethod
    def make_visual(cfg: Any, **options: Any) -> VisionTower:
        return VisionTower(cfg.vision, **options)

    def encode_images(
        self,
        vision: Mapping[str, jax.Array],
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The table of visual tokens.

        Args:
          vision: arrays of `Qwen25VLInputs.pack_screens` or `from_processor`, the patches of an
            image in the order of windows:
            patches_ipc: uint8[I,P,C], or pixels_ipf: float32[I,P,F];
            patch_positions_ip2: int32[I,P,2], (row, column) of the patch within its image;
            patch_segments_ip: int32[I,P], one number per image, 0 at padding;
            patch_windows_ip: int32[I,P], one number per window, 0 at padding;
            token_order_im: int32[I,M], where in its row each visual token is, in the text's order.
          adapters, dropout_key: see `hidden`; for adapters of the vision tower.
        Returns: visual_md, [I * P / merge_size**2, D]; rows of padding are undefined.
        """
        blocks_key, fc1_key, fc2_key = split_key(dropout_key, 3)
        x_ipd, _ = _vision_blocks(
            self, vision, adapters=adapters, dropout_key=blocks_key, collect=False
        )
        keys = (fc1_key, fc2_key)
        visual_imd = self.visual.merge(x_ipd, adapters=adapters, dropout_keys=keys)
        visual_imd = jnp.take_along_axis(visual_imd, vision["token_order_im"][..., None], axis=1)
        visual_md = visual_imd.reshape(-1, self.cfg.vision.out_hidden_size)
        return constrain(visual_md, "visual", None)


def _vision_blocks(
    model: Qwen25VL,
    vision: Mapping[str, jax.Array],
    *,
    adapters: bool,
    dropout_key: jax.Array | None,
    collect: bool,
) -> tuple[jax.Array, jax.Array | None]:
    cfg = model.cfg.vision
    pixels_ipf = image_pixels(vision, model.cfg.images)
    pixels_ipf = constrain(pixels_ipf.astype(model.compute_dtype), "images", None, None)
    x_ipd = model.visual.patch_embed(pixels_ipf)
    positions_ip2 = vision["patch_positions_ip2"]
    rotary = Rotary(*layers.axial_angles(positions_ip2, cfg.head_dim, VISION_ROPE_THETA))
    in_images = functools.partial(
        attention, segment_ids_bt=vision["patch_segments_ip"], causal=False
    )
    in_windows = functools.partial(
        window_attention, segment_ids_bt=vision["patch_windows_ip"], longest=cfg.window_patches
    )
    # The backward pass of a branch would keep what the other one needs, too: nothing is kept, and
    # the attention is computed once more.
    branches = [jax.checkpoint(attend, prevent_cse=False) for attend in (in_windows, in_images)]

    def body(
        x_ipd: jax.Array, layer: tuple[VisionBlock, jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        block, kind, key = layer
        attend = functools.partial(jax.lax.switch, kind, branches)
        x_ipd = block(x_ipd, rotary, attend, adapters=adapters, dropout_key=key)
        return x_ipd, x_ipd if collect else None

    kinds_l = np.isin(np.arange(cfg.depth), cfg.fullatt_block_indexes).astype(np.int32)
    stacked = (model.visual.blocks, jnp.asarray(kinds_l), layer_keys(dropout_key, cfg.depth))
    return through(body, x_ipd, stacked, model.remat)


def vision_block_outputs(model: Qwen25VL, vision: Mapping[str, jax.Array]) -> jax.Array:
    """The residual stream after every vision block, [L,I,P,D], in windows' order; for tests."""
    _, x_lipd = _vision_blocks(model, vision, adapters=True, dropout_key=None, collect=True)
    assert x_lipd is not None  # collect=True
    return x_lipd
