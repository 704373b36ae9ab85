"""The engine against a loop without a cache, the learner's logprobs, and its own promises."""

import asyncio
import contextlib
import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from tests import test_sharding
from uirl_jax import vision_inputs
from uirl_jax.engine import requests
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest, SampleResult
from uirl_jax.errors import ConfigError, PolicyError
from uirl_jax.models import qwen2_vl, scoring, sharding
from uirl_jax.models.lora import LoraConfig, LoRAParam

VOCAB, IMAGE_TOKEN, END_TOKEN = 64, 60, 1
FORBIDDEN = (60, 61, 62, 63)
ORACLE_TOKENS = 48  # the oracle pads every sequence to this, so that it compiles once
MODEL_CFG = qwen2_vl.Qwen2VLConfig.from_dict(
    {
        "model_type": "qwen2_vl",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "tie_word_embeddings": True,
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 61,
        "vision_start_token_id": 62,
        "vision_end_token_id": 63,
        "vision_config": {
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
        },
    }
)
GRIDS = {"a": (1, 4, 4), "b": (1, 4, 6), "c": (1, 2, 4)}  # 4, 6 and 2 visual tokens
CFG = EngineConfig(  # few sizes: each costs seconds to compile
    batch_sizes=(1, 4),
    context_lengths=(32,),
    prefill_rows=(2,),
    prefill_lengths=(12,),
    image_rows=(2,),
    image_row_patches=32,
    max_new_tokens=8,
    decode_steps=3,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    graphdef: nnx.GraphDef
    lora: nnx.State
    frozen: nnx.State


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy()


@functools.cache
def make_policy() -> Policy:
    """A random model whose adapters change what it says (a fresh one's are zero)."""
    model = qwen2_vl.Qwen2VL(
        MODEL_CFG,
        lora=LoraConfig(rank=2, alpha=4.0),
        rngs=nnx.Rngs(0),
        param_dtype=jnp.float32,
    )
    graphdef, lora, frozen = nnx.split(model, LoRAParam, ...)
    return Policy(graphdef, redrawn(lora, 1), frozen)


def redrawn(lora: nnx.State, seed: int) -> nnx.State:
    leaves, structure = jax.tree.flatten(lora)
    rng = np.random.default_rng(seed)
    drawn = [jnp.array(rng.normal(size=leaf.shape) * 0.5, leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, drawn)


def new_engine(
    policy: Policy, *, cfg=CFG, end=(END_TOKEN,), forbidden=FORBIDDEN, decode=None
) -> Engine:
    return Engine(
        policy.graphdef,
        policy.frozen,
        policy.lora,
        7,
        model_cfg=MODEL_CFG,
        end_token_ids=end,
        forbidden_ids=forbidden,
        cfg=cfg,
        decode_text=decode,
    )


@pytest.fixture(scope="module")
def engine(policy) -> Engine:
    """Shared, so that its few shapes compile once; tests that change the policy put it back."""
    return new_engine(policy)


@functools.cache
def screenshot_patches(key: str) -> np.ndarray:
    rng = np.random.default_rng(ord(key))
    features = 3 * 2 * 4 * 4
    return rng.normal(size=(np.prod(GRIDS[key]), features)).astype(np.float32)


def request(seed=0, text=5, images="", *, temperature=1.0, max_new_tokens=8) -> SampleRequest:
    """A context with `text` random tokens, the screenshots in the middle of them."""
    rng = np.random.default_rng(1000 + seed)
    words = rng.integers(2, 60, text).tolist()
    visual: list[int] = []
    for key in images:
        visual += [62, *[IMAGE_TOKEN] * vision_inputs.num_visual_tokens(GRIDS[key], 2), 63]
    ids = np.array(words[: text // 2] + visual + words[text // 2 :])
    return SampleRequest(
        context_ids=ids.astype(np.int32),
        patches=tuple(screenshot_patches(key) for key in images),
        grids=tuple(GRIDS[key] for key in images),
        image_keys=tuple(images),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )


def sample_all(engine: Engine, asked: list[SampleRequest]) -> list[SampleResult]:
    async def run() -> list[SampleResult]:
        async with engine, asyncio.timeout(600):
            return await asyncio.gather(*map(engine.sample, asked))

    return asyncio.run(run())


MIXED = [
    request(0, 5, "a"),
    request(1, 14, ""),
    request(2, 7, "ab"),
    request(3, 6, "ca", temperature=0.7),
    request(4, 9, "", temperature=1.5),
    request(5, 1, "", max_new_tokens=3),
    request(6, 16, "b"),
]


@jax.jit
def learner_pass(graphdef, frozen, lora, images, ids, vision_index, positions, segments, heat):
    """The learner's functions on one padded row: logits of every position, and token_logprobs."""
    model = nnx.merge(graphdef, lora, frozen)
    visual_md = qwen2_vl.encode_images(model, *images)
    x_btd = qwen2_vl.hidden(model, ids, visual_md, vision_index, positions, segments)
    forbidden_v = np.isin(np.arange(VOCAB), FORBIDDEN)
    scores_bt = scoring.token_logprobs(model, x_btd, ids, temperature=heat, forbidden_v=forbidden_v)
    return qwen2_vl.logits(model, x_btd)[0], scores_bt[0]


def without_cache(
    policy: Policy, asked: SampleRequest, sampled, *, lora: nnx.State | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Every screenshot in a row of its own, the whole sequence anew; (logits_tv, scores_t)."""
    ids = np.concatenate([asked.context_ids, np.array(sampled, np.int32)])
    length, row_patches = len(ids), 24
    patches_ipf = np.zeros((4, row_patches, 96), np.float32)
    places_ip2 = np.zeros((4, row_patches, 2), np.int32)
    segments_ip = np.zeros((4, row_patches), np.int32)
    index = []
    for row, (patches_pf, grid) in enumerate(zip(asked.patches, asked.grids, strict=True)):
        patches_ipf[row, : len(patches_pf)] = patches_pf
        places_ip2[row, : len(patches_pf)] = vision_inputs.patch_positions(grid, 2)
        segments_ip[row, : len(patches_pf)] = 1
        index += range(row * row_patches // 4, row * row_patches // 4 + len(patches_pf) // 4)
    token_ids_bt = np.zeros((1, ORACLE_TOKENS), np.int32)
    token_ids_bt[0, :length] = ids
    vision_index_bt = np.full((1, ORACLE_TOKENS), -1, np.int32)
    vision_index_bt[0, :length][ids == IMAGE_TOKEN] = index
    positions_3bt = np.zeros((3, 1, ORACLE_TOKENS), np.int32)
    positions_3bt[:, 0, :length] = vision_inputs.rope_positions(ids, asked.grids, IMAGE_TOKEN, 2)
    segment_ids_bt = (np.arange(ORACLE_TOKENS) < length)[None].astype(np.int32)
    logits_tv, scores_t = learner_pass(
        policy.graphdef,
        policy.frozen,
        policy.lora if lora is None else lora,
        (patches_ipf, places_ip2, segments_ip),
        token_ids_bt,
        vision_index_bt,
        positions_3bt,
        segment_ids_bt,
        np.float32(asked.temperature or 1.0),
    )
    return np.array(logits_tv), np.array(scores_t)


def masked_log_softmax(logits_tv: np.ndarray, temperature: float, forbidden) -> np.ndarray:
    scaled_tv = logits_tv.astype(np.float64) / (temperature or 1.0)
    scaled_tv[:, list(forbidden)] = -np.inf
    scaled_tv -= scaled_tv.max(axis=-1, keepdims=True)
    return scaled_tv - np.log(np.exp(scaled_tv).sum(axis=-1, keepdims=True))


# ---------------------------------------------------------------- tokens and logprobs


def test_engine_greedy_equals_loop_without_cache(engine, policy):
    asked = [dataclasses.replace(one, temperature=0.0) for one in MIXED]
    for one, result in zip(asked, sample_all(engine, asked), strict=True):
        expected: list[int] = []
        while len(expected) < one.max_new_tokens and END_TOKEN not in expected:
            logits_tv, _ = without_cache(policy, one, expected)
            last = masked_log_softmax(logits_tv, 1.0, FORBIDDEN)[
                len(one.context_ids) + len(expected) - 1
            ]
            expected.append(int(last.argmax()))
        assert result.token_ids.tolist() == expected
        assert result.stopped == (expected[-1] == END_TOKEN)


def test_engine_logprobs_equal_softmax_of_full_forward_at_each_temperature(engine, policy):
    asked = [*MIXED, dataclasses.replace(MIXED[2], temperature=0.0)]
    for one, result in zip(asked, sample_all(engine, asked), strict=True):
        start, count = len(one.context_ids), len(result.token_ids)
        logits_tv, _ = without_cache(policy, one, result.token_ids)
        logprobs_tv = masked_log_softmax(logits_tv, one.temperature, FORBIDDEN)
        expected = logprobs_tv[np.arange(start - 1, start - 1 + count), result.token_ids]
        # Two float32 paths that sum in another order: 1e-6-class here.
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


def test_engine_logprobs_equal_the_learners_token_logprobs(engine, policy):
    for one, result in zip(MIXED, sample_all(engine, MIXED), strict=True):
        start, count = len(one.context_ids), len(result.token_ids)
        _, scores_t = without_cache(policy, one, result.token_ids)
        np.testing.assert_allclose(result.logprobs, scores_t[start : start + count], atol=1e-4)


@pytest.mark.parametrize(("cache_dtype", "most"), [("bfloat16", 0.06), ("int8", 0.12)])
def test_engine_smaller_caches_move_logprobs_a_little(policy, cache_dtype, most):
    """Measured 2026-11-21, the largest of all tokens: 0.031 in bfloat16, 0.069 in int8."""
    small = new_engine(policy, cfg=dataclasses.replace(CFG, cache_dtype=cache_dtype))
    differences = []
    for one, result in zip(MIXED, sample_all(small, MIXED), strict=True):
        start, count = len(one.context_ids), len(result.token_ids)
        _, scores_t = without_cache(policy, one, result.token_ids)
        differences += np.abs(result.logprobs - scores_t[start : start + count]).tolist()
    assert 1e-5 < max(differences) < most


def test_engine_tokens_do_not_depend_on_batch_mates(engine):
    together = sample_all(engine, MIXED)
    others = [request(40 + seed, 11, "b") for seed in range(3)]
    for position, one in enumerate(MIXED):
        alone = sample_all(engine, [one])[0]
        elsewhere = sample_all(engine, [*others, one])[3]
        for result in (alone, elsewhere):
            assert result.token_ids.tolist() == together[position].token_ids.tolist()
            np.testing.assert_allclose(result.logprobs, together[position].logprobs, atol=1e-4)


def test_engine_seeds_decide_the_tokens(engine):
    base = request(0, 5, temperature=3.0)
    asked = [dataclasses.replace(base, seed=seed) for seed in (1, 2, 1)]
    first, second, again = (result.token_ids.tolist() for result in sample_all(engine, asked))
    assert first == again
    assert first != second


def test_engine_forbidden_ids_are_never_sampled_and_end_tokens_stop(policy):
    # Two thirds of the vocabulary are forbidden, and near-uniform sampling would hit them.
    forbidden = tuple(range(20, VOCAB))
    cfg = dataclasses.replace(CFG, batch_sizes=(40,))
    narrow = new_engine(policy, cfg=cfg, end=(3, 4, 5), forbidden=forbidden)
    results = sample_all(narrow, [request(seed, 5, temperature=50.0) for seed in range(40)])
    for result in results:
        assert result.token_ids.max() < 20
        hits = np.isin(result.token_ids, (3, 4, 5))
        assert not hits[:-1].any()
        assert result.stopped == hits[-1]
        assert result.stopped or len(result.token_ids) == 8
        assert len(result.logprobs) == len(result.token_ids)
    assert 0 < sum(result.stopped for result in results) < 40


# ---------------------------------------------------------------- slots and caches


def test_engine_compile_count_stands_still_over_a_thousand_mixed_requests(policy):
    """Screens of three sizes, none to ten in a context, 8 to 200 new tokens, ten policies: what
    warm_up compiles is all there is."""
    cfg = dataclasses.replace(
        CFG,
        batch_sizes=(1, 8, 32),
        context_lengths=(32, 112),
        prefill_rows=(1, 8),
        prefill_lengths=(16, 48),
        image_rows=(1, 4),
        max_new_tokens=200,
        decode_steps=16,
    )
    mixed = new_engine(policy, cfg=cfg, end=(-1,))  # as long as they may be

    def some_request(rng: np.random.Generator) -> SampleRequest:
        images = "".join(rng.choice(["a", "b", "c"], rng.integers(0, 11)))
        one = request(int(rng.integers(1000)), int(rng.integers(1, 14)), images)
        return dataclasses.replace(
            one,
            max_new_tokens=int(rng.integers(8, 201)),
            top_p=float(rng.choice([1.0, 0.8])),
            episode=str(rng.integers(40)),
        )

    async def run() -> tuple[float, float]:
        async with mixed, asyncio.timeout(600):
            await mixed.warm_up()
            warm = mixed.metrics()["engine/compile_count"]
            for number in range(10):
                mixed.set_policy(jax.tree.map(np.array, redrawn(policy.lora, number)), number)
                rng = np.random.default_rng(number)
                await asyncio.gather(*(mixed.sample(some_request(rng)) for _ in range(100)))
            return warm, mixed.metrics()["engine/compile_count"]

    warm, after = asyncio.run(run())
    assert mixed.metrics()["engine/requests"] == 1000
    # encode 2, prefill 2 rows x (2 lengths x 2 contexts), decode 3 batches x 2 contexts, copy 1
    assert warm == after == 2 + 8 + 6 + 1


def spent(engine: Engine, asked: list[SampleRequest]) -> dict[str, float]:
    """What the metrics of these requests come to."""
    before = engine.metrics()
    sample_all(engine, asked)
    after = engine.metrics()
    return {key: after[key] - before[key] for key in before}


def test_engine_group_shares_one_prefill_and_one_screenshot(policy):
    fresh = new_engine(policy)
    one = request(0, 4, "a")  # 10 tokens, of which the last is left to the decode step
    costs = spent(fresh, [dataclasses.replace(one, seed=seed) for seed in range(8)])
    assert costs["engine/images_encoded"] == 1
    assert costs["engine/prefill_tokens"] == 9
    assert costs["engine/cached_tokens"] == 7 * 9
    again = spent(fresh, [dataclasses.replace(one, seed=9), request(1, 4, "a")])
    assert again["engine/images_encoded"] == 0, "a screenshot that was seen before"
    # The second begins with two other words, so nothing of it is known but its screenshot.
    assert again["engine/prefill_tokens"] == 9


def next_turn(one: SampleRequest, result: SampleResult, text: int, images: str) -> SampleRequest:
    """The context goes on: what was sampled, a new screenshot, some words."""
    more = request(len(result.token_ids), text, images)
    return dataclasses.replace(
        one,
        context_ids=np.concatenate([one.context_ids, result.token_ids, more.context_ids]),
        patches=(*one.patches, *more.patches),
        grids=(*one.grids, *more.grids),
        image_keys=(*one.image_keys, *more.image_keys),
        seed=one.seed + 100,
    )


def test_engine_next_turn_prefills_only_what_is_new_and_a_cut_context_from_the_cut(policy):
    fresh = new_engine(policy)
    first = dataclasses.replace(request(0, 4, "a", max_new_tokens=3), episode="e")

    async def run() -> None:
        async with fresh, asyncio.timeout(600):
            result = await fresh.sample(first)
            # Others come and go: the slot stays the episode's as long as there are others.
            await asyncio.gather(*[fresh.sample(request(seed, 9)) for seed in range(1, 4)])
            second = next_turn(first, result, 2, "c")
            before = fresh.metrics()["engine/prefill_tokens"]
            again = await fresh.sample(second)
            # What was sampled last is not in the cache, and the context's last token is not
            # prefilled: c is 2 visual tokens, 2 markers, 2 words.
            assert fresh.metrics()["engine/prefill_tokens"] - before == 1 + 6 - 1
            assert_logprobs(policy, second, again)

            cut = dataclasses.replace(
                second,
                context_ids=np.concatenate([second.context_ids[:2], second.context_ids[-6:]]),
                patches=second.patches[1:],
                grids=second.grids[1:],
                image_keys=second.image_keys[1:],
            )
            before = fresh.metrics()["engine/prefill_tokens"]
            shorter = await fresh.sample(cut)
            assert fresh.metrics()["engine/prefill_tokens"] - before == 8 - 2 - 1
            assert_logprobs(policy, cut, shorter)

    asyncio.run(run())


def assert_logprobs(
    policy: Policy, asked: SampleRequest, result: SampleResult, lora: nnx.State | None = None
) -> None:
    """Those of the learner on the same tokens."""
    start, count = len(asked.context_ids), len(result.token_ids)
    _, scores_t = without_cache(policy, asked, result.token_ids, lora=lora)
    np.testing.assert_allclose(result.full_logprobs, scores_t[start : start + count], atol=1e-4)


def test_engine_more_requests_than_slots_wait_the_oldest_first(engine):
    asked = [request(seed, 6, "abc"[seed % 3]) for seed in range(11)]
    order: list[int] = []

    async def run() -> list[SampleResult]:
        async def one(number: int) -> SampleResult:
            result = await engine.sample(asked[number])
            order.append(number)
            return result

        async with engine, asyncio.timeout(600):
            return await asyncio.gather(*map(one, range(11)))

    together = asyncio.run(run())
    assert max(order[:4]) < 8, "the last ones had to wait for a slot"
    for position in (0, 7, 10):
        alone = sample_all(engine, [asked[position]])[0]
        assert alone.token_ids.tolist() == together[position].token_ids.tolist()


def test_engine_more_screenshots_than_the_table_holds_take_turns(policy):
    # b has 6 tokens, a 4, c 2: two contexts of two screenshots do not fit into 12 rows at once.
    cfg = dataclasses.replace(CFG, image_tokens=12)
    narrow = new_engine(policy, cfg=cfg)
    asked = [
        dataclasses.replace(request(n, 3, "ba"), image_keys=(f"b{n}", f"a{n}")) for n in range(5)
    ]
    for one, result in zip(asked, sample_all(narrow, asked), strict=True):
        assert_logprobs(policy, one, result)
    assert narrow.metrics()["engine/images_encoded"] == 10


def test_engine_cancelled_request_frees_its_slot_at_once(engine):
    async def run() -> None:
        async with engine, asyncio.timeout(600):
            running = [asyncio.create_task(engine.sample(request(seed))) for seed in range(4)]
            waiting = asyncio.create_task(engine.sample(request(5)))
            kept = asyncio.create_task(engine.sample(request(6)))
            await asyncio.sleep(0)
            for task in (*running, waiting):
                task.cancel()
            outcomes = await asyncio.gather(*running, waiting, return_exceptions=True)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
            assert len((await kept).token_ids) > 0

    asyncio.run(run())


def test_engine_counts_the_time_it_waits_for_environments(engine):
    asked = dataclasses.replace(request(0, 4), episode="slow")

    async def run() -> list[dict[str, float]]:
        async with engine, asyncio.timeout(600):
            seen = [engine.metrics()]
            await engine.sample(asked)
            await asyncio.sleep(0.2)  # its environment
            await engine.sample(asked)
            seen.append(engine.metrics())
            engine.release("slow")
            await asyncio.sleep(0.2)  # nobody's
            await engine.sample(request(1, 4))
            return [*seen, engine.metrics()]

    seen = asyncio.run(run())
    idle, environments = (
        [after[key] - before[key] for before, after in zip(seen, seen[1:], strict=False)]
        for key in ("engine/idle_s", "engine/environments_s")
    )
    assert min(idle) > 0.19
    assert environments[0] > 0.19 and environments[1] < 0.1


def test_engine_stop_string_ends_with_the_token_that_completes_it(policy):
    spelled = new_engine(policy, decode=lambda ids: "".join(chr(60 + int(i)) for i in ids))
    free = request(3, 6, "a", temperature=3.0)
    (whole,) = sample_all(spelled, [free])
    text = "".join(chr(60 + int(i)) for i in whole.token_ids)
    stopping = dataclasses.replace(free, stop_strings=("never", text[2:4]))
    (cut,) = sample_all(spelled, [stopping])
    assert cut.token_ids.tolist() == whole.token_ids[: text.index(text[2:4]) + 2].tolist()
    assert cut.stopped and len(cut.logprobs) == len(cut.token_ids)


def test_engine_top_p_and_top_k_record_both_logprobs(engine, policy):
    one = dataclasses.replace(request(3, 6, "a"), top_k=5, top_p=0.7)
    asked = [dataclasses.replace(one, seed=seed) for seed in range(6)]
    for one, result in zip(asked, sample_all(engine, asked), strict=True):
        assert_logprobs(policy, one, result)
        logits_tv, _ = without_cache(policy, one, result.token_ids)
        full_tv = masked_log_softmax(logits_tv, 1.0, FORBIDDEN)[len(one.context_ids) - 1 :]
        for token_id, logprob, full_v in zip(
            result.token_ids, result.logprobs, full_tv, strict=False
        ):
            likeliest = np.argsort(-full_v)[:5]
            chances = np.exp(full_v[likeliest]) / np.exp(full_v[likeliest]).sum()
            kept = likeliest[: 1 + int((np.cumsum(chances) < 0.7).sum())]
            assert token_id in kept
            expected = full_v[token_id] - np.log(np.exp(full_v[kept]).sum())
            assert logprob == pytest.approx(expected, abs=1e-4)


# ---------------------------------------------------------------- policies and failures


def test_engine_set_policy_changes_tokens_and_version_of_later_batches(engine, policy):
    other = redrawn(policy.lora, 99)
    one = request(3, 6, "a", temperature=0.0)

    async def run() -> list[SampleResult]:
        async with engine, asyncio.timeout(600):
            before = await engine.sample(one)
            engine.set_policy(other, 8)
            during = await engine.sample(one)
            engine.set_policy(policy.lora, 7)
            return [before, during, await engine.sample(one)]

    before, during, after = asyncio.run(run())
    assert [before.policy_version, during.policy_version, after.policy_version] == [7, 8, 7]
    assert before.token_ids.tolist() == after.token_ids.tolist()
    logits_tv, _ = without_cache(policy, one, during.token_ids, lora=other)
    logprobs_tv = masked_log_softmax(logits_tv, 1.0, FORBIDDEN)
    rows = len(one.context_ids) - 1 + np.arange(len(during.token_ids))
    np.testing.assert_allclose(during.logprobs, logprobs_tv[rows, during.token_ids], atol=1e-4)


def test_engine_set_policy_with_other_shapes_is_refused(engine, policy):
    wider = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf], axis=-1), policy.lora)
    with pytest.raises(PolicyError, match=r"version 8.*expected float32"):
        engine.set_policy(wider, 8)
    assert engine.policy_version == 7


def test_engine_policy_that_gives_nan_fails_its_requests_and_lives_on(engine, policy):
    """Also those that wait for a prefix of the one that fails."""

    async def run() -> None:
        async with engine, asyncio.timeout(600):
            engine.set_policy(jax.tree.map(lambda leaf: leaf * jnp.nan, policy.lora), 8)
            asked = [request(0), request(1)]
            asked += [dataclasses.replace(request(0), seed=seed) for seed in range(2, 8)]
            outcomes = await asyncio.gather(*map(engine.sample, asked), return_exceptions=True)
            engine.set_policy(policy.lora, 7)
            assert [type(outcome) for outcome in outcomes] == [PolicyError] * 8
            assert "version 8" in str(outcomes[0])
            assert len((await engine.sample(request(0))).token_ids) > 0

    asyncio.run(run())


@pytest.mark.parametrize("program", ["encode", "prefill", "decode"])
def test_engine_call_that_fails_fails_its_requests_and_lives_on(policy, program: str):
    broken = new_engine(policy)
    whole = broken._programs

    def fail(buffer: jax.Array, *arguments: object, **options: object) -> None:
        jax.tree.map(lambda leaf: leaf.delete(), buffer)  # as a donated one is gone
        raise MemoryError("no memory left")

    async def run() -> SampleResult:
        async with broken, asyncio.timeout(600):
            broken._programs = whole._replace(**{program: fail})
            asked = [request(seed, 5, "a") for seed in range(6)]
            outcomes = await asyncio.gather(*map(broken.sample, asked), return_exceptions=True)
            assert [str(outcome) for outcome in outcomes] == ["no memory left"] * 6
            broken._programs = whole
            return await broken.sample(asked[0])

    assert_logprobs(policy, request(0, 5, "a"), asyncio.run(run()))


def test_engine_close_fails_what_is_not_done_and_opens_again(engine):
    async def run() -> None:
        async with asyncio.timeout(600):
            async with engine:
                asked = [asyncio.create_task(engine.sample(request(seed))) for seed in range(9)]
                await asyncio.sleep(0)
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            assert any(isinstance(outcome, RuntimeError) for outcome in outcomes)
            with pytest.raises(RuntimeError, match="outside"):
                await engine.sample(request(0))

    asyncio.run(run())
    assert len(sample_all(engine, [request(0)])[0].token_ids) > 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request(0, 33), r"33 tokens.*32.*engine\.context_lengths"),
        (request(0, 5, max_new_tokens=9), r"9 new tokens.*8.*engine\.max_new_tokens"),
        (request(0, 5, max_new_tokens=0), r"engine\.max_new_tokens"),
        (request(0, 5, temperature=1e-9), "temperature"),
        (request(0, 5, temperature=float("nan")), "temperature"),
        (dataclasses.replace(request(0, 5), top_p=0.0), "top_p 0"),
        (dataclasses.replace(request(0, 5), top_k=-1), "top_k -1"),
        (
            dataclasses.replace(request(0, 5, "a"), patches=(np.zeros((36, 96), np.float32),)),
            r"36 patches.*32.*engine\.image_row_patches",
        ),
    ],
)
def test_engine_request_beyond_a_limit_names_the_key(engine, asked, message):
    with pytest.raises(ConfigError, match=message):
        sample_all(engine, [asked])


def test_engine_screenshots_of_one_context_beyond_the_table_name_the_key(policy):
    narrow = new_engine(policy, cfg=dataclasses.replace(CFG, image_tokens=11))
    asked = dataclasses.replace(request(0, 5, "bb"), image_keys=("b1", "b2"))
    with pytest.raises(ConfigError, match=r"2 screenshots.*12 visual.*11: raise engine\.image_tok"):
        sample_all(narrow, [asked])


@pytest.mark.parametrize(
    "asked",
    [
        dataclasses.replace(request(0, 5, "a"), grids=((1, 4, 6),)),
        dataclasses.replace(request(0, 5, "ac"), grids=((1, 2, 4), (1, 4, 4))),
        dataclasses.replace(request(0, 5, "b"), grids=((1, 2, 12),), image_keys=("a", "b")),
        dataclasses.replace(request(0, 5, "a"), image_keys=()),
        dataclasses.replace(request(0, 5), context_ids=np.array([5, IMAGE_TOKEN], np.int32)),
        dataclasses.replace(request(0, 5), context_ids=np.zeros(0, np.int32)),
    ],
)
def test_engine_contradicting_request_is_refused_alone(engine, asked):
    async def run() -> list:
        async with engine, asyncio.timeout(600):
            return await asyncio.gather(
                engine.sample(request(1)), engine.sample(asked), return_exceptions=True
            )

    good, bad = asyncio.run(run())
    assert isinstance(bad, ValueError)
    assert isinstance(good, SampleResult)


def test_image_arrays_share_rows_and_take_the_smallest_number_of_them():
    cfg = EngineConfig(image_rows=(1, 2), image_row_patches=32, context_lengths=(16,))

    def rows(images: str) -> int:
        placed: dict[str, requests.PlacedImage] = {}
        for key in images:
            assert requests.place_image(placed, key, screenshot_patches(key), GRIDS[key], cfg)
        table = {key: np.arange(len(screenshot_patches(key)) // 4) for key in images}
        arrays = requests.image_arrays(placed, table, cfg, merge_size=2, patch_features=96)
        named = arrays.row_m[arrays.row_m < cfg.table_rows(2)]
        assert len(named) == sum(map(len, table.values()))
        return len(arrays.patches_ipf)

    assert rows("ac") == 1  # 16 + 8 patches
    assert rows("ab") == 2  # 16 + 24
    placed = {}
    fits = [
        requests.place_image(placed, k, screenshot_patches("b"), GRIDS["b"], cfg) for k in "xyz"
    ]
    assert fits == [True, True, False] and list(placed) == ["x", "y"]


def test_engine_config_impossible_sizes_are_listed_together():
    with pytest.raises(ConfigError, match=r"context_lengths=\(\).*batch_sizes=\(4, 1\)"):
        EngineConfig(batch_sizes=(4, 1), context_lengths=())


# ---------------------------------------------------------------- everything at once


@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(st.integers(0, 2**31), st.booleans())
def test_engine_mixed_episodes_score_as_the_learner_does(seed, keep_stale):
    """Episodes of many turns that share prompts, cut their contexts, are cancelled and see new
    policies come in the middle: every token's logprob is that of the policy it was sampled with."""
    policy = make_policy()  # no fixture: hypothesis would print it
    mixed = mixed_engine(policy, keep_stale)
    loras = {7: policy.lora, 8: redrawn(policy.lora, 8), 9: redrawn(policy.lora, 9)}
    turns: list[tuple[SampleRequest, SampleResult]] = []

    async def episode(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        # Two of three begin alike, as a group's members do.
        one = request(number % 3 // 2, 4, "a", max_new_tokens=3)
        one = dataclasses.replace(one, episode=f"{seed}-{number}", seed=number)
        for turn in range(20):
            if rng.random() < 0.2:
                asking = asyncio.create_task(mixed.sample(one))
                await asyncio.sleep(float(rng.uniform(0, 0.02)))
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
            result = await mixed.sample(one)
            turns.append((one, result))
            following = next_turn(one, result, int(rng.integers(1, 3)), rng.choice(["", "c"]))
            if len(following.context_ids) > 32 or rng.random() < 0.2:  # cut to the words' start
                keep = following.context_ids[:2]
                following = dataclasses.replace(
                    request(turn, 5, "c", max_new_tokens=3), episode=one.episode, seed=one.seed
                )
                ids = np.concatenate([keep, following.context_ids])
                following = dataclasses.replace(following, context_ids=ids)
            one = following
        mixed.release(one.episode)

    async def run() -> None:
        async with mixed, asyncio.timeout(600):
            mixed.set_policy(loras[7], 7)
            playing = asyncio.gather(*map(episode, range(6)))
            for version in (8, 9):
                await asyncio.sleep(0.05)
                mixed.set_policy(loras[version], version)
            await playing

    asyncio.run(run())
    assert len(turns) == 6 * 20
    for asked, result in turns:
        assert result.policy_version == result.policy_versions.min()
        if keep_stale:
            assert np.isfinite(result.logprobs).all()  # of no single policy
            continue
        start = len(asked.context_ids)
        for version in np.unique(result.policy_versions):
            _, scores_t = without_cache(policy, asked, result.token_ids, lora=loras[int(version)])
            of_t = result.policy_versions == version
            expected = scores_t[start : start + len(of_t)]
            np.testing.assert_allclose(result.logprobs[of_t], expected[of_t], atol=1e-4)


@functools.cache
def mixed_engine(policy: Policy, keep_stale: bool) -> Engine:
    cfg = dataclasses.replace(CFG, slots=5, image_tokens=40, keep_stale_cache=keep_stale)
    return new_engine(policy, cfg=cfg)


def check_mesh() -> None:
    """The body of the test below, in a process of its own: the device count is fixed at start."""
    assert len(jax.devices()) == 8
    lone = make_policy()
    expected = sample_all(new_engine(lone), MIXED)
    mesh = sharding.make_mesh(data=2, fsdp=2, model=2)
    placed = [
        jax.device_put(tree, sharding.state_shardings(mesh, tree))
        for tree in (lone.lora, lone.frozen)
    ]
    spread = new_engine(Policy(lone.graphdef, *placed))
    for got, wanted in zip(sample_all(spread, MIXED), expected, strict=True):
        assert got.token_ids.tolist() == wanted.token_ids.tolist()
        np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4)
    cut = spread._cache.k_lcksh.sharding.shard_shape(spread._cache.k_lcksh.shape)
    assert cut == (2, 1, 1, 40, 8), "slots over data and fsdp, heads over model"
    compiled = spread.metrics()["engine/compile_count"]
    sample_all(spread, MIXED)
    assert spread.metrics()["engine/compile_count"] == compiled


def test_engine_on_eight_fake_devices_equals_one_device():
    done = test_sharding.on_eight_devices("check_mesh", module="test_engine")
    assert done.returncode == 0, done.stderr[-3000:]
