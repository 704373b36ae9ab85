"""What a step would do with other advantages than the config's, and what those are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np

from uirl_jax.learner import algorithm

Change = Callable[[list[np.ndarray]], list[np.ndarray]]


@contextmanager
def changed_advantages(change: Change) -> Iterator[None]:
    """Steps in this block take `change` of every token's advantages, an array for each record."""
    own = algorithm.token_fields

    def changed(*args):
        fields = own(*args)
        return fields | {"advantages_bt": change(fields["advantages_bt"])}

    with mock.patch.object(algorithm, "token_fields", changed):
        yield


@contextmanager
def seen_advantages() -> Iterator[list[list[np.ndarray]]]:
    """The advantages of the steps in this block: of each step an array for each record."""
    seen: list[list[np.ndarray]] = []

    def note(advantages: list[np.ndarray]) -> list[np.ndarray]:
        seen.append(advantages)
        return advantages

    with changed_advantages(note):
        yield seen
