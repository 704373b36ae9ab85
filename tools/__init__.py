"""Command lines around uirl_jax: `python -m tools.NAME`, and `python -m tools.bench COMMAND`.

The folders are what the commands are made of; each says in its `__init__` to which it belongs.
"""
