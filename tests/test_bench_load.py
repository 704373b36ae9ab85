import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests import small_model
from tools.bench import load
from tools.planner.families import PlannedModel, read_model
from uirl_jax import assets
from uirl_jax.families import loading, qwen2_vl
from uirl_jax.families.table import family_of

SMALL = PlannedModel(
    qwen2_vl.FAMILY,
    dataclasses.replace(
        small_model.CONFIG, images=dataclasses.replace(small_model.CONFIG.images, patch_size=4)
    ),
)


def test_every_published_model_can_be_written_at_its_size():
    for path in assets.PUBLISHED.iterdir():
        assert read_model(path).cfg.vocab_size > 32_000


def test_write_checkpoint_is_a_model_of_random_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(load, "BLOCK_BYTES", 1000)  # tensors of several blocks
    total_bytes = load.write_checkpoint(tmp_path, SMALL)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    family = family_of(tmp_path)
    model = loading.read_model(
        family,
        tmp_path,
        family.read_config(tmp_path),
        lora=None,
        param_dtype=jnp.bfloat16,
        init_key=jax.random.key(0),
    )
    leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(nnx.state(model))]
    assert total_bytes == 2 * sum(leaf.size for leaf in leaves)
    values = np.concatenate([leaf.ravel() for leaf in leaves])
    assert np.abs(values).min() >= 1 / 64 and np.abs(values).max() < 1 / 32
    assert 0.45 < (values > 0).mean() < 0.55
    assert len(np.unique(values)) == 256  # one exponent, seven bits of mantissa, two signs


def test_measure_counts_the_arrays_and_what_is_above_them(tmp_path, monkeypatch):
    load.write_checkpoint(tmp_path, SMALL)
    monkeypatch.setattr(load, "drop_caches", lambda directory: "nothing")
    wide, narrow = (
        load.measure("load", tmp_path, load.Settings(dtype, quantize))
        for dtype, quantize in (("float32", "none"), ("bfloat16", "int8"))
    )
    assert narrow["arrays_gib"] < wide["arrays_gib"] / 2
    for row in (wide, narrow):
        assert row["seconds"] > 0 and row["peak_gib"] >= row["before_gib"]
        assert (
            row["peak_above_arrays_gib"] < 0.5
        )  # of a model of 100 KB: it compiles small programs
