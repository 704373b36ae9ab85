"""Episodes of any published family (tests/oracles/), played greedily by the engine.

Contexts enter in chunks that end inside images, and prefixes are reused; tokens and logprobs are
compared with transformers' generate and with the learner's.
"""

import asyncio

import jax
import numpy as np
import torch

from tests import family_world as world
from tests.oracles import reference_torch
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest, SampleResult
from uirl_jax.families.border import PlacedScreen, TokenRows
from uirl_jax.families.chat import Vocabulary
from uirl_jax.families.screens import vision_index
from uirl_jax.models import scoring

FORBIDDEN = tuple(range(288, 292))
# Chunks of 6 tokens: an image of 15 enters the cache in three calls or four.
CFG = EngineConfig(
    batch_sizes=(2,),
    context_lengths=(64,),
    prefill_rows=(2,),
    prefill_lengths=(6,),
    image_rows=(1,),
    image_row_patches=60,
    max_new_tokens=8,
)
TURNS = 3


def turn_of(inputs, number: int, before: SampleRequest | None, sampled: list[int]) -> SampleRequest:
    """A context that goes on from the one before, with a new screen and words around it."""
    rng = np.random.default_rng(number)
    screen = world.screen_of(inputs, ((5, 3), (3, 2), (1, 4))[number], number)
    words = rng.integers(3, 280, 7).tolist()
    ids = [*words[:3], 288, *[world.IMAGE_TOKEN] * screen.tokens, 289, *words[3:]]
    earlier = [] if before is None else [*before.context_ids.tolist(), *sampled]
    return SampleRequest(
        context_ids=np.array([*earlier, *ids], np.int32),
        screens=(*(() if before is None else before.screens), screen),
        max_new_tokens=5,
        temperature=0.0,
        seed=number,
        episode="one",
    )


def play(policy) -> tuple[list[tuple[SampleRequest, SampleResult]], dict[str, float]]:
    """Three turns of an episode, each continuing what the engine holds of the one before."""

    async def run():
        turns, before, sampled = [], None, []
        engine = Engine(policy, Vocabulary((1,), FORBIDDEN), CFG)
        async with engine, asyncio.timeout(600):
            for number in range(TURNS):
                before = turn_of(policy.inputs, number, before, sampled)
                result = await engine.sample(before)
                sampled = list(result.token_ids)
                turns.append((before, result))
        return turns, engine.metrics()

    return asyncio.run(run())


def generated(reference, inputs, asked: SampleRequest) -> list[int]:
    reference_torch.reset(reference)
    screens = list(asked.screens)
    out_bt = reference.generate(
        **reference_torch.model_inputs(
            reference.config.model_type,
            asked.context_ids[None],
            world.pixels_of(inputs, screens),
            [screen.layout for screen in screens],
        ),
        attention_mask=torch.ones((1, len(asked.context_ids)), dtype=torch.long),
        do_sample=False,
        suppress_tokens=list(FORBIDDEN),
        eos_token_id=1,
        pad_token_id=0,
        max_new_tokens=asked.max_new_tokens,
    )
    return out_bt[0, len(asked.context_ids) :].tolist()


def assert_greedy_tokens_equal_generate(config: str) -> None:
    policy = world.policy_of(config)
    turns, metrics = play(policy)
    for number, (asked, result) in enumerate(turns):
        expected = generated(world.reference_of(config), policy.inputs, asked)
        assert list(result.token_ids) == expected, f"turn {number}"
    contexts = [len(asked.context_ids) for asked, _ in turns]
    assert min(len(result.token_ids) for _, result in turns) > 1
    # Each turn computes what is new of its context: nothing of an image twice.
    assert metrics["engine/cached_tokens"] > contexts[0] + contexts[1]
    assert metrics["engine/images_encoded"] == TURNS
    assert metrics["engine/prefill_tokens"] < contexts[-1] + TURNS


def assert_logprobs_equal_the_learners(config: str) -> None:
    policy = world.policy_of(config)
    (asked, result), *_ = reversed(play(policy)[0])
    ids_t = np.concatenate([asked.context_ids, result.token_ids]).astype(np.int32)
    placed = [PlacedScreen(screen, row, 0, 1) for row, screen in enumerate(asked.screens)]
    packed = policy.inputs.pack_screens(placed, TURNS, 60)
    rows_v = np.concatenate(
        [
            first + np.arange(screen.tokens)
            for first, screen in zip(packed.first_tokens, asked.screens, strict=True)
        ]
    )
    rows = TokenRows(
        ids_t[None],
        policy.inputs.positions(ids_t, asked.screens)[:, None],
        np.ones_like(ids_t)[None],
        vision_index(ids_t, world.IMAGE_TOKEN, rows_v)[None],
    )

    @jax.jit
    def logprobs(model):
        x_btd = model.hidden(rows, model.encode_images(packed.arrays))
        forbidden_v = np.isin(np.arange(world.VOCAB), FORBIDDEN)
        return scoring.token_logprobs(model, x_btd, rows.token_ids_bt, forbidden_v=forbidden_v)

    expected_s = np.asarray(logprobs(world.merged(policy)))[0, len(asked.context_ids) :]
    np.testing.assert_allclose(result.full_logprobs, expected_s, atol=1e-4)
