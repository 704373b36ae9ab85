"""What ships with the package: models, adapters, prompts and pages, and the configs beside it.

Installed from a wheel, they lie in site-packages, and a run may be started in any folder.
"""

import re
from pathlib import Path

DIRECTORY = Path(__file__).parent
CONFIGS = DIRECTORY.parents[1] / "configs"


def find(path: str | Path) -> Path:
    """A path as a config has it; `uirl_jax/assets/...` is found from every folder."""
    path = Path(path)
    if path.parts[:2] == ("uirl_jax", "assets") and not path.exists():
        return DIRECTORY.joinpath(*path.parts[2:])
    return path


def find_config(name: str) -> Path:
    """The file of `--config`: a path, or the name of a shipped config ("quickstart")."""
    shipped = CONFIGS / f"{name}.py"
    if re.fullmatch(r"\w+", name) and not Path(name).is_file() and shipped.is_file():
        return shipped
    return Path(name)
