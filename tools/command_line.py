"""What the commands of tools have in common: how an error ends them, and the files of --json.

Every command parses its own flags.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

from uirl_jax.errors import ConfigError, UirlError

_P = ParamSpec("_P")


def one_line_errors(
    *, exit_code: int | None = None
) -> Callable[[Callable[_P, int]], Callable[_P, int]]:
    """Decorates a command's `main`, which returns the exit code: an error is one line on stderr.

    UirlError and OSError are errors of paths, values and machines; any other exception is a bug and
    keeps its traceback.

    Args: exit_code: of every error; None: the error's own, 1 for an OSError.
    """

    def decorate(main: Callable[_P, int]) -> Callable[_P, int]:
        @functools.wraps(main)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except (UirlError, OSError) as error:
                print(f"error: {error}", file=sys.stderr)
                if exit_code is not None:
                    return exit_code
                return error.exit_code if isinstance(error, UirlError) else 1

        return run

    return decorate


def check_file(flag: str, path: Path | None) -> None:
    """Call it before the work whose result `write_json` writes to `path`.

    Raises: ConfigError: it could not be written there.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag}={path}: is a directory; give a file")
    if not path.exists():
        check_folder(flag, path)
    elif not os.access(path, os.W_OK):
        raise ConfigError(f"{flag}={path}: cannot be written to")


def check_folder(flag: str, path: Path | None) -> None:
    """Call it before the work that makes or fills the folder `path`.

    Raises: ConfigError: it could not be made or filled.
    """
    if path is None:
        return
    nearest = next(one for one in (path, *path.parents) if one.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise ConfigError(f"{flag}={path}: {nearest} is no folder that can be written to")


def write_json(path: Path, content: Any) -> None:
    """Raises OSError."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Makes the folders of `path` where they are missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)  # the folder may be one that --out has made
    path.write_text(text, encoding="utf-8")
