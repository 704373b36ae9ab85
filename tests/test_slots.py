"""Bookkeeping of the engine's slots and of its table of visual tokens: nothing on a device."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from tests.policies import screen_of
from uirl_jax.engine.slots import Slot, SlotPool, common, contents
from uirl_jax.engine.visual_table import VisualTable


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def run_to_end(pool: SlotPool, slot: Slot, *sampled: int) -> None:
    """Prefilled, decoded and ended: it holds its context and what was sampled but the last."""
    slot.computed = len(slot.contents_c)
    whole = np.concatenate([slot.contents_c, ids(*sampled)])
    pool.finish(slot, whole, len(whole))


def test_contents_tell_screenshots_of_equal_size_apart():
    context_c = np.array([5, 9, 9, 6, 9, 9, 7], np.int32)

    def of_screens(*keys: str) -> np.ndarray:
        return contents(context_c, [screen_of(key, (1, 2, 4)) for key in keys], 9)

    one, other = of_screens("a", "b"), of_screens("a", "c")
    assert common(one, of_screens("a", "b")) == 7
    assert common(one, other) == 4, "up to the second screenshot"
    assert (one[[1, 2, 4, 5]] < 0).all() and one[[0, 3, 6]].tolist() == [5, 6, 7]


def test_admit_keeps_the_own_prefix_and_begins_at_the_cut():
    pool = SlotPool(2)
    slot = pool.admit("e", ids(1, 2, 3))
    run_to_end(pool, slot, 4)
    again = pool.admit("e", ids(1, 2, 3, 4, 5, 6))
    assert again is slot and (again.computed, again.pending) == (4, 2)
    run_to_end(pool, again)
    cut = pool.admit("e", ids(1, 2, 9))
    assert cut is slot and (cut.computed, cut.pending) == (2, 1)


def test_admit_takes_free_slots_before_others_and_then_the_one_idle_for_longest():
    pool = SlotPool(3)
    slots = {name: pool.admit(name, ids(n)) for n, name in enumerate("abc")}
    assert len({slot.number for slot in slots.values()}) == 3
    assert pool.admit("d", ids(7)) is None, "all are busy"
    for name in "bac":
        run_to_end(pool, slots[name])
    pool.release("c")
    assert pool.admit("d", ids(7)) is slots["c"]
    assert pool.admit("f", ids(7)) is slots["a"], "the one that was used longest ago"
    assert pool.admit("b", ids(1, 2)) is slots["b"], "its own"


def test_group_copies_what_its_first_member_prefills():
    pool = SlotPool(3)
    first, second, third = (pool.admit("", ids(1, 2, 3, n)) for n in range(3))
    assert first.donor is None and second.donor is first and third.donor is first
    assert pool.copies() == []
    first.computed = 2
    assert pool.copies() == []
    first.computed = 4
    assert pool.copies() == [(first, second), (first, third)]
    pool.copied(second)
    assert (second.computed, second.pending, second.donor) == (3, 1, None)


def test_donor_that_fails_leaves_nobody_waiting():
    pool = SlotPool(3)
    first, second, third = (pool.admit("", ids(1, 2, 3, n)) for n in range(3))
    first.computed = 1
    pool.abandon(first)
    assert second.donor is first and second.shared == 1, "what was computed is worth copying"
    pool.finish(first, first.contents_c, 0)
    assert second.donor is None and third.donor is second


def test_forget_prefills_what_runs_again_and_shares_it():
    pool = SlotPool(3)
    slots = [pool.admit("", ids(1, 2, 3, n)) for n in range(3)]
    for slot in slots:
        slot.computed, slot.donor = 4, None
    run_to_end(pool, slots[2])
    pool.forget()
    assert [slot.computed for slot in slots] == [0, 0, 0] and len(slots[2].contents_c) == 0
    waiting = [slot for slot in slots[:2] if slot.donor is not None]
    assert len(waiting) == 1 and waiting[0].shared == 3


@hypothesis.given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60))
def test_table_never_gives_rows_twice_nor_takes_those_that_are_read(actions):
    """Sizes 1 to 4 by key, twelve rows: readers come and go at random."""
    table, sizes = VisualTable(12), {f"k{n}": n % 4 + 1 for n in range(8)}
    readers: list[dict[str, int]] = []
    for number, give_back in actions:
        if give_back and readers:
            table.give_back(readers.pop(number % len(readers)))
        else:
            wanted = {key: sizes[key] for key in (f"k{number}", f"k{(number * 3 + 1) % 8}")}
            before = {key: table.rows_of(key).tolist() for of in readers for key in of}
            if table.take(wanted) is not None:
                readers.append(wanted)
                for key in wanted:
                    table.set_encoded(key)
            assert all(table.rows_of(key).tolist() == rows for key, rows in before.items())
        held = {key for of in readers for key in of}
        rows = [row for key in held for row in table.rows_of(key).tolist()]
        assert len(rows) == len(set(rows)) == sum(sizes[key] for key in held)
    for of in readers:
        table.give_back(of)
    assert table.take({"all": 12}) is not None, "no row was lost"


def test_table_keeps_what_was_encoded_until_its_rows_are_needed():
    table = VisualTable(6)
    for key in "ab":
        table.take({key: 2})
        table.set_encoded(key)
        table.give_back({key: 2})
    table.take({"a": 2})  # used again: b is the older one now
    table.give_back({"a": 2})
    table.take({"c": 4})
    assert table.is_encoded("a")
    assert table.take({"b": 2, "a": 2}) is None, "c is being read"
    table.give_back({"c": 4})  # it was never encoded
    assert table.take({"b": 2}) is not None and not table.is_encoded("b")


def test_pool_that_may_not_reuse_begins_a_longer_context_anew():
    pool = SlotPool(2, reuse=False)
    slot = pool.admit("e", ids(1, 2, 3))
    run_to_end(pool, slot, 4)
    again = pool.admit("e", ids(1, 2, 3, 4, 5))
    assert again is slot and (again.computed, again.pending) == (0, 5)


def test_pool_that_may_not_reuse_shares_equal_contexts_alone():
    pool = SlotPool(3, reuse=False)
    first, equal = pool.admit("", ids(1, 2)), pool.admit("", ids(1, 2))
    longer = pool.admit("", ids(1, 2, 3))
    assert equal.donor is first and longer.donor is None


def test_pool_that_may_not_share_computes_every_context():
    pool = SlotPool(2, share=False)
    pool.admit("", ids(1, 2))
    assert pool.admit("", ids(1, 2)).donor is None
