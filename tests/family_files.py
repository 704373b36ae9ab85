"""Directories and adapters of any published family (tests/oracles/), read and written by both.

Also int8 and a mesh of eight devices.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests import family_world as world
from tests.family_checks import GROUPS
from tests.oracles import florence2_torch, reference_torch
from uirl_jax.errors import ModelError
from uirl_jax.families import loading
from uirl_jax.families.border import TokenRows
from uirl_jax.families.loading import PolicyModel
from uirl_jax.models import sharding, weights
from uirl_jax.models.lora import LoraConfig


@jax.jit
def logits(model, rows, vision):
    return model.logits(model.hidden(rows, model.encode_images(vision)))


def our_logits(policy: PolicyModel, case: world.Case) -> np.ndarray:
    """Of the case's first row, from the first token that has any."""
    logits_btv = logits(world.merged(policy), case.rows, case.vision)
    return np.asarray(logits_btv)[0, case.firsts[0] : case.lengths[0]]


def their_logits(reference: Any, policy: PolicyModel, case: world.Case) -> np.ndarray:
    length = case.lengths[0]
    if policy.family.model_type == "florence2":
        ids_t = case.rows.token_ids_bt[0, :length]
        pixels = world.pixels_of(policy.inputs, case.screens)
        return florence2_torch.run_row(reference, ids_t, pixels).logits_tv
    outputs = reference_torch.run(
        reference,
        case.rows.token_ids_bt[:1, :length],
        case.rows.segment_ids_bt[:1, :length],
        world.pixels_of(policy.inputs, case.screens),
        [screen.layout for screen in case.screens],
        case.rows.turn_ids_bt[:1, :length],
    )
    return outputs.logits_btv[0]


def assert_same_logits(got_tv: np.ndarray, expected_tv: np.ndarray) -> None:
    """Of the largest logit: 1e-4 is the bar, 1e-6 is usual."""
    assert np.abs(got_tv - expected_tv).max() < 1e-4 * np.abs(expected_tv).max()


def assert_saved_again_is_the_same(name: str, tmp_path: Path) -> None:
    """A loaded directory that is saved has the same tensors, and transformers reads it."""
    policy = world.policy_of(name)
    loading.save_model(policy.family, world.merged(policy), tmp_path)
    before, after = (
        load_file(directory / "model.safetensors")
        for directory in (world.directory_of(name), tmp_path)
    )
    assert before.keys() == after.keys()
    for tensor, array in before.items():
        np.testing.assert_array_equal(array, after[tensor], err_msg=tensor)
    reference, info = reference_torch.model_class(name).from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info.values()), info  # nothing missing, unexpected or of another shape
    for tensor, value in reference.state_dict().items():
        expected = world.reference_of(name).state_dict()[tensor]
        np.testing.assert_array_equal(value, expected, err_msg=tensor)


def as_saved_by_transformers_5(published: str) -> str:
    """A tensor's name in a file that transformers 5 writes of a model that it made."""
    return published.replace("vision_tower.vision_model.", "vision_tower.")


def as_of_transformers_4_52(published: str) -> str:
    """A tensor's name in a file that transformers 4.52 writes."""
    name = published.replace("language_model.lm_head", "lm_head")
    name = name.replace("language_model.model.", "model.language_model.")
    return re.sub(r"^(vision_tower|multi_modal_projector)\.", r"model.\1.", name)


