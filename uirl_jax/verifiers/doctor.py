"""Examines verifiers before a run: which dialect they speak, what works, how long calls take.

    python -m uirl_jax.verifiers.doctor http://127.0.0.1:8000 http://10.0.0.7:8000/proxy/ab12cd34

Prints the lines to put into a config, for OpenEnv's servers too. A server with sessions is checked
by opening one, moving the pointer in it and deleting it. A container, whose one session cannot be
reset, is only looked at. The checks are those of a run's client. Exits with 1 if a run would refuse
one of the servers.
"""

import argparse
import asyncio
import dataclasses
import json
import re
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from uirl_jax.errors import ActionError, UirlError, VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.client.openenv import OpenEnvClient
from uirl_jax.verifiers.client.token import read_token
from uirl_jax.verifiers.client.transport import ClientLimits
from uirl_jax.verifiers.dialects import CORRECT, DATA_ENTRY, OPENENV, ROWS

T = TypeVar("T")

LOOKS = 5  # screenshots that are timed
_EXAMPLE = re.compile(r"^Example task: (\S{1,200})$", re.MULTILINE)
_LIMITS = ClientLimits(attempts=1, create_timeout_s=60.0)


@dataclasses.dataclass
class Finding:
    """What is known of one server."""

    url: str
    dialect: str = ""
    says: str = ""  # first line of its root
    works: list[str] = dataclasses.field(default_factory=list)
    fails: list[str] = dataclasses.field(default_factory=list)
    latency_ms: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def usable(self) -> bool:
        return bool(self.dialect) and not self.fails


async def examine(url: str, *, task: str = "", token: str | None = None) -> Finding:
    """Looks at one server.

    Args:
      task: what to open a session of; empty takes one that the dialect's servers have.
      token: sent as a bearer token.

    Returns:
      The finding; what went wrong is in it, also an answer that nobody has foreseen.
    """
    finding = Finding(url)
    try:
        await _examine(finding, task, token)
    except VerifierError as error:
        finding.fails.append(str(error))
    except Exception as error:  # one server must not hide the report of the others
        finding.fails.append(printable(f"{type(error).__name__}: {error}", 200))
    return finding


async def _examine(finding: Finding, task: str, token: str | None) -> None:
    url = finding.url
    async with VerifierClient(url, limits=_LIMITS, token=token) as client:
        try:
            text = await client.root()
        except VerifierError:  # an OpenEnv server has no root, or a page for people
            if await _try_openenv(finding, task, token):
                return
            raise
        finding.says = printable((text.splitlines() or [""])[0], 120)
        finding.dialect = await _dialect(client, url, text)
    async with VerifierClient(url, dialect=finding.dialect, limits=_LIMITS, token=token) as client:
        if client.dialect.has_sessions:
            example = _EXAMPLE.search(text)
            known = example[1] if example else "desktop/click_button"
            name = task or (known if client.dialect.judges else DATA_ENTRY)
            await _try_session(client, TaskSpec(name, seed=0), finding)
        else:
            await _look(client, finding)


async def _try_openenv(finding: Finding, task: str, token: str | None) -> bool:
    """Looks at an OpenEnv server; False where it is none."""
    async with OpenEnvClient(finding.url, limits=_LIMITS, token=token) as client:
        try:
            says = await client.root()
        except VerifierError:
            return False
        finding.says, finding.dialect = says.strip(), OPENENV
        kind = await _step(finding, "schema", client.kind)
        if kind is None:
            return True
        name = task or await _step(finding, "state", client.played_task)
        if name is not None:
            finding.works.append(f"environment {kind.name}, task {name}")
            await _try_session(client, TaskSpec(name, seed=0), finding)
    return True


async def _dialect(client: VerifierClient, url: str, text: str) -> str:
    """Which dialect answers at a URL.

    Raises:
      VerifierError: none that is known.
    """
    if "G1+" in text:
        return "g1+"
    try:
        counts = await client.transport.json("GET", ("progress",), again_if="failed")
    except VerifierError:
        await client.transport.json("GET", ("status",), again_if="failed")
        return "g1"
    if "/proxy/" in url:
        return "g3"
    if ROWS in counts:
        return "g2b"
    if CORRECT in counts:
        return "g2a"
    raise VerifierError(
        f"{url}: its progress counts {printable(', '.join(counts))!r}, which is unknown"
    )


