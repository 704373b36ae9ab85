"""What ships with the package: models, adapters, prompts and pages, and the configs beside it.

Installed from a wheel, they lie in site-packages, and a run may be started in any folder.
"""

import re
from pathlib import Path

from uirl_jax.errors import ModelError

DIRECTORY = Path(__file__).parent
PUBLISHED = DIRECTORY / "published"  # configs of models that others publish, without weights
PREFIX = "asset:"
CONFIGS = DIRECTORY.parents[1] / "configs"


def find(path: str | Path) -> Path:
    """A path as a config has it; `asset:tiny-ui-base` is what ships, from every folder.

    Raises: ModelError: an asset that does not exist.
    """
    if not str(path).startswith(PREFIX):
        return Path(path)
    found = DIRECTORY / str(path).removeprefix(PREFIX)
    if not found.is_dir():
        known = sorted({file.parent for file in DIRECTORY.glob("**/*.safetensors")})
        names = ", ".join(f"{PREFIX}{folder.relative_to(DIRECTORY)}" for folder in known)
        raise ModelError(f"{path}: no such asset; there are {names}")
    return found


def find_config(name: str) -> Path:
    """The file of `--config`: a path, or the name of a shipped config ("quickstart")."""
    shipped = CONFIGS / f"{name}.py"
    if re.fullmatch(r"\w+", name) and not Path(name).is_file() and shipped.is_file():
        return shipped
    return Path(name)
