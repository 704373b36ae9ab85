"""`python -m uirl_jax` and the installed command `uirl-jax`: `main`, which takes seconds to import.

Until `main` handles signals itself, Ctrl-C ends the process at once and without a traceback, and
SIGTERM waits: a learner on several hosts obeys it together with the others.
"""

import signal


def command() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    from uirl_jax import main

    main.command()


if __name__ == "__main__":
    command()
