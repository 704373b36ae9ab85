"""Qwen2-VL in Flax NNX: the vision tower, the text tower, and what learner and engine ask of them.

A module holds names and parameters; the functions below it are pure and take the merged model, so
that `jax.jit` stays at the edge. The blocks of a tower are stacked and run by one `lax.scan` under
`jax.checkpoint`. Reading and writing Hugging Face directories is in qwen2_vl_weights, patches and
positions come from vision_inputs; nothing here samples or computes a loss.

Source: arXiv:2409.12191 and transformers, models/qwen2_vl/modeling_qwen2_vl.py.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.errors import ModelError
from uirl_jax.models import layers
from uirl_jax.models.attention import attention, masked_attention
from uirl_jax.models.lora import Linear, LoraConfig, Projection, split_key
from uirl_jax.models.sharding import constrain, on_a_device

# What a block keeps for its backward pass: none recomputes nothing (most memory), dots recomputes
# everything but the outputs of projections, full keeps the block's input alone (least memory).
Remat = Literal["none", "dots", "full"]

_MAX_LOGITS_BYTES = 256 * 2**20  # of a device's float32 logits at once, see token_logprobs

_VISION_NORM_EPS = 1e-6  # not in the config of the reference either
_VISION_ROPE_THETA = 10_000.0


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower. Defaults are those of the published models."""

    depth: int = 32
    embed_dim: int = 1280
    num_heads: int = 16
    mlp_ratio: float = 4
    hidden_size: int = 1536  # of the text tower: the width of a visual token
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def mlp_dim(self) -> int:
        return int(self.embed_dim * self.mlp_ratio)

    @property
    def patch_features(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclasses.dataclass(frozen=True)
class Qwen2VLConfig:
    """Both towers and the special tokens. Names are those of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vision: VisionConfig
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    mrope_section: tuple[int, ...] = (16, 24, 24)
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02  # of the embeddings; projections scale with their width
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 151643
    eos_token_id: int | None = 151645
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def __post_init__(self) -> None:
        problems = [
            f"{field.name}={value!r}, expected a positive integer"
            for config in (self, self.vision)
            for field in dataclasses.fields(config)
            if field.type is int
            and not ((value := getattr(config, field.name)).__class__ is int and value > 0)
        ]
        if problems:
            raise ModelError("config.json: " + "; ".join(problems))
        if self.hidden_size % self.num_attention_heads:
            problems.append(
                f"hidden_size={self.hidden_size} is no multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if 2 * sum(self.mrope_section) != self.head_dim:
            problems.append(
                f"mrope_section={self.mrope_section} adds up to {sum(self.mrope_section)}, "
                f"expected half of head_dim={self.head_dim}"
            )
        vision = self.vision
        if vision.embed_dim % vision.num_heads or vision.head_dim % 4:
            problems.append(
                f"vision_config: embed_dim={vision.embed_dim} over num_heads={vision.num_heads}, "
                "expected a head_dim that is a multiple of 4"
            )
        if vision.hidden_size != self.hidden_size:
            problems.append(
                f"vision_config: hidden_size={vision.hidden_size}, expected the text tower's "
                f"{self.hidden_size}"
            )
        if problems:
            raise ModelError("config.json: " + "; ".join(problems))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Qwen2VLConfig":
        """Reads a config.json, text fields at the top (transformers 4) or in text_config (5).

        Raises: ModelError for another architecture, missing fields, or a variant that this
        implementation does not compute (sliding windows, scaled RoPE, other activations).
        """
        if config.get("model_type") != "qwen2_vl":
            raise ModelError(
                f"config.json: model_type={config.get('model_type')!r}, expected 'qwen2_vl'"
            )
        text = {**config, **(config.get("text_config") or {})}
        vision = dict(config.get("vision_config") or {})
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        problems = []
        if rope.get("rope_type", rope.get("type", "default")) not in ("default", "mrope"):
            problems.append(f"RoPE of type {rope.get('rope_type', rope.get('type'))!r}")
        if text.get("use_sliding_window"):
            problems.append("use_sliding_window=true")
        if text.get("hidden_act", "silu") != "silu":
            problems.append(f"hidden_act={text['hidden_act']!r}")
        vision_theta = (vision.get("rope_parameters") or {}).get("rope_theta", _VISION_ROPE_THETA)
        if vision_theta != _VISION_ROPE_THETA:
            problems.append(f"vision_config.rope_parameters.rope_theta={vision_theta}")
        if vision.get("hidden_act", "quick_gelu") != "quick_gelu":
            problems.append(f"vision_config.hidden_act={vision['hidden_act']!r}")
        if problems:
            raise ModelError(f"config.json: not supported: {', '.join(problems)}")

        found = {f.name: text.get(f.name) for f in dataclasses.fields(cls)}
        if found["num_key_value_heads"] is None:  # no grouping
            found["num_key_value_heads"] = found["num_attention_heads"]
        if "rope_theta" in rope:
            found["rope_theta"] = rope["rope_theta"]
        if "mrope_section" in rope:
            found["mrope_section"] = tuple(rope["mrope_section"])
        # transformers 5 keeps the special tokens at the top, and `false` at the top gives way to
        # the text tower's `true`.
        found["tie_word_embeddings"] = bool(
            config.get("tie_word_embeddings") or text.get("tie_word_embeddings")
        )
        if isinstance(found["eos_token_id"], list):
            found["eos_token_id"] = found["eos_token_id"][0]
        found = {name: value for name, value in found.items() if value is not None}
        # in_chans is what the published files call it; the reference reads in_channels alone, and
        # both are always 3.
        vision = {"hidden_size": found.get("hidden_size"), **vision}
        names = {field.name for field in dataclasses.fields(VisionConfig)}
        found["vision"] = VisionConfig(**{k: v for k, v in vision.items() if k in names})
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        missing = sorted(set(required) - set(found))
        if missing:
            raise ModelError(f"config.json: missing {', '.join(missing)}")
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """config.json that transformers 4 and 5 read: the flat layout of the published models."""
        values = dataclasses.asdict(self)
        vision = values.pop("vision")
        section = list(values.pop("mrope_section"))
        return {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            **values,
            "hidden_act": "silu",
            "rope_scaling": {"type": "mrope", "mrope_section": section},
            "use_sliding_window": False,
            "vision_config": {
                "model_type": "qwen2_vl",
                **vision,
                "in_chans": vision["in_channels"],
                "hidden_act": "quick_gelu",
            },
        }


class KVCache(NamedTuple):
    """Keys (rotated) and values of every layer; slot s of row b holds the row's s-th token."""

    k_lbskh: jax.Array
    v_lbskh: jax.Array


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
      patches_ipf: float[I,P,F], vision_inputs.process_image; several images may share a row.
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
    rotary = _Rotary(*layers.axial_angles(patch_positions_ip2, vision.head_dim, _VISION_ROPE_THETA))

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
    """float32[B,T,V]. For whole rows use token_logprobs, which never holds such an array."""
    if model.text.lm_head is not None:
        kernel_dv = constrain(model.text.lm_head.kernel[...].astype(x_btd.dtype), None, "vocab")
        logits_btv = jnp.einsum("btd,dv->btv", x_btd, kernel_dv, preferred_element_type=jnp.float32)
    else:
        embedding_vd = constrain(model.text.embedding[...].astype(x_btd.dtype), "vocab", None)
        logits_btv = jnp.einsum(
            "btd,vd->btv", x_btd, embedding_vd, preferred_element_type=jnp.float32
        )
    return constrain(logits_btv, "batch", None, "vocab")


def token_logprobs(
    model: Qwen2VL,
    x_btd: jax.Array,
    token_ids_bt: jax.Array,
    sampled_index_bs: jax.Array | None = None,
    *,
    chunk: int | None = None,
    temperature: float = 1.0,
    forbidden_v: jax.Array | None = None,
) -> jax.Array:
    """float32[B,T]: [:,t] is the logprob of token_ids[:,t] given x[:,t-1]; [:,0] is 0.

    Values at padding and at the first token of a packed segment are finite and mean nothing.

    Args:
      sampled_index_bs: int32[B,S], the only positions that are scored, -1 at places that are not
        used; 0 stands everywhere else. A screenshot's tokens are never sampled, so that a row has
        far fewer positions to score than it has tokens. None scores all of them.
      chunk: tokens of a row that are scored at once; float32[B,chunk,V] is the largest array. None:
        as many as make it 256 MiB on a device.
      temperature, forbidden_v: bool[V]; of the distribution that was sampled from, so that what the
        engine recorded and what is computed here are the same number.
    """
    logprobs_bt, _ = token_logprobs_and_entropies(
        model,
        x_btd,
        token_ids_bt,
        sampled_index_bs,
        chunk=chunk,
        temperature=temperature,
        forbidden_v=forbidden_v,
        entropies=False,
    )
    return logprobs_bt


def token_logprobs_and_entropies(
    model: Qwen2VL,
    x_btd: jax.Array,
    token_ids_bt: jax.Array,
    sampled_index_bs: jax.Array | None = None,
    *,
    chunk: int | None = None,
    temperature: float = 1.0,
    forbidden_v: jax.Array | None = None,
    entropies: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """token_logprobs, and beside it the entropy of the distribution that each token is of, in nats.

    Args: see token_logprobs; without `entropies` they are None.
    """
    if sampled_index_bs is None:
        sampled_index_bs = jnp.broadcast_to(
            jnp.arange(1, token_ids_bt.shape[1]), (len(token_ids_bt), token_ids_bt.shape[1] - 1)
        )
    before_bs = jnp.maximum(sampled_index_bs - 1, 0)
    x_bsd = jnp.take_along_axis(x_btd, before_bs[..., None], axis=1)
    target_ids_bs = jnp.take_along_axis(token_ids_bt, jnp.maximum(sampled_index_bs, 0), axis=1)
    if chunk is None:
        token_bytes = 4 * on_a_device((len(x_btd), model.cfg.vocab_size), "batch", "vocab")
        chunk = max(_MAX_LOGITS_BYTES // token_bytes, 1)

    def score(x_bcd: jax.Array, target_ids_bc: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        logits_bcv = logits(model, x_bcd) / temperature
        if forbidden_v is not None:
            logits_bcv = jnp.where(forbidden_v, jnp.finfo(jnp.float32).min, logits_bcv)
        # A comparison with the targets instead of a gather: its gradient is elementwise, where the
        # gather's would be a scatter over the vocabulary.
        is_target_bcv = target_ids_bc[..., None] == jnp.arange(logits_bcv.shape[-1])
        target_bc = jnp.sum(jnp.where(is_target_bcv, logits_bcv, 0.0), axis=-1)
        total_bc = jax.nn.logsumexp(logits_bcv, axis=-1)
        if not entropies:
            return target_bc - total_bc, None
        mean_bc = jnp.sum(jax.nn.softmax(logits_bcv, axis=-1) * logits_bcv, axis=-1)
        return target_bc - total_bc, total_bc - mean_bc

    scores_bs, entropies_bs = _in_chunks(score, x_bsd, target_ids_bs, chunk)
    # Past the end of the row, where nothing is written.
    at_bs = jnp.where(sampled_index_bs < 0, token_ids_bt.shape[1], sampled_index_bs)
    row_b1 = jnp.arange(len(token_ids_bt))[:, None]

    def spread(values_bs: jax.Array) -> jax.Array:
        return jnp.zeros(token_ids_bt.shape).at[row_b1, at_bs].set(values_bs, mode="drop")

    return spread(scores_bs), None if entropies_bs is None else spread(entropies_bs)


def _in_chunks(
    score: Callable[..., Any], x_bsd: jax.Array, target_ids_bs: jax.Array, chunk: int
) -> Any:
    """score() of a few positions of all rows at a time; its results are [B,S]."""
    # Recomputed in the backward pass: saved logits of every chunk would be the [B,T,V] array again.
    score = jax.checkpoint(score)
    batch, places = target_ids_bs.shape
    if places <= chunk:
        return score(x_bsd, target_ids_bs)
    chunks = -(-places // chunk)
    chunk = -(-places // chunks)  # equal parts waste the least padding
    padding = chunks * chunk - places
    x_kbcd = jnp.moveaxis(
        jnp.pad(x_bsd, ((0, 0), (0, padding), (0, 0))).reshape(batch, chunks, chunk, -1), 1, 0
    )
    target_ids_kbc = jnp.moveaxis(
        jnp.pad(target_ids_bs, ((0, 0), (0, padding))).reshape(batch, chunks, chunk), 1, 0
    )
    results = jax.lax.map(lambda part: score(*part), (x_kbcd, target_ids_kbc))
    return jax.tree.map(
        lambda of_kbc: jnp.moveaxis(of_kbc, 0, 1).reshape(batch, -1)[:, :places], results
    )


def init_cache(cfg: Qwen2VLConfig, batch: int, slots: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache: k and v, [L,B,S,K,H]."""
    shape = (cfg.num_hidden_layers, batch, slots, cfg.num_key_value_heads, cfg.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def extend(
    model: Qwen2VL,
    token_ids_bt: jax.Array,
    visual_md: jax.Array | None,
    vision_index_bt: jax.Array | None,
    positions_3bt: jax.Array,
    cache: KVCache,
    start_b: jax.Array,
    *,
    adapters: bool = True,
) -> tuple[jax.Array, KVCache]:
    """Writes the rows' next tokens into the cache and runs the text tower on them.

    Row b's tokens take the slots start_b[b] ... start_b[b] + T - 1, each attending to the slots up
    to its own; slots past the end of the cache are dropped. Prefill: start 0, rows padded on the
    right; what padding wrote lies behind the row's last token, out of sight until it is
    overwritten. Decode: T = 1.

    Returns: x_btd after the final norm, and the cache (donate the old one).
    """
    batch, tokens = token_ids_bt.shape
    slots = cache.k_lbskh.shape[2]
    x_btd = _embed(model, token_ids_bt, visual_md, vision_index_bt)
    rotary = _rotary(model.cfg, positions_3bt)
    slot_bt = start_b[:, None] + jnp.arange(tokens)
    mask_bts = jnp.arange(slots) <= slot_bt[..., None]
    row_b1 = jnp.arange(batch)[:, None]

    def body(
        carry: tuple[jax.Array, KVCache, jax.Array], block: TextBlock
    ) -> tuple[tuple[jax.Array, KVCache, jax.Array], None]:
        # The cache is carried, not scanned over: then a step writes T slots in place, where scanned
        # outputs would copy all of it.
        x_btd, (k_lbskh, v_lbskh), layer = carry
        q_btnh, k_btkh, v_btkh = block.qkv(x_btd, rotary, adapters=adapters)
        at = (layer, row_b1, slot_bt)
        k_lbskh = k_lbskh.at[at].set(k_btkh.astype(k_lbskh.dtype), mode="drop")
        v_lbskh = v_lbskh.at[at].set(v_btkh.astype(v_lbskh.dtype), mode="drop")
        attended_btnh = masked_attention(
            q_btnh,
            k_lbskh[layer].astype(q_btnh.dtype),
            v_lbskh[layer].astype(q_btnh.dtype),
            mask_bts,
        )
        x_btd = block.finish(x_btd, attended_btnh, adapters=adapters)
        return (x_btd, KVCache(k_lbskh, v_lbskh), layer + 1), None

    (x_btd, cache, _), _ = jax.lax.scan(body, (x_btd, cache, jnp.int32(0)), model.text.blocks)
    return model.text.final_norm(x_btd), cache
