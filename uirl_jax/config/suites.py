"""Reads a tasks.json, or a suite that ships with the package, for an evaluation."""

from pathlib import Path

from uirl_jax import assets
from uirl_jax.config import reading
from uirl_jax.errors import ConfigError
from uirl_jax.evaluation import Suite
from uirl_jax.untrusted import json as untrusted_json

_MAX_BYTES = 8 * 2**20
_TUNING = ":tuning"


def read_suite(where: str) -> Suite:
    """Reads a suite.

    Args: where: path of a JSON file, or the name of a suite that ships (`shipped`); with `:tuning`
      behind it, its tuning instances (`Suite.on_tuning`).
    Raises: ConfigError: one line with every fault and its place in the file.
    """
    if where.endswith(_TUNING):
        return read_suite(where.removesuffix(_TUNING)).on_tuning()
    path = Path(where)
    known = shipped()
    if where in known:
        path = known[where]
    elif not path.is_file():
        raise ConfigError(
            f"--tasks={where}: no such file, nor a suite that ships: {', '.join(known)}"
        )
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, expected at most {_MAX_BYTES}")
        content = untrusted_json.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: cannot be read as a JSON object ({error})") from None
    try:
        return reading.from_config(Suite, content, path=where)
    except ConfigError as error:  # keys and texts of the file are in it
        raise ConfigError(untrusted_json.printable(str(error), 2000)) from None


def shipped() -> dict[str, Path]:
    """Suites of the package by name."""
    folder = Path(assets.find("asset:suites"))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}
