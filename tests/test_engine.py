"""The engine's tokens and logprobs against a loop without a cache and the learner's, its faults."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine_world import (
    CFG,
    END_TOKEN,
    FORBIDDEN,
    IMAGE_TOKEN,
    MIXED,
    VOCAB,
    assert_logprobs,
    make_policy,
    masked_log_softmax,
    named,
    new_engine,
    redrawn,
    request,
    sample_all,
    screen,
    without_cache,
)
from tests.policies import screen_of
from uirl_jax.engine import requests
from uirl_jax.engine.engine import Engine, EngineConfig, SampleResult
from uirl_jax.errors import ConfigError, PolicyError
from uirl_jax.families.border import PlacedScreen
from uirl_jax.families.loading import PolicyModel


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    return make_policy()


@pytest.fixture(scope="module")
def engine(policy) -> Engine:
    """Shared, so that its few shapes compile once; tests that change the policy put it back."""
    return new_engine(policy)


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


def test_engine_stop_string_ends_with_the_token_that_completes_it(policy):
    spelled = new_engine(policy, decode=lambda ids: "".join(chr(60 + int(i)) for i in ids))
    free = request(3, 6, "a", temperature=3.0)
    (whole,) = sample_all(spelled, [free])
    text = "".join(chr(60 + int(i)) for i in whole.token_ids)
    stopping = dataclasses.replace(free, stop_strings=("never", text[2:4]))
    (cut,) = sample_all(spelled, [stopping])
    assert cut.token_ids.tolist() == whole.token_ids[: text.index(text[2:4]) + 2].tolist()
    assert cut.stopped and len(cut.logprobs) == len(cut.token_ids)


def test_engine_text_that_cannot_be_decoded_fails_its_request_alone(policy):
    calls = iter(range(100))

    def decode(ids: object) -> str:
        if next(calls) == 1:
            raise LookupError("no such token")
        return "stop"

    broken = new_engine(policy, decode=decode)
    asked = [dataclasses.replace(request(seed), stop_strings=("stop",)) for seed in range(2)]

    async def run() -> list[SampleResult | BaseException]:
        async with broken, asyncio.timeout(60):
            return await asyncio.gather(*map(broken.sample, asked), return_exceptions=True)

    first, second = asyncio.run(run())
    assert len(first.token_ids) == 1
    assert str(second) == "no such token"


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
    other = redrawn(policy.trainable, 99)
    one = request(3, 6, "a", temperature=0.0)

    async def run() -> list[SampleResult]:
        async with engine, asyncio.timeout(600):
            before = await engine.sample(one)
            engine.set_policy(other, 8)
            during = await engine.sample(one)
            engine.set_policy(policy.trainable, 7)
            return [before, during, await engine.sample(one)]

    before, during, after = asyncio.run(run())
    assert [before.policy_version, during.policy_version, after.policy_version] == [7, 8, 7]
    assert before.token_ids.tolist() == after.token_ids.tolist()
    logits_tv, _ = without_cache(policy, one, during.token_ids, lora=other)
    logprobs_tv = masked_log_softmax(logits_tv, 1.0, FORBIDDEN)
    rows = len(one.context_ids) - 1 + np.arange(len(during.token_ids))
    np.testing.assert_allclose(during.logprobs, logprobs_tv[rows, during.token_ids], atol=1e-4)


def test_engine_set_policy_with_other_shapes_is_refused(engine, policy):
    wider = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf], axis=-1), policy.trainable)
    with pytest.raises(PolicyError, match=r"version 8.*expected float32"):
        engine.set_policy(wider, 8)
    assert engine.policy_version == 7


def test_engine_policy_that_gives_nan_fails_its_requests_and_lives_on(engine, policy):
    """Also those that wait for a prefix of the one that fails."""

    async def run() -> None:
        async with engine, asyncio.timeout(600):
            engine.set_policy(jax.tree.map(lambda leaf: leaf * jnp.nan, policy.trainable), 8)
            asked = [request(0), request(1)]
            asked += [dataclasses.replace(request(0), seed=seed) for seed in range(2, 8)]
            outcomes = await asyncio.gather(*map(engine.sample, asked), return_exceptions=True)
            engine.set_policy(policy.trainable, 7)
            assert [type(outcome) for outcome in outcomes] == [PolicyError] * 8
            assert "version 8" in str(outcomes[0])
            assert len((await engine.sample(request(0))).token_ids) > 0

    asyncio.run(run())


def test_engine_slots_that_held_nan_serve_shorter_contexts_of_a_good_policy(engine, policy):
    spoilt = jax.tree.map(lambda leaf: leaf * jnp.nan, policy.trainable)
    asked = [request(seed, 5, "a") for seed in range(CFG.num_slots)]

    async def run() -> list[SampleResult]:
        async with engine, asyncio.timeout(600):
            engine.set_policy(spoilt, 8)
            long = [request(seed, 20, "a") for seed in range(CFG.num_slots)]  # in every slot
            outcomes = await asyncio.gather(*map(engine.sample, long), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [PolicyError] * len(long)
            engine.set_policy(policy.trainable, 7)
            return await asyncio.gather(*map(engine.sample, asked))

    for one, result in zip(asked, asyncio.run(run()), strict=True):
        assert_logprobs(policy, one, result)


@pytest.mark.parametrize("program", ["encode", "prefill", "decode"])
def test_engine_call_that_fails_fails_its_requests_and_lives_on(policy, program: str):
    broken = new_engine(policy)
    whole = broken._rounds._programs

    def fail(buffer: jax.Array, *arguments: object, **options: object) -> None:
        jax.tree.map(lambda leaf: leaf.delete(), buffer)  # as a donated one is gone
        raise MemoryError("no memory left")

    async def run() -> SampleResult:
        async with broken, asyncio.timeout(600):
            broken._rounds._programs = whole._replace(**{program: fail})
            asked = [request(seed, 5, "a") for seed in range(6)]
            outcomes = await asyncio.gather(*map(broken.sample, asked), return_exceptions=True)
            assert [str(outcome) for outcome in outcomes] == ["no memory left"] * 6
            broken._rounds._programs = whole
            return await broken.sample(asked[0])

    assert_logprobs(policy, request(0, 5, "a"), asyncio.run(run()))


def test_engine_whose_buffers_cannot_be_made_again_fails_what_waits_and_comes(policy):
    broken = new_engine(policy)
    working = broken._rounds._programs, broken._rounds._init_cache

    def fail(*arguments: object, **options: object) -> None:
        raise MemoryError("no memory left")

    def fail_again() -> None:
        assert broken._rounds._cache is None  # freed first: both may not fit
        raise MemoryError("no memory for a new cache")

    async def run() -> None:
        async with broken, asyncio.timeout(600):
            broken._rounds._programs = broken._rounds._programs._replace(prefill=fail)
            broken._rounds._init_cache = fail_again
            asked = [request(seed, 5, "a") for seed in range(6)]  # two more than there are slots
            outcomes = await asyncio.gather(*map(broken.sample, asked), return_exceptions=True)
            assert [str(outcome) for outcome in outcomes] == [
                *["no memory left"] * 4,
                *["no memory for a new cache"] * 2,
            ]
            with pytest.raises(MemoryError, match="for a new cache"):
                await broken.sample(asked[0])
        with pytest.raises(MemoryError, match="for a new cache"):
            await broken.sample(asked[0])

    asyncio.run(run())
    broken._rounds._programs, broken._rounds._init_cache = working
    assert len(sample_all(broken, [request(0, 5)])[0].token_ids) > 0  # opened again


def test_engine_that_ends_by_no_exception_fails_what_waits_and_comes(policy):
    class PanicException(BaseException):
        pass

    broken = new_engine(policy)

    def panic() -> None:
        raise PanicException("in Rust")

    async def run() -> None:
        async with broken, asyncio.timeout(60):
            broken._rounds.run = panic
            outcomes = await asyncio.gather(
                *(broken.sample(request(seed, 5)) for seed in range(2)), return_exceptions=True
            )
            assert [type(outcome) for outcome in outcomes] == [RuntimeError] * 2
            with pytest.raises(RuntimeError, match=r"serves no more: PanicException\('in Rust'\)"):
                await broken.sample(request(0, 5))

    asyncio.run(run())


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
            dataclasses.replace(request(0, 5, "a"), screens=(screen_of("a", (1, 6, 6)),)),
            r"36 patches.*32.*engine\.image_row_patches",
        ),
    ],
)
def test_engine_request_beyond_a_limit_names_the_key(engine, asked, message):
    with pytest.raises(ConfigError, match=message):
        sample_all(engine, [asked])


def test_engine_screenshots_of_one_context_beyond_the_table_name_the_key(policy):
    narrow = new_engine(policy, cfg=dataclasses.replace(CFG, image_tokens=11))
    asked = named(request(0, 5, "bb"), "b1", "b2")
    with pytest.raises(ConfigError, match=r"2 screenshots.*12 visual.*11: raise engine\.image_tok"):
        sample_all(narrow, [asked])


@pytest.mark.parametrize(
    "asked",
    [
        dataclasses.replace(request(0, 5, "a"), screens=(screen("b"),)),
        dataclasses.replace(request(0, 5, "ac"), screens=(screen("c"), screen("a"))),
        dataclasses.replace(request(0, 5, "b"), screens=(screen("b"), screen("b"))),
        dataclasses.replace(request(0, 5, "a"), screens=()),
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
    inputs = make_policy().inputs

    def rows(images: str) -> int:
        placed: list[PlacedScreen] = []
        for key in images:
            assert requests.place_screen(placed, screen(key), cfg, inputs)
        table = {key: np.arange(screen(key).tokens) for key in images}
        arrays = requests.image_arrays(placed, table, cfg, inputs)
        used_m = arrays.row_m[arrays.row_m < cfg.table_rows(inputs)]
        assert len(used_m) == sum(map(len, table.values()))
        return len(arrays.vision["patches_ipc"])

    assert rows("ac") == 1  # 16 + 8 patches
    assert rows("ab") == 2  # 16 + 24
    placed: list[PlacedScreen] = []
    fits = [requests.place_screen(placed, screen("b"), cfg, inputs) for _ in range(3)]
    assert fits == [True, True, False] and [one.row for one in placed] == [0, 1]


def test_engine_config_impossible_sizes_are_listed_together():
    with pytest.raises(ConfigError, match=r"context_lengths=\(\).*batch_sizes=\(4, 1\)"):
        EngineConfig(batch_sizes=(4, 1), context_lengths=())
