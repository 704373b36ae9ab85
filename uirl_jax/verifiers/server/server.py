"""The bundled verifier: desktops and browsers over HTTP (dialect G1+), in a process of its own.

OpenEnv's protocol is on the same port (`openenv`).

    python -m uirl_jax.verifiers.server --port 0 --port-file PATH --exit-with-parent
    python -m uirl_jax.verifiers.server --single=simple_data_entry     one session, dialect G2b

The actor's client treats it like any verifier. No caller is trusted: it listens on loopback or asks
for a token, checks the Host header, refuses requests from web pages, and limits everything that a
caller can make grow, but for connections that never ask for anything. This module has access
checks, the port and the life of the process; the calls are in `sessions`, `field_calls` and
`openenv`. There is no TLS: put a proxy in front, which also ends such connections.
"""

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from uirl_jax.errors import ConfigError, UirlError, VerifierError
from uirl_jax.store.files import write_atomically
from uirl_jax.types import TaskSpec
from uirl_jax.untrusted.http import equal_secrets, is_loopback, port_number
from uirl_jax.verifiers import own_tasks
from uirl_jax.verifiers.recorded import rewards
from uirl_jax.verifiers.recorded import sets as recorded_sets
from uirl_jax.verifiers.recorded.sets import RecordedSets
from uirl_jax.verifiers.server import openenv, openenv_calls
from uirl_jax.verifiers.server.field_calls import SingleSession
from uirl_jax.verifiers.server.open_session import ServerLimits, refusal
from uirl_jax.verifiers.server.session_types import SessionTypes
from uirl_jax.verifiers.server.sessions import Sessions

logger = logging.getLogger(__name__)

MIN_TOKEN_BYTES = 32
_PARENT_POLL_S = 0.5
_SHUTDOWN_S = 2.0
_KEPT = ("Allow", "Retry-After")  # headers of an error that say what to do


def _guard(host: str, allowed_hosts: Sequence[str], token: str | None) -> Middleware:
    """The middleware before every call: who may speak, and how errors are told."""
    # A URL's host comes in small letters.
    names = {"localhost", "127.0.0.1", "::1", host.lower(), *map(str.lower, allowed_hosts)}
    expected = None if token is None else f"Bearer {token}"

    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            # A page in a browser on this machine can reach loopback, directly or by DNS rebinding.
            if _host(request) not in names:
                raise refusal(web.HTTPForbidden, "the Host header names another host")
            # A page's GET (a picture, a link) has no Origin, and can act all the same. A person who
            # opens a URL of the server sends `none`.
            site = request.headers.get("Sec-Fetch-Site")
            if "Origin" in request.headers or site in ("cross-site", "same-site"):
                raise refusal(web.HTTPForbidden, "browsers are not served")
            given = request.headers.get("Authorization", "")
            if expected is not None and not equal_secrets(given, expected):
                raise refusal(web.HTTPUnauthorized, "the bearer token is missing or wrong")
            if request.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise refusal(web.HTTPUnsupportedMediaType, "compressed bodies are not read")
            return await handler(request)
        except web.HTTPException as error:
            text = error.text
            if error.content_type != "application/json":
                text = json.dumps({"detail": error.reason})
            headers = {name: error.headers[name] for name in _KEPT if name in error.headers}
            return web.Response(
                text=text,
                status=error.status,
                headers=headers,
                content_type="application/json",
            )
        except ValueError as error:
            return web.json_response({"detail": str(error)}, status=422)
        except Exception:
            logger.exception("event=error method=%s", request.method)
            return web.json_response({"detail": "Internal Server Error"}, status=500)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await answer(request, handler)
        if not request.content.at_eof():  # what comes next on this connection may be no request
            response.force_close()
        return response

    return guard


def _host(request: web.Request) -> str | None:
    try:
        return request.url.host
    except ValueError:  # no URL comes of what the header says
        return None


@contextlib.asynccontextmanager
async def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | None = None,
    allowed_hosts: Sequence[str] = (),
    limits: ServerLimits | None = None,
    task_dirs: Sequence[str | Path] = (),
    recorded: RecordedSets | None = None,
    single: TaskSpec | None = None,
    types: SessionTypes | None = None,
) -> AsyncIterator[int]:
    """Serves while the context is open.

    Args:
      host: address to listen on. Anything but loopback needs a token.
      port: 0 takes a free one.
      token: at least MIN_TOKEN_BYTES long; callers send it as `Authorization: Bearer`.
      allowed_hosts: further names that a Host header may carry.
      task_dirs: folders of tasks of one's own (own_tasks.load).
      recorded: recorded sets (recorded.sets.load).
      single: the one session that there is, as a container of the field has one (`field_calls`).
      types: what is served in place of the server's own tasks (examples/browsergym_bridge.py); it
        is closed with the server.

    Yields:
      The port.

    Raises:
      ConfigError: no token, or a weak one, where one is needed; a folder that is not a task.
      VerifierError: the address or the port cannot be had, or the single session.
    """
    limits = limits or ServerLimits()
    if token is None and not is_loopback(host):
        raise ConfigError(f"verifier: listening on {host} needs a token (--token-file)")
    if token is not None and len(token.encode()) < MIN_TOKEN_BYTES:
        raise ConfigError(f"verifier: a token has at least {MIN_TOKEN_BYTES} bytes")
    types = types or SessionTypes(
        warm_browsers=limits.warm_browsers if single is None else 0,
        max_browsers=limits.max_browsers if single is None else 1,
        own=own_tasks.load(task_dirs),
        recorded=recorded,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(types.close)
        served: Sessions | SingleSession
        if single is not None:
            served = SingleSession(types, single, limits)
        else:
            served = Sessions(types, limits, more_calls=tuple(openenv_calls.CALLS.values()))
        await stack.enter_async_context(served)
        app = web.Application(
            middlewares=[_guard(host, allowed_hosts, token)], client_max_size=limits.max_body_bytes
        )
        app.add_routes(served.routes())
        if isinstance(served, Sessions):
            door = openenv.OpenEnvDoor(served, types, limits)
            app.add_routes(door.routes())
            app.on_shutdown.append(door.close)
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_S,
            max_line_size=limits.max_body_bytes,  # the longest text by GET too, percent-encoded
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error}"
            raise VerifierError(
                f"verifier: port {port} of {host} {why}; give another one, or 0 for any"
            ) from error
        yield runner.addresses[0][1]


