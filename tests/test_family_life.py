"""Every family but the quickstart's in a run: GRPO on the bundled verifier, exports, VLM."""

import pytest

from tests import family_life

ANSWERS = {"paligemma": "<loc0001><loc0002> click", "florence2": "<loc_2><loc_1> click"}


@pytest.mark.parametrize("family", family_life.ROW_PATCHES)
def test_family_trains_evaluates_exports_and_loads_again(family, tmp_path):
    family_life.write_tiny_model(family, tmp_path / "model")
    family_life.assert_trains_exports_and_loads_again(
        tmp_path / "model",
        tmp_path,
        row_patches=family_life.ROW_PATCHES[family],
        answer=ANSWERS.get(family, "click(1, 2)"),
    )
