"""Command lines around uirl_jax: `python -m tools.NAME`, and `python -m tools.bench COMMAND`."""
