"""Reading a config.json: required fields, positive integers, one ModelError for what is wrong."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from uirl_jax.errors import ModelError
from uirl_jax.models.directory import read_json

T = TypeVar("T")


def check(*configs: Any, problems: Sequence[str] = (), signed: Collection[str] = ()) -> None:
    """Raises ModelError for `problems` and for every field of type int that is not positive.

    Args:
      signed: fields that may be 0 or negative, too.
    """
    wrong = [
        f"{field.name}={value!r}, expected {'an' if field.name in signed else 'a positive'} integer"
        for config in configs
        for field in dataclasses.fields(config)
        if field.type is int
        and not (
            (value := getattr(config, field.name)).__class__ is int
            and (value > 0 or field.name in signed)
        )
    ]
    if wrong or problems:
        raise ModelError("config.json: " + "; ".join([*wrong, *problems]))


def check_complete(
    found: Mapping[str, Any], fields: Sequence[dataclasses.Field[Any]], prefix: str = ""
) -> None:
    """Raises ModelError that names the fields without default that are not in `found`."""
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    if missing := sorted(required - set(found)):
        raise ModelError(f"config.json: missing {', '.join(prefix + name for name in missing)}")


def read_file(path: Path, from_dict: Callable[[Mapping[str, Any]], T]) -> T:
    """The config of a config.json. Raises: ModelError."""
    try:
        return from_dict(read_json(path))
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: a value of the wrong type ({error})") from error
