"""Small models of other families, made from nothing, learn the quickstart's task: an hour each."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs import quickstart
from tools.base_models.tiny_architectures import BASES
from tools.make_base_model import STAGE_STEPS
from uirl_jax import evaluation

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in BASES if family != "qwen2_vl"])
def test_family_goes_from_below_half_to_above_nine_tenths(family, tmp_path):
    """By the two commands of docs/model_families.md, with its own chat, screens and coordinates."""
    base, work, run = (tmp_path / name for name in ("base", "work", "run"))
    for command in (
        (
            *("tools.make_base_model", f"--family={family}", f"--out={base}"),
            f"--workdir={work}",
        ),
        (
            *("uirl_jax.main", f"--config={quickstart.__file__}", f"--workdir={run}"),
            f"--config.model.path={base}",
        ),
    ):
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True)
    steps = BASES[family].flags.get("telling_steps", STAGE_STEPS["telling"])
    assert f"--telling_steps={steps}" in (base / "README.md").read_text()
    results = evaluation.read_results(run)
    assert results["before"].rate < 0.5
    assert results["after"].rate > 0.9
