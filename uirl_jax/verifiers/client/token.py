"""Where the bearer token of a verifier comes from: a file, or an environment variable."""

import os
from pathlib import Path

from uirl_jax.errors import ConfigError

VARIABLE = "UIRL_VERIFIER_TOKEN"
_MAX_BYTES = 4096


def read_token(token_file: str | Path = "") -> str | None:
    """The token in the file, else the one in UIRL_VERIFIER_TOKEN, else None.

    Raises: ConfigError: the file cannot be read, or the token cannot be sent. The message does not
      hold the token.
    """
    where = str(token_file) if token_file else VARIABLE
    if token_file:
        try:
            with open(token_file, "rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"verifier.token_file={where}: cannot be read: {reason}") from error
    else:
        content = os.environ.get(VARIABLE, "").encode(errors="surrogateescape")
        if not content:
            return None
    token = content.strip()
    if not token or len(token) > _MAX_BYTES or any(not 0x21 <= byte <= 0x7E for byte in token):
        raise ConfigError(
            f"the verifier's token in {where}: expected 1 to {_MAX_BYTES} ASCII characters without "
            "spaces, on one line"
        )
    return token.decode("ascii")
