import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests import small_model
from tests.model_files import load_adapter, load_pretrained, save_adapter
from uirl_jax.errors import ModelError
from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen.inputs import patch_positions, rope_positions
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig, read_model_config
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.models import peft_adapters, weights
from uirl_jax.models.lora import LoraConfig, LoRAParam

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

GRID = (1, 4, 4)  # an image of 16 patches, 4 visual tokens
IDS_BT = np.array([[3, 17, 90, 90, 90, 90, 5, 44, 8, 71]], np.int32)
ROWS = TokenRows(
    IDS_BT,
    positions_abt=rope_positions(IDS_BT[0], [GRID], 90, 2)[:, None],
    segment_ids_bt=np.ones_like(IDS_BT),
    vision_index_bt=np.array([[-1, -1, 0, 1, 2, 3, -1, -1, -1, -1]], np.int32),
)
PATCHES_PF = np.random.default_rng(0).normal(size=(16, 1176)).astype(np.float32)
VISION = {
    "pixels_ipf": PATCHES_PF[None],
    "patch_positions_ip2": patch_positions(GRID, 2)[None],
    "patch_segments_ip": np.ones((1, 16), np.int32),
}

# Our targets, the same in peft's words, and the rest of the config.
CASES = {
    "text": (
        ("attention", "mlp"),
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        {"alpha": 6.0, "rslora": False},
    ),
    "vision": (
        ("vision", "merger"),
        r"model\.visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.fc[12])|merger\.mlp\.[02])",
        {"alpha": 4.5, "rslora": False},
    ),
    "rslora": (
        ("vision", "q_proj", "v_proj"),
        ["q_proj", "v_proj", "attn.qkv", "attn.proj", "fc1", "fc2"],
        {"alpha": 3.0, "rslora": True},
    ),
}


@jax.jit
def our_logits(model: Qwen2VL) -> jax.Array:
    return model.logits(model.hidden(ROWS, model.encode_images(VISION)))


def their_logits(reference) -> np.ndarray:
    from tests.oracles import qwen2_vl_torch

    rows = (IDS_BT, np.ones_like(IDS_BT))
    return qwen2_vl_torch.run(reference, *rows, [PATCHES_PF], [GRID]).logits_btv


def make_reference():
    from tests.oracles import qwen2_vl_torch

    return qwen2_vl_torch.make_reference(head_dim=32, tied=True)


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory):
    pytest.importorskip("peft")
    model_dir = tmp_path_factory.mktemp("base")
    make_reference().save_pretrained(model_dir)
    return model_dir


def with_lora(base_dir, lora: LoraConfig) -> Qwen2VL:
    """The reference's weights, with random A and B."""
    model = load_pretrained(base_dir, lora=lora)
    randomise(model)
    return model


def randomise(model: Qwen2VL) -> None:
    rng = np.random.default_rng(7)
    noise = jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), nnx.state(model, LoRAParam)
    )
    nnx.update(model, noise)


def assert_same_logits(got_btv, expected_btv, base_btv):
    """Of the largest logit: 1e-4 is the bar, 1e-6 is usual. The adapters move them by far more."""
    largest = np.abs(expected_btv).max()
    assert np.abs(got_btv - expected_btv).max() < 1e-4 * largest
    assert np.abs(expected_btv - base_btv).max() > 0.05 * largest


@pytest.mark.parametrize("case", CASES)
def test_save_adapter_peft_reads_it_and_gives_the_same_logits(case, base_dir, tmp_path):
    import peft

    targets, _, options = CASES[case]
    model = with_lora(base_dir, LoraConfig(rank=3, targets=targets, **options))
    save_adapter(model, tmp_path / "ours", base_model=base_dir)
    reference = make_reference()
    base_btv = their_logits(reference)
    wrapped = peft.PeftModel.from_pretrained(reference, tmp_path / "ours")
    assert_same_logits(np.asarray(our_logits(model)), their_logits(reference), base_btv)

    # What peft writes of it is what we wrote: no tensor was renamed, left out or made up by it.
    wrapped.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name], err_msg=name)
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base_dir)


