"""A family's life in a run: trained, evaluated, exported, loaded again."""

import json
import threading
from pathlib import Path

import numpy as np
from flax import nnx
from PIL import Image

import uirl_jax
from tests import tiny_config
from tests.changed_advantages import changed_advantages
from tools import export, make_base_model
from tools.base_models.tiny_architectures import BASES
from uirl_jax import evaluation
from uirl_jax.config import reading, schema
from uirl_jax.families import loading
from uirl_jax.families.table import family_of
from uirl_jax.models import weights
from uirl_jax.roles.all import run_all
from uirl_jax.run import Run, open_run

# Patches of a screen of 224x168 pixels.
ROW_PATCHES = {
    "qwen2_5_vl": 192,
    "qwen3_vl": 140,
    "llava": 64,
    "idefics2": 192,
    "paligemma": 64,
    "florence2": 49,
}


def write_tiny_model(family: str, directory: Path) -> None:
    """The family's small base model, before its training."""
    base = BASES[family]
    tokenizer = base.tokenizer.train_tokenizer(make_base_model.tokenizer_texts(base)[:200], 512)
    model = base.family.make_model(base.config(tokenizer), lora=None, rngs=nnx.Rngs(0))
    make_base_model.write_model(base, model, tokenizer, directory)
    # In float32: bfloat16 would round the merged adapters of an export.
    loading.save_model(base.family, model, directory)


def signs(tokens: list[np.ndarray]) -> list[np.ndarray]:
    """Advantages of 1 and -1 in turn."""
    return [np.full(len(one), (-1) ** n, np.float32) for n, one in enumerate(tokens)]


def assert_trains_exports_and_loads_again(
    model_dir: Path, tmp_path: Path, *, row_patches: int, answer: str = "click(1, 2)"
) -> None:
    """Two steps of GRPO on the bundled verifier, with packing and shared prompts.

    Args:
      row_patches: of a screen of 224x168 pixels.
      answer: an action in the model's format.
    """
    cfg = tiny_config.get_config()
    cfg.model.path = str(model_dir)
    cfg.learner.steps = 2
    cfg.learner.batch.patch_lengths = (row_patches,)
    cfg.engine.image_row_patches = row_patches
    if not family_of(model_dir).capabilities.chunked_prefill:
        cfg.engine.prefill_lengths = cfg.engine.context_lengths
    assert cfg.learner.batch.share_prompts
    resolved = reading.from_config(schema.RunConfig, cfg)
    run = Run(resolved, tmp_path / "run", open_run(tmp_path / "run", resolved))
    # A random policy earns nothing: without advantages there would be no gradient to follow.
    with changed_advantages(signs):
        run_all(run, threading.Event())

    assert list(evaluation.read_results(run.workdir)) == ["before", "after"]
    lines = [json.loads(line) for line in (run.workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert ["eval/success" in line for line in lines] == [True, False, True]
    # Engine and learner agree on the policy's logprobs: 1e-6-class in float32.
    drifts = [v for line in lines for k, v in line.items() if k == "offpolicy/drift"]
    assert drifts and max(map(abs, drifts)) < 1e-3
    assert json.loads((run.workdir / "summary.json").read_text())["episodes"]["trained"] == 16

    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    export.export("adapter", run.workdir, adapter)
    export.export("merged", run.workdir, merged)
    with_adapter = loading.load(model_dir, lora=resolved.model.lora, seed=0, adapter=adapter)
    base = uirl_jax.VLM.from_pretrained(model_dir, lora=resolved.model.lora, adapter=adapter)
    whole = uirl_jax.VLM.from_pretrained(merged)
    moved = weights.adapters_to_numpy(with_adapter.trainable)
    assert all(array.any() for name, array in moved.items() if name.endswith("lora_b"))
    picture = Image.fromarray(np.zeros((168, 224, 3), np.uint8))
    losses = [vlm.forward([picture], ["Go"], [answer])["loss"] for vlm in (base, whole)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
