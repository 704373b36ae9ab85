"""Command lines around uirl_jax: each file is one tool, run as `python -m tools.<name>`."""
