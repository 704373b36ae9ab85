"""The engine's slots: who shares, who waits, what is computed again; and everything at once."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.eight_devices import on_eight_devices
from tests.engine_world import (
    CFG,
    MIXED,
    assert_logprobs,
    make_policy,
    named,
    new_engine,
    next_turn,
    redrawn,
    request,
    sample_all,
    without_cache,
)
from uirl_jax.engine.engine import Engine, SampleRequest, SampleResult
from uirl_jax.families.loading import PolicyModel
from uirl_jax.models import sharding


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    return make_policy()


@pytest.fixture(scope="module")
def engine(policy) -> Engine:
    """Shared, so that its few shapes compile once; tests that change the policy put it back."""
    return new_engine(policy)


def spent(engine: Engine, asked: list[SampleRequest]) -> dict[str, float]:
    """What the metrics of these requests come to."""
    before = engine.metrics()
    sample_all(engine, asked)
    after = engine.metrics()
    return {key: after[key] - before[key] for key in before}


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
                mixed.set_policy(jax.tree.map(np.array, redrawn(policy.trainable, number)), number)
                rng = np.random.default_rng(number)
                await asyncio.gather(*(mixed.sample(some_request(rng)) for _ in range(100)))
            return warm, mixed.metrics()["engine/compile_count"]

    warm, after = asyncio.run(run())
    assert mixed.metrics()["engine/requests"] == 1000
    # encode 2, prefill 2 rows x (2 lengths x 2 contexts), decode 3 batches x 2 contexts, copy 1
    assert warm == after == 2 + 8 + 6 + 1


def test_engine_requests_share_decode_steps(policy):
    """Four requests of eight tokens: one decodes alone while the others are prefilled, two rows a
    call; then they all go on together."""
    fresh = new_engine(policy, end=(-1,))
    used = spent(fresh, [request(seed, 9) for seed in range(4)])
    assert used["engine/tokens_sampled"] == 4 * 8
    assert 8 <= used["engine/decode_steps"] <= 10


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
                screens=second.screens[1:],
            )
            before = fresh.metrics()["engine/prefill_tokens"]
            shorter = await fresh.sample(cut)
            assert fresh.metrics()["engine/prefill_tokens"] - before == 8 - 2 - 1
            assert_logprobs(policy, cut, shorter)

    asyncio.run(run())


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
    asked = [named(request(n, 3, "ba"), f"b{n}", f"a{n}") for n in range(5)]
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
        [after[key] - before[key] for before, after in itertools.pairwise(seen)]
        for key in ("engine/idle_s", "engine/environments_s")
    )
    assert min(idle) > 0.19
    assert environments[0] > 0.19 and environments[1] < 0.1


# ---------------------------------------------------------------- everything at once


@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(st.integers(0, 2**31), st.booleans())
def test_engine_mixed_episodes_score_as_the_learner_does(seed, keep_stale):
    """Episodes of many turns that share prompts, cut their contexts, are cancelled and see new
    policies come in the middle: every token's logprob is that of the policy it was sampled with."""
    policy = make_policy()  # no fixture: hypothesis would print it
    mixed = mixed_engine(policy, keep_stale)
    loras = {7: policy.trainable, 8: redrawn(policy.trainable, 8), 9: redrawn(policy.trainable, 9)}
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
def mixed_engine(policy: PolicyModel, keep_stale: bool) -> Engine:
    cfg = dataclasses.replace(CFG, slots=5, image_tokens=40, keep_stale_cache=keep_stale)
    return new_engine(policy, cfg=cfg)


def check_mesh() -> None:
    """The body of the test below, in a process of its own: the device count is fixed at start."""
    assert len(jax.devices()) == 8
    lone = make_policy()
    expected = sample_all(new_engine(lone), MIXED)
    mesh = sharding.make_mesh(data=2, fsdp=2, model=2)
    lora, frozen = (
        jax.device_put(
            tree, sharding.state_shardings(mesh, tree, lone.family.weights.sharding_rules)
        )
        for tree in (lone.trainable, lone.frozen)
    )
    spread = new_engine(dataclasses.replace(lone, trainable=lora, frozen=frozen))
    for got, wanted in zip(sample_all(spread, MIXED), expected, strict=True):
        assert got.token_ids.tolist() == wanted.token_ids.tolist()
        np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4)
    cut = spread._rounds._cache.k_lcksh.sharding.shard_shape(spread._rounds._cache.k_lcksh.shape)
    assert cut == (2, 1, 1, 40, 8), "slots over data and fsdp, heads over model"
    compiled = spread.metrics()["engine/compile_count"]
    sample_all(spread, MIXED)
    assert spread.metrics()["engine/compile_count"] == compiled


def test_engine_on_eight_fake_devices_equals_one_device():
    done = on_eight_devices("check_mesh", module="test_engine_episodes")
    assert done.returncode == 0, done.stderr[-3000:]
