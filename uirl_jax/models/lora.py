"""LoRA: the linear layer that carries adapters, their config and their parameter kind.

Adapters have a parameter kind of their own: `nnx.split(model, LoRAParam, ...)` separates trained
from frozen leaves. LoRAParam subclasses nnx.Param, so it must be the first filter of a split.
Works on stacked blocks, where every leaf has a leading layer axis. `peft_adapters` reads and writes
PEFT's files.

Source: arXiv:2106.09685 and the peft library, tuners/lora; rsLoRA: arXiv:2312.03732.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.errors import ConfigError
from uirl_jax.models.sharding import constrain, platform
from uirl_jax.models.weight_table import WeightTable


class LoRAParam(nnx.Param):
    """A leaf of the adapters. Filter for it before nnx.Param."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Rank, scale and targets of the adapters.

    Targets are groups of a family's projections (attention, mlp and all, of the text tower; vision
    and others, as the family lists them) or single projections. `WeightTable.projections_of` checks
    them.
    """

    # R of the two matrices [D,R] and [R,D].
    rank: int = dataclasses.field(default=16, metadata={"min": 1, "max": 4096})
    # The update is scaled by alpha / rank.
    alpha: float = dataclasses.field(default=32.0, metadata={"above": 0.0, "max": 1e6})
    targets: tuple[str, ...] = ("attention", "mlp")  # q, k, v, o / gate, up, down
    # Fraction of an adapter's inputs that is zeroed, only in the pass that computes gradients.
    # Default 0: with dropout the ratio of new to old logprobs does not start at 1.
    dropout: float = dataclasses.field(default=0.0, metadata={"min": 0.0, "below": 1.0})
    rslora: bool = False  # scale by alpha / sqrt(rank): updates do not shrink with the rank
    # Added tokens whose embeddings, and rows of an untied head, are trained with the adapters. In a
    # name * stands for any text: "<point_*>".
    trainable_tokens: tuple[str, ...] = ()
    # The same by id, for tokens that were not added; loading a model appends those of the names.
    trainable_token_ids: tuple[int, ...] = dataclasses.field(
        default=(), metadata={"min": 0, "max": 2**31 - 1}
    )

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora.rank={self.rank}, expected at least 1")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout={self.dropout}, expected at least 0 and less than 1")
        if not self.targets:
            raise ConfigError("lora.targets=(), expected at least one, such as 'attention'")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def trains_tokens(self) -> bool:
        return bool(self.trainable_tokens or self.trainable_token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The order of the trained rows; complete once families.token_ids has found the names."""
        return tuple(sorted(set(self.trainable_token_ids)))


class AdaptedModel(Protocol):
    """What is read here of a family's model (families.border.Model)."""

    cfg: Any
    lora: LoraConfig | None

    def logits(self, x_btd: jax.Array, *, adapters: bool = True) -> jax.Array: ...


class Linear(nnx.Module):
    """y = x kernel (+ bias) (+ scale (dropout(x) A) B).

    Leaves: kernel [in, out], bias [out] or None, lora_a [in, R] and lora_b [R, out] or None.
    B starts at zero: fresh adapters do not change the output, bit for bit. An int8 kernel
    (`quantization`) comes with kernel_scale [out].

    Args:
      axes: sharding of the kernel during the product (sharding.AXIS_RULES): (None, "wide") shards
        the outputs, ("wide", None) the inputs. The embedding side, sharded along fsdp in storage,
        is gathered: rows of x are sharded over the same devices, and weights are cheaper to move.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str | None, str | None] = (None, "wide"),
        use_bias: bool = False,
        lora: LoraConfig | None = None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ) -> None:
        # Standard deviation 1 / sqrt(in): 0.0255 at a width of 1536. The published models use 0.02
        # at every width; a small model trained from scratch needs the scale of its width.
        kernel_io = jax.random.normal(rngs.params(), (in_features, out_features), jnp.float32)
        self.kernel = nnx.Param((kernel_io / math.sqrt(in_features)).astype(param_dtype))
        self.kernel_scale: nnx.Param | None = None
        self.axes = axes
        self.bias = nnx.Param(jnp.zeros((out_features,), param_dtype)) if use_bias else None
        if lora is None:
            self.lora_a = self.lora_b = None
            self.scale = self.dropout = 0.0
        else:
            bound = 1 / math.sqrt(in_features)  # PEFT's kaiming_uniform(a=sqrt(5))
            lora_a_ir = jax.random.uniform(
                rngs.params(), (in_features, lora.rank), jnp.float32, -bound, bound
            )
            # float32 whatever the dtype of the frozen weights: bfloat16 would round away most of an
            # update of relative size 1e-4.
            self.lora_a = LoRAParam(lora_a_ir)
            self.lora_b = LoRAParam(jnp.zeros((lora.rank, out_features), jnp.float32))
            self.scale = lora.scale
            self.dropout = lora.dropout

    def __call__(
        self, x: jax.Array, *, adapters: bool = True, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """[B, ..., in] -> [B, ..., out] in x's dtype.

        Args:
          adapters: False computes the base alone.
          dropout_key: for this layer and this call; None drops nothing.
        """
        wide_in, wide_out = self.axes
        y = _product(x, constrain(self.kernel[...].astype(x.dtype), wide_in, wide_out))
        if self.kernel_scale is not None:
            y = y * self.kernel_scale[...].astype(x.dtype)
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)
        if adapters and self.lora_a is not None and self.lora_b is not None:
            if dropout_key is not None and self.dropout > 0:
                kept = jax.random.bernoulli(dropout_key, 1 - self.dropout, x.shape)
                x = jnp.where(kept, x / (1 - self.dropout), 0)
            low_rank = _product(x, constrain(self.lora_a[...].astype(x.dtype), wide_in, None))
            lora_b_ro = constrain(self.lora_b[...].astype(x.dtype), None, wide_out)
            y = y + _product(low_rank, lora_b_ro) * self.scale
        return constrain(y, "batch", *[None] * (y.ndim - 2), wide_out)


def _product(x: jax.Array, kernel_io: jax.Array) -> jax.Array:
    """x kernel, [..., in] -> [..., out]."""
    if platform() != "cpu" or x.ndim == 2:
        return x @ kernel_io
    # Two matrices, for the kernel's gradient: XLA's CPU compiler copies a transpose of all
    # activations for a product that sums over rows and tokens, a tenth of a training step.
    return (x.reshape(-1, x.shape[-1]) @ kernel_io).reshape(*x.shape[:-1], kernel_io.shape[1])


def split_key(key: jax.Array | None, count: int) -> list[jax.Array] | list[None]:
    """A dropout key for each of `count` layers; all None without a key."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def adapted_linear(
    name: str,
    in_features: int,
    out_features: int,
    *,
    lora: LoraConfig | None,
    table: WeightTable,
    **options: Any,
) -> Linear:
    """A family's projection `name`, with adapters if the targets of `lora` include it."""
    adapted = lora is not None and name in table.projections_of(lora.targets)
    return Linear(in_features, out_features, lora=lora if adapted else None, **options)