@pytest.mark.parametrize("case", CASES)
def test_load_adapter_made_by_peft_gives_the_same_logits(case, base_dir, tmp_path):
    import peft
    import torch

    targets, target_modules, options = CASES[case]
    reference = make_reference()
    base_btv = their_logits(reference)
    wrapped = peft.get_peft_model(
        reference,
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=3,
            lora_alpha=options["alpha"],
            use_rslora=options["rslora"],
            lora_dropout=0.25,
            target_modules=target_modules,
        ),
    ).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    wrapped.save_pretrained(tmp_path)

    adapter = load_adapter(tmp_path, read_model_config(base_dir))
    assert adapter.lora == LoraConfig(rank=3, targets=targets, dropout=0.25, **options)
    model = with_lora(base_dir, adapter.lora)
    nnx.update(
        model,
        weights.adapters_from_numpy(adapter.arrays, nnx.state(model, LoRAParam)),
    )
    assert_same_logits(np.asarray(our_logits(model)), their_logits(reference), base_btv)


def test_load_adapter_of_all_linear_layers_is_every_target(base_dir, tmp_path):
    import peft

    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.get_peft_model(make_reference(), config).save_pretrained(tmp_path)
    adapter = load_adapter(tmp_path, read_model_config(base_dir))
    assert adapter.lora.targets == ("attention", "mlp", "vision", "merger")


LORA = LoraConfig(
    rank=2, alpha=5.5, targets=("mlp", "vision", "merger", "v_proj"), dropout=0.1, rslora=True
)


@functools.cache
def noisy_model() -> Qwen2VL:
    return small_model.noisy(lora=LORA)


@pytest.fixture
def saved(tmp_path):
    """A directory of our own writing and what is in it."""
    save_adapter(noisy_model(), tmp_path)
    return tmp_path, weights.adapters_to_numpy(nnx.state(noisy_model(), LoRAParam))


def change_config(directory, **fields):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def load(directory, cfg: Qwen2VLConfig = small_model.CONFIG) -> peft_adapters.Adapter:
    return load_adapter(directory, cfg)


def assert_same_arrays(got, expected):
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_adapter_round_trip_is_bit_exact(saved):
    directory, arrays = saved
    adapter = load(directory)
    assert adapter.lora == LORA
    assert_same_arrays(adapter.arrays, arrays)
    assert sorted(path.name for path in directory.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.parametrize("as_regex", [False, True])
def test_load_adapter_in_the_old_layout_of_names_gives_the_same(saved, as_regex):
    directory, arrays = saved
    path = directory / "adapter_model.safetensors"
    old = {
        name.replace("model.language_model.layers", "model.layers").replace(
            "model.model.visual.", "model.visual."
        ): tensor
        for name, tensor in load_file(path).items()
    }
    assert "base_model.model.model.layers.2.mlp.up_proj.lora_A.weight" in old
    assert "base_model.model.visual.blocks.1.mlp.fc1.lora_B.weight" in old
    save_file(old, path)
    if as_regex:
        pattern = r"model\.layers\..*\.(mlp\.\w+|self_attn\.v_proj)|visual\.(blocks|merger)\..*"
        change_config(directory, target_modules=pattern, exclude_modules=r".*(norm\d|ln_q)")
    adapter = load(directory)
    assert adapter.lora == LORA
    assert_same_arrays(adapter.arrays, arrays)


def test_load_adapter_in_bfloat16_is_widened(saved):
    directory, arrays = saved
    path = directory / "adapter_model.safetensors"
    save_file({name: x.astype(jnp.bfloat16) for name, x in load_file(path).items()}, path)
    rounded = {name: x.astype(jnp.bfloat16).astype(np.float32) for name, x in arrays.items()}
    assert_same_arrays(load(directory).arrays, rounded)


REFUSED = {
    "peft_type": "LOHA",
    "bias": "all",
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "layers_to_transform": 0,
    "fan_in_fan_out": True,
    "lora_bias": True,
    "layer_replication": [[0, 1]],
    "init_lora_weights": "pissa",
    "a_field_of_the_future": "on",
    "r": 2.5,
    "lora_alpha": "8",
    "lora_dropout": None,
    "use_rslora": 1,
    "target_modules": None,
}


@pytest.mark.parametrize("field", REFUSED)
def test_load_adapter_refuses_what_it_does_not_compute_by_name(saved, field):
    change_config(saved[0], **{field: REFUSED[field]})
    with pytest.raises(ModelError, match=rf"adapter_config\.json: .*\b{field}=") as error:
        load(saved[0])
    assert repr(REFUSED[field]) in str(error.value)


def test_load_adapter_lists_all_refusals_at_once(saved):
    fields = ("bias", "use_dora", "modules_to_save", "rank_pattern", "peft_type", "lora_bias")
    change_config(saved[0], **{field: REFUSED[field] for field in fields})
    with pytest.raises(ModelError) as error:
        load(saved[0])
    assert all(f"{field}=" in str(error.value) for field in fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ["proj"]}, r"visual\.patch_embed\.proj cannot carry an adapter"),
        ({"target_modules": ["norm"]}, r"language_model\.norm cannot carry an adapter"),
        ({"target_modules": ["embed_tokens"]}, r"embed_tokens cannot carry an adapter"),
        ({"target_modules": r".*layers\.[01]\..*q_proj"}, r"layers\.0.*but not every q_proj"),
        ({"target_modules": ["c_attn"]}, r"'c_attn'\] matches no layer"),
        ({"target_modules": "("}, "regular expression"),
        ({"target_modules": ["q_proj"], "exclude_modules": 3}, "exclude_modules=3"),
        ({"r": 0}, r"lora\.rank=0"),
        ({"lora_dropout": 1.0}, r"lora\.dropout=1\.0"),
    ],
)
def test_load_adapter_of_impossible_values_is_a_model_error(saved, fields, message):
    change_config(saved[0], **fields)
    with pytest.raises(ModelError, match=message):
        load(saved[0])


