"""PaliGemma's adapters, read and written by both sides, in today's and in older names."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import family_checks, family_files
from tests.test_paligemma_weights import middle
from uirl_jax.errors import ModelError
from uirl_jax.families import loading, paligemma, tower_names
from uirl_jax.models import weights

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

FAMILY = paligemma.FAMILY

# Our targets, the same in peft's words, and the rest of the config.
CASES = {
    "text": (
        ("attention", "mlp"),
        r"model\.language_model\..*\.(q|k|v|o|gate|up|down)_proj",
        {"alpha": 6.0, "rslora": False},
    ),
    "all_linear": (family_checks.GROUPS, "all-linear", {"alpha": 3.0, "rslora": True}),
    "vision": (
        ("vision", "merger"),
        r"model\.(vision_tower\.encoder\.layers|multi_modal_projector)\..*(_proj|fc[12]|linear)",
        {"alpha": 4.5, "rslora": False},
    ),
    "some": (
        ("v_proj", "vision_q", "projector"),
        r".*(language_model.*v_proj|vision_tower.*q_proj|projector.linear)",
        {"alpha": 8.0, "rslora": False},
    ),
}


@pytest.mark.parametrize("case_name", CASES)
def test_adapters_written_here_and_by_peft_are_read_by_the_other(case_name, tmp_path):
    targets, in_pefts_words, options = CASES[case_name]
    family_files.assert_adapters_are_read_by_the_other(
        "paligemma_2_odd", targets, in_pefts_words, options, tmp_path
    )


@pytest.mark.parametrize("renamed", [str, middle])
def test_adapters_in_older_names_are_read(renamed, tmp_path):
    policy = family_files.with_random_adapters("paligemma_2_odd", family_checks.GROUPS)
    loading.save_adapter(policy, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    start = "base_model.model."
    older = {}
    for name, tensor in load_file(path).items():
        module, _, rest = name.removeprefix(start).partition(".lora_")
        older[f"{start}{renamed(tower_names.published_name(module))}.lora_{rest}"] = tensor
    assert older.keys() != load_file(path).keys()
    save_file(older, path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    last = {name.partition(".lora_")[0].rpartition(".")[2] for name in older}
    config["target_modules"] = sorted(last)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = loading.load_adapter(tmp_path, FAMILY, policy.cfg)
    expected = weights.adapters_to_numpy(policy.trainable)
    assert found.arrays.keys() == expected.keys()
    for path, array in found.arrays.items():
        np.testing.assert_array_equal(array, expected[path], err_msg=path)


def test_adapter_that_lacks_a_block_is_refused(tmp_path):
    policy = family_files.with_random_adapters("paligemma_2_odd", ("vision",))
    loading.save_adapter(policy, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = {k: v for k, v in load_file(path).items() if ".layers.1.mlp.fc1." not in k}
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"missing .*layers\.1\.mlp\.fc1\.lora_A") as error:
        loading.load_adapter(tmp_path, FAMILY, policy.cfg)
    assert "\n" not in str(error.value)
