"""Tests, and the worlds that they share."""

import jax

# Tests that call a tool's `main` turn the cache of compiled programs on for all that follow, and
# programs compiled for a TPU that is not there cannot be read back from it.
jax.config.update("jax_enable_compilation_cache", False)
