"""Image settings of a model directory: where they are, switches, resampling, numbers of pixels.

transformers 5 writes them into processor_config.json, as its block image_processor; older versions,
and exports of this package, into preprocessor_config.json. Where both are there the block holds.

Source: transformers, image_processing_base.py, get_image_processor_dict.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from uirl_jax.errors import ModelError
from uirl_jax.families.pixel_levels import Normalisation
from uirl_jax.models.directory import is_finite_number, read_json

T = TypeVar("T")
_FILE = "preprocessor_config.json"
_NESTED_FILE, _NESTED = "processor_config.json", "image_processor"

_KINDS = {2: "bilinear", 3: "bicubic"}  # of PIL.Image.Resampling
_VARIANTS = ("", "Fast", "Pil")  # of the same processor in transformers, by its backend


def read(model_dir: Path, from_dict: Callable[[Mapping[str, Any]], T]) -> tuple[T, str]:
    """What `from_dict` makes of the image settings, and where they are, for messages.

    Raises: ModelError: there are none, or `from_dict` refuses them.
    """
    where, content = _find(model_dir)
    try:
        return from_dict(content), where
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{where}: a value of the wrong type ({error})") from error


def _find(model_dir: Path) -> tuple[str, dict[str, Any]]:
    nested_file = model_dir / _NESTED_FILE
    if nested_file.is_file():
        nested = read_json(nested_file).get(_NESTED)
        if nested is not None and not isinstance(nested, dict):
            raise ModelError(f"{nested_file}: {_NESTED}={nested!r}, expected an object")
        if nested is not None:
            return f"{nested_file}: {_NESTED}", nested
    if not (model_dir / _FILE).is_file():
        raise ModelError(
            f"{model_dir}: no image settings: neither {_FILE} nor {_NESTED} in {_NESTED_FILE}"
        )
    return str(model_dir / _FILE), read_json(model_dir / _FILE)


def write(directory: Path, content: Mapping[str, Any]) -> None:
    """Writes preprocessor_config.json; settings of a copied processor_config.json would override
    it, and are taken out."""
    _dump(directory / _FILE, content)
    nested_file = directory / _NESTED_FILE
    if nested_file.is_file():
        rest = {name: value for name, value in read_json(nested_file).items() if name != _NESTED}
        _dump(nested_file, rest)


def _dump(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def problems_of(
    content: Mapping[str, Any],
    *,
    processors: Sequence[str],
    resample: int,
    switches: Sequence[str] = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"),
) -> list[str]:
    """What another family's processor would do, or this one's in another way, in words.

    Args:
      processors: classes in transformers that this family's directories may name.
      resample: of PIL.Image.Resampling.
      switches: what may not be switched off.
    """
    problems = [f"{switch}=false" for switch in switches if not content.get(switch, True)]
    if content.get("resample", resample) != resample:
        problems.append(f"resample={content['resample']}, expected {resample} ({_KINDS[resample]})")
    known = [name + variant for name in processors for variant in _VARIANTS]
    if content.get("image_processor_type", known[0]) not in known:
        one_of = "one of " if len(processors) > 1 else ""
        problems.append(
            f"image_processor_type={content['image_processor_type']!r}, expected {one_of}"
            f"{', '.join(processors)}: it belongs to another model; take the file of this model's "
            "directory"
        )
    return problems


def numbers(content: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of the normalisation, by the names of `Normalisation`."""
    return {
        name: tuple(value) if isinstance(value := content[name], list) else value
        for name in ("image_mean", "image_std", "rescale_factor")
        if content.get(name) is not None
    }


def number_problems(images: Normalisation) -> list[str]:
    """What of the normalisation cannot be computed with, in words."""
    three = (("image_mean", images.image_mean), ("image_std", images.image_std))
    problems = [
        f"{name}={value!r}, expected three numbers"
        for name, value in three
        if not (isinstance(value, tuple) and len(value) == 3 and all(map(is_finite_number, value)))
    ]
    if not problems and min(images.image_std) <= 0:
        problems.append(f"image_std={images.image_std!r}, expected positive numbers")
    if not is_finite_number(images.rescale_factor):
        problems.append(f"rescale_factor={images.rescale_factor!r}, expected a number")
    return problems


def check(problems: Sequence[str]) -> None:
    """Raises: ModelError: there are problems; `read` adds where."""
    if problems:
        raise ModelError(f"image settings: {'; '.join(problems)}")
