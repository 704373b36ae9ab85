"""Florence-2's adapters, read and written by both sides."""

import pytest

from tests import family_checks, family_files

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

# Our targets, the same in peft's words, and the rest of the config.
CASES = {
    "text": (
        ("attention", "mlp"),
        r"model\.language_model\..*\.([qkv]_proj|out_proj|fc[12])",
        {"alpha": 6.0, "rslora": False},
    ),
    "all_linear": (family_checks.GROUPS, "all-linear", {"alpha": 3.0, "rslora": True}),
    "vision": (
        ("vision", "merger"),
        r"model\.(vision_tower\.blocks|multi_modal_projector)\..*(qkv|proj|fc[12]|image_projection)",
        {"alpha": 4.5, "rslora": False},
    ),
    "some": (
        ("v_proj", "cross_q", "fc1", "window_qkv", "channel_fc2"),
        r".*(self_attn\.v_proj|encoder_attn\.q_proj|layers\.\d\.fc1|window_attn\.qkv"
        r"|channel_block\.ffn\.fc2)",
        {"alpha": 8.0, "rslora": False},
    ),
}


# A second each, and ten to compile.
@pytest.mark.parametrize(
    "case_name",
    ["all_linear", "some", *(pytest.param(n, marks=pytest.mark.slow) for n in ("text", "vision"))],
)
def test_adapters_written_here_and_by_peft_are_read_by_the_other(case_name, tmp_path):
    targets, in_pefts_words, options = CASES[case_name]
    family_files.assert_adapters_are_read_by_the_other(
        "florence2_odd", targets, in_pefts_words, options, tmp_path
    )


def test_adapter_that_lacks_a_block_is_refused(tmp_path):
    family_files.assert_adapter_that_lacks_a_block_is_refused(
        "florence2_odd", "vision", "blocks.0.1.spatial_block.ffn.fc1", tmp_path
    )
