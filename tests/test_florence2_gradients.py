"""Florence-2's loss and LoRA gradients against peft on transformers, in float32."""

import pytest

from tests import family_checks


@pytest.mark.parametrize(
    ("config", "remat"),
    [
        ("florence2_odd", "full"),
        pytest.param("florence2", "dots", marks=pytest.mark.slow),
        pytest.param("florence2_window", "none", marks=pytest.mark.slow),
    ],
)
# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_loss_and_every_lora_gradient_equal_those_of_peft(config, remat, tmp_path):
    family_checks.assert_loss_and_gradients_equal_pefts(config, remat, tmp_path)
