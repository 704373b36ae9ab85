"""Florence-2's text towers, BART's: an encoder that sees all, a decoder that sees it and goes on.

Blocks are post-norm, with biases, and embed their positions from tables. A context holds tokens of
both towers (`inputs`). Rows run through each tower whole: a tower sees its own tokens alone, and
what it makes of the others' is not read. They cost as much as its own.

A slot of the cache holds both kinds of keys and values, one after the other in every layer. After
a context of 6 tokens, whose last two the decoder read, and two sampled ones:

    cache position  0 1 2 3 | 4 5 6 7
                    encoder | decoder      a decoder's token attends to either part by itself

Source: arXiv:1910.13461 and transformers, models/bart/modeling_bart.py.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.families.florence2.config import Florence2Config
from uirl_jax.families.florence2.names import WEIGHTS
from uirl_jax.models import kv_cache, layers
from uirl_jax.models.attention import attention, masked_attention
from uirl_jax.models.blocks import Remat, layer_keys, stack, through
from uirl_jax.models.kv_cache import KVCache
from uirl_jax.models.lora import Linear, LoraConfig, adapted_linear, split_key
from uirl_jax.models.sharding import constrain, platform, visual_parts

_EPS = 1e-5  # of every norm
_OFFSET = 2  # rows of a table of positions before that of position 0

Keys = Sequence[jax.Array | None]


class SlotCache(NamedTuple):
    """Keys and values of the decoder's layers, and where each slot's encoder ends."""

    kv: KVCache
    encoder_1c111: jax.Array  # int32, cache positions of the encoder's tokens

    @property
    def positions(self) -> int:
        """Cache positions of a slot."""
        return self.kv.positions


class Roles(NamedTuple):
    """Which tower a token of a row belongs to, and what it sees there. 0 is no token of it.

    Two sequences behind a shared prompt whose last token both begin with (types.TrainBatch):

        token            v <s> Go </s> </s> <s> yes </s> <s> no </s>
        segment          1  1  1   1    1    2   2   2    3   3  3
        encoder          1  1  1   1    0    0   0   0    0   0  0
        decoder          0  0  0   0    1    2   2   2    3   3  3
        decoder_prefix   0  0  0   0    1    1   1   1    1   1  1     seen in addition
    """

    encoder_bt: jax.Array
    decoder_bt: jax.Array
    decoder_prefix_bt: jax.Array | None

    @classmethod
    def of(
        cls, is_decoder_bt: jax.Array, segment_bt: jax.Array, prefix_bt: jax.Array | None
    ) -> "Roles":
        return cls(
            jnp.where(is_decoder_bt, 0, segment_bt),
            jnp.where(is_decoder_bt, segment_bt, 0),
            None if prefix_bt is None else jnp.where(is_decoder_bt, prefix_bt, 0),
        )

    def cross_mask(self) -> jax.Array:
        """bool[B,T,T], True where the decoder's token (row) sees the encoder's (column)."""
        key_b1s = self.encoder_bt[:, None, :]
        mask_bts = self.decoder_bt[:, :, None] == key_b1s
        if self.decoder_prefix_bt is not None:
            mask_bts |= self.decoder_prefix_bt[:, :, None] == key_b1s
        return mask_bts & (key_b1s > 0)


class EncoderBlock(nnx.Module):
    """Attention to all tokens, then an MLP; a norm after each."""

    def __init__(
        self,
        cfg: Florence2Config,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
        heads: int,
        wide: int,
    ) -> None:
        dim = cfg.hidden_size
        linear = _linears(lora, rngs, param_dtype)
        norm = functools.partial(layers.LayerNorm, dim, eps=_EPS, param_dtype=param_dtype)
        self.q_proj = linear("q_proj", dim, dim)
        self.k_proj = linear("k_proj", dim, dim)
        self.v_proj = linear("v_proj", dim, dim)
        self.out_proj = linear("out_proj", dim, dim, axes=("wide", None))
        self.attention_norm = norm()
        self.fc1 = linear("fc1", dim, wide)
        self.fc2 = linear("fc2", wide, dim, axes=("wide", None))
        self.mlp_norm = norm()
        self.heads = heads

    def qkv(
        self, x_btd: jax.Array, keys: Keys, *, adapters: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B,T,N,H] each. Args: keys: three dropout keys."""
        q, k, v = (
            _heads(projection, x_btd, self.heads, key, adapters)
            for projection, key in zip((self.q_proj, self.k_proj, self.v_proj), keys, strict=True)
        )
        return q, k, v

    def attended(
        self, x_btd: jax.Array, out_btnh: jax.Array, key: jax.Array | None, *, adapters: bool
    ) -> jax.Array:
        """x_btd with what was attended to."""
        return _added(self.out_proj, self.attention_norm, x_btd, out_btnh, key, adapters)

    def mlp(self, x_btd: jax.Array, keys: Keys, *, adapters: bool) -> jax.Array:
        """x_btd behind the block. Args: keys: two dropout keys."""
        wide_btf = self.fc1(x_btd, adapters=adapters, dropout_key=keys[0])
        wide_btf = jax.nn.gelu(wide_btf, approximate=False)
        x_btd = x_btd + self.fc2(wide_btf, adapters=adapters, dropout_key=keys[1])
        return constrain(self.mlp_norm(x_btd), "batch", None, None)


