"""Reading a config.json: its fields, and one ModelError for what is wrong or is not computed."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from uirl_jax.errors import ModelError
from uirl_jax.models.directory import is_finite_number, read_json

T = TypeVar("T")
_MAY_BE_ZERO = ("initializer_range", "init_std")  # deviations of fresh weights


def check(*configs: Any, problems: Sequence[str] = (), signed: Collection[str] = ()) -> None:
    """Raises ModelError for `problems`, and for fields of type int or float that are not positive.

    Args:
      signed: integers that may be 0 or negative, too.
    """
    wrong = [
        f"{field.name}={value!r}, expected {expected}"
        for config in configs
        for field in dataclasses.fields(config)
        if (expected := _expected(field, value := getattr(config, field.name), signed))
    ]
    if wrong or problems:
        raise ModelError("config.json: " + "; ".join([*wrong, *problems]))


def _expected(field: dataclasses.Field[Any], value: Any, signed: Collection[str]) -> str:
    """What a value of this field must be, in words; empty where it is."""
    if field.type is int:
        is_right = type(value) is int and (value > 0 or field.name in signed)
        return "" if is_right else f"{'an' if field.name in signed else 'a positive'} integer"
    if field.type == int | None:
        return "" if value is None or type(value) is int else "an integer or null"
    if field.type is not float:
        return ""
    if not is_finite_number(value):
        return "a positive number"
    return "" if value > 0 or (value == 0 and field.name in _MAY_BE_ZERO) else "a positive number"


def check_model_type(config: Mapping[str, Any], expected: str) -> None:
    """Raises ModelError where a config.json is another architecture's."""
    if (found := config.get("model_type")) != expected:
        raise ModelError(f"config.json: model_type={found!r}, expected {expected!r}")


def check_computed(*values: tuple[Any, ...], problems: Sequence[str] = ()) -> None:
    """Raises ModelError for values that ask for another computation than the family's.

    Args:
      values: what it is, the value of config.json, and the values that are computed.
      problems: more of the kind, in words.
    """
    found = [
        f"{what} {got!r} (computed is {' or '.join(map(repr, computed))})"
        for what, got, *computed in values
        if got not in computed
    ]
    if found or problems:
        raise ModelError(f"config.json: not supported: {', '.join([*found, *problems])}")


def fields_given(config: type, content: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Of a config.json, or of a part of it, the fields of `config` that are there and not null.

    Of several eos_token_id, which a list may have, the first. Raises: ModelError: it has none.
    """
    names = [field.name for field in dataclasses.fields(config) if field.name not in without]
    found = {name: content[name] for name in names if content.get(name) is not None}
    if isinstance(ends := found.get("eos_token_id"), list):
        if not ends:
            raise ModelError("config.json: eos_token_id=[], expected a token id")
        found["eos_token_id"] = ends[0]
    return found


def rope_of(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of rotary positions, as transformers 5 or 4 name them."""
    return text.get("rope_parameters") or text.get("rope_scaling") or {}


def rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def head_dim(width: Any, heads: Any) -> int:
    """The width of a head where config.json leaves it out.

    Args: width, heads: hidden_size and num_attention_heads, unchecked.
    Raises: ModelError: they are no positive integers, or have no such width.
    """
    given = {"hidden_size": width, "num_attention_heads": heads}
    check(
        problems=[
            f"{name}={value!r}, expected a positive integer"
            for name, value in given.items()
            if type(value) is not int or value < 1
        ]
    )
    if width % heads:
        raise ModelError(
            f"config.json: hidden_size={width} is not a multiple of num_attention_heads={heads}"
        )
    return width // heads


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