def test_load_adapter_fields_that_are_off_are_no_obstacle(saved):
    off = {"use_dora": False, "rank_pattern": {}, "modules_to_save": None, "layer_replication": []}
    change_config(saved[0], **off, revision="main", task_type=None, peft_version="0.21.2")
    assert_same_arrays(load(saved[0]).arrays, saved[1])


def test_load_adapter_every_tensor_that_does_not_fit_is_in_one_error(saved):
    path = saved[0] / "adapter_model.safetensors"
    tensors = load_file(path)
    layer = "base_model.model.model.language_model.layers"
    del tensors[f"{layer}.1.mlp.up_proj.lora_A.weight"]
    tensors[f"{layer}.3.mlp.up_proj.lora_A.weight"] = np.ones((2, 32), np.float32)
    tensors[f"{layer}.0.mlp.up_proj.lora_B.weight"] = np.ones((2, 24), np.float32)
    tensors["base_model.model.model.visual.merger.mlp.0.lora_B.weight"] = np.ones((64, 2), np.int8)
    save_file(tensors, path)
    with pytest.raises(ModelError) as error:
        load(saved[0])
    for part in (
        str(path),
        f"missing {layer}.1.mlp.up_proj.lora_A.weight",
        f"unexpected {layer}.3.mlp.up_proj.lora_A.weight",
        f"{layer}.0.mlp.up_proj.lora_B.weight is [2, 24], expected [24, 2]",
        "visual.merger.mlp.0.lora_B.weight has dtype I8",
    ):
        assert part in str(error.value)


def remove_config(directory):
    (directory / "adapter_config.json").unlink()


def cut_config(directory):
    (directory / "adapter_config.json").write_text("{")


def config_that_is_a_list(directory):
    (directory / "adapter_config.json").write_text("[]")


def remove_tensors(directory):
    (directory / "adapter_model.safetensors").unlink()


def leave_a_pickle(directory):
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")


def truncate_tensors(directory):
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_config, r"adapter_config\.json: cannot be read"),
        (cut_config, r"adapter_config\.json: cannot be read"),
        (config_that_is_a_list, r"adapter_config\.json: expected a JSON object, got list"),
        (remove_tensors, r"adapter_model\.safetensors: no such file"),
        (leave_a_pickle, r"adapter_model\.bin is a pickle.*safetensors"),
        (truncate_tensors, r"not a complete safetensors file"),
    ],
)
def test_load_adapter_of_a_broken_directory_is_a_model_error(saved, damage, message):
    damage(saved[0])
    with pytest.raises(ModelError, match=message):
        load(saved[0])


def test_save_adapter_of_a_model_without_adapters_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="no adapters to save"):
        save_adapter(small_model.fresh(lora=None), tmp_path)


def test_save_adapter_that_fails_leaves_the_old_one(saved, monkeypatch):
    directory, _ = saved
    before = {path.name: path.read_bytes() for path in directory.iterdir()}

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_adapter(noisy_model(), directory, base_model="another")
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