class DecoderBlock(EncoderBlock):
    """Attention to what the decoder has read, then to the encoder's output, then an MLP."""

    def __init__(
        self,
        cfg: Florence2Config,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
        heads: int,
        wide: int,
    ) -> None:
        super().__init__(cfg, lora=lora, rngs=rngs, param_dtype=param_dtype, heads=heads, wide=wide)
        dim = cfg.hidden_size
        linear = _linears(lora, rngs, param_dtype)
        self.cross_q = linear("cross_q", dim, dim)
        self.cross_k = linear("cross_k", dim, dim)
        self.cross_v = linear("cross_v", dim, dim)
        self.cross_out = linear("cross_out", dim, dim, axes=("wide", None))
        self.cross_norm = layers.LayerNorm(dim, eps=_EPS, param_dtype=param_dtype)

    def cross_query(
        self, x_btd: jax.Array, key: jax.Array | None = None, *, adapters: bool
    ) -> jax.Array:
        """[B,T,N,H]."""
        return _heads(self.cross_q, x_btd, self.heads, key, adapters)

    def cross_kv(
        self, memory_btd: jax.Array, keys: Keys, *, adapters: bool
    ) -> tuple[jax.Array, jax.Array]:
        """[B,T,N,H] each, of the encoder's output. Args: keys: two dropout keys."""
        k, v = (
            _heads(projection, memory_btd, self.heads, key, adapters)
            for projection, key in zip((self.cross_k, self.cross_v), keys, strict=True)
        )
        return k, v

    def crossed(
        self, x_btd: jax.Array, out_btnh: jax.Array, key: jax.Array | None, *, adapters: bool
    ) -> jax.Array:
        """x_btd with what was attended to of the encoder's output."""
        return _added(self.cross_out, self.cross_norm, x_btd, out_btnh, key, adapters)


def _linears(lora: LoraConfig | None, rngs: nnx.Rngs, param_dtype: jnp.dtype) -> Any:
    return functools.partial(
        adapted_linear,
        lora=lora,
        table=WEIGHTS,
        use_bias=True,
        rngs=rngs,
        param_dtype=param_dtype,
    )


def _heads(
    projection: Linear, x_btd: jax.Array, heads: int, key: jax.Array | None, adapters: bool
) -> jax.Array:
    y_btd = projection(x_btd, adapters=adapters, dropout_key=key)
    return y_btd.reshape(*y_btd.shape[:2], heads, -1)


def _added(
    projection: Linear,
    norm: layers.LayerNorm,
    x_btd: jax.Array,
    out_btnh: jax.Array,
    key: jax.Array | None,
    adapters: bool,
) -> jax.Array:
    out_btd = out_btnh.reshape(x_btd.shape)
    return norm(x_btd + projection(out_btd, adapters=adapters, dropout_key=key))


