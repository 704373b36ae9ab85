"""Every config that ships can be read, in each of its variants."""

import importlib
from pathlib import Path

import pytest

from uirl_jax import assets
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig

ROOT = Path(__file__).parents[1]
VARIANTS = {
    "configs.miniwob_cpu": ("base", "grpo"),
    "configs.miniwob_pages": ("base", "grpo", "trained"),
    "configs.miniwob_points": ("base", "grpo"),
    "configs.pix2act_beside": ("right-angle,find-midpoint", "right-angle"),
    "configs.pix2act_pages": (
        "base",
        "more",
        "last",
        "again",
        "aim",
        "figures",
        "polish",
        "right-angle",
        "grpo",
    ),
    "configs.quickstart": ("click_button", "enter_text", "data_entry", "miniwob"),
    "configs.simple_data_entry_cpu": ("base", "start", "grpo", "trained"),
}
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("configs", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if "def get_config(" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_it_is_valid(name):
    get_config = importlib.import_module(name).get_config
    for arguments in [(), *((variant,) for variant in VARIANTS.get(name, ()))]:
        config = reading.from_config(RunConfig, get_config(*arguments))
        for path in (config.model.path, config.model.adapter):
            assets.find(path)  # raises for an asset that does not ship


@pytest.mark.parametrize("name", VARIANTS)
def test_an_unknown_variant_names_the_known_ones(name):
    with pytest.raises(ValueError, match=f"expected .*{VARIANTS[name][-1]}"):
        importlib.import_module(name).get_config("nothing")
