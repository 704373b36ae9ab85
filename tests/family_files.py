"""Directories and adapters of any published family (tests/oracles/), read and written by both.

Also int8 and a mesh of eight devices.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from tests import family_world as world
from tests.family_checks import GROUPS
from tests.oracles import reference_torch
from uirl_jax.families import loading
from uirl_jax.families.border import TokenRows
from uirl_jax.families.loading import PolicyModel
from uirl_jax.models import sharding
from uirl_jax.models.lora import LoraConfig


@jax.jit
def logits(model, rows, vision):
    return model.logits(model.hidden(rows, model.encode_images(vision)))


def our_logits(policy: PolicyModel, case: world.Case) -> np.ndarray:
    """Of the case's first row."""
    logits_btv = logits(world.merged(policy), case.rows, case.vision)
    return np.asarray(logits_btv)[0, : case.lengths[0]]


def their_logits(reference: Any, policy: PolicyModel, case: world.Case) -> np.ndarray:
    length = case.lengths[0]
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
    own = peft.get_peft_model(
        reference_torch.make_reference(name),
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
        for key, parameter in own.named_parameters():
            if "lora_" in key:
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
