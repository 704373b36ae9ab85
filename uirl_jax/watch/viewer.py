"""The viewer's HTTP server: pages and JSON about one workdir, read only, for a person.

`follow` looks at the run, `episode_index` knows its episodes, `episode_view` and `panels` make what
the templates show. Here are the addresses, and who may ask: loopback with a known Host, or anybody
with the token. Only GET; no address ever becomes a path of a file: episodes are found by a key of
the index. Everything that a model or a verifier wrote is untrusted here.
"""

import asyncio
import collections
import contextlib
import errno
import functools
import logging
import math
import re
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from uirl_jax.errors import ConfigError, RecordError, ShardError
from uirl_jax.log_lines import key_values
from uirl_jax.types import Trajectory
from uirl_jax.untrusted.http import equal_secrets, is_loopback
from uirl_jax.watch import episode_view, frames, panels
from uirl_jax.watch.charts import format_value
from uirl_jax.watch.episode_index import ORDERS, TRAINING, Filter, Row
from uirl_jax.watch.follow import MAX_REASONS, Follower
from uirl_jax.watch.frames import visible
from uirl_jax.watch.tokens import MAX_MEMBERS, Advantages, TokenTexts, advantages_of

logger = logging.getLogger(__name__)

COOKIE = "uirl_viewer"
MIN_TOKEN_CHARS = 16
MAX_WINDOW = 500  # rows in one answer
_CACHED_BYTES = 256 * 2**20  # of records
_MAX_FACET_VALUES = 500
_SHUTDOWN_S = 2.0
_FILES = {
    "report.css": "text/css",
    "viewer.css": "text/css",
    "viewer.js": "text/javascript",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Viewer:
    """The handlers of one workdir.

    Args:
      follower: is started and closed by the caller.
      model: where the tokenizer is; empty: as the run's config says.
    """

    def __init__(self, follower: Follower, model: str = "") -> None:
        self._follower, self._index = follower, follower.index
        self._model = model
        self._texts: tuple[str, TokenTexts] | None = None
        self._records: collections.OrderedDict[str, Trajectory] = collections.OrderedDict()
        self._page: tuple[str, str] = "", ""  # of the run: its signature and HTML

    def application(self, guard: Middleware) -> web.Application:
        app = web.Application(middlewares=[guard], client_max_size=1024)
        app.router.add_get("/", self.run_page)
        app.router.add_get("/parts/run", self.run_parts)
        app.router.add_get("/episodes", self.episodes_page)
        app.router.add_get("/episode/{key}", self.episode_page)
        app.router.add_get("/episode/{key}/screen/{turn}", self.screen)
        app.router.add_get("/compare", self.compare_page)
        app.router.add_get("/api/state", self.state)
        app.router.add_get("/api/episodes", self.rows)
        app.router.add_get("/static/{name}", self.static)
        app.router.add_get("/favicon.ico", self.no_icon)
        return app

    # ------------------------------------------------------------------------ the run

    async def run_page(self, request: web.Request) -> web.Response:
        return self._html("run.html.j2", page="run", parts=await self._run_html())

    async def run_parts(self, request: web.Request) -> web.Response:
        return web.Response(text=await self._run_html(), content_type="text/html")

    async def _run_html(self) -> str:
        """The changing part of the run's page, drawn once for each change."""
        snapshot = self._follower.snapshot
        if snapshot is None:
            return panels.environment().get_template("run_parts.html.j2").render(snapshot=None)
        if self._page[0] != snapshot.signature:
            html = await asyncio.to_thread(
                lambda: (
                    panels.environment()
                    .get_template("run_parts.html.j2")
                    .render(
                        snapshot=snapshot,
                        max_reasons=MAX_REASONS,
                        **panels.run_panels(snapshot.run, snapshot.name, on_its_machine=False),
                    )
                )
            )
            self._page = snapshot.signature, html
        return self._page[1]

    async def state(self, request: web.Request) -> web.Response:
        """What a page asks every second or two."""
        snapshot, index = self._follower.snapshot, self._index
        return web.json_response(
            {
                "signature": snapshot.signature if snapshot else "",
                "episodes": len(index.rows),
                "shards": index.listed,
                "read": index.read,
                "complete": index.is_complete,
                "trouble": visible(index.trouble),
                "step": snapshot.run.rows[-1]["step"] if snapshot and snapshot.run.rows else None,
            }
        )

    # ------------------------------------------------------------------------ episodes

    async def episodes_page(self, request: web.Request) -> web.Response:
        facets = {
            # A copy, in one step: the index's thread counts on meanwhile.
            name: sorted(
                dict(collections.Counter(dict(counts)).most_common(_MAX_FACET_VALUES)).items()
            )
            for name, counts in self._index.facets.items()
        }
        return self._html(
            "episodes.html.j2",
            page="episodes",
            facets=facets,
            orders=ORDERS,
            asked=_filter(request.query),
        )

    async def rows(self, request: web.Request) -> web.Response:
        """A window of the filtered list, among the first `upto` rows of the index."""
        wanted = _filter(request.query)
        there = len(self._index.rows)
        upto = min(_number(request.query, "upto", there), there)
        start = _number(request.query, "start", 0)
        count = min(_number(request.query, "count", 100), MAX_WINDOW)
        numbers = await asyncio.to_thread(self._index.select, wanted, upto)
        rows = [self._index.rows[n] for n in numbers[start : start + count]]
        return web.json_response(
            {
                "total": len(numbers),
                "upto": upto,
                "newer": there - upto,
                "start": start,
                "rows": [_json_row(row) for row in rows],
            }
        )

    async def episode_page(self, request: web.Request) -> web.Response:
        row = self._row(request.match_info["key"])
        first = max(1, _number(request.query, "from", 1))
        view = await asyncio.to_thread(self._view, row, first)
        return self._html(
            "episode.html.j2",
            page="episode",
            view=view,
            turns_a_page=episode_view.TURNS_A_PAGE,
            members=episode_view.members(self._index, row),
            choices=episode_view.choices(self._index, row),
            tokenizer=self._token_texts().problem,
        )

    async def compare_page(self, request: web.Request) -> web.Response:
        rows = [self._row(request.query.get(name, "")) for name in ("a", "b")]
        first = max(1, _number(request.query, "from", 1))
        views = [await asyncio.to_thread(self._view, row, first) for row in rows]
        same_group = rows[0] in self._index.group_of(rows[1])
        same_instance = rows[0] in self._index.instance_of(rows[1])
        return self._html(
            "compare.html.j2",
            page="compare",
            views=views,
            relation="Two episodes of one group"
            if same_group
            else "Two episodes of the same task instance"
            if same_instance
            else "Two episodes",
            turns_a_page=episode_view.TURNS_A_PAGE,
            first=first,
            tokenizer=self._token_texts().problem,
        )

    async def screen(self, request: web.Request) -> web.Response:
        """The screenshot before a turn's action, if the bytes are one."""
        row = self._row(request.match_info["key"])
        trajectory = await asyncio.to_thread(self._read, row)
        number = request.match_info["turn"]
        if not re.fullmatch(r"[0-9]{1,6}", number) or not (
            1 <= int(number) <= len(trajectory.turns)
        ):
            raise web.HTTPNotFound(text="This episode has no such turn.")
        keys = trajectory.turns[int(number) - 1].image_keys
        data = trajectory.images.get(keys[-1], b"") if keys else b""
        picture = frames.picture_of(data)
        if picture is None:
            raise web.HTTPNotFound(text="This turn has no screenshot that can be shown.")
        headers = {
            "Content-Security-Policy": "default-src 'none'; sandbox",
            "Cache-Control": "private, max-age=3600",  # the key names the content
        }
        return web.Response(body=data, content_type=picture.media_type, headers=headers)

    def _row(self, key: str) -> Row:
        row = self._index.find(key) if re.fullmatch(r"[0-9a-f]{16}", key) else None
        if row is not None:
            return row
        index = self._index
        hint = "" if index.is_complete else f" ({index.read} of {index.listed} shards are read)"
        raise web.HTTPNotFound(text=f"No episode of this workdir has this address{hint}.")

    def _read(self, row: Row) -> Trajectory:
        """A record, of those read last or of its shard. Raises: HTTPGone: it cannot be read."""
        found = self._records.get(row.key)
        if found is not None:
            return found
        try:
            trajectory = self._index.read_episode(row)
        except (ShardError, RecordError) as error:
            raise web.HTTPGone(text=f"This episode cannot be shown: {error}.") from None
        self._records[row.key] = trajectory
        while len(self._records) > 1 and sum(map(_size, list(self._records.values()))) > (
            _CACHED_BYTES
        ):
            self._records.popitem(last=False)
        return trajectory

    def _view(self, row: Row, first: int) -> episode_view.EpisodeView:
        trajectory = self._read(row)
        snapshot = self._follower.snapshot
        return episode_view.episode_view(
            row,
            trajectory,
            self._advantages(row),
            self._token_texts(),
            version=snapshot.version if snapshot else None,
            first=first,
        )

    def _advantages(self, row: Row) -> Advantages:
        if row.place != TRAINING:
            return Advantages(None, "An evaluation has no advantages: it trains nothing.")
        return advantages_of(self._members(row), row.summary.episode_id, self._config())

    def _members(self, row: Row) -> Iterator[Trajectory]:
        """The records of its group that can be read, each once it is asked for."""
        there = [
            member
            for member in self._index.group_of(row)
            if not member.shard.is_gone or member.key in self._records
        ]
        for member in there[: MAX_MEMBERS + 1]:  # one more: then it is no group of at most so many
            with contextlib.suppress(web.HTTPGone):
                yield self._read(member)

    def _config(self) -> dict[str, Any]:
        snapshot = self._follower.snapshot
        found = snapshot.run.config.get("config") if snapshot else None
        return found if isinstance(found, dict) else {}

    def _token_texts(self) -> TokenTexts:
        model = self._config().get("model")
        path = self._model or (str(model.get("path", "")) if isinstance(model, dict) else "")
        if self._texts is None or self._texts[0] != path:
            self._texts = path, TokenTexts(path, self._follower.directory)
        return self._texts[1]

    # ------------------------------------------------------------------------ files

    async def static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in _FILES:
            raise web.HTTPNotFound(text="There is no such file.")
        return web.Response(text=_static(name), content_type=_FILES[name], charset="utf-8")

    async def no_icon(self, request: web.Request) -> web.Response:
        return web.Response(status=204)

    def _html(self, template: str, *, status: int = 200, **values: Any) -> web.Response:
        snapshot = self._follower.snapshot
        text = (
            panels.environment()
            .get_template(template)
            .render(run_name=snapshot.name if snapshot else "", index=self._index, **values)
        )
        return web.Response(text=text, content_type="text/html", status=status)

    def message(self, status: int, text: str) -> web.Response:
        """A page that says what is wrong."""
        return self._html("message.html.j2", status=status, page="message", text=visible(text))


@functools.cache
def _static(name: str) -> str:
    return (panels.TEMPLATES / name).read_text(encoding="utf-8")


def _size(trajectory: Trajectory) -> int:
    return 4096 + sum(map(len, trajectory.images.values()))


def _json_row(row: Row) -> dict[str, Any]:
    """Texts are put into the page as text; here they are only made visible."""
    summary = row.summary
    return {
        "key": row.key,
        "task": visible(summary.task),
        "variant": visible(summary.variant),
        "seed": str(summary.seed),  # may be above 2**53
        "outcome": frames.outcome_text(summary.success, summary.stop_reason),
        "good": summary.success,
        "reward": format_value(summary.reward),
        "version": "-"
        if summary.lowest_version < 0
        else episode_view.versions_text(summary.lowest_version, summary.highest_version),
        "turns": summary.turns,
        "actor": visible(summary.actor_id),
        "place": visible(row.place),
        "gone": row.shard.is_gone,
    }


def _filter(query: Any) -> Filter:
    """The filter of a URL; what cannot be read is left out."""
    order = query.get("order", "")
    return Filter(
        **{
            name: query.get(name, "")[:200]
            for name in ("task", "place", "outcome", "actor", "text")
        },
        lowest_version=_integer(query.get("lowest_version", "")),
        highest_version=_integer(query.get("highest_version", "")),
        lowest_reward=_finite(query.get("lowest_reward", "")),
        highest_reward=_finite(query.get("highest_reward", "")),
        order=order if order in ORDERS else ORDERS[0],
    )


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,12}", text) else None


