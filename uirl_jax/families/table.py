"""The table of model families, by the model_type of config.json.

A family of one's own is one more entry, which a config names in model.family, and a program of
one's own adds by `add_own` (docs/add_a_model.md).
"""

from pathlib import Path

from uirl_jax import user_code
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families import (
    florence2,
    idefics2,
    llava,
    paligemma,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
)
from uirl_jax.families.border import Family
from uirl_jax.models.directory import read_json

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(qwen2_vl.FAMILY, qwen2_5_vl.FAMILY, qwen3_vl.FAMILY),
        *(llava.FAMILY, idefics2.FAMILY, paligemma.FAMILY, florence2.FAMILY),
    )
}
# What users may ask for and no family computes, and why.
_REFUSED = {
    "idefics3": "its tiles of a screen are not computed; Idefics2 is",
    "llava_next": "its tiles of a screen are not computed; LLaVA-1.5 is",
    "llava_llama": "the layout of the original repository; take a conversion such as "
    "llava-hf/llava-1.5-7b-hf",
    "qwen3_vl_moe": "its mixture of experts is not computed; Qwen3-VL 2B, 4B and 8B are dense",
}


def add_own(reference: str) -> None:
    """Adds the user's own family to the table; "" adds none.

    Args: reference: "package.module:FAMILY", a border.Family.
    Raises: ConfigError: there is none, or it has the model_type of a family of the package.
    """
    if not reference:
        return
    family = user_code.load(reference, "model.family", Family, "a families.border.Family")
    if FAMILIES.setdefault(family.model_type, family) is not family:
        raise ConfigError(
            f"model.family={reference!r}: model_type {family.model_type!r} is another family's"
        )


def family_of(model_dir: str | Path) -> Family:
    """The family that a model directory belongs to. Raises: ModelError."""
    path = Path(model_dir)
    expected = "a directory with config.json, *.safetensors and tokenizer.json"
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path}: no model in Hugging Face's format (no config.json there); expected {expected}"
        )
    model_type = read_json(path / "config.json", expected).get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        why = f" ({_REFUSED[model_type]})" if str(model_type) in _REFUSED else ""
        raise ModelError(
            f"{path}: model_type={model_type!r} is not supported{why}; "
            f"supported: {', '.join(FAMILIES)}, and a family of your own: model.family in a "
            "config, families.table.add_own in a program"
        )
    return FAMILIES[model_type]
