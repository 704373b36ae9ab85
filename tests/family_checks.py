"""What every published family (tests/oracles/) is compared in; the tests of a family call it.

Forward pass block by block, packed rows, shared prompts, loss and LoRA gradients, in float32.
"""

import dataclasses
import functools
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from tests import family_world as world
from tests.oracles import florence2_torch, reference_torch
from uirl_jax.families import two_towers
from uirl_jax.families.border import TokenRows
from uirl_jax.families.loading import PolicyModel
from uirl_jax.models import peft_adapters, scoring
from uirl_jax.models.blocks import Remat
from uirl_jax.models.lora import LoraConfig

GROUPS = ("attention", "mlp", "vision", "merger")  # every projection of a model


@functools.cache
def _all_outputs(model_type: str):
    own = importlib.import_module(f"uirl_jax.families.{model_type}.model")

    @jax.jit
    def run(model, rows, vision):
        visual_me = model.encode_images(vision)
        return (
            own.vision_block_outputs(model, vision),
            visual_me,
            two_towers.block_outputs(model, rows, visual_me),
            model.logits(model.hidden(rows, visual_me)),
        )

    return run


def assert_close_to_largest(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Within 1e-5 of the tensor's largest value; 1e-6 is usual, so a wrong angle cannot hide."""
    assert got.shape == expected.shape
    worst = np.abs(got - expected).max() / np.abs(expected).max()
    assert worst < 1e-5, f"{what}: {worst:.1e} of the largest value"


def assert_forward_equals_transformers(name: str, config: str) -> None:
    """Every block, visual token and logit of a case."""
    policy = world.policy_of(config)
    case = world.make_case(policy.inputs, name)
    rows, width = len(case.lengths), max(case.lengths)
    expected = reference_torch.run(
        world.reference_of(config),
        case.rows.token_ids_bt[:rows, :width],
        case.rows.segment_ids_bt[:rows, :width],
        world.pixels_of(policy.inputs, case.screens),
        [screen.layout for screen in case.screens],
        case.rows.turn_ids_bt[:rows, :width],
    )
    vision_lipd, visual_me, text_lbtd, logits_btv = map(
        np.asarray,
        _all_outputs(policy.family.model_type)(world.merged(policy), case.rows, case.vision),
    )
    # Padding holds nothing of use, but nothing that spreads either.
    assert np.isfinite(vision_lipd).all()
    assert np.isfinite(text_lbtd).all()
    if case.screens:
        vision_lpd = np.concatenate([vision_lipd[:, row, span] for row, span in case.spans], axis=1)
        for layer, expected_pd in enumerate(expected.vision_blocks_lpd):
            assert_close_to_largest(vision_lpd[layer], expected_pd, f"vision block {layer}")
        dim = policy.cfg.hidden_size
        levels = visual_me.shape[1] // dim
        assert visual_me.shape[1] == expected.visual_me.shape[1] == levels * dim
        for level in range(levels):
            columns = slice(level * dim, (level + 1) * dim)
            assert_close_to_largest(
                visual_me[case.table_rows, columns],
                expected.visual_me[:, columns],
                f"vector {level} of visual tokens",
            )
    for row, length in enumerate(case.lengths):
        np.testing.assert_array_equal(
            case.rows.positions_abt[:, row, :length], expected.positions_abt[:, row, :length]
        )
        for layer, expected_btd in enumerate(expected.text_blocks_lbtd):
            assert_close_to_largest(
                text_lbtd[layer, row, :length],
                expected_btd[row, :length],
                f"row {row} after text block {layer}",
            )
        assert_close_to_largest(
            logits_btv[row, :length], expected.logits_btv[row, :length], f"logits of row {row}"
        )


def assert_packed_segments_equal_rows_of_their_own(config: str) -> None:
    policy = world.policy_of(config)
    model = world.merged(policy)
    case = world.make_case(policy.inputs, "two_rows_with_padding")
    visual_me = jax.jit(type(model).encode_images)(model, case.vision)
    hidden = jax.jit(type(model).hidden)
    alone_btd = hidden(model, case.rows, visual_me)
    first, second = case.lengths
    together = TokenRows(
        **{
            name: np.concatenate([array[..., 0, :first], array[..., 1, :second]], -1)[..., None, :]
            for name, array in given(case.rows).items()
        }
    )
    together.segment_ids_bt[0, first:] = 2
    packed_btd = hidden(model, together, visual_me)
    np.testing.assert_allclose(packed_btd[0, :first], alone_btd[0, :first], atol=1e-5)
    np.testing.assert_allclose(packed_btd[0, first:], alone_btd[1, :second], atol=1e-5)


def assert_two_replies_behind_one_shared_prompt_equal_two_rows(config: str) -> None:
    """[prompt 1 2], both replies attend to the prompt, whose screen adds its levels once."""
    policy = world.policy_of(config)
    model = world.merged(policy)
    case = world.make_case(policy.inputs, "one_image")
    visual_me = jax.jit(type(model).encode_images)(model, case.vision)
    hidden = jax.jit(type(model).hidden)
    prompt = case.lengths[0]
    rng = np.random.default_rng(3)
    replies = [rng.integers(3, 280, count).astype(np.int32) for count in (4, 6)]
    next_position = case.rows.positions_abt[:, 0, :prompt].max() + 1
    alone, parts = [], []
    for number, reply in enumerate(replies):
        part = TokenRows(
            reply[None],
            np.broadcast_to(
                next_position + np.arange(len(reply)),
                (policy.inputs.position_axes, 1, len(reply)),
            ),
            np.full((1, len(reply)), 2 + number),
            np.full((1, len(reply)), -1, np.int32),
            turn_ids_bt=np.full((1, len(reply)), 1 + number),
        )
        parts.append(part)
        same_segment = part._replace(segment_ids_bt=np.ones_like(reply)[None])
        row = _joined([_prompt_of(case, prompt), same_segment])
        alone.append(hidden(model, row, visual_me)[0, prompt:])
    row = _joined([_prompt_of(case, prompt), *parts])
    prefix_bt = np.ones_like(row.segment_ids_bt)
    shared_btd = hidden(model, row._replace(prefix_segments_bt=prefix_bt), visual_me)
    np.testing.assert_allclose(shared_btd[0, prompt : prompt + 4], alone[0], atol=1e-5)
    np.testing.assert_allclose(shared_btd[0, prompt + 4 :], alone[1], atol=1e-5)


def given(rows: TokenRows) -> dict[str, np.ndarray]:
    """The fields that are there, by name."""
    return {name: array for name, array in rows._asdict().items() if array is not None}


def _prompt_of(case: world.Case, length: int) -> TokenRows:
    rows = {name: array[..., :1, :length] for name, array in given(case.rows).items()}
    return TokenRows(**rows | {"turn_ids_bt": np.zeros((1, length), np.int32)})


def _joined(parts: list[TokenRows]) -> TokenRows:
    return TokenRows(
        **{
            name: np.concatenate([getattr(part, name) for part in parts], axis=-1)
            for name in given(parts[0])
        }
    )


def with_random_adapters(policy: PolicyModel, seed: int = 7) -> PolicyModel:
    """Of a size at which rounding stays small: with three times as much, Qwen2.5-VL's gradients are
    a thousand times larger, and two float32 programs differ by 4e-3 of them."""
    rng = np.random.default_rng(seed)
    return dataclasses.replace(
        policy,
        trainable=jax.tree.map(
            lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), policy.trainable
        ),
    )