async def _try_session(
    client: VerifierClient | OpenEnvClient, task: TaskSpec, finding: Finding
) -> None:
    session = await _step(finding, "create", lambda: client.create(task))
    if session is None:
        return
    try:
        finding.works.append(f"screen {session.width_px}x{session.height_px}")
        for _ in range(LOOKS):
            await _step(finding, "screenshot", lambda: client.screenshot(session.id))
        action = Action("move", x=session.width_px // 2, y=session.height_px // 2)
        try:
            client.check_action(action)
        except ActionError as error:
            finding.works.append(f"no pointer ({error})")
            action = Action("wait", seconds=0.0)
        await _step(finding, "act", lambda: client.act(session.id, action, "doctor"))
        await _step(finding, "progress", lambda: client.progress(session.id))
    finally:
        await _step(finding, "delete", lambda: client.delete(session.id))


async def _look(client: VerifierClient, finding: Finding) -> None:
    """A container's session, without touching it: it is somebody's."""
    size: tuple[int, int] | None = None
    for _ in range(LOOKS):
        size = await _step(finding, "screenshot", client.look)
        if size is None:
            return
    assert size is not None  # LOOKS is not 0
    finding.works += ["progress", f"screen {size[0]}x{size[1]}"]


async def _step(finding: Finding, name: str, call: Callable[[], Awaitable[T]]) -> T | None:
    """Times a call; None where it fails, with the reason in the finding."""
    started_s = time.perf_counter()
    try:
        result = await call()
    except VerifierError as error:
        finding.fails.append(f"{name}: {error}")
        return None
    elapsed_ms = 1000 * (time.perf_counter() - started_s)
    if name not in finding.works:
        finding.works.append(name)
    known = finding.latency_ms.get(name)
    finding.latency_ms[name] = elapsed_ms if known is None else min(known, elapsed_ms)
    return result


def report(findings: Sequence[Finding]) -> str:
    """The report of all servers, as it is printed."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.url}")
        lines.append(f"  dialect   {finding.dialect or 'unknown'}  ({finding.says or 'no answer'})")
        if finding.works:
            lines.append(f"  works     {', '.join(finding.works)}")
        times = [f"{name} {ms:.1f} ms" for name, ms in finding.latency_ms.items()]
        if times:
            lines.append(f"  latency   {', '.join(times)}")
        lines += [f"  fails     {reason}" for reason in finding.fails]
    usable = [finding for finding in findings if finding.usable]
    for dialect in sorted({finding.dialect for finding in usable}):
        urls = ", ".join(f'"{f.url}"' for f in usable if f.dialect == dialect)
        lines.append(f"pin: cfg.verifier.dialect = {dialect!r}; cfg.verifier.urls = ({urls},)")
    if len({finding.dialect for finding in usable}) > 1:
        lines.append("a run has one dialect: choose one of these lines")
    looks = [f.latency_ms["screenshot"] for f in usable if "screenshot" in f.latency_ms]
    if looks:
        lines.append(f"median screenshot {statistics.median(looks):.1f} ms")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m uirl_jax.verifiers.doctor",
        description="Says what a verifier is, what works there, and what to pin in a config.",
        allow_abbrev=False,
    )
    parser.add_argument("url", nargs="+")
    parser.add_argument("--task", default="", help="what to open a session of")
    parser.add_argument(
        "--token-file", type=Path, help="sent as a bearer token; else $UIRL_VERIFIER_TOKEN"
    )
    parser.add_argument("--json", type=Path, help="the same, machine-readable")
    args = parser.parse_args(argv)

    async def run() -> list[Finding]:
        token = read_token(args.token_file or "")
        looks = (examine(url, task=args.task, token=token) for url in args.url)
        return list(await asyncio.gather(*looks))

    try:
        findings = asyncio.run(run())
        if args.json is not None:
            plain = [{**dataclasses.asdict(f), "usable": f.usable} for f in findings]
            args.json.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    except UirlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report(findings))
    return 0 if all(finding.usable for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
