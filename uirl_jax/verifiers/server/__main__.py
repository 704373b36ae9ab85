"""The command `python -m uirl_jax.verifiers.server`."""

import sys

from uirl_jax.verifiers.server.server import main

if __name__ == "__main__":
    sys.exit(main())
