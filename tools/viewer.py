"""A local web page that follows a run: curves, actors, shards, and every episode turn by turn.

    python -m tools.viewer --workdir=runs/quickstart
    python -m tools.viewer --workdir=gs://bucket/run --port=8765
    python -m tools.viewer --workdir=runs/x --host=0.0.0.0 --token_file=token

Prints its address and serves until Ctrl-C. It only reads: nothing is written into the workdir. On
loopback nobody is asked for a token unless one is given; any other --host needs one, and without
--token_file one is drawn and printed. docs/viewer.md.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import urllib.parse
from collections.abc import Sequence

from tools import command_line
from uirl_jax.errors import ConfigError
from uirl_jax.untrusted.http import is_loopback, port_number
from uirl_jax.watch import viewer
from uirl_jax.watch.follow import Follower

TOKEN_VARIABLE = "UIRL_VIEWER_TOKEN"


async def serve(args: argparse.Namespace, token: str | None) -> None:
    """Prints the address, and serves until SIGINT or SIGTERM."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    follower = Follower(args.workdir)
    serving = viewer.serving(
        follower,
        host=args.host,
        port=args.port,
        token=token,
        allowed_hosts=args.allow_host,
        model=args.model,
    )
    with contextlib.closing(follower):
        async with serving as address:
            follower.start()
            query = f"?token={urllib.parse.quote(token, safe='')}" if token else ""
            print(address + query, flush=True)
            await over.wait()


def read_token(path: str, host: str) -> str | None:
    """The token of a file or the environment; a new one where the host needs one."""
    if path:
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token_file={path}: cannot be read ({error})") from None
    given = os.environ.get(TOKEN_VARIABLE, "")
    if given:
        return given
    return None if is_loopback(host) else secrets.token_urlsafe(24)


@command_line.one_line_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.viewer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workdir", required=True, help="of a run: a directory, gs:// or s3://")
    parser.add_argument("--host", default="127.0.0.1", help="any other than loopback needs a token")
    parser.add_argument("--port", type=port_number, default=0, help="0: any free one")
    parser.add_argument(
        "--token_file", default="", help=f"at least 16 characters; or ${TOKEN_VARIABLE}"
    )
    parser.add_argument(
        "--allow_host", action="append", default=[], help="a further Host name, behind a proxy"
    )
    parser.add_argument(
        "--model", default="", help="where tokenizer.json is, if not where the run's config says"
    )
    args = parser.parse_args(argv)
    asyncio.run(serve(args, read_token(args.token_file, args.host)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