def assert_shards_give_the_same(
    name: str, buffers: dict[str, np.ndarray], tmp_path: Path, renamed: Callable[[str], str] = str
) -> None:
    """The directory in two shards, in other names and with buffers that older versions saved."""
    directory = world.directory_of(name)
    published = world.policy_of(name).family.weights.published_name
    tensors = load_file(directory / "model.safetensors")
    tensors = {renamed(published(stored)): tensor for stored, tensor in tensors.items()} | buffers
    for file in ("config.json", "preprocessor_config.json"):
        shutil.copy(directory / file, tmp_path)
    listed = sorted(tensors)
    files = {"a.safetensors": listed[::2], "b.safetensors": listed[1::2]}
    for file, part in files.items():
        save_file({stored: tensors[stored] for stored in part}, tmp_path / file)
    index = {"weight_map": {stored: file for file, part in files.items() for stored in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    got = loading.load(tmp_path, lora=None, seed=0)
    jax.tree.map(np.testing.assert_array_equal, got.trainable, world.policy_of(name).trainable)


def assert_tied_head_may_be_repeated(name: str, embedding: str, head: str, tmp_path: Path) -> None:
    shutil.copytree(world.directory_of(name), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    assert head not in tensors
    save_file({**tensors, head: tensors[embedding]}, path)
    got = loading.load(tmp_path / "model", lora=None, seed=0)
    jax.tree.map(np.testing.assert_array_equal, got.trainable, world.policy_of(name).trainable)


def assert_refused_in_one_line(
    name: str,
    *,
    missing: Sequence[str],
    others: dict[str, np.ndarray],
    says: Sequence[str],
    tmp_path: Path,
) -> None:
    """The directory without some tensors, with others in addition or in place of its own.

    Args:
      says: of the others; what is missing is said of each.
    """
    directory = world.directory_of(name)
    published = world.policy_of(name).family.weights.published_name
    stored = load_file(directory / "model.safetensors")
    tensors = {published(key): tensor for key, tensor in stored.items()}
    for key in missing:
        del tensors[key]
    shutil.copytree(directory, tmp_path / "model")
    save_file({**tensors, **others}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelError) as error:
        loading.load(tmp_path / "model", lora=None, seed=0)
    message = str(error.value)
    assert "\n" not in message
    for part in (*(f"missing {key}" for key in missing), *says):
        assert part in message


def assert_processor_refused_in_one_line(model_dir: Path, fields: dict, message: str) -> None:
    """Args: fields: of preprocessor_config.json; message: a regular expression."""
    world.change(model_dir / "preprocessor_config.json", **fields)
    with pytest.raises(ModelError, match=message) as error:
        loading.load(model_dir, lora=None, seed=0)
    assert "\n" not in str(error.value)
    assert "preprocessor_config.json" in str(error.value)


def assert_merged_adapters_give_the_same_logits(name: str, tmp_path: Path) -> None:
    policy = with_random_adapters(name, GROUPS)
    loading.save_model(policy.family, world.merged(policy), tmp_path)
    reference = reference_torch.model_class(name).from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    case = world.make_case(policy.inputs, "three_images_of_different_sizes")
    assert_same_logits(our_logits(policy, case), their_logits(reference, policy, case))


def assert_int8_moves_logits_a_little(name: str) -> None:
    """And every projection, no other leaf, is stored in 8 bits."""
    policy = loading.load(world.directory_of(name), lora=None, seed=0, quantize="int8")
    assert {
        "/".join(sharding.leaf_names(path)[-2:])
        for path, leaf in jax.tree.leaves_with_path(policy.trainable)
        if leaf.dtype == np.int8
    } == {f"{name}/kernel" for name in policy.family.weights.projections}
    case = world.make_case(policy.inputs, "one_image")
    exact = our_logits(world.policy_of(name), case)
    difference = np.abs(our_logits(policy, case) - exact).max() / np.abs(exact).max()
    assert 1e-4 < difference < 0.05


def with_random_adapters(name: str, targets: tuple[str, ...], **options: Any) -> PolicyModel:
    lora = LoraConfig(rank=3, targets=targets, **{"alpha": 6.0, **options})
    policy = world.policy_of(name, lora)
    rng = np.random.default_rng(7)
    trainable = jax.tree.map(
        lambda x: (0.1 * rng.normal(size=x.shape)).astype(x.dtype), policy.trainable
    )
    return dataclasses.replace(policy, trainable=trainable)


def assert_adapters_are_read_by_the_other(
    name: str,
    targets: tuple[str, ...],
    in_pefts_words: str | list[str],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """One that is written here, and one of peft's own making; both give the same logits."""
    import peft
    import torch

    policy = with_random_adapters(name, targets, **options)
    loading.save_adapter(policy, tmp_path / "ours", base_model=policy.path)
    reference = reference_torch.make_reference(name)
    wrapped = peft.PeftModel.from_pretrained(reference, tmp_path / "ours")
    case = world.make_case(policy.inputs, "one_image")
    assert_same_logits(our_logits(policy, case), their_logits(reference, policy, case))
    # What peft writes of it is what we wrote: no tensor was renamed, left out or made up by it.
    wrapped.save_pretrained(tmp_path / "again")
    ours, again = (
        load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "again")
    )
    assert ours.keys() == again.keys()
    for key, tensor in ours.items():
        np.testing.assert_array_equal(tensor, again[key], err_msg=key)

    # One of peft's own making.
    written = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    own = peft.get_peft_model(
        reference_torch.make_reference(name),
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=3,
            lora_alpha=options["alpha"],
            use_rslora=options["rslora"],
            target_modules=in_pefts_words,
            trainable_token_indices=written.get("trainable_token_indices"),
        ),
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in own.named_parameters():
            if "lora_" in key or "trainable_tokens" in key:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    own.save_pretrained(tmp_path / "theirs")
    loaded = loading.load(
        policy.path,
        lora=LoraConfig(rank=3, targets=targets, **options),
        seed=0,
        adapter=tmp_path / "theirs",
    )
    assert_same_logits(our_logits(loaded, case), their_logits(own.base_model.model, loaded, case))


def loss_and_gradients(policy: PolicyModel, mesh: jax.sharding.Mesh | None) -> Any:
    """Through both towers, over 8 rows of text and 8 of patches; of adapters in all groups."""
    case = world.make_case(policy.inputs, "two_rows_with_padding")
    image_rows = len(next(iter(case.vision.values())))
    table_rows = image_rows * policy.inputs.row_tokens(world.ROW_PATCHES)
    index_bt = case.rows.vision_index_bt
    rows = TokenRows(
        np.tile(case.rows.token_ids_bt, (4, 1)),
        np.tile(case.rows.positions_abt, (1, 4, 1)),
        np.tile(case.rows.segment_ids_bt, (4, 1)),
        np.concatenate([np.where(index_bt < 0, -1, index_bt + i * table_rows) for i in range(4)]),
        turn_ids_bt=np.tile(case.rows.turn_ids_bt, (4, 1)),
    )
    vision = {name: np.concatenate([array] * 4) for name, array in case.vision.items()}
    batch = {**{name: x for name, x in rows._asdict().items() if x is not None}, "vision": vision}
    adapters, frozen, out = policy.trainable, policy.frozen, None
    if mesh is not None:
        rules = policy.family.weights.sharding_rules
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


def assert_mesh_of_eight_equals_one_device(name: str) -> None:
    assert len(jax.devices()) == 8
    policy = with_random_adapters(name, GROUPS)
    expected_loss, expected = loss_and_gradients(policy, None)
    loss, gradients = loss_and_gradients(policy, sharding.make_mesh(data=2, fsdp=2, model=2))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max()),
        gradients,
        expected,
    )


def assert_adapters_in_older_names_are_read(
    name: str, renamed: Callable[[str], str], tmp_path: Path
) -> None:
    """Args: renamed: a published module's name -> the older one."""
    policy = with_random_adapters(name, GROUPS)
    table = policy.family.weights
    loading.save_adapter(policy, tmp_path)
    path, start = tmp_path / "adapter_model.safetensors", "base_model.model."
    older = {}
    for key, tensor in load_file(path).items():
        module, _, rest = key.removeprefix(start).partition(".lora_")
        older[f"{start}{renamed(table.published_name(module))}.lora_{rest}"] = tensor
    assert older.keys() != load_file(path).keys()
    save_file(older, path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    last = {key.partition(".lora_")[0].rpartition(".")[2] for key in older}
    config["target_modules"] = sorted(last)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = loading.load_adapter(tmp_path, policy.family, policy.cfg)
    expected = weights.adapters_to_numpy(policy.trainable)
    assert found.arrays.keys() == expected.keys()
    for key, array in found.arrays.items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)


def assert_adapter_that_lacks_a_block_is_refused(
    name: str, target: str, module: str, tmp_path: Path
) -> None:
    """Args: module: of the block that is left out, such as layers.1.mlp.fc1."""
    policy = with_random_adapters(name, (target,))
    loading.save_adapter(policy, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = {key: x for key, x in load_file(path).items() if f".{module}." not in key}
    assert len(tensors) < len(load_file(path))
    save_file(tensors, path)
    said = rf"missing .*{re.escape(module)}\.lora_A"
    with pytest.raises(ModelError, match=said) as error:
        loading.load_adapter(tmp_path, policy.family, policy.cfg)
    assert "\n" not in str(error.value)
