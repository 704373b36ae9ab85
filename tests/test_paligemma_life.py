"""PaliGemma in a run: GRPO on the bundled verifier, exports, VLM."""

import pytest
from flax import nnx

from tests import family_life
from tools import make_base_model
from tools.base_models import BASES
from uirl_jax.families import loading


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """The tiny base model of the family, before its training."""
    directory = tmp_path_factory.mktemp("model")
    base = BASES["paligemma"]
    tokenizer = base.tokenizer.train_tokenizer(make_base_model.tokenizer_texts(base)[:200], 512)
    model = base.family.make_model(base.config(tokenizer), lora=None, rngs=nnx.Rngs(0))
    make_base_model.write_model(base, model, tokenizer, directory)
    # In float32: bfloat16 would round the merged adapters of an export.
    loading.save_model(base.family, model, directory)
    return directory


def test_trains_evaluates_exports_and_loads_again(model_dir, tmp_path):
    family_life.assert_trains_exports_and_loads_again(
        model_dir, tmp_path, row_patches=64, answer="<loc0001><loc0002> click"
    )
