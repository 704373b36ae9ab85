"""Functions and models of the user's own, named in a config: "my_rewards:shorter_is_better".

The module is looked for in the folder where the command was started and on PYTHONPATH. Nothing is
evaluated: the name is imported and looked up. An error inside such a function ends the run with one
line that names its file.
"""

import contextlib
import importlib
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uirl_jax.errors import ConfigError, UserCodeError

_REFERENCE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def load(reference: str, key: str, kind: type | None = None, kind_name: str = "a function") -> Any:
    """The function, or what else of the user's own, that a config names.

    Args:
      reference: "package.module:name".
      key: of the config, for messages.
      kind: the type that it must have, None: a function; and what messages call it.

    Raises: ConfigError: no such module or name, or the module cannot be imported.
    """
    check(reference, key)
    module_name, _, name = reference.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:  # the command `uirl-jax` does not look there, `python -m` does
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself, or a package that it is in; else something that it imports is missing.
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key}={reference!r}: {_where(error)}: {error}") from error
        raise ConfigError(
            f"{key}={reference!r}: no module {module_name!r} in {folder} or on PYTHONPATH"
        ) from error
    except Exception as error:
        shown = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}={reference!r}: {_where(error)}: {shown}") from error
    found = getattr(module, name, None)
    if not (callable(found) if kind is None else isinstance(found, kind)):
        why = f"{name} is {type(found).__name__}, expected {kind_name}"
        why = "has no such name" if found is None else why
        where = getattr(module, "__file__", None) or f"the module {module_name}"
        raise ConfigError(f"{key}={reference!r}: {where}: {why}")
    return found


def check(reference: str, key: str) -> None:
    """Raises ConfigError for a reference that is not "module:name"; imports nothing."""
    if not _REFERENCE.fullmatch(reference):
        raise ConfigError(f"{key}={reference!r}: expected 'module:name'")


def name_of(reference: str) -> str:
    """The function's name, for metrics."""
    return reference.partition(":")[2]


@contextlib.contextmanager
def blamed(reference: str) -> Iterator[None]:
    """Around a call of the user's function: an exception of it becomes a UserCodeError."""
    try:
        yield
    except UserCodeError:
        raise
    except Exception as error:
        raise UserCodeError(
            f"{reference}: {_where(error)}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _where(error: Exception) -> str:
    """The last line of the user's own file in a traceback: neither this package nor a library."""
    package = Path(__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file()
        and package not in Path(frame.filename).parents
        and "site-packages" not in frame.filename
    ]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "in a library"
