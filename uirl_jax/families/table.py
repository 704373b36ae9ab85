"""The table of model families, by the model_type of config.json.

A family of one's own is one more entry, made before a model is loaded: a config file may say
`FAMILIES["my_model"] = my_family.FAMILY` (docs/add_a_model.md).
"""

from pathlib import Path

from uirl_jax.errors import ModelError
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
            f"supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]
