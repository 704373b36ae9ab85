"""Pure functions of reinforcement learning: advantages (numpy, host) and losses (JAX, device)."""
