"""Qwen3-VL's directories and adapters, read and written by both sides; int8; a mesh."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests import qwen3_vl_world as world
from tests.eight_devices import on_eight_devices
from tests.oracles import qwen3_vl_torch
from uirl_jax.errors import ModelError
from uirl_jax.families import loading, qwen3_vl
from uirl_jax.families.border import TokenRows
from uirl_jax.models import sharding
from uirl_jax.models.lora import LoraConfig

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

FAMILY = qwen3_vl.FAMILY
CONFIGS = [*qwen3_vl_torch.CONFIGS]
GROUPS = ("attention", "mlp", "vision", "merger")


@jax.jit
def logits(model, rows, vision):
    return model.logits(model.hidden(rows, model.encode_images(vision)))


def our_logits(policy, case: world.Case) -> np.ndarray:
    """Of the case's first row."""
    logits_btv = logits(world.merged(policy), case.rows, case.vision)
    return np.asarray(logits_btv)[0, : case.lengths[0]]


def their_logits(reference, policy, case: world.Case) -> np.ndarray:
    length = case.lengths[0]
    outputs = qwen3_vl_torch.run(
        reference,
        case.rows.token_ids_bt[:1, :length],
        case.rows.segment_ids_bt[:1, :length],
        world.pixels_of(policy.inputs, case.screens),
        [screen.layout for screen in case.screens],
    )
    return outputs.logits_btv[0]


def assert_same_logits(got_tv: np.ndarray, expected_tv: np.ndarray) -> None:
    """Of the largest logit: 1e-4 is the bar, 1e-6 is usual."""
    assert np.abs(got_tv - expected_tv).max() < 1e-4 * np.abs(expected_tv).max()


# ------------------------------------------------------------------------------- directories


@pytest.mark.parametrize("name", CONFIGS)
def test_save_of_a_loaded_directory_holds_the_same_tensors_and_transformers_reads_it(
    name, tmp_path
):
    from transformers import Qwen3VLForConditionalGeneration

    policy = world.policy_of(name)
    loading.save_model(FAMILY, world.merged(policy), tmp_path)
    before, after = (
        load_file(directory / "model.safetensors")
        for directory in (world.directory_of(name), tmp_path)
    )
    assert before.keys() == after.keys()
    for tensor, array in before.items():
        np.testing.assert_array_equal(array, after[tensor], err_msg=tensor)
    reference, info = Qwen3VLForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info.values()), info  # nothing missing, unexpected or of another shape
    for tensor, value in reference.state_dict().items():
        expected = world.reference_of(name).state_dict()[tensor]
        np.testing.assert_array_equal(value, expected, err_msg=tensor)


def test_load_in_shards_that_repeat_the_tied_head_gives_the_same(tmp_path):
    directory = world.directory_of("plain")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(directory / name, tmp_path)
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    got = loading.load(tmp_path, lora=None, seed=0)
    expected = world.policy_of("plain")
    jax.tree.map(np.testing.assert_array_equal, got.trainable, expected.trainable)


def test_load_everything_that_does_not_fit_is_in_one_line(tmp_path):
    directory = world.directory_of("plain")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.language_model.layers.1.self_attn.q_norm.weight"]
    del tensors["model.visual.deepstack_merger_list.1.norm.bias"]
    tensors["model.visual.deepstack_merger_list.2.norm.bias"] = np.ones(128, np.float32)
    tensors["model.visual.pos_embed.weight"] = np.ones((25, 32), np.float32)
    tensors["model.visual.patch_embed.proj.weight"] = np.ones((32, 3, 2, 7, 7), np.float32)
    shutil.copytree(directory, tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelError) as error:
        loading.load(tmp_path / "model", lora=None, seed=0)
    message = str(error.value)
    assert "\n" not in message
    for part in (
        "missing model.language_model.layers.1.self_attn.q_norm.weight",
        "missing model.visual.deepstack_merger_list.1.norm.bias",
        "unexpected model.visual.deepstack_merger_list.2.norm.bias",
        "model.visual.pos_embed.weight is [25, 32], expected [36, 32]",
        "model.visual.patch_embed.proj.weight is [32, 3, 2, 7, 7], expected [32, 3, 2, 8, 8]",
    ):
        assert part in message


def test_save_merged_adapters_of_all_groups_transformers_gives_the_same_logits(tmp_path):
    from transformers import Qwen3VLForConditionalGeneration

    policy = with_random_adapters("odd", GROUPS)
    loading.save_model(FAMILY, world.merged(policy), tmp_path)
    reference = Qwen3VLForConditionalGeneration.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    case = world.make_case(policy.inputs, "three_images_of_different_sizes")
    assert_same_logits(our_logits(policy, case), their_logits(reference, policy, case))


def test_int8_moves_logits_a_little_and_stores_every_projection_in_8_bits():
    policy = loading.load(world.directory_of("odd"), lora=None, seed=0, quantize="int8")
    assert {
        "/".join(sharding.leaf_names(path)[-2:])
        for path, leaf in jax.tree.leaves_with_path(policy.trainable)
        if leaf.dtype == np.int8
    } == {f"{name}/kernel" for name in FAMILY.weights.projections}
    case = world.make_case(policy.inputs, "one_image")
    exact = our_logits(world.policy_of("odd"), case)
    difference = np.abs(our_logits(policy, case) - exact).max() / np.abs(exact).max()
    assert 1e-4 < difference < 0.05


# ---------------------------------------------------------------------------------- adapters

