"""Which slot of the cache holds which context, and what of it. Host side, numpy only.

A slot belongs to an episode from its first turn until `release`, so that the next turn prefills
only what is new. What a slot holds is compared as `contents`: token ids, and for visual tokens a
number that names the screenshot, because placeholders look alike. Nothing here knows the device.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from uirl_jax.families.border import Screen


def contents(token_ids_c: np.ndarray, screens: Sequence[Screen], image_token_id: int) -> np.ndarray:
    """int64[C]: equal up to a position exactly where the cache is.

    Args:
      screens: in the order of their placeholders.
    """
    contents_c = token_ids_c.astype(np.int64)
    visual = [_names(screen.key, screen.tokens) for screen in screens]
    if visual:
        contents_c[token_ids_c == image_token_id] = np.concatenate(visual)
    return contents_c


def _names(image_key: str, tokens: int) -> np.ndarray:
    """Negative, so that no token id is among them."""
    digest = hashlib.blake2b(image_key.encode(), digest_size=8).digest()
    first = int.from_bytes(digest, "little") >> 2
    return -1 - first - np.arange(tokens, dtype=np.int64)


def common(a_c: np.ndarray, b_c: np.ndarray) -> int:
    """Length of the longest common prefix."""
    length = min(len(a_c), len(b_c))
    different = a_c[:length] != b_c[:length]
    return int(different.argmax()) if different.any() else length


@dataclasses.dataclass(eq=False)
class Slot:
    """Cache positions 0 ... computed - 1 hold contents_c[:computed]; the rest is pending.

    context_c is all of the newest context, of which contents_c may lack the last token.
    """

    number: int
    owner: str = ""  # the episode that it belongs to; empty: free
    contents_c: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    context_c: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    computed: int = 0
    used: int = 0  # time of last use, on the pool's own clock
    busy: bool = False  # a request runs in it
    donor: "Slot | None" = None  # its prefix is to be copied from there ...
    shared: int = 0  # ... up to here, once it is computed

    @property
    def pending(self) -> int:
        """Positions that are still to be prefilled."""
        return len(self.contents_c) - self.computed


class SlotPool:
    """All slots. A request gets its episode's own, a free one, or the one idle for longest.

    Args:
      reuse: a slot keeps what it holds of a context that continues it; else each begins anew.
      share: a prefix may be copied from another slot.
    """

    def __init__(self, count: int, *, reuse: bool = True, share: bool = True) -> None:
        self.slots = [Slot(number) for number in range(count)]
        self._reuse, self._share = reuse, share
        self._clock = 0

    def admit(
        self, owner: str, contents_c: np.ndarray, context_c: np.ndarray | None = None
    ) -> Slot | None:
        """A slot for these contents, what it holds of them already kept; None: all are busy.

        Where another slot holds more of them, or will, its prefix is to be copied: `donor`.

        Args: context_c: see Slot; None: it is contents_c.
        """
        slot = self._find(owner)
        if slot is None:
            return None
        self._clock += 1
        slot.used, slot.owner, slot.busy = self._clock, owner, True
        kept = common(slot.contents_c, contents_c) if self._reuse else 0
        slot.computed = min(slot.computed, kept)
        slot.contents_c = contents_c
        slot.context_c = contents_c if context_c is None else context_c
        self._plan_anew(slot)
        self.plan(slot)
        return slot

    def plan(self, slot: Slot) -> None:
        """Finds the slot that a prefix can be copied from."""
        slot.donor, slot.shared = None, 0
        if not self._share:
            return
        best = slot.computed
        for other in self.slots:
            # Never from a slot that waits for a third, or for this one: no circular waits.
            if other is slot or other.donor is not None:
                continue
            if not self._reuse and not np.array_equal(other.context_c, slot.context_c):
                continue  # a family that computes a context as a whole shares only equal ones
            shared = common(other.contents_c, slot.contents_c)
            if not other.busy:
                shared = min(shared, other.computed)
            if shared > best:
                slot.donor, slot.shared, best = other, shared, shared

    def copies(self) -> list[tuple[Slot, Slot]]:
        """(source, target) of the prefixes that can be copied now."""
        return [
            (slot.donor, slot)
            for slot in self.slots
            if slot.donor is not None and slot.donor.computed >= slot.shared
        ]

    def copied(self, slot: Slot) -> None:
        slot.computed, slot.donor = slot.shared, None

    def finish(self, slot: Slot, contents_c: np.ndarray, computed: int) -> None:
        """The request in the slot has ended; what it holds stays for the episode's next turn."""
        slot.contents_c, slot.computed, slot.busy = contents_c[:computed], computed, False
        slot.donor = None
        self._plan_anew(slot)

    def abandon(self, slot: Slot) -> None:
        """The request in the slot ended in the middle: what was computed so far holds."""
        self.finish(slot, slot.contents_c, slot.computed)

    def release(self, owner: str) -> None:
        """The episode is over; its slot is anybody's, and a donor until then."""
        for slot in self.slots:
            if slot.owner == owner:
                slot.owner = ""

    def has_owners(self) -> bool:
        """Whether any episode has had a turn here and may have another."""
        return any(slot.owner for slot in self.slots)

    def forget(self) -> None:
        """Nothing that was computed holds any more; what runs is to be prefilled again."""
        for slot in self.slots:
            slot.computed, slot.donor = 0, None
            if not slot.busy:
                slot.contents_c = slot.contents_c[:0]
        for slot in self.slots:
            if slot.busy:
                self.plan(slot)

    def _find(self, owner: str) -> Slot | None:
        idle = [slot for slot in self.slots if not slot.busy]
        own = next((slot for slot in idle if owner and slot.owner == owner), None)
        free = min((s for s in idle if not s.owner), key=lambda slot: slot.used, default=None)
        return own or free or min(idle, key=lambda slot: slot.used, default=None)

    def _plan_anew(self, donor: Slot) -> None:
        """For those that were to copy from here: it may hold less now than it was going to."""
        for slot in self.slots:
            if slot.donor is donor:
                self.plan(slot)
