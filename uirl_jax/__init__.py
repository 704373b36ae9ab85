"""Trains vision-language agents that operate user interfaces, on JAX. Start at `main`."""
