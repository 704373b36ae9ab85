"""The learner's checkpoints; see `checkpointer`."""

from uirl_jax.checkpoints.checkpointer import Checkpointer, Restored

__all__ = ["Checkpointer", "Restored"]
