import dataclasses
import json
import re
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests import small_model
from tests.model_files import load_pretrained as load
from tests.model_files import save_pretrained as save
from uirl_jax.errors import ModelError
from uirl_jax.families import loading
from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.models import stacking, weight_files, weights
from uirl_jax.models.lora import LoraConfig, LoRAParam

# The vision tower's weights show in the logits through two visual tokens.
VISION = {
    "pixels_ipf": np.random.default_rng(1).normal(size=(1, 8, 96)).astype(np.float32),
    "patch_positions_ip2": np.zeros((1, 8, 2), np.int32),
    "patch_segments_ip": np.ones((1, 8), np.int32),
}
ROWS = TokenRows(
    token_ids_bt=np.random.default_rng(0).integers(0, 50, (1, 7)).astype(np.int32),
    positions_abt=np.broadcast_to(np.arange(7, dtype=np.int32), (3, 1, 7)),
    segment_ids_bt=np.ones((1, 7), np.int32),
    vision_index_bt=np.array([[-1, 1, 0, -1, -1, -1, -1]], np.int32),
)


@jax.jit
def logits(model: Qwen2VL) -> jax.Array:
    return model.logits(model.hidden(ROWS, model.encode_images(VISION)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("saved")
    model = small_model.noisy(small_model.UNTIED, lora=None)
    save(model, model_dir)
    return model_dir, model


def test_save_then_load_gives_every_leaf_back(saved):
    model_dir, model = saved
    loaded = load(model_dir)
    assert loaded.cfg == small_model.UNTIED
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(model))
    assert sorted(path.name for path in model_dir.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_save_merged_adapters_transformers_gives_the_same_logits(tmp_path, tied, dtype):
    torch = pytest.importorskip("torch")
    from transformers import Qwen2VLForConditionalGeneration

    from tests.oracles import qwen2_vl_torch

    cfg = Qwen2VLConfig.from_dict(qwen2_vl_torch.config_dict(head_dim=32, tied=tied))
    model = Qwen2VL(cfg, lora=LoraConfig(rank=2, alpha=6.0), rngs=nnx.Rngs(0))
    graphdef, adapters, frozen = nnx.split(model, LoRAParam, ...)
    adapters = jax.tree.map(lambda x: jnp.full_like(x, 0.1), adapters)
    model = nnx.merge(graphdef, adapters, frozen)
    save(model, tmp_path, dtype=dtype)

    reference, info = Qwen2VLForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info  # nothing missing, unexpected or of another shape
    ids_bt = np.arange(3, 15, dtype=np.int32)[None]
    with torch.no_grad():
        expected_btv = reference(input_ids=torch.tensor(ids_bt).long()).logits.numpy()
    rows = TokenRows(ids_bt, np.broadcast_to(np.arange(12), (3, 1, 12)), np.ones((1, 12)))
    x_btd = jax.jit(Qwen2VL.hidden)(model, rows, None)
    # bfloat16 has 8 bits: 0.4 % a weight.
    tolerance = 1e-5 if dtype is None else 3e-2
    got_btv = np.asarray(model.logits(x_btd))
    assert np.abs(got_btv - expected_btv).max() < tolerance * np.abs(expected_btv).max()
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        stored = {file.get_slice(name).get_dtype() for name in sorted(file.keys())}
        assert ("lm_head.weight" in set(file.keys())) != tied
    assert stored == {"F32" if dtype is None else "BF16"}


@pytest.mark.parametrize("layout", ["model.", "old"])
@pytest.mark.parametrize("sharded", [False, True])
def test_load_any_layout_of_names_and_files_gives_the_same(saved, tmp_path, layout, sharded):
    model_dir, model = saved
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.rotary_emb.inv_freq"] = np.ones(8, np.float32)  # a buffer of old files
    if layout == "model.":
        for name in list(tensors):
            new = re.sub(r"^model\.", "model.language_model.", name)
            tensors[re.sub(r"^visual\.", "model.visual.", new)] = tensors.pop(name)
        assert "model.language_model.layers.0.mlp.up_proj.weight" in tensors
        assert "model.visual.blocks.0.attn.qkv.weight" in tensors
    shutil.copy(model_dir / "config.json", tmp_path)
    if sharded:
        names = sorted(tensors)
        files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in files.items():
            save_file({name: tensors[name] for name in part}, tmp_path / file)
        index = {"weight_map": {name: file for file, part in files.items() for name in part}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(load(tmp_path)), nnx.state(model))


def test_load_param_dtype_casts_the_base_and_not_the_adapters(saved):
    model = load(saved[0], lora=small_model.LORA, param_dtype=jnp.bfloat16)
    _, adapters, frozen = nnx.split(model, LoRAParam, ...)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(adapters)} == {"float32"}
    np.testing.assert_allclose(
        np.asarray(logits(model)), np.asarray(logits(saved[1])), atol=0.15, rtol=0
    )


def test_load_fresh_adapters_leave_the_base_and_follow_the_key(saved):
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    models = [load(saved[0], lora=small_model.LORA, init_key=key) for key in keys]
    _, _, frozen = nnx.split(models[0], LoRAParam, ...)
    _, base = nnx.split(saved[1])
    jax.tree.map(np.testing.assert_array_equal, frozen, base)
    # One operation after the other: as a whole it is another program with adapters, whose sums XLA
    # may order otherwise.
    with jax.disable_jit():
        np.testing.assert_array_equal(logits(models[0]), logits(saved[1]))
    first, same, other = (
        weights.adapters_to_numpy(nnx.state(model, LoRAParam)) for model in models
    )
    for name, array in first.items():
        np.testing.assert_array_equal(array, same[name])
        if name.endswith("lora_a"):
            assert np.abs(array - other[name]).max() > 0.01
            assert np.abs(array[0] - array[1]).max() > 0.01  # layers differ
        else:
            assert not array.any()


@pytest.mark.parametrize("kind", [stacking.HostLeaf, stacking.DeviceLeaf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_load_holds_a_few_tensors_in_host_memory_above_the_arrays(
    tmp_path, monkeypatch, kind, dtype
):
    cfg = dataclasses.replace(
        small_model.CONFIG, intermediate_size=32_768, num_hidden_layers=8, hidden_size=32
    )
    model = small_model.fresh(cfg, lora=None)
    save(model, tmp_path)
    expected = nnx.state(model)
    del model
    monkeypatch.setattr(weights, "start_leaf", kind)
    largest_bytes = 4 * 32 * 32_768
    monkeypatch.setattr(weight_files, "_READ_AHEAD_BYTES", largest_bytes)
    monkeypatch.setattr(weights, "_PLACERS", 1)
    load(tmp_path, param_dtype=dtype)  # compiles
    tracemalloc.start()
    try:
        state = nnx.state(load(tmp_path, param_dtype=dtype))
        arrays_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    jax.tree.map(
        lambda got, wanted: np.testing.assert_array_equal(got, wanted.astype(dtype)),
        state,
        expected,
    )
    if kind is stacking.HostLeaf:  # the arrays are the buffers that were read into
        assert arrays_bytes > sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    else:
        assert arrays_bytes < largest_bytes  # XLA's own memory is not numpy's
    # One that is put in place, with its copy in another layout, one that waits for that, and one
    # that is read ahead.
    assert peak_bytes - arrays_bytes < 4.5 * largest_bytes


def damaged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = dict(tensors)
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    tensors["model.layers.3.mlp.up_proj.weight"] = np.ones((24, 32), np.float32)
    tensors["model.norm.weight"] = np.ones(33, np.float32)
    tensors["visual.merger.ln_q.bias"] = np.ones(16, np.int32)
    return tensors


def test_load_everything_that_does_not_fit_is_in_one_error(saved, tmp_path):
    shutil.copy(saved[0] / "config.json", tmp_path)
    save_file(damaged(load_file(saved[0] / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as error:
        load(tmp_path)
    message = str(error.value)
    assert "\n" not in message
    for part in (
        str(tmp_path),
        "missing model.layers.1.self_attn.q_proj.bias",
        "unexpected model.layers.3.mlp.up_proj.weight",
        "model.norm.weight is [33], expected [32]",
        "visual.merger.ln_q.bias has dtype I32",
    ):
        assert part in message


def remove_config(model_dir):
    (model_dir / "config.json").unlink()


def cut_config(model_dir):
    (model_dir / "config.json").write_text("{")


def config_of_wrong_types(model_dir):
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"vision_config": 3}))


def remove_weights(model_dir):
    (model_dir / "model.safetensors").unlink()


def truncate_weights(model_dir):
    data = (model_dir / "model.safetensors").read_bytes()
    (model_dir / "model.safetensors").write_bytes(data[: len(data) // 2])


def absurd_header(model_dir):
    data = (model_dir / "model.safetensors").read_bytes()
    (model_dir / "model.safetensors").write_bytes(b"\xff" * 8 + data[8:])


def index_that_points_outside(model_dir):
    (model_dir / "model.safetensors").rename(model_dir.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))


def index_without_a_map(model_dir):
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_config, r"config\.json: cannot be read"),
        (cut_config, r"config\.json: cannot be read"),
        (config_of_wrong_types, r"config\.json: a value of the wrong type"),
        (remove_weights, r"neither model\.safetensors nor"),
        (truncate_weights, r"not a complete safetensors file"),
        (absurd_header, r"not a complete safetensors file"),
        (index_that_points_outside, r"\.\./outside\.safetensors is not a file next to it"),
        (index_without_a_map, r"not an index of weights"),
    ],
)
def test_load_a_broken_directory_is_a_model_error(saved, tmp_path, damage, message):
    model_dir = tmp_path / "model"
    shutil.copytree(saved[0], model_dir)
    damage(model_dir)
    with pytest.raises(ModelError, match=message):
        load(model_dir)


def test_base_hash_changes_with_any_byte_and_with_nothing_else(saved, tmp_path):
    first = weights.base_hash(saved[0])
    assert re.fullmatch("[0-9a-f]{32}", first)
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    (copy / "README.md").write_text("not part of the model")
    assert weights.base_hash(copy) == first
    tensors_path = copy / "model.safetensors"
    data = bytearray(tensors_path.read_bytes())
    data[-1] ^= 1
    tensors_path.write_bytes(data)
    changed = weights.base_hash(copy)
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    assert len({first, changed, weights.base_hash(copy)}) == 3


def test_loading_hashes_the_files_meanwhile_and_gives_up_with_the_load(
    saved, tmp_path, monkeypatch
):
    model_dir = tmp_path / "model"
    shutil.copytree(saved[0], model_dir)
    (model_dir / "preprocessor_config.json").write_text(
        json.dumps(ImageConfig(patch_size=4).to_dict())
    )
    asked = []

    def slow_hash(path, stop):
        asked.append(path)
        assert stop.wait(60)  # a load that fails does not wait for the hash of 15 GB
        return "unused"

    monkeypatch.setattr(weights, "base_hash", slow_hash)
    broken = dataclasses.replace(small_model.LORA, rank=1)
    monkeypatch.setattr(weights, "load_pretrained", failing)
    with pytest.raises(ModelError, match="does not fit"):
        loading.load(model_dir, lora=broken, seed=0)
    assert asked == [model_dir]


def failing(*_, **__):
    raise ModelError("does not fit")


def contents(model_dir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model_dir.iterdir()}


@pytest.mark.parametrize("function", ["uirl_jax.models.weights._tensors_of", "os.fsync"])
@pytest.mark.parametrize("old_shard_bytes", [10**9, 20_000])
def test_save_that_fails_leaves_the_old_files(
    saved, tmp_path, monkeypatch, function, old_shard_bytes
):
    save(saved[1], tmp_path, max_shard_bytes=old_shard_bytes)
    before = contents(tmp_path)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(function, full_disk)
    with pytest.raises(OSError, match="No space"):
        save(saved[1], tmp_path, dtype="bfloat16", max_shard_bytes=20_000)
    assert contents(tmp_path) == before


def test_save_in_shards_transformers_and_we_read_every_tensor(saved, tmp_path):
    pytest.importorskip("torch")
    from transformers import Qwen2VLForConditionalGeneration

    model_dir, model = saved
    save(model, tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    assert [path.name for path in shards] == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    size_bytes = {path.name: sum(x.nbytes for x in load_file(path).values()) for path in shards}
    assert max(size_bytes.values()) <= 20_000
    assert index["metadata"]["total_size"] == sum(size_bytes.values())
    assert index["weight_map"] == {n: path.name for path in shards for n in load_file(path)}

    jax.tree.map(np.testing.assert_array_equal, nnx.state(load(tmp_path)), nnx.state(model))
    from_shards, from_one = (
        Qwen2VLForConditionalGeneration.from_pretrained(directory, output_loading_info=True)
        for directory in (tmp_path, model_dir)
    )
    assert not any(from_shards[1].values()), from_shards[1]
    expected = from_one[0].state_dict()
    assert len(expected) == len(index["weight_map"])
    for name, tensor in from_shards[0].state_dict().items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)


def test_save_a_tensor_larger_than_a_shard_has_one_of_its_own(saved, tmp_path):
    save(saved[1], tmp_path, max_shard_bytes=1)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) == len(load_file(saved[0] / "model.safetensors"))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(load(tmp_path)), nnx.state(saved[1]))


