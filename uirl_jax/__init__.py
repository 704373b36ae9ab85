"""Trains vision-language agents that operate user interfaces, on JAX. Start at `main`.

In a notebook: `uirl_jax.VLM` (see `vlm`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uirl_jax.models.lora import LoraConfig
    from uirl_jax.vlm import VLM

__all__ = ["VLM", "LoraConfig"]


def __getattr__(name: str) -> Any:
    """Imports these at their first use, because verifiers import this package without JAX."""
    if name == "VLM":
        from uirl_jax.vlm import VLM

        return VLM
    if name == "LoraConfig":
        from uirl_jax.models.lora import LoraConfig

        return LoraConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
