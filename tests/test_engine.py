"""The engine against a loop without a cache, the learner's logprobs, and its own promises."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from uirl_jax import vision_inputs
from uirl_jax.engine import requests
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest, SampleResult, Shape
from uirl_jax.errors import ConfigError, PolicyError
from uirl_jax.models import qwen2_vl, scoring
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
CFG = EngineConfig(  # four shapes in all: each costs seconds to compile
    batch_sizes=(1, 4),
    context_lengths=(32,),
    image_rows=(2,),
    image_row_patches=32,
    max_new_tokens=8,
    wait_s=0.02,
)
PATIENT_CFG = dataclasses.replace(CFG, batch_sizes=(4,), wait_s=3600.0)


@dataclasses.dataclass(frozen=True)
class Policy:
    graphdef: nnx.GraphDef
    lora: nnx.State
    frozen: nnx.State


@pytest.fixture(scope="module")
def policy() -> Policy:
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


def new_engine(policy: Policy, *, cfg=CFG, end=(END_TOKEN,), forbidden=FORBIDDEN) -> Engine:
    return Engine(
        policy.graphdef,
        policy.frozen,
        policy.lora,
        7,
        model_cfg=MODEL_CFG,
        end_token_ids=end,
        forbidden_ids=forbidden,
        cfg=cfg,
    )


@pytest.fixture(scope="module")
def engine(policy) -> Engine:
    """Shared, so that its few shapes compile once; tests that change the policy put it back."""
    return new_engine(policy)


@pytest.fixture(scope="module")
def patient(policy) -> Engine:
    """Shared; starts a batch only where everybody who is expected waits."""
    return new_engine(policy, cfg=PATIENT_CFG)


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
    patches_ipf = np.zeros((2, row_patches, 96), np.float32)
    places_ip2 = np.zeros((2, row_patches, 2), np.int32)
    segments_ip = np.zeros((2, row_patches), np.int32)
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


# ---------------------------------------------------------------- batches


def test_engine_compile_count_stands_still_over_mixed_requests(engine, policy):
    shapes = [Shape(rows, 32, images) for rows in (1, 4) for images in (0, 2)]

    async def run() -> tuple[float, float]:
        async with engine, asyncio.timeout(600):
            await engine.warm_up(shapes)
            warm = engine.metrics()["engine/compile_count"]
            for round_index in range(6):
                engine.set_policy(jax.tree.map(np.array, redrawn(policy.lora, round_index)), 8)
                rng = np.random.default_rng(round_index)
                asked = [
                    request(int(rng.integers(1000)), int(rng.integers(1, 14)), images)
                    for images in rng.choice(["", "a", "ab", "c"], int(rng.integers(1, 9)))
                ]
                await asyncio.gather(*map(engine.sample, asked))
            engine.set_policy(policy.lora, 7)
            return warm, engine.metrics()["engine/compile_count"]

    warm, after = asyncio.run(run())
    assert warm == after == len(shapes)


def test_engine_screenshot_shared_in_a_batch_is_encoded_once(engine):
    before = engine.metrics()
    results = sample_all(engine, [request(seed, 4, "a") for seed in range(3)])
    after = engine.metrics()
    spent = {key: after[key] - before[key] for key in before}
    assert spent["engine/images_encoded"] == 1
    assert spent["engine/batches"] == 1
    assert spent["engine/requests"] == 3
    assert spent["engine/prefill_tokens"] == 3 * 10
    # The fourth row is padding: it samples nothing.
    assert spent["engine/tokens_sampled"] == sum(len(result.token_ids) for result in results)


def test_engine_more_screenshots_than_rows_are_sampled_in_two_batches(engine):
    # 24 + 16 patches do not fit into one row of 32, nor 24 + 16 + 8 + 24 into two.
    asked = [
        request(0, 3, "ba"),
        dataclasses.replace(request(1, 3, "b"), image_keys=("b2",)),
        dataclasses.replace(request(2, 3, "c"), image_keys=("c2",)),
    ]
    before = engine.metrics()["engine/batches"]
    together = sample_all(engine, asked)
    assert engine.metrics()["engine/batches"] == before + 2
    for one, result in zip(asked, together, strict=True):
        assert sample_all(engine, [one])[0].token_ids.tolist() == result.token_ids.tolist()


def test_engine_expected_episodes_waiting_start_a_batch_at_once(patient):
    before = patient.metrics()["engine/batches"]

    async def run() -> None:
        async with patient, asyncio.timeout(600):
            patient.expect(4)
            first = asyncio.create_task(patient.sample(request(0)))
            await asyncio.sleep(0.05)
            assert patient.metrics()["engine/batches"] == before
            patient.expect(2)
            await asyncio.gather(first, patient.sample(request(1)))
            patient.expect(1)
            await patient.sample(request(2))

    asyncio.run(run())
    assert patient.metrics()["engine/batches"] == before + 2


def test_engine_cancelled_request_leaves_the_queue(patient):
    before = patient.metrics()["engine/requests"]

    async def run() -> None:
        async with patient, asyncio.timeout(600):
            patient.expect(2)
            cancelled = asyncio.create_task(patient.sample(request(0)))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            kept = asyncio.create_task(patient.sample(request(1)))
            await asyncio.sleep(0.05)
            assert not kept.done()  # the cancelled one does not count as waiting
            patient.expect(1)
            await asyncio.gather(kept, patient.sample(request(2)))

    asyncio.run(run())
    assert patient.metrics()["engine/requests"] == before + 2


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


def test_engine_failing_batch_fails_its_requests_and_lives_on(engine, policy):
    async def run() -> None:
        async with engine, asyncio.timeout(600):
            engine.set_policy(jax.tree.map(lambda leaf: leaf * jnp.nan, policy.lora), 8)
            outcomes = await asyncio.gather(
                *[engine.sample(request(seed)) for seed in range(3)], return_exceptions=True
            )
            engine.set_policy(policy.lora, 7)
            assert [type(outcome) for outcome in outcomes] == [PolicyError] * 3
            assert "version 8" in str(outcomes[0])
            assert len((await engine.sample(request(0))).token_ids) > 0

    asyncio.run(run())


def test_engine_close_fails_what_waits(patient):
    async def run() -> None:
        async with asyncio.timeout(600):
            async with patient:
                patient.expect(2)
                waiting = asyncio.create_task(patient.sample(request(0)))
                await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError, match="closed"):
                await waiting
            with pytest.raises(RuntimeError, match="outside"):
                await patient.sample(request(0))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request(0, 33), r"33 tokens.*32.*engine\.context_lengths"),
        (request(0, 5, max_new_tokens=9), r"9 new tokens.*8.*engine\.max_new_tokens"),
        (request(0, 5, max_new_tokens=0), r"engine\.max_new_tokens"),
        (request(0, 5, temperature=1e-9), "temperature"),
        (request(0, 5, temperature=float("nan")), "temperature"),
        (
            dataclasses.replace(request(0, 5, "bb"), image_keys=("b1", "b2")),
            None,  # fits: each has a row
        ),
        (
            dataclasses.replace(request(0, 5, "bbb"), image_keys=("b1", "b2", "b3")),
            r"3 screenshots.*2: raise engine\.image_rows",
        ),
        (
            dataclasses.replace(request(0, 5, "a"), patches=(np.zeros((36, 96), np.float32),)),
            r"36 patches.*32.*engine\.image_row_patches",
        ),
    ],
)
def test_engine_request_beyond_a_limit_names_the_key(engine, asked, message):
    if message is None:
        assert sample_all(engine, [asked])[0].policy_version == 7
        return
    with pytest.raises(ConfigError, match=message):
        sample_all(engine, [asked])


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


def test_shape_of_takes_the_smallest_sizes_that_hold_the_batch():
    cfg = EngineConfig(
        batch_sizes=(1, 4), context_lengths=(16, 32), image_rows=(1, 2), image_row_patches=32
    )

    def shape(*asked: SampleRequest) -> Shape:
        placed: dict[str, requests.PlacedImage] = {}
        for one in asked:
            placed = requests.place_images(one, placed, cfg)
        return requests.shape_of(asked, placed, cfg)

    assert shape(request(0, 16)) == Shape(1, 16, 0)
    assert shape(request(0, 16), request(1, 17)) == Shape(4, 32, 0)
    assert shape(request(0, 5, "ac"), request(1, 5, "ca")) == Shape(4, 16, 1)  # 16 + 8 patches
    assert shape(request(0, 5, "a"), request(1, 5, "b")) == Shape(4, 16, 2)  # 16 + 24


def test_engine_config_impossible_sizes_are_listed_together():
    with pytest.raises(ConfigError, match=r"batch_sizes=\(4, 1\).*max_new_tokens=0"):
        EngineConfig(batch_sizes=(4, 1), max_new_tokens=0)
