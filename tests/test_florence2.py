"""Florence-2's forward pass against transformers, in float32; packed rows, shared prompts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import family_world as world
from tests.family_checks import assert_close_to_largest, given
from tests.oracles import florence2_torch
from uirl_jax.families.border import TokenRows
from uirl_jax.families.florence2 import model as own


@jax.jit
def _all_outputs(model, rows, vision):
    visual_md = model.encode_images(vision)
    return (
        own.vision_block_outputs(model, vision),
        visual_md,
        own.text_block_outputs(model, rows, visual_md),
        model.logits(model.hidden(rows, visual_md)),
    )


@pytest.mark.parametrize("config", florence2_torch.CONFIGS)
@pytest.mark.parametrize("name", world.CASES)
def test_every_block_visual_token_and_logit_equals_transformers(name, config):
    policy = world.policy_of(config)
    case = world.make_case(policy.inputs, name)
    vision, visual_md, text, logits_btv = jax.tree.map(
        np.asarray, _all_outputs(world.merged(policy), case.rows, case.vision)
    )
    for array in jax.tree.leaves((vision, text, logits_btv)):
        assert np.isfinite(array).all()  # padding holds nothing of use, but nothing that spreads
    blocks_ipd = [block_ipd for stage in vision for block_ipd in stage]
    done = 0
    for row, (length, first) in enumerate(zip(case.lengths, case.firsts, strict=True)):
        ids_t = case.rows.token_ids_bt[row, :length]
        images = (ids_t == world.IMAGE_TOKEN).sum() // policy.inputs.tokens
        own_images = slice(done, done + images)
        pixels = world.pixels_of(policy.inputs, case.screens[own_images])
        expected = florence2_torch.run_row(world.reference_of(config), ids_t, pixels)
        assert len(expected.vision_lipd) == len(blocks_ipd) * bool(pixels)
        for layer, block_ipd in enumerate(expected.vision_lipd):
            got_ipd = blocks_ipd[layer][own_images]
            assert_close_to_largest(got_ipd, block_ipd, f"vision block {layer}")
        if pixels:
            rows_m = case.table_rows[own_images.start * policy.inputs.tokens :]
            got_md = visual_md[rows_m[: len(expected.visual_md)]]
            assert_close_to_largest(got_md, expected.visual_md, "visual tokens")
        encoder_lbtd, decoder_lbtd = text
        for layer, block_td in enumerate(expected.encoder_lsd):
            got_td = encoder_lbtd[layer, row, :first]
            assert_close_to_largest(got_td, block_td, f"row {row} after encoder block {layer}")
        for layer, block_td in enumerate(expected.decoder_ltd):
            got_td = decoder_lbtd[layer, row, first:length]
            assert_close_to_largest(got_td, block_td, f"row {row} after decoder block {layer}")
        got_tv = logits_btv[row, first:length]
        assert_close_to_largest(got_tv, expected.logits_tv, f"logits of row {row}")
        done += images


@functools.cache
def _world(config: str, name: str):
    """The model, a case, its visual tokens, and `hidden` of it."""
    policy = world.policy_of(config)
    case = world.make_case(policy.inputs, name)
    model = world.merged(policy)
    visual_md = jax.jit(type(model).encode_images)(model, case.vision)
    return model, case, visual_md, jax.jit(type(model).hidden)


def test_hidden_packed_segments_with_screens_equal_rows_of_their_own():
    model, case, visual_md, hidden = _world("florence2_odd", "two_rows_with_padding")
    alone_btd = hidden(model, case.rows, visual_md)
    first, second = case.lengths
    together = TokenRows(
        **{
            name: np.concatenate([array[..., 0, :first], array[..., 1, :second]], -1)[..., None, :]
            for name, array in given(case.rows).items()
        }
    )
    together.segment_ids_bt[0, first:] = 2
    packed_btd = hidden(model, together, visual_md)
    own_first, own_second = case.firsts
    np.testing.assert_allclose(
        packed_btd[0, own_first:first], alone_btd[0, own_first:first], atol=1e-5
    )
    np.testing.assert_allclose(
        packed_btd[0, first + own_second :], alone_btd[1, own_second:second], atol=1e-5
    )


def test_hidden_sequences_that_begin_with_the_last_token_of_a_shared_prompt_equal_rows():
    """As the learner packs a group: [prompt without its last token | last, reply | last, reply]."""
    model, case, visual_md, hidden = _world("florence2_odd", "one_image")
    prompt = case.firsts[0] + 2  # and </s> <s>, the decoder's
    row = {name: array[..., 0, :prompt] for name, array in given(case.rows).items()}
    rng = np.random.default_rng(3)
    replies = [rng.integers(3, 280, count).astype(np.int32) for count in (4, 6)]

    def part(segment: int, reply: np.ndarray | None, first: int) -> dict[str, np.ndarray]:
        """Of the prompt from `first` on, and a reply; None: but its last token."""
        end = prompt - 1 if reply is None else prompt
        more = np.zeros(0, np.int32) if reply is None else reply
        kept = {name: array[..., first:end] for name, array in row.items()}
        positions_at = kept["positions_abt"]
        next_t = row["positions_abt"][:, -1:] + 1 + np.arange(len(more))
        return {
            "token_ids_bt": np.concatenate([kept["token_ids_bt"], more]),
            "positions_abt": np.concatenate([positions_at, next_t], -1).astype(np.int32),
            "segment_ids_bt": np.full(end - first + len(more), segment, np.int32),
            "vision_index_bt": np.concatenate([kept["vision_index_bt"], np.full(len(more), -1)]),
            "turn_ids_bt": np.concatenate(
                [np.zeros(end - first, int), np.full(len(more), segment)]
            ),
        }

    def joined(parts: list[dict[str, np.ndarray]]) -> TokenRows:
        names = parts[0].keys()
        arrays = {name: np.concatenate([part[name] for part in parts], -1) for name in names}
        return TokenRows(**{n: a[..., None, :].astype(np.int32) for n, a in arrays.items()})

    shared = joined(
        [part(1, None, 0), part(2, replies[0], prompt - 1), part(3, replies[1], prompt - 1)]
    )
    prefix_bt = np.ones_like(shared.segment_ids_bt)
    shared_td = hidden(model, shared._replace(prefix_segments_bt=prefix_bt), visual_md)[0]
    start = prompt - 1
    for reply in replies:
        alone_td = hidden(model, joined([part(1, reply, 0)]), visual_md)[0]
        end = start + 1 + len(reply)
        np.testing.assert_allclose(shared_td[start:end], alone_td[prompt - 1 :], atol=1e-5)
        start = end
    np.testing.assert_allclose(shared_td[prompt - 2], alone_td[prompt - 2], atol=1e-5)


@pytest.mark.parametrize("config", ["florence2", "florence2_window"])
@pytest.mark.parametrize("in_one_call", [2, 4])
def test_extend_equals_hidden(config, in_one_call):
    """A context with so many of the decoder's tokens at once, then one token after the other."""
    model, case, visual_md, hidden = _world(config, "two_rows_with_padding")
    expected_btd = np.asarray(hidden(model, case.rows, visual_md))
    cache = own.Florence2.init_cache(model.cfg, 3, 48, jnp.dtype("float32"))
    slot_b = np.array([2, 0])
    context_b = np.array(case.firsts) + 2
    first_b = np.array(case.firsts) + in_one_call
    width = first_b.max()
    rows = {name: array[..., :width] for name, array in given(case.rows).items()}
    extend = jax.jit(type(model).extend, static_argnames="span")
    x_btd, cache = extend(
        model,
        *(rows["token_ids_bt"], visual_md, rows["vision_index_bt"], rows["positions_abt"]),
        *(cache, np.zeros(2, np.int32)),
        prefix_b=context_b,
        slot_b=slot_b,
        span=40,
    )
    for row, (first, end) in enumerate(zip(case.firsts, first_b, strict=True)):
        np.testing.assert_allclose(x_btd[row, first:end], expected_btd[row, first:end], atol=1e-5)
    # A context's last token comes again.
    at_b = first_b - 1
    rows_b = np.arange(2)
    while (at_b < case.lengths).all():
        x_b1d, cache = extend(
            model,
            *(case.rows.token_ids_bt[rows_b, at_b][:, None], None, None),
            *(case.rows.positions_abt[:, rows_b, at_b][..., None], cache, at_b),
            prefix_b=np.where(at_b < context_b, context_b, 0),
            slot_b=slot_b,
            span=40,
        )
        np.testing.assert_allclose(x_b1d[:, 0], expected_btd[rows_b, at_b], atol=1e-5)
        at_b = at_b + 1
