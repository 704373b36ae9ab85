"""A family's sharding rules: the meaning of each dimension of its leaves. No JAX is imported here.

`sharding` maps the meanings (embed, wide, vocab) to axes of the mesh.
"""

import types
from collections.abc import Mapping, Sequence

Rules = Mapping[str, tuple[str | None, ...]]  # leaf -> meanings of its last dimensions

# The same in every family.
_SHARED_RULES: Rules = types.MappingProxyType(
    {
        "embedding": ("vocab", "embed"),
        "lm_head/kernel": ("embed", "vocab"),
        "embedding_rows/rows": (None, None),
        "head_rows/rows": (None, None),
        "value_head/kernel": ("embed", None),
        "value_head/bias": (None,),
    }
)


def param_rules(
    *,
    wide_out: Sequence[str],
    wide_in: Sequence[str],
    whole: Sequence[str] = (),
    more: Rules = types.MappingProxyType({}),
) -> Rules:
    """A family's rules; a leading layer axis is not sharded.

    Args:
      wide_out: linear layers from the residual stream to heads or to an MLP's inside.
      wide_in: linear layers back to the residual stream.
      whole: norms, which are replicated.
      more: rules of other leaves, by their last two names.
    """
    rules = dict(_SHARED_RULES)
    for name in wide_out:
        rules |= {
            f"{name}/kernel": ("embed", "wide"),
            f"{name}/kernel_scale": ("wide",),
            f"{name}/bias": ("wide",),
            f"{name}/lora_a": ("embed", None),
            f"{name}/lora_b": (None, "wide"),
        }
    for name in wide_in:
        rules |= {
            f"{name}/kernel": ("wide", "embed"),
            f"{name}/kernel_scale": (None,),
            f"{name}/bias": (None,),
            f"{name}/lora_a": ("wide", None),
            f"{name}/lora_b": (None, "embed"),
        }
    rules |= {f"{name}/{leaf}": (None,) for name in whole for leaf in ("scale", "bias")}
    return types.MappingProxyType(rules | dict(more))
