"""Idefics2's adapters, read and written by both sides."""

import pytest

from tests import family_checks, family_files

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

# Our targets, the same in peft's words, and the rest of the config. The three towers have
# projections of the same last names.
CASES = {
    "text": (
        ("attention", "mlp"),
        r"model\.text_model\..*\.(q|k|v|o|gate|up|down)_proj",
        {"alpha": 6.0, "rslora": False, "trainable_token_ids": (3, 5, 9)},
    ),
    "all_linear": (family_checks.GROUPS, "all-linear", {"alpha": 3.0, "rslora": True}),
    "vision": (
        ("vision", "merger"),
        r"model\.(vision_model|connector)\..*(_proj|fc[12])",
        {"alpha": 4.5, "rslora": False},
    ),
    "some": (
        ("v_proj", "vision_q", "latent_q", "connector_down"),
        r".*(text_model.*v_proj|(vision_model|perceiver).*q_proj|modality_projection\.down_proj)",
        {"alpha": 8.0, "rslora": False},
    ),
}


@pytest.mark.parametrize("case_name", CASES)
def test_adapters_written_here_and_by_peft_are_read_by_the_other(case_name, tmp_path):
    targets, in_pefts_words, options = CASES[case_name]
    family_files.assert_adapters_are_read_by_the_other(
        "idefics2_odd", targets, in_pefts_words, options, tmp_path
    )


def test_adapter_that_lacks_a_latent_block_is_refused(tmp_path):
    family_files.assert_adapter_that_lacks_a_block_is_refused(
        "idefics2_odd", "merger", "layers.1.mlp.up_proj", tmp_path
    )