# Our targets, the same in peft's words, and the rest of the config.
CASES = {
    "text": (
        ("attention", "mlp"),
        r"model\.language_model\..*\.(q|k|v|o|gate|up|down)_proj",
        {"alpha": 6.0, "rslora": False},
    ),
    "all_linear": (GROUPS, "all-linear", {"alpha": 3.0, "rslora": True}),
    "vision": (
        ("vision", "merger"),
        r"model\.visual\.(blocks|merger|deepstack_merger_list)\..*(qkv|attn\.proj|linear_fc[12])",
        {"alpha": 4.5, "rslora": False},
    ),
    "some": (
        ("q_proj", "v_proj", "deepstack_fc2"),
        ["q_proj", "v_proj", *(f"deepstack_merger_list.{i}.linear_fc2" for i in range(3))],
        {"alpha": 8.0, "rslora": False},
    ),
}


def with_random_adapters(name: str, targets: tuple[str, ...], **options):
    lora = LoraConfig(rank=3, targets=targets, **{"alpha": 6.0, **options})
    policy = world.policy_of(name, lora)
    rng = np.random.default_rng(7)
    trainable = jax.tree.map(
        lambda x: (0.3 * rng.normal(size=x.shape)).astype(x.dtype), policy.trainable
    )
    return dataclasses.replace(policy, trainable=trainable)


@pytest.mark.parametrize("case_name", CASES)
def test_adapters_written_here_and_by_peft_are_read_by_the_other(case_name, tmp_path):
    import peft
    import torch

    targets, in_pefts_words, options = CASES[case_name]
    policy = with_random_adapters("odd", targets, **options)
    loading.save_adapter(policy, tmp_path / "ours", base_model=policy.path)
    reference = qwen3_vl_torch.make_reference("odd")
    wrapped = peft.PeftModel.from_pretrained(reference, tmp_path / "ours")
    case = world.make_case(policy.inputs, "one_image")
    assert_same_logits(our_logits(policy, case), their_logits(reference, policy, case))
    # What peft writes of it is what we wrote: no tensor was renamed, left out or made up by it.
    wrapped.save_pretrained(tmp_path / "again")
    ours, again = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "again")
    )
    assert ours.keys() == again.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, again[name], err_msg=name)

    # One of peft's own making.
    own = peft.get_peft_model(
        qwen3_vl_torch.make_reference("odd"),
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=3,
            lora_alpha=options["alpha"],
            use_rslora=options["rslora"],
            target_modules=in_pefts_words,
        ),
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    own.save_pretrained(tmp_path / "theirs")
    loaded = loading.load(
        policy.path,
        lora=LoraConfig(rank=3, targets=targets, **options),
        seed=0,
        adapter=tmp_path / "theirs",
    )
    assert_same_logits(our_logits(loaded, case), their_logits(own.base_model.model, loaded, case))


def test_adapter_of_some_layers_only_is_refused(tmp_path):
    policy = with_random_adapters("odd", ("merger",))
    loading.save_adapter(policy, tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].remove("deepstack_merger_list.1.linear_fc1")
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="but not every deepstack_fc1"):
        loading.load_adapter(tmp_path, FAMILY, policy.cfg)


# ---------------------------------------------------------------------------------- sharding


def loss_and_gradients(policy, mesh: jax.sharding.Mesh | None):
    """Through both towers, over 8 rows of text and 8 of patches; of adapters in all groups."""
    case = world.make_case(policy.inputs, "two_rows_with_padding")
    table_rows = case.vision["patch_segments_ip"].size // 4
    index_bt = case.rows.vision_index_bt
    rows = TokenRows(
        np.tile(case.rows.token_ids_bt, (4, 1)),
        np.tile(case.rows.positions_abt, (1, 4, 1)),
        np.tile(case.rows.segment_ids_bt, (4, 1)),
        np.concatenate([np.where(index_bt < 0, -1, index_bt + i * table_rows) for i in range(4)]),
    )
    vision = {name: np.concatenate([array] * 4) for name, array in case.vision.items()}
    batch = {**{name: x for name, x in rows._asdict().items() if x is not None}, "vision": vision}
    adapters, frozen, out = policy.trainable, policy.frozen, None
    if mesh is not None:
        rules = FAMILY.weights.sharding_rules
        placed = sharding.state_shardings(mesh, adapters, rules)
        adapters = jax.device_put(adapters, placed)
        frozen = jax.device_put(frozen, sharding.state_shardings(mesh, frozen, rules))
        batch = jax.device_put(batch, sharding.batch_shardings(mesh, batch))
        out = (None, placed)

    def loss(adapters, frozen, batch):
        model = nnx.merge(policy.graphdef, adapters, frozen)
        visual_me = model.encode_images(batch["vision"])
        rows = TokenRows(**{name: array for name, array in batch.items() if name != "vision"})
        return (model.hidden(rows, visual_me) ** 2).mean()

    step = jax.jit(jax.value_and_grad(loss), out_shardings=out)
    if mesh is None:
        return jax.device_get(step(adapters, frozen, batch))
    with jax.set_mesh(mesh):
        return jax.device_get(step(adapters, frozen, batch))


def check_eight_devices() -> None:
    """The body of the test below, in a process of its own: the device count is fixed at start."""
    assert len(jax.devices()) == 8
    policy = with_random_adapters("plain", GROUPS)
    expected_loss, expected = loss_and_gradients(policy, None)
    loss, gradients = loss_and_gradients(policy, sharding.make_mesh(data=2, fsdp=2, model=2))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max()),
        gradients,
        expected,
    )


def test_eight_fake_devices_on_a_2x2x2_mesh_equal_one_device():
    done = on_eight_devices("check_eight_devices", "test_qwen3_vl_weights")
    assert done.returncode == 0, done.stderr[-3000:]
    # The compiler says so where two stated shardings force it to gather an activation whole.
    assert "Involuntary full rematerialization" not in done.stderr
