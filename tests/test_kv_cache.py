"""The cache's int8 form: what is read is what was written, to half a scale; nothing else moves."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from uirl_jax.models import kv_cache

LAYERS, SLOTS, PLACES, HEADS, DIM = 2, 3, 8, 2, 4


def empty(dtype: str) -> kv_cache.KVCache:
    return kv_cache.init(LAYERS, SLOTS, PLACES, HEADS, DIM, jnp.dtype(dtype))


def written(cache, layer: int, slots: list[int], starts: list[int], k, v):
    return kv_cache.write(cache, layer, np.array(slots), np.array(starts), k, v)


def random_kv(seed: int, rows: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    # Heads and tokens of very different size: one scale for all of them would lose the small ones.
    size = 10.0 ** rng.integers(-6, 6, (2, rows, tokens, HEADS, 1))
    return tuple((rng.normal(size=(2, rows, tokens, HEADS, DIM)) * size).astype(np.float32))


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(st.integers(0, 2**31), st.integers(0, LAYERS - 1), st.integers(0, PLACES - 3))
def test_int8_reads_what_was_written_to_half_a_scale(seed, layer, start):
    k_btkh, v_btkh = random_kv(seed, 2, 3)
    cache = written(empty("int8"), layer, [2, 0], [start, 0], k_btkh, v_btkh)
    read = kv_cache.read(cache, layer, np.array([2, 0]), PLACES, jnp.float32)
    for wrote, got in zip((k_btkh, v_btkh), (x.swapaxes(1, 2) for x in read), strict=True):
        for row, at in ((0, start), (1, 0)):
            bound = np.abs(wrote[row]).max(axis=-1, keepdims=True) / 127 / 2
            # and float32's own rounding of a number of that size
            assert (np.abs(got[row, at : at + 3] - wrote[row]) <= bound * (1 + 1e-4)).all()


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    st.integers(0, 2**31),
    st.lists(st.integers(0, PLACES + 2), min_size=2, max_size=2),
    st.permutations(range(SLOTS + 1)),
    st.integers(1, PLACES + 2),
)
def test_write_equals_a_loop_over_places(seed, starts, slots, tokens):
    """One token or many, beyond the last place and the last slot too."""
    k_btkh, v_btkh = random_kv(seed, 2, tokens)
    full = jax.tree.map(lambda x: x + 7, empty("float32"))
    got = written(full, 1, slots[:2], starts, k_btkh, v_btkh)
    for before, after, new_btkh in zip(full, got, (k_btkh, v_btkh), strict=False):
        expected = np.array(before)
        for row, token in np.ndindex(2, tokens):
            if slots[row] < SLOTS and starts[row] + token < PLACES:
                expected[1, slots[row], :, starts[row] + token] = new_btkh[row, token]
        np.testing.assert_array_equal(after, expected)


def test_int8_write_changes_nothing_else():
    before = written(empty("int8"), 1, [1], [2], *random_kv(0, 1, 2))
    after = written(before, 1, [1], [4], *(100 * x for x in random_kv(1, 1, 1)))
    changed = np.zeros((LAYERS, SLOTS, HEADS, PLACES), bool)
    changed[1, 1, :, 4] = True
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(new)[~changed], np.asarray(old)[~changed])
        assert (np.asarray(new)[changed] != np.asarray(old)[changed]).any()


def test_int8_zeros_and_what_lies_outside():
    k_btkh, v_btkh = (np.zeros((1, 1, HEADS, DIM), np.float32) for _ in range(2))
    cache = written(empty("int8"), 0, [0], [0], k_btkh, v_btkh)
    assert all(np.isfinite(x).all() for x in kv_cache.read(cache, 0, None, PLACES, jnp.float32))
    for slot, place in ((SLOTS, 0), (0, PLACES)):
        outside = written(cache, 0, [slot], [place], *random_kv(2, 1, 1))
        jax.tree.map(np.testing.assert_array_equal, outside, cache)


def test_int8_takes_a_quarter_of_the_memory_and_a_scale_a_head():
    sizes = {
        dtype: sum(x.nbytes for x in jax.tree.leaves(empty(dtype))) for dtype in ("float32", "int8")
    }
    numbers = 2 * LAYERS * SLOTS * PLACES * HEADS
    assert sizes == {"float32": 4 * numbers * DIM, "int8": numbers * DIM + 4 * numbers}
