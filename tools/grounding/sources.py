"""Where the screens of a stream come from, and what each screen is: a function of seed and number.

Train and test have no source in common: one library and whole families of MiniWoB++ pages are held
out, so that a score on test is one of components that were never shown.
"""

import dataclasses
import hashlib
from collections.abc import Mapping

import numpy as np

from uirl_jax.seeds import TRAIN_SEEDS
from uirl_jax.verifiers.browser import MINIWOB_PREFIX
from uirl_jax.verifiers.dialects import DATA_ENTRY

SPLITS = ("train", "test")
MINIWOB = "miniwob"
MINIWOB_PX = (160, 210)
HELD_OUT_LIBRARY = "bulma"
# Families of MiniWoB++ pages that only test has; a task belongs to one by the start of its name.
HELD_OUT_FAMILIES = (
    *("book-flight", "buy-ticket", "choose-date", "click-color", "click-dialog", "click-menu"),
    *("click-pie", "click-widget", "login-user", "navigate-tree", "order-food", "phone-book"),
    *("search-engine", "social-media", "use-spinner"),
)
# Pages that follow the clock: equal seeds do not give equal pixels (docs/miniwob_tasks.md).
_CLOCK = ("chase-circle", "moving-items", "simon-says", "stock-market", "terminal")
# Shares of the screens, among the sources that there are.
_SHARES = {
    "train": {"plain": 0.32, "bootstrap": 0.18, "pico": 0.16, MINIWOB: 0.3, DATA_ENTRY: 0.04},
    "test": {HELD_OUT_LIBRARY: 0.6, MINIWOB: 0.4},
}


def source_names(split: str) -> tuple[str, ...]:
    return tuple(_SHARES[split])


def miniwob_tasks(split: str) -> tuple[str, ...]:
    """Names of the pages of a split: "miniwob/click-test", ...

    Raises: BrowserError: the package is not installed.
    """
    from uirl_jax.verifiers.browser import miniwob  # needs the extra `browser`

    names = [name.removeprefix(MINIWOB_PREFIX) for name in miniwob.task_names()]
    held_out = [name for name in names if name.startswith(HELD_OUT_FAMILIES)]
    wanted = held_out if split == "test" else [name for name in names if name not in held_out]
    return tuple(MINIWOB_PREFIX + name for name in wanted if name not in _CLOCK)


def miniwob_scale(size_px: tuple[int, int], density: int = 1) -> int | None:
    """The scale at which a page of MiniWoB++ fills the screen; None where none does.

    Args: density: pixels of the screen along each side of one of `size_px`.
    """
    width, height = (side * density for side in size_px)
    return next(
        (n for n in range(1, 5) if (width, height) == (n * MINIWOB_PX[0], n * MINIWOB_PX[1])), None
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a screen will show."""

    number: int  # of the screen in its stream
    attempt: int  # above 0: an earlier one repeated a screen of the stream, or showed nothing
    component: str  # "plain", "bootstrap", "miniwob/click-test", ...
    seed: int

    def rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *purpose.encode()])


def plan(
    seed: int, split: str, number: int, attempt: int, sources: Mapping[str, tuple[str, ...]]
) -> Plan:
    """The number-th screen of the stream of a seed.

    Args:
      sources: name -> its components; for MiniWoB++ its pages, for another source itself.
    """
    text = f"grounding|{split}|{seed}|{number}|{attempt}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    # As training instances: a page of MiniWoB++ is never one of a held-out episode.
    own_seed = int.from_bytes(digest, "little") % len(TRAIN_SEEDS)
    rng = np.random.default_rng([own_seed, 0])
    names = [name for name in source_names(split) if name in sources]
    shares = np.array([_SHARES[split][name] for name in names])
    components = sources[names[int(rng.choice(len(names), p=shares / shares.sum()))]]
    return Plan(number, attempt, components[int(rng.integers(len(components)))], own_seed)
