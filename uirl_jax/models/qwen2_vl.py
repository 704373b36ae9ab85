"""Qwen2-VL in Flax NNX: the vision tower, the text tower, and what learner and engine ask of them.

A module holds names and parameters; the functions below it are pure and take the merged model, so
that `jax.jit` stays at the edge. The blocks of a tower are stacked and run by one `lax.scan` under
`jax.checkpoint`. Reading and writing Hugging Face directories is in qwen2_vl_weights, patches and
positions come from vision_inputs; nothing here samples or computes a loss.

Source: arXiv:2409.12191 and transformers, models/qwen2_vl/modeling_qwen2_vl.py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.models import kv_cache, layers
from uirl_jax.models.attention import attention, cached_attention
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import Linear, LoraConfig, Projection, split_key
from uirl_jax.models.qwen2_vl_config import VISION_ROPE_THETA, Qwen2VLConfig, VisionConfig
from uirl_jax.models.sharding import constrain
from uirl_jax.vision_inputs import ImageConfig, level_values

# What a block keeps for its backward pass: none recomputes nothing (most memory), dots recomputes
# everything but the outputs of projections, full keeps the block's input alone (least memory).
Remat = Literal["none", "dots", "full"]

_VISION_NORM_EPS = 1e-6  # not in the config of the reference either


class _Rotary(NamedTuple):
    """cos and sin of every token, float32[B,T,H/2]: computed once, used by every block."""

    cos_bth: jax.Array
    sin_bth: jax.Array


class VisionBlock(nnx.Module):
    """Pre-norm attention over an image's patches, then a two-layer MLP."""

    def __init__(
        self,
        cfg: VisionConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        dim = cfg.embed_dim
        linear = functools.partial(
            _adapted_linear, lora=lora, use_bias=True, rngs=rngs, param_dtype=param_dtype
        )
        self.norm1 = layers.LayerNorm(dim, eps=_VISION_NORM_EPS, param_dtype=param_dtype)
        self.qkv = linear("qkv", dim, 3 * dim)
        self.proj = linear("proj", dim, dim, axes=("wide", None))
        self.norm2 = layers.LayerNorm(dim, eps=_VISION_NORM_EPS, param_dtype=param_dtype)
        self.fc1 = linear("fc1", dim, cfg.mlp_dim)
        self.fc2 = linear("fc2", cfg.mlp_dim, dim, axes=("wide", None))
        self.num_heads = cfg.num_heads

    def __call__(
        self,
        x_ipd: jax.Array,
        rotary: _Rotary,
        segments_ip: jax.Array,
        *,
        adapters: bool,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        images, patches, dim = x_ipd.shape
        qkv_key, proj_key, fc1_key, fc2_key = split_key(dropout_key, 4)
        qkv_ipe = self.qkv(self.norm1(x_ipd), adapters=adapters, dropout_key=qkv_key)
        qkv_ip3nh = qkv_ipe.reshape(images, patches, 3, self.num_heads, -1)
        q_ipnh, k_ipnh, v_ipnh = (qkv_ip3nh[:, :, i] for i in range(3))
        q_ipnh, k_ipnh = (layers.rotate(x, *rotary) for x in (q_ipnh, k_ipnh))
        out_ipnh = attention(q_ipnh, k_ipnh, v_ipnh, segments_ip, causal=False)
        out_ipd = out_ipnh.reshape(images, patches, dim)
        x_ipd = x_ipd + self.proj(out_ipd, adapters=adapters, dropout_key=proj_key)
        wide_ipf = self.fc1(self.norm2(x_ipd), adapters=adapters, dropout_key=fc1_key)
        wide_ipf = layers.quick_gelu(wide_ipf)
        x_ipd = x_ipd + self.fc2(wide_ipf, adapters=adapters, dropout_key=fc2_key)
        return constrain(x_ipd, "images", None, None)


class VisionTower(nnx.Module):
    """Patches -> visual tokens of the text tower's width."""

    def __init__(
        self,
        cfg: VisionConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        # The reference's Conv3d has its kernel's size as stride: a product with flat patches.
        self.patch_embed = Linear(
            cfg.patch_features,
            cfg.embed_dim,
            axes=(None, None),
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.blocks = _stack(
            lambda key: VisionBlock(cfg, lora=lora, rngs=nnx.Rngs(key), param_dtype=param_dtype),
            cfg.depth,
            rngs,
        )
        self.merger_norm = layers.LayerNorm(
            cfg.embed_dim, eps=_VISION_NORM_EPS, param_dtype=param_dtype
        )
        merged = cfg.embed_dim * cfg.spatial_merge_size**2
        linear = functools.partial(
            _adapted_linear, lora=lora, use_bias=True, rngs=rngs, param_dtype=param_dtype
        )
        self.merger_fc1 = linear("merger_fc1", merged, merged)
        self.merger_fc2 = linear("merger_fc2", merged, cfg.hidden_size, axes=("wide", None))


class TextBlock(nnx.Module):
    """Pre-norm grouped-query attention, then a gated MLP."""

    def __init__(
        self,
        cfg: Qwen2VLConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        dim, head_dim = cfg.hidden_size, cfg.head_dim
        kv_dim = cfg.num_key_value_heads * head_dim
        norm = functools.partial(layers.RMSNorm, dim, eps=cfg.rms_norm_eps, param_dtype=param_dtype)
        linear = functools.partial(_adapted_linear, lora=lora, rngs=rngs, param_dtype=param_dtype)
        self.input_norm = norm()
        self.q_proj = linear("q_proj", dim, dim, use_bias=True)
        self.k_proj = linear("k_proj", dim, kv_dim, use_bias=True)
        self.v_proj = linear("v_proj", dim, kv_dim, use_bias=True)
        self.o_proj = linear("o_proj", dim, dim, axes=("wide", None))
        self.post_attention_norm = norm()
        self.gate_proj = linear("gate_proj", dim, cfg.intermediate_size)
        self.up_proj = linear("up_proj", dim, cfg.intermediate_size)
        self.down_proj = linear("down_proj", cfg.intermediate_size, dim, axes=("wide", None))
        self.head_dim = head_dim

    def qkv(
        self,
        x_btd: jax.Array,
        rotary: _Rotary,
        *,
        adapters: bool,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [B,T,N,H] and keys, and values [B,T,K,H]."""
        h_btd = self.input_norm(x_btd)
        q_key, k_key, v_key = split_key(dropout_key, 3)

        def heads(projection: Linear, key: jax.Array | None) -> jax.Array:
            y = projection(h_btd, adapters=adapters, dropout_key=key)
            return y.reshape(*y.shape[:2], -1, self.head_dim)

        q_btnh = layers.rotate(heads(self.q_proj, q_key), *rotary)
        k_btkh = layers.rotate(heads(self.k_proj, k_key), *rotary)
        return q_btnh, k_btkh, heads(self.v_proj, v_key)

    def finish(
        self,
        x_btd: jax.Array,
        attended_btnh: jax.Array,
        *,
        adapters: bool,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Output projection and MLP, each added to the residual stream."""
        o_key, gate_key, up_key, down_key = split_key(dropout_key, 4)
        attended_btd = attended_btnh.reshape(x_btd.shape)
        x_btd = x_btd + self.o_proj(attended_btd, adapters=adapters, dropout_key=o_key)
        h_btd = self.post_attention_norm(x_btd)
        gate_btf = jax.nn.silu(self.gate_proj(h_btd, adapters=adapters, dropout_key=gate_key))
        up_btf = self.up_proj(h_btd, adapters=adapters, dropout_key=up_key)
        x_btd = x_btd + self.down_proj(gate_btf * up_btf, adapters=adapters, dropout_key=down_key)
        return constrain(x_btd, "batch", None, None)


class TextTower(nnx.Module):
    """Token embeddings, decoder blocks, final norm, and the head where it is not the embeddings."""

    def __init__(
        self,
        cfg: Qwen2VLConfig,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        embedding_vd = cfg.initializer_range * jax.random.normal(
            rngs.params(), (cfg.vocab_size, cfg.hidden_size), jnp.float32
        )
        self.embedding = nnx.Param(embedding_vd.astype(param_dtype))
        self.blocks = _stack(
            lambda key: TextBlock(cfg, lora=lora, rngs=nnx.Rngs(key), param_dtype=param_dtype),
            cfg.num_hidden_layers,
            rngs,
        )
        self.final_norm = layers.RMSNorm(
            cfg.hidden_size, eps=cfg.rms_norm_eps, param_dtype=param_dtype
        )
        self.lm_head = (
            None
            if cfg.tie_word_embeddings
            else Linear(
                cfg.hidden_size,
                cfg.vocab_size,
                axes=(None, "vocab"),
                rngs=rngs,
                param_dtype=param_dtype,
            )
        )


class Qwen2VL(nnx.Module):
    """Both towers. Split it once: `graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)`.

    Args:
      lora: which projections carry adapters; None for the base alone.
      rngs: random weights; reading a directory replaces them.
      param_dtype: of the base weights; adapters are float32.
      compute_dtype: of activations; None is param_dtype. Softmax, norms, angles and logprobs are
        float32 in any case.
      remat: what the backward pass keeps of a block.
    """

    def __init__(
        self,
        cfg: Qwen2VLConfig,
        *,
        lora: LoraConfig | None = None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
        remat: Remat = "full",
    ) -> None:
        self.cfg = cfg
        self.lora = lora
        self.compute_dtype = jnp.dtype(param_dtype if compute_dtype is None else compute_dtype)
        self.remat = remat
        self.visual = VisionTower(cfg.vision, lora=lora, rngs=rngs, param_dtype=param_dtype)
        self.text = TextTower(cfg, lora=lora, rngs=rngs, param_dtype=param_dtype)


def _adapted_linear(
    name: Projection,
    in_features: int,
    out_features: int,
    *,
    lora: LoraConfig | None,
    **options: Any,
) -> Linear:
    """The projection `name`, with adapters where lora has them there."""
    lora = lora.for_projection(name) if lora else None
    return Linear(in_features, out_features, lora=lora, **options)


def _stack(make: Callable[[jax.Array], nnx.Module], depth: int, rngs: nnx.Rngs) -> nnx.Module:
    """One block whose every leaf has a leading layer axis."""
    return jax.vmap(make)(jax.random.split(rngs.params(), depth))


def _checkpointed(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    if remat == "none":
        return body
    policy = {
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": jax.checkpoint_policies.nothing_saveable,
    }[remat]
    # Inside a scan XLA cannot merge the two computations, so the guard against it is only a cost.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)


def pixel_values(patches_ipc: jax.Array, image_cfg: ImageConfig) -> jax.Array:
    """What the vision tower reads of patches that came to the device as bytes.

    An eighth of the floats on the host and on their way. A table, so that they are those of
    vision_inputs.pixel_values bit for bit: arithmetic is rounded in another way in every program
    that the compiler joins it into, and gradients of equal screens then differ by 1e-5.

    Args:
      patches_ipc: uint8[I,P,C], vision_inputs.cut_image.
    Returns: float32[I,P,F], the still image repeated in time.
    """
    shape_ip = patches_ipc.shape[:2]
    levels_ipcx = patches_ipc.reshape(*shape_ip, 3, -1)
    table_cl = jnp.asarray(level_values(image_cfg))
    values_ipcx = jnp.stack([table_cl[c][levels_ipcx[:, :, c]] for c in range(3)], axis=2)
    values_ipctx = jnp.repeat(values_ipcx[:, :, :, None], image_cfg.temporal_patch_size, axis=3)
    return values_ipctx.reshape(*shape_ip, -1)


def encode_images(
    model: Qwen2VL,
    patches_ipf: jax.Array,
    patch_positions_ip2: jax.Array,
    patch_segments_ip: jax.Array,
    *,
    adapters: bool = True,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """The table of visual tokens.

    Args:
      patches_ipf: float[I,P,F] of pixel_values; several images may share a row.
      patch_positions_ip2: int32[I,P,2], (row, column) within the patch's own image.
      patch_segments_ip: int32[I,P], one number an image, 0 at padding. Patches of one number attend
        to each other; every run of merge_size**2 patches belongs to one image.
      adapters, dropout_key: as in `hidden`; they matter where the vision tower has adapters.
    Returns: visual_md, [I * P / merge_size**2, D]; rows of padding hold nothing of use.
    """
    blocks_key, fc1_key, fc2_key = split_key(dropout_key, 3)
    x_ipd, _ = _vision_blocks(
        model,
        patches_ipf,
        patch_positions_ip2,
        patch_segments_ip,
        adapters=adapters,
        dropout_key=blocks_key,
        collect=False,
    )
    tower = model.visual
    h_ipd = tower.merger_norm(x_ipd)
    merged = h_ipd.shape[-1] * model.cfg.vision.spatial_merge_size**2
    h_imd = h_ipd.reshape(h_ipd.shape[0], -1, merged)
    h_imd = tower.merger_fc1(h_imd, adapters=adapters, dropout_key=fc1_key)
    h_imd = jax.nn.gelu(h_imd, approximate=False)
    visual_imd = tower.merger_fc2(h_imd, adapters=adapters, dropout_key=fc2_key)
    visual_md = visual_imd.reshape(-1, model.cfg.vision.hidden_size)
    # Any row of text may hold any image: the table is whole on every device before it is looked up.
    return constrain(visual_md, None, None)


def _vision_blocks(
    model: Qwen2VL,
    patches_ipf: jax.Array,
    patch_positions_ip2: jax.Array,
    patch_segments_ip: jax.Array,
    *,
    adapters: bool,
    dropout_key: jax.Array | None,
    collect: bool,
) -> tuple[jax.Array, jax.Array | None]:
    vision = model.cfg.vision
    patches_ipf = constrain(patches_ipf.astype(model.compute_dtype), "images", None, None)
    x_ipd = model.visual.patch_embed(patches_ipf)
    rotary = _Rotary(*layers.axial_angles(patch_positions_ip2, vision.head_dim, VISION_ROPE_THETA))

    def body(
        x_ipd: jax.Array, layer: tuple[VisionBlock, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        block, key = layer
        x_ipd = block(x_ipd, rotary, patch_segments_ip, adapters=adapters, dropout_key=key)
        return x_ipd, x_ipd if collect else None

    stacked = (model.visual.blocks, _layer_keys(dropout_key, vision.depth))
    return jax.lax.scan(_checkpointed(body, model.remat), x_ipd, stacked)


def _layer_keys(dropout_key: jax.Array | None, depth: int) -> jax.Array | None:
    """Keys with a leading layer axis, so that a scan hands every layer its own."""
    return None if dropout_key is None else jax.random.split(dropout_key, depth)


def hidden(
    model: Qwen2VL,
    token_ids_bt: jax.Array,
    visual_md: jax.Array | None,
    vision_index_bt: jax.Array | None,
    positions_3bt: jax.Array,
    segment_ids_bt: jax.Array,
    *,
    prefix_segments_bt: jax.Array | None = None,
    adapters: bool = True,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """The text tower over whole rows, causal within a segment and the prefix that it shares.

    Args:
      token_ids_bt: int32[B,T].
      visual_md: [M,D] of encode_images; None where no row holds an image.
      vision_index_bt: int32[B,T], row of visual_md that stands here, -1 at ordinary tokens.
      positions_3bt: int32[3,B,T], M-RoPE.
      segment_ids_bt: int32[B,T], 0 at padding.
      prefix_segments_bt: int32[B,T] or None, see types.TrainBatch.
      adapters: False computes the base exactly, without the adapters' matrix products.
      dropout_key: of the adapters' inputs (LoraConfig.dropout) in this one forward pass; None, as
        for all that scores or samples, drops nothing.
    Returns: x_btd in the compute dtype, after the final norm.
    """
    x_btd, _ = _text_blocks(
        model,
        _embed(model, token_ids_bt, visual_md, vision_index_bt),
        positions_3bt,
        segment_ids_bt,
        prefix_segments_bt,
        adapters=adapters,
        dropout_key=dropout_key,
        collect=False,
    )
    return model.text.final_norm(x_btd)


def _embed(
    model: Qwen2VL,
    token_ids_bt: jax.Array,
    visual_md: jax.Array | None,
    vision_index_bt: jax.Array | None,
) -> jax.Array:
    """Token embeddings, with visual tokens in their places."""
    embedding_vd = constrain(model.text.embedding[...], "vocab", None)
    x_btd = layers.lookup(embedding_vd, token_ids_bt).astype(model.compute_dtype)
    if visual_md is not None and vision_index_bt is not None:
        visual_btd = layers.lookup(visual_md, jnp.maximum(vision_index_bt, 0))
        x_btd = jnp.where((vision_index_bt >= 0)[..., None], visual_btd.astype(x_btd.dtype), x_btd)
    return constrain(x_btd, "batch", None, None)


def _text_blocks(
    model: Qwen2VL,
    x_btd: jax.Array,
    positions_3bt: jax.Array,
    segment_ids_bt: jax.Array,
    prefix_segments_bt: jax.Array | None,
    *,
    adapters: bool,
    dropout_key: jax.Array | None,
    collect: bool,
) -> tuple[jax.Array, jax.Array | None]:
    rotary = _rotary(model.cfg, positions_3bt)

    def body(
        x_btd: jax.Array, layer: tuple[TextBlock, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        block, key = layer
        qkv_key, finish_key = split_key(key, 2)
        q_btnh, k_btkh, v_btkh = block.qkv(x_btd, rotary, adapters=adapters, dropout_key=qkv_key)
        attended_btnh = attention(
            q_btnh,
            k_btkh,
            v_btkh,
            segment_ids_bt,
            causal=True,
            prefix_segments_bt=prefix_segments_bt,
        )
        x_btd = block.finish(x_btd, attended_btnh, adapters=adapters, dropout_key=finish_key)
        return x_btd, x_btd if collect else None

    stacked = (model.text.blocks, _layer_keys(dropout_key, model.cfg.num_hidden_layers))
    return jax.lax.scan(_checkpointed(body, model.remat), x_btd, stacked)


def _rotary(cfg: Qwen2VLConfig, positions_3bt: jax.Array) -> _Rotary:
    return _Rotary(
        *layers.mrope_angles(positions_3bt, cfg.head_dim, cfg.rope_theta, cfg.mrope_section)
    )


def block_outputs(
    model: Qwen2VL,
    token_ids_bt: jax.Array,
    visual_md: jax.Array | None,
    vision_index_bt: jax.Array | None,
    positions_3bt: jax.Array,
    segment_ids_bt: jax.Array,
    *,
    adapters: bool = True,
) -> jax.Array:
    """The residual stream after every text block, [L,B,T,D]: `hidden` opened up, for comparison."""
    _, x_lbtd = _text_blocks(
        model,
        _embed(model, token_ids_bt, visual_md, vision_index_bt),
        positions_3bt,
        segment_ids_bt,
        None,
        adapters=adapters,
        dropout_key=None,
        collect=True,
    )
    return x_lbtd


def vision_block_outputs(
    model: Qwen2VL,
    patches_ipf: jax.Array,
    patch_positions_ip2: jax.Array,
    patch_segments_ip: jax.Array,
) -> jax.Array:
    """The residual stream after every vision block, [L,I,P,D], for comparison."""
    _, x_lipd = _vision_blocks(
        model,
        patches_ipf,
        patch_positions_ip2,
        patch_segments_ip,
        adapters=True,
        dropout_key=None,
        collect=True,
    )
    return x_lipd


def logits(model: Qwen2VL, x_btd: jax.Array) -> jax.Array:
    """float32[B,T,V]. For whole rows scoring.token_logprobs, which never holds such an array."""
    if model.text.lm_head is not None:
        kernel_dv = constrain(model.text.lm_head.kernel[...].astype(x_btd.dtype), None, "vocab")
        logits_btv = jnp.einsum("btd,dv->btv", x_btd, kernel_dv, preferred_element_type=jnp.float32)
    else:
        embedding_vd = constrain(model.text.embedding[...].astype(x_btd.dtype), "vocab", None)
        logits_btv = jnp.einsum(
            "btd,vd->btv", x_btd, embedding_vd, preferred_element_type=jnp.float32
        )
    return constrain(logits_btv, "batch", None, "vocab")


def init_cache(cfg: Qwen2VLConfig, slots: int, places: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache: k and v, [L,C,K,S,H] of C slots with S places; dtype int8 adds scales."""
    return kv_cache.init(
        cfg.num_hidden_layers, slots, places, cfg.num_key_value_heads, cfg.head_dim, dtype
    )


def extend(
    model: Qwen2VL,
    token_ids_bt: jax.Array,
    visual_md: jax.Array | None,
    vision_index_bt: jax.Array | None,
    positions_3bt: jax.Array,
    cache: KVCache,
    start_b: jax.Array,
    *,
    slot_b: jax.Array | None = None,
    places: int | None = None,
    blocks: Sequence[TextBlock] | None = None,
    adapters: bool = True,
) -> tuple[jax.Array, KVCache]:
    """Writes the rows' next tokens into the cache and runs the text tower on them.

    Row b's tokens take the places start_b[b] ... start_b[b] + T - 1 of its slot, each attending to
    the places up to its own; places past the end of the cache are dropped. Prefill: rows padded on
    the right; what padding wrote lies behind the row's last token, out of sight until it is
    overwritten. Decode: T = 1.

    Args:
      slot_b: int32[B], distinct slots of the rows; a row of padding has one past the last, and
        writes nothing. None: the rows are the cache's slots, in order.
      places: how many of a slot's places are looked at; None is all of them. No row may reach
        further.
      blocks: the model's text blocks one by one, in place of the stacked ones.
    Returns: x_btd after the final norm, and the cache (donate the old one).
    """
    places = places or cache.places
    x_btd = _embed(model, token_ids_bt, visual_md, vision_index_bt)
    rotary = _rotary(model.cfg, positions_3bt)

    def body(
        carry: tuple[jax.Array, KVCache, jax.Array | int], block: TextBlock
    ) -> tuple[tuple[jax.Array, KVCache, jax.Array | int], None]:
        # The cache is carried, not scanned over: then a step writes T slots in place, where scanned
        # outputs would copy all of it.
        x_btd, cache, layer = carry
        q_btnh, k_btkh, v_btkh = block.qkv(x_btd, rotary, adapters=adapters)
        cache = kv_cache.write(cache, layer, slot_b, start_b, k_btkh, v_btkh)
        k_bksh, v_bksh = kv_cache.read(cache, layer, slot_b, places, q_btnh.dtype)
        attended_btnh = cached_attention(q_btnh, k_btkh, v_btkh, k_bksh, v_bksh, start_b)
        x_btd = block.finish(x_btd, attended_btnh, adapters=adapters)
        return (x_btd, cache, layer + 1), None

    if blocks is None:
        (x_btd, cache, _), _ = jax.lax.scan(body, (x_btd, cache, jnp.int32(0)), model.text.blocks)
    else:
        for layer, block in enumerate(blocks):
            (x_btd, cache, _), _ = body((x_btd, cache, layer), block)
    return model.text.final_norm(x_btd), cache
