"""Trains vision-language agents that operate user interfaces, on JAX. Start at `main`.

In a notebook: `uirl_jax.VLM` (see `vlm`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uirl_jax.vlm import VLM

__all__ = ["VLM"]


def __getattr__(name: str) -> Any:
    """Imports `VLM` at its first use, because verifiers import this package without JAX."""
    if name == "VLM":
        from uirl_jax.vlm import VLM

        return VLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
