"""The distribution that tokens are drawn from, against numpy; and the draws, against it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uirl_jax.engine import requests, sampling

NO_FORBIDDEN = np.zeros(6, bool)


def seeds_of(seeds) -> np.ndarray:
    return np.stack([requests.seed_words(seed) for seed in seeds])


def numpy_log_softmax(logits_v: np.ndarray) -> np.ndarray:
    shifted_v = logits_v.astype(np.float64) - logits_v.max()
    return shifted_v - np.log(np.exp(shifted_v).sum())


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_sampling_logprobs_temperature_divides_logits_before_softmax(temperature):
    logits_bv = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32) * 4
    logprobs_bv = sampling.sampling_logprobs(
        jnp.array(logits_bv), jnp.full(3, temperature), NO_FORBIDDEN
    )
    for row in range(3):
        expected_v = numpy_log_softmax(logits_bv[row] / temperature)
        np.testing.assert_allclose(logprobs_bv[row], expected_v, atol=1e-5)


def test_sampling_logprobs_greedy_row_scores_at_temperature_one():
    logits_bv = jnp.array([[1.0, 2.0, 4.0, -3.0, 0.0, 0.5]])
    greedy_bv = sampling.sampling_logprobs(logits_bv, jnp.zeros(1), NO_FORBIDDEN)
    np.testing.assert_allclose(greedy_bv[0], numpy_log_softmax(np.array(logits_bv[0])), atol=1e-6)


def test_sampling_logprobs_forbidden_ids_leave_the_softmax():
    logits_bv = np.array([[5.0, 0.0, 1.0, 2.0, 9.0, -1.0]], np.float32)
    forbidden_v = np.array([True, False, False, False, True, False])
    logprobs_bv = np.array(
        sampling.sampling_logprobs(jnp.array(logits_bv), jnp.ones(1), forbidden_v)
    )
    assert (logprobs_bv[0, forbidden_v] == -np.inf).all()
    expected_v = numpy_log_softmax(logits_bv[0, ~forbidden_v])
    np.testing.assert_allclose(logprobs_bv[0, ~forbidden_v], expected_v, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_draw_many_seeds_follow_the_softmax(temperature):
    # Chi-square with 4 degrees of freedom (5 allowed ids): 23.5 is exceeded once in 10,000 draws of
    # this test; the seeds are fixed, so it either passes for ever or the sampler is wrong.
    draws = 20_000
    logits_v = jnp.array([0.0, 1.0, -1.0, 2.0, 30.0, 0.5])
    forbidden_v = np.array([False, False, False, False, True, False])
    temperature_b = jnp.full(draws, temperature)
    logprobs_bv = sampling.sampling_logprobs(
        jnp.broadcast_to(logits_v, (draws, 6)), temperature_b, forbidden_v
    )
    token_b = np.array(
        jax.jit(sampling.draw)(
            logprobs_bv, temperature_b, seeds_of(range(draws)), jnp.full(draws, 3)
        )
    )
    assert not (token_b == 4).any()
    allowed = [0, 1, 2, 3, 5]
    expected = draws * np.exp(numpy_log_softmax(np.array(logits_v)[allowed] / temperature))
    observed = np.bincount(token_b, minlength=6)[allowed]
    assert ((observed - expected) ** 2 / expected).sum() < 23.5


def test_draw_rows_and_steps_of_one_seed_differ_only_by_step():
    logprobs_bv = jnp.full((2, 5_000), -np.log(5_000.0))
    warm_b = jnp.ones(2)
    first_b = sampling.draw(logprobs_bv, warm_b, seeds_of([7, 7]), jnp.zeros(2, int))
    second_b = sampling.draw(logprobs_bv, warm_b, seeds_of([7, 8]), jnp.ones(2, int))
    assert first_b[0] == first_b[1]  # a row's place in the batch is no part of its noise
    assert first_b[0] != second_b[0]  # but the step is
    assert second_b[0] != second_b[1]  # and the seed


def test_draw_temperature_zero_takes_the_most_likely_token():
    logits_bv = jnp.array([[0.0, 0.1, 0.2, 0.15, 0.0, 0.0]] * 50)
    logprobs_bv = sampling.sampling_logprobs(logits_bv, jnp.zeros(50), NO_FORBIDDEN)
    token_b = sampling.draw(logprobs_bv, jnp.zeros(50), seeds_of(range(50)), jnp.zeros(50, int))
    assert (np.array(token_b) == 2).all()


def test_seed_words_high_bits_and_negative_seeds_are_distinct():
    words = {tuple(requests.seed_words(seed)) for seed in (0, 1, -1, 2**32, 2**63, 2**32 + 1)}
    assert len(words) == 6


def oracle_kept(probabilities_v: np.ndarray, top_p: float, top_k: int) -> list[int]:
    """By hand: the k likeliest, then the fewest of them that together reach p of what they have."""
    order = sorted(range(len(probabilities_v)), key=lambda v: -probabilities_v[v])
    order = order[:top_k] if top_k else order
    total, kept = probabilities_v[order].sum(), []
    while sum(probabilities_v[kept]) < top_p * total and len(kept) < len(order):
        kept.append(order[len(kept)])
    return sorted(kept)


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(0.5, 0), (0.9, 0), (1.0, 3), (0.6, 3), (1e-6, 0), (1.0, 1), (1.0, 99)]
)
def test_truncated_keeps_what_the_oracle_keeps_and_draws_follow_it(top_p, top_k):
    draws = 10_000
    logits_v = np.array([0.0, 1.0, -1.0, 2.0, 1.5, 0.5], np.float32)
    full_bv = sampling.sampling_logprobs(
        jnp.broadcast_to(logits_v, (draws, 6)), jnp.ones(draws), NO_FORBIDDEN
    )
    cut_bv = sampling.truncated(full_bv, jnp.full(draws, top_p), jnp.full(draws, top_k))
    kept = oracle_kept(np.exp(np.array(full_bv[0])), top_p, top_k)
    assert np.flatnonzero(np.isfinite(cut_bv[0])).tolist() == kept
    expected = np.exp(numpy_log_softmax(logits_v[kept]))
    np.testing.assert_allclose(np.exp(np.array(cut_bv[0])[kept]), expected, atol=1e-6)
    token_b = np.array(
        jax.jit(sampling.draw)(
            cut_bv, jnp.ones(draws), seeds_of(range(draws)), jnp.zeros(draws, int)
        )
    )
    observed = np.bincount(token_b, minlength=6)
    assert observed[kept].sum() == draws
    # Chi-square with at most 5 degrees of freedom: 25.7 is exceeded once in 10,000 (see above).
    assert ((observed[kept] - draws * expected) ** 2 / (draws * expected)).sum() < 25.7


def test_truncated_rows_that_ask_for_nothing_keep_their_distribution_beside_others():
    full_bv = sampling.sampling_logprobs(
        jnp.array([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]), jnp.ones(2), np.zeros(3, bool)
    )
    cut_bv = sampling.truncated(full_bv, jnp.array([1.0, 1.0]), jnp.array([0, 1]))
    np.testing.assert_allclose(cut_bv[0], full_bv[0], atol=1e-6)
    assert np.isfinite(cut_bv[1]).tolist() == [False, False, True]
