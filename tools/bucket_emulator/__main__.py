"""The command of the emulator; see the package."""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
from pathlib import Path

from tools import command_line
from tools.bucket_emulator.faults import HARD, Faults
from tools.bucket_emulator.objects import Buckets
from tools.bucket_emulator.running import serve
from tools.bucket_emulator.server import Server
from uirl_jax.untrusted.http import port_number


@command_line.one_line_errors()
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bucket_emulator", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port_number, default=0, help="0: any free one")
    parser.add_argument("--port_file", "--port-file", type=Path, help="the port is written here")
    parser.add_argument("--bucket", action="append", default=[], help="exists; default: runs")
    parser.add_argument("--denied", action="append", default=[], help="a bucket that answers 403")
    parser.add_argument("--faults", default="none", help='none, hard, or JSON: {"internal": 0.1}')
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--refuse_fast_writes", action="store_true", help="429 to them")
    parser.add_argument("--latency_s", type=float, default=0.0, help="waited before every answer")
    args = parser.parse_args()
    shipped = {"none": Faults(), "hard": HARD}
    try:
        faults = shipped.get(args.faults) or Faults(**json.loads(args.faults))
    except (ValueError, TypeError) as error:
        parser.error(f"--faults={args.faults}: {error}")
    faults = dataclasses.replace(faults, seed=args.seed)
    buckets = Buckets(args.bucket or ["runs"], args.denied, args.refuse_fast_writes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        server = Server(buckets, faults, args.latency_s)
        asyncio.run(serve(server, args.host, args.port, args.port_file))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
