"""HTTP to servers that are not trusted: addresses, sessions and answers within limits.

Shared by every client of this package; each has its own retries and time-outs. Also what the
servers of this package have in common: the port on the command line, and who may ask.
"""

import argparse
import hmac
import ipaddress
from collections.abc import Mapping, Sequence

import aiohttp
import yarl

from uirl_jax.errors import UirlError
from uirl_jax.untrusted.json import printable

_CHUNK_BYTES = 64 * 1024


def check_base_url(base_url: str, what: str, error_type: type[UirlError]) -> yarl.URL:
    """An http or https address without user, query and fragment, its path without a last slash.

    Raises:
      error_type: the address is not valid; the message begins with `what`.
    """
    expected = "expected one like http://127.0.0.1:8000"
    shown = printable(base_url)
    try:
        url = yarl.URL(base_url)
        port = url.port
    except ValueError as error:
        raise error_type(f"{what} {shown!r} is not a URL ({error}); {expected}") from error
    if url.scheme not in ("http", "https") or not url.host or port is None:
        raise error_type(f"{what} {shown!r} is not an http address; {expected}")
    if url.user is not None or url.password is not None:
        raise error_type(f"{what} {url.host}: no user or password there; use a token")
    if url.query_string or url.fragment:
        raise error_type(f"{what} {shown!r} has a query or a fragment; {expected}")
    return url.with_path(url.path.rstrip("/"))


def port_number(text: str) -> int:
    """The port that a command line names; argparse prints the error of another text."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; expected 0 to 65535")
    return int(text)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def equal_secrets(given: str, expected: str) -> bool:
    """Compares in a time that does not tell how much of `given` is right.

    Args: given: of a caller; may have the lone surrogates of a header that is not UTF-8.
    """
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


def open_session(
    *,
    max_connections: int,
    keep_alive_s: float,
    headers: Mapping[str, str],
    middlewares: Sequence[aiohttp.ClientMiddlewareType] = (),
) -> aiohttp.ClientSession:
    """The one client session for servers that are not trusted; the caller closes it.

    Takes no proxy and no netrc from the environment, keeps no cookies, unpacks nothing. A request
    must pass `allow_redirects=False` itself: aiohttp has no such option for a session.

    Args:
      max_connections: at a time; 0: no limit.
      keep_alive_s: below the time after which the server drops an idle connection.
      headers: of every request, besides Accept-Encoding.
      middlewares: of every request that has none of its own.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=keep_alive_s),
        auto_decompress=False,  # 1 MB of gzip became 1 GiB with the default
        trust_env=False,  # no proxy and no netrc from the environment
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity", **headers},
        middlewares=middlewares,
    )


def check_encoding(
    response: aiohttp.ClientResponse, where: str, error_type: type[UirlError]
) -> None:
    """Raises error_type for a compressed body, which `open_session` does not ask for."""
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise error_type(f"{where}: a body in {printable(encoding)!r}, which was not asked for")


async def read_body(
    response: aiohttp.ClientResponse, max_bytes: int, where: str, error_type: type[UirlError]
) -> bytes:
    """The body, chunk by chunk; raises error_type as soon as it is, or says it is, too long."""
    if (response.content_length or 0) > max_bytes:
        raise error_type(f"{where}: a body of {response.content_length} bytes, cap {max_bytes}")
    data = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        data += chunk
        if len(data) > max_bytes:
            raise error_type(f"{where}: the body is longer than {max_bytes} bytes")
    return bytes(data)


def retry_after_s(response: aiohttp.ClientResponse) -> float:
    """What the server asks for; 0 where it does not, or not in plain seconds."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdecimal() and len(value) < 12 else 0.0