def _finite(text: str) -> float | None:
    try:
        value = float(text[:40])
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _number(query: Any, name: str, default: int) -> int:
    found = _integer(query.get(name, ""))
    return default if found is None or found < 0 else found


# ---------------------------------------------------------------- who may ask


def guard(viewer: Viewer, names: Sequence[str], token: str | None) -> Middleware:
    """The middleware before every page.

    Args:
      names: Host headers that are answered; others come from pages that rebind a name (DNS). Empty:
        any, as the token's cookie belongs to one name.
      token: is asked for, in a cookie or an Authorization header; None: nobody is asked.
    """

    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await _guarded(request, handler, names, token)
        except web.HTTPException as error:
            if 300 <= error.status < 400:
                response = web.Response(status=error.status, headers=error.headers)
            else:
                response = viewer.message(error.status, error.text or error.reason)
        except Exception:
            logger.exception(key_values("error", path=request.path[:100]))
            response = viewer.message(500, "The viewer has made an error; its log has the details.")
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return web.middleware(answer)


async def _guarded(
    request: web.Request, handler: Handler, names: Sequence[str], token: str | None
) -> web.StreamResponse:
    if names and _host(request) not in names:
        raise web.HTTPForbidden(text="The Host header names another host (see --allow_host).")
    if request.method not in ("GET", "HEAD"):
        raise web.HTTPMethodNotAllowed(request.method, ("GET",), text="The viewer only shows.")
    if token is None:
        return await handler(request)
    if "token" in request.query:  # the first visit: the token leaves the address
        if not equal_secrets(request.query["token"], token):
            raise web.HTTPUnauthorized(text="The token is wrong.")
        left = [(name, value) for name, value in request.query.items() if name != "token"]
        # A path that begins with two slashes would be another host's.
        path = "/" + request.rel_url.raw_path.lstrip("/")
        response = web.Response(
            status=303,
            headers={"Location": path + ("?" + urllib.parse.urlencode(left) if left else "")},
        )
        response.set_cookie(COOKIE, token, httponly=True, samesite="Strict", path="/")
        return response
    header = request.headers.get("Authorization", "")
    given = header.removeprefix("Bearer ") if header else request.cookies.get(COOKIE, "")
    if not equal_secrets(given, token):
        raise web.HTTPUnauthorized(
            text="The viewer asks for its token: open the address that it printed."
        )
    return await handler(request)


def _host(request: web.Request) -> str:
    """The Host header without its port and brackets; empty if there is none."""
    host = request.headers.get("Host", "")
    bracketed = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](:\d+)?", host)
    return (bracketed[1] if bracketed else host.rpartition(":")[0] or host).lower()


@contextlib.asynccontextmanager
async def serving(
    follower: Follower,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    allowed_hosts: Sequence[str] = (),
    model: str = "",
) -> AsyncIterator[str]:
    """Serves a workdir until the block ends; its address.

    Args:
      port: 0: any free one.
      token: needed where host is not loopback.
    Raises: ConfigError: no token for such a host, a short one, or the port is taken.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(f"--host={host}: other machines can reach it, which needs a token")
    if token is not None and len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(f"the token has {len(token)} characters, at least {MIN_TOKEN_CHARS}")
    names = {"localhost", "127.0.0.1", "::1", host.lower(), *map(str.lower, allowed_hosts)}
    if not is_loopback(host):
        names = set()
    viewer = Viewer(follower, model)
    runner = web.AppRunner(
        viewer.application(guard(viewer, sorted(names), token)),
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"--host={host} --port={port}: {reason}") from None
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()
