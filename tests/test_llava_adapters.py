"""LLaVA-1.5's adapters, read and written by both sides, in today's and in older names."""

import pytest

from tests import family_checks, family_files

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

# Our targets, the same in peft's words, and the rest of the config.
CASES = {
    "text": (
        ("attention", "mlp"),
        r"model\.language_model\..*\.(q|k|v|o|gate|up|down)_proj",
        {"alpha": 6.0, "rslora": False, "trainable_token_ids": (3, 5, 9)},
    ),
    # peft adapts the unused blocks too, which changes nothing.
    "all_linear": (family_checks.GROUPS, "all-linear", {"alpha": 3.0, "rslora": True}),
    "vision": (
        ("vision", "merger"),
        r"model\.(vision_tower\.encoder\.layers|multi_modal_projector)\..*(_proj|fc[12]|linear_[12])",
        {"alpha": 4.5, "rslora": False},
    ),
    "some": (
        ("v_proj", "vision_q", "merger_fc2"),
        r".*(language_model.*v_proj|vision_tower.*q_proj|linear_2)",
        {"alpha": 8.0, "rslora": False},
    ),
}


@pytest.mark.parametrize("case_name", CASES)
def test_adapters_written_here_and_by_peft_are_read_by_the_other(case_name, tmp_path):
    targets, in_pefts_words, options = CASES[case_name]
    family_files.assert_adapters_are_read_by_the_other(
        "llava_odd", targets, in_pefts_words, options, tmp_path
    )


@pytest.mark.parametrize("renamed", [str, family_files.as_of_transformers_4_52])
def test_adapters_in_older_names_are_read(renamed, tmp_path):
    family_files.assert_adapters_in_older_names_are_read("llava_odd", renamed, tmp_path)


def test_adapter_that_lacks_a_used_block_is_refused(tmp_path):
    family_files.assert_adapter_that_lacks_a_block_is_refused(
        "llava_odd", "vision", "layers.1.mlp.fc1", tmp_path
    )
