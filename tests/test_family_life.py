"""Every family but the quickstart's in a run: GRPO on the bundled verifier, exports, VLM."""

from pathlib import Path

import pytest
from flax import nnx

from tests import family_life
from tools import make_base_model
from tools.tiny_architectures import BASES
from uirl_jax.families import loading

# Patches of a screen of 224x168 pixels.
ROW_PATCHES = {
    "qwen2_5_vl": 192,
    "qwen3_vl": 140,
    "llava": 64,
    "idefics2": 192,
    "paligemma": 64,
    "florence2": 49,
}
ANSWERS = {"paligemma": "<loc0001><loc0002> click", "florence2": "<loc_2><loc_1> click"}


def write_tiny_model(family: str, directory: Path) -> None:
    """The family's small base model, before its training."""
    base = BASES[family]
    tokenizer = base.tokenizer.train_tokenizer(make_base_model.tokenizer_texts(base)[:200], 512)
    model = base.family.make_model(base.config(tokenizer), lora=None, rngs=nnx.Rngs(0))
    make_base_model.write_model(base, model, tokenizer, directory)
    # In float32: bfloat16 would round the merged adapters of an export.
    loading.save_model(base.family, model, directory)


@pytest.mark.parametrize("family", ROW_PATCHES)
def test_family_trains_evaluates_exports_and_loads_again(family, tmp_path):
    write_tiny_model(family, tmp_path / "model")
    family_life.assert_trains_exports_and_loads_again(
        tmp_path / "model",
        tmp_path,
        row_patches=ROW_PATCHES[family],
        answer=ANSWERS.get(family, "click(1, 2)"),
    )