def run_server(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    port_file: Path | None = None,
    parent_pid: int | None = None,
    token: str | None = None,
    allowed_hosts: Sequence[str] = (),
    limits: ServerLimits | None = None,
    task_dirs: Sequence[str | Path] = (),
    recorded: RecordedSets | None = None,
    single: TaskSpec | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; the arguments beyond `serve`'s are those of the command."""

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        async with serve(
            host,
            port,
            token=token,
            allowed_hosts=allowed_hosts,
            limits=limits,
            task_dirs=task_dirs,
            recorded=recorded,
            single=single,
        ) as actual_port:
            logger.info("event=listening host=%s port=%d", host, actual_port)
            if port_file is not None:
                _write_port(port_file, actual_port)
            # Polled: PR_SET_PDEATHSIG fires when the thread that started us ends, not the process.
            while not stop.is_set() and parent_pid in (None, os.getppid()):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _PARENT_POLL_S)

    asyncio.run(run())


def _write_port(path: Path, port: int) -> None:
    """In one piece: a reader that polls for the file never sees half a number."""
    try:
        write_atomically(path, f"{port}\n".encode())
    except UirlError as error:
        raise VerifierError(f"verifier: cannot write the port file {path}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    parent_pid = os.getppid()  # first of all: a parent that dies from here on is noticed
    parser = argparse.ArgumentParser(
        prog="python -m uirl_jax.verifiers.server",
        description="Serves the hermetic desktop and browser sessions over HTTP.",
        allow_abbrev=False,
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port_number, default=0, help="0: any free one")
    parser.add_argument("--port-file", type=Path, help="the port is written there, in one piece")
    parser.add_argument("--token-file", type=Path, help="callers must send what it holds")
    parser.add_argument("--allow-host", action="append", default=[], help="a further Host name")
    parser.add_argument(
        "--exit-with-parent",
        nargs="?",
        type=int,
        const=parent_pid,
        metavar="PID",
        help="end when the parent process does; with its PID, also if it is gone already",
    )
    parser.add_argument("--max-sessions", type=int, default=ServerLimits.max_sessions)
    parser.add_argument("--max-browsers", type=int, default=ServerLimits.max_browsers)
    parser.add_argument("--warm-browsers", type=int, default=ServerLimits.warm_browsers)
    parser.add_argument(
        "--max-actions-per-s",
        type=float,
        default=ServerLimits.max_actions_per_s,
        help="of one session; more are a 429",
    )
    parser.add_argument(
        "--task-dir",
        action="append",
        default=[],
        metavar="FOLDER",
        help="a task of your own (docs/own_task.md); its task.py is run; as often as you like",
    )
    parser.add_argument(
        "--recorded-set",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a parquet of tools.prepare_gui_data as tasks recorded/NAME; as often as you like",
    )
    parser.add_argument(
        "--single",
        metavar="TYPE",
        help="one session, as a container of the field has one (dialect g2b)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of --single")
    parser.add_argument("--variant", default="", help="of --single")
    args = parser.parse_args(argv)
    if args.single is None and (args.seed or args.variant):
        parser.error("--seed and --variant are those of --single=TYPE")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s verifier %(message)s")
    try:
        token = None
        if args.token_file is not None:
            try:
                token = args.token_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"verifier: cannot read {args.token_file}: {error}") from error
        run_server(
            args.host,
            args.port,
            port_file=args.port_file,
            parent_pid=args.exit_with_parent,
            token=token,
            allowed_hosts=args.allow_host,
            limits=ServerLimits(
                max_sessions=args.max_sessions,
                max_browsers=args.max_browsers,
                warm_browsers=args.warm_browsers,
                max_actions_per_s=args.max_actions_per_s,
            ),
            task_dirs=args.task_dir,
            recorded=recorded_sets.load(rewards.read_sets(args.recorded_set)),
            single=None if args.single is None else TaskSpec(args.single, args.seed, args.variant),
        )
    except UirlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
