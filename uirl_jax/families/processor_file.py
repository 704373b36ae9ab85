"""Reading a preprocessor_config.json: switches, resampling, whose file it is, numbers of pixels."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from uirl_jax.errors import ModelError
from uirl_jax.families.pixel_levels import Normalisation

_KINDS = {2: "bilinear", 3: "bicubic"}  # of PIL.Image.Resampling
_VARIANTS = ("", "Fast", "Pil")  # of the same processor in transformers, by its backend


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
        if not (isinstance(value, tuple) and len(value) == 3 and all(map(_is_number, value)))
    ]
    if not problems and min(images.image_std) <= 0:
        problems.append(f"image_std={images.image_std!r}, expected positive numbers")
    if not _is_number(images.rescale_factor):
        problems.append(f"rescale_factor={images.rescale_factor!r}, expected a number")
    return problems


def check(problems: Sequence[str]) -> None:
    """Raises: ModelError: there are problems."""
    if problems:
        raise ModelError(f"preprocessor_config.json: {'; '.join(problems)}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