class Text(nnx.Module):
    """Embeddings that both towers and the head share, and the towers.

    Args: see two_towers.TwoTowers.
    """

    def __init__(
        self,
        cfg: Florence2Config,
        *,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
        compute_dtype: jnp.dtype,
        remat: Remat,
    ) -> None:
        self.compute_dtype = compute_dtype
        self.remat: Remat = remat
        self.embedding_scale = cfg.hidden_size**0.5 if cfg.scale_embedding else 1.0
        self.encoder_depth, self.decoder_depth = cfg.encoder_layers, cfg.decoder_layers

        def table(rows: int) -> nnx.Param:
            shape = (rows, cfg.hidden_size)
            table_vd = cfg.init_std * jax.random.normal(rngs.params(), shape, jnp.float32)
            return nnx.Param(table_vd.astype(param_dtype))

        def blocks(kind: type[EncoderBlock], depth: int, heads: int, wide: int) -> nnx.Module:
            return stack(
                lambda key: kind(
                    cfg,
                    lora=lora,
                    rngs=nnx.Rngs(key),
                    param_dtype=param_dtype,
                    heads=heads,
                    wide=wide,
                ),
                depth,
                rngs,
            )

        norm = functools.partial(
            layers.LayerNorm, cfg.hidden_size, eps=_EPS, param_dtype=param_dtype
        )
        positions = cfg.max_position_embeddings + _OFFSET
        self.embedding = table(cfg.vocab_size)
        self.encoder_positions, self.encoder_norm = table(positions), norm()
        self.encoder = blocks(
            EncoderBlock, cfg.encoder_layers, cfg.encoder_attention_heads, cfg.encoder_ffn_dim
        )
        self.decoder_positions, self.decoder_norm = table(positions), norm()
        self.decoder = blocks(
            DecoderBlock, cfg.decoder_layers, cfg.decoder_attention_heads, cfg.decoder_ffn_dim
        )

    def embed(
        self,
        token_ids_bt: jax.Array,
        visual_md: jax.Array | None,
        vision_index_bt: jax.Array | None,
        *,
        in_parts: bool = False,
    ) -> jax.Array:
        """x_btd without positions: embeddings, rows of visual_md where vision_index is not -1.

        Args: in_parts: these are whole rows, see border.Model.hidden.
        """
        embedding_vd = constrain(self.embedding[...], "vocab", None)
        x_btd = layers.lookup(embedding_vd, token_ids_bt).astype(self.compute_dtype)
        if self.embedding_scale != 1:
            x_btd = x_btd * jnp.asarray(self.embedding_scale, x_btd.dtype)
        if visual_md is not None and vision_index_bt is not None:
            parts = visual_parts(len(vision_index_bt), len(visual_md)) if in_parts else 1
            visual_btd = layers.lookup_columns(
                visual_md, vision_index_bt, 0, x_btd.shape[-1], parts=parts
            )
            x_btd = jnp.where(
                (vision_index_bt >= 0)[..., None], visual_btd.astype(x_btd.dtype), x_btd
            )
        return constrain(x_btd, "batch", None, None)

    def encode(
        self,
        x_btd: jax.Array,
        position_bt: jax.Array,
        segment_bt: jax.Array,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
        collect: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The encoder's output [B,T,D], undefined outside its segments.

        Args:
          x_btd: embeddings.
          segment_bt: int32, tokens with equal numbers see each other; 0 is none of the encoder.
        Returns: and, with `collect`, [L,B,T,D] after every block.
        """
        x_btd = _placed(x_btd, self.encoder_positions, position_bt, self.encoder_norm)

        def body(
            x_btd: jax.Array, at: tuple[EncoderBlock, jax.Array | None]
        ) -> tuple[jax.Array, jax.Array | None]:
            block, key = at
            keys = split_key(key, 6)
            q, k, v = block.qkv(x_btd, keys[:3], adapters=adapters)
            out_btnh = attention(q, k, v, segment_bt, causal=False)
            x_btd = block.attended(x_btd, out_btnh, keys[3], adapters=adapters)
            x_btd = block.mlp(x_btd, keys[4:], adapters=adapters)
            return x_btd, x_btd if collect else None

        stacked = cast(Any, (self.encoder, layer_keys(dropout_key, self.encoder_depth)))
        return through(body, x_btd, stacked, self.remat)

    def decode_rows(
        self,
        x_btd: jax.Array,
        position_bt: jax.Array,
        memory_btd: jax.Array,
        roles: Roles,
        *,
        adapters: bool = True,
        dropout_key: jax.Array | None = None,
        collect: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Whole rows through the decoder; arguments and result as of `encode`.

        Args: memory_btd: the encoder's output.
        """
        x_btd = _placed(x_btd, self.decoder_positions, position_bt, self.decoder_norm)
        cross_mask_bts = roles.cross_mask()

        def body(
            x_btd: jax.Array, at: tuple[DecoderBlock, jax.Array | None]
        ) -> tuple[jax.Array, jax.Array | None]:
            block, key = at
            keys = split_key(key, 10)
            q, k, v = block.qkv(x_btd, keys[:3], adapters=adapters)
            out_btnh = attention(
                q, k, v, roles.decoder_bt, causal=True, prefix_segments_bt=roles.decoder_prefix_bt
            )
            x_btd = block.attended(x_btd, out_btnh, keys[3], adapters=adapters)
            q = block.cross_query(x_btd, keys[4], adapters=adapters)
            k, v = block.cross_kv(memory_btd, keys[5:7], adapters=adapters)
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
            out_btnh = masked_attention(q, k, v, cross_mask_bts)
            x_btd = block.crossed(x_btd, out_btnh, keys[7], adapters=adapters)
            x_btd = block.mlp(x_btd, keys[8:], adapters=adapters)
            return x_btd, x_btd if collect else None

        stacked = cast(Any, (self.decoder, layer_keys(dropout_key, self.decoder_depth)))
        return through(body, x_btd, stacked, self.remat)

    def extend(
        self,
        x_btd: jax.Array,
        position_bt: jax.Array,
        memory_btd: jax.Array | None,
        encoder_b: jax.Array,
        cache: KVCache,
        start_b: jax.Array,
        *,
        slot_b: jax.Array | None,
        span: int,
        blocks: Sequence[DecoderBlock] | None,
    ) -> tuple[jax.Array, KVCache]:
        """Writes the rows' next tokens into the cache and runs the decoder on them.

        Args:
          x_btd, position_bt: as of `encode`.
          memory_btd: the encoder's output where new tokens are the encoder's; None: none is.
          encoder_b: int32[B], cache positions of the encoder's tokens.
          others: as in border.Model.extend.
        """
        x_btd = _placed(x_btd, self.decoder_positions, position_bt, self.decoder_norm)
        at_bt1 = (start_b[:, None] + jnp.arange(x_btd.shape[1]))[..., None]
        encoder_b11 = encoder_b[:, None, None]
        key_s = jnp.arange(span)
        own_mask_bts = (key_s >= encoder_b11) & (key_s <= at_bt1)
        cross_mask_bts = jnp.broadcast_to(key_s < encoder_b11, own_mask_bts.shape)
        is_encoder_bt11 = (at_bt1 < encoder_b11)[..., None]
        none: Keys = (None, None, None)

        def body(
            carry: tuple[jax.Array, KVCache, jax.Array | int], block: DecoderBlock
        ) -> tuple[tuple[jax.Array, KVCache, Any], None]:
            # The cache is carried, see models.decoder.
            x_btd, cache, layer = carry
            q_btnh, k_btnh, v_btnh = block.qkv(x_btd, none, adapters=True)
            if memory_btd is not None:
                cross_k_btnh, cross_v_btnh = block.cross_kv(memory_btd, none[:2], adapters=True)
                k_btnh = jnp.where(is_encoder_bt11, cross_k_btnh, k_btnh)
                v_btnh = jnp.where(is_encoder_bt11, cross_v_btnh, v_btnh)
            cache = kv_cache.write(cache, layer, slot_b, start_b, k_btnh, v_btnh)
            k_bnsh, v_bnsh = kv_cache.read(cache, layer, slot_b, span, q_btnh.dtype)
            out_btnh = masked_attention(q_btnh, k_bnsh, v_bnsh, own_mask_bts)
            x_btd = block.attended(x_btd, out_btnh, None, adapters=True)
            q_btnh = block.cross_query(x_btd, adapters=True)
            out_btnh = masked_attention(q_btnh, k_bnsh, v_bnsh, cross_mask_bts)
            x_btd = block.crossed(x_btd, out_btnh, None, adapters=True)
            x_btd = block.mlp(x_btd, none[:2], adapters=True)
            return (x_btd, cache, layer + 1), None

        if blocks is None:
            carry = (x_btd, cache, jnp.int32(0))
            (x_btd, cache, _), _ = jax.lax.scan(body, carry, cast(Any, self.decoder))
        else:
            for layer, block in enumerate(blocks):
                (x_btd, cache, _), _ = body((x_btd, cache, layer), block)
        return x_btd, cache

    def logits(self, x_btd: jax.Array) -> jax.Array:
        """float32[B,T,V]."""
        if x_btd.shape[:2] == (1, 1) and x_btd.dtype == jnp.bfloat16 and platform() == "cpu":
            # As in models.decoder: two rows are much cheaper than one.
            return self.logits(jnp.repeat(x_btd, 2, axis=0))[:1]
        embedding_vd = constrain(self.embedding[...].astype(x_btd.dtype), "vocab", None)
        logits_btv = jnp.einsum(
            "btd,vd->btv", x_btd, embedding_vd, preferred_element_type=jnp.float32
        )
        return constrain(logits_btv, "batch", None, "vocab")


def _placed(
    x_btd: jax.Array, table: nnx.Param, position_bt: jax.Array, norm: layers.LayerNorm
) -> jax.Array:
    """What enters a tower."""
    table_vd = constrain(table[...], None, None)
    x_btd = x_btd + layers.lookup(table_vd, position_bt + _OFFSET).astype(x_btd.dtype)
    return constrain(norm(x_btd), "batch", None, None)


def init_cache(cfg: Florence2Config, slots: int, positions: int, dtype: jnp.dtype) -> SlotCache:
    """An empty cache; see border.Family."""
    heads = cfg.decoder_attention_heads
    kv = kv_cache.init(cfg.decoder_layers, slots, positions, heads, cfg.hidden_size // heads, dtype)
    return SlotCache(kv, jnp.zeros((1, slots, 1, 1, 1), jnp.int32))
