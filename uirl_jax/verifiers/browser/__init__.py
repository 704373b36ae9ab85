"""Real browser sessions: a pool of Chromium processes, and the tasks that are played in them.

`tab` is one page with a mouse, a keyboard and a screen, `pool` keeps such tabs warm, `data_entry`
and `miniwob` are the tasks. All of them need the extra `browser`, and are imported when a session
of such a type is asked for (`server.session_types`).
"""

from uirl_jax.errors import VerifierError


class BrowserError(VerifierError):
    """No browser can be started, or the one of a session is lost."""


class PoolFullError(VerifierError):
    """As many browsers as the pool may have are in use."""

    def __init__(self, message: str, capacity: int) -> None:
        super().__init__(message)
        self.capacity = capacity
