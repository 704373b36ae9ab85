"""Real browser sessions: a pool of Chromium processes, and the tasks that are played in them.

From below: `cdp` is a process and its protocol, `page` one page in it, `keyboard` its keys, `tab` a
page that a session acts in, `pool` keeps tabs warm, `data_entry`, `miniwob` and `own_page` are the
tasks. They are imported when a session of such a type is asked for (`server.session_types`).
"""

from uirl_jax.errors import VerifierError

MINIWOB_PREFIX = "miniwob/"  # of the names of MiniWoB++'s tasks


class BrowserError(VerifierError):
    """No browser can be started, or the one of a session is lost."""


class PoolFullError(VerifierError):
    """As many browsers as the pool may have are in use."""

    def __init__(self, message: str, capacity: int) -> None:
        super().__init__(message)
        self.capacity = capacity