_LORA = LoraConfig(rank=3, alpha=6.0, targets=GROUPS)


def assert_loss_and_gradients_equal_pefts(config: str, remat: Remat, tmp_path: Path) -> None:
    """Of adapters in both towers and all mergers; cross-entropy of all words but the first."""
    import peft
    import torch

    policy = with_random_adapters(world.policy_of(config, _LORA, remat))
    case = world.make_case(policy.inputs, "three_images_of_different_sizes")
    length = case.lengths[0]
    ids_t = case.rows.token_ids_bt[0, :length]
    words_t = np.flatnonzero(ids_t < 280)[1:]

    table = policy.family.weights
    peft_adapters.save_adapter(world.merged(policy), tmp_path / "adapters", table)
    wrapped = peft.PeftModel.from_pretrained(
        reference_torch.make_reference(config), tmp_path / "adapters", is_trainable=True
    )
    pixels = world.pixels_of(policy.inputs, case.screens)
    if policy.family.model_type == "florence2":
        words_t = np.arange(length - world.SAMPLED, length)  # of the decoder
        logits_tv = wrapped(**florence2_torch.model_inputs(ids_t[None], pixels, [])).logits[0]
        before_t = words_t - 1 - case.firsts[0]
        expected = torch.nn.functional.cross_entropy(
            logits_tv[before_t], torch.tensor(ids_t[words_t]).long()
        )
    else:
        labels_t = np.full(length, -100)
        labels_t[words_t] = ids_t[words_t]
        expected = wrapped(
            **reference_torch.model_inputs(
                policy.family.model_type,
                ids_t[None],
                pixels,
                [screen.layout for screen in case.screens],
                case.rows.turn_ids_bt[:1, :length],
            ),
            labels=torch.tensor(labels_t[None]),
        ).loss
    expected.backward()

    @jax.jit
    def loss_and_gradient(adapters):
        def loss(adapters):
            model = nnx.merge(policy.graphdef, adapters, policy.frozen)
            x_btd = model.hidden(case.rows, model.encode_images(case.vision))
            logprobs_bt = scoring.token_logprobs(model, x_btd, case.rows.token_ids_bt)
            return -logprobs_bt[0, words_t].mean()

        return jax.value_and_grad(loss)(adapters)

    loss, gradient = loss_and_gradient(policy.trainable)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    # Gradients have the names of their adapters where they are written in their place.
    model = nnx.merge(policy.graphdef, gradient, policy.frozen)
    peft_adapters.save_adapter(model, tmp_path / "gradient", table)
    ours = load_file(tmp_path / "gradient" / "adapter_model.safetensors")
    theirs = {
        name.replace(".default", ""): parameter.grad.numpy()
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    assert ours.keys() == theirs.keys()
    largest = max(np.abs(array).max() for array in theirs.values())
    for name, array in theirs.items():
        assert np.abs(array).max() > 1e-4 * largest, f"{name}: hardly a gradient to compare"
        worst = np.abs(ours[name] - array).max() / np.abs(array).max()
        assert worst < 1e-4, f"{name}: {worst:.1e} of the largest value"