def test_save_over_an_earlier_one_leaves_its_own_weights_and_other_files(saved, tmp_path):
    others = ["README.md", "adapter_model.safetensors", "model-of-mine.safetensors"]
    for name in others:
        (tmp_path / name).write_text("not a weight file of ours")
    for max_shard_bytes in (20_000, 10**9, 50_000, 20_000):
        save(saved[1], tmp_path, max_shard_bytes=max_shard_bytes)
        files = {path.name for path in tmp_path.iterdir()} - {"config.json", *others}
        if max_shard_bytes == 10**9:
            assert files == {"model.safetensors"}
        else:
            index_path = tmp_path / "model.safetensors.index.json"
            named = set(json.loads(index_path.read_text())["weight_map"].values())
            assert files == named | {index_path.name}
        jax.tree.map(np.testing.assert_array_equal, nnx.state(load(tmp_path)), nnx.state(saved[1]))


def test_save_holds_a_few_tensors_in_host_memory_and_not_the_model(tmp_path):
    cfg = dataclasses.replace(small_model.CONFIG, intermediate_size=32_768)
    model = small_model.fresh(cfg, lora=LoraConfig(rank=1, targets=("mlp",)))
    save(model, tmp_path)  # compiles what slices a layer
    largest_bytes = 4 * 32 * 32_768
    total_bytes = (tmp_path / "model.safetensors").stat().st_size
    tracemalloc.start()
    try:
        save(model, tmp_path, max_shard_bytes=total_bytes // 3)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total_bytes > 8 * largest_bytes
    # A B, its product with the scale, the sum with the kernel, and the transpose of that.
    assert peak_bytes < 4.5 * largest_bytes


def test_adapters_round_trip_gives_every_leaf_back():
    adapters = nnx.state(small_model.noisy(), LoRAParam)
    flat = weights.adapters_to_numpy(adapters)
    assert flat["text/blocks/q_proj/lora_a"].shape == (3, 32, 2)
    assert len(flat) == 14
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), adapters)
    for target in (adapters, abstract):
        restored = weights.adapters_from_numpy(flat, target)
        assert jax.tree.structure(restored) == jax.tree.structure(adapters)
        jax.tree.map(np.testing.assert_array_equal, restored, adapters)


def test_adapters_that_do_not_fit_are_all_in_one_error():
    adapters = nnx.state(small_model.noisy(), LoRAParam)
    flat = weights.adapters_to_numpy(adapters)
    flat["text/blocks/x"] = flat.pop("text/blocks/q_proj/lora_a")
    flat["text/blocks/v_proj/lora_b"] = flat["text/blocks/v_proj/lora_b"][:1]
    with pytest.raises(ModelError) as error:
        weights.adapters_from_numpy(flat, adapters)
    for part in ("missing text/blocks/q_proj/lora_a", "unexpected text/blocks/x", "(1, 2, 16)"):
        assert part in str(error.value)
