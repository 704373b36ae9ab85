"""Answers that no verifier should give, one by one: images, HTTP, JSON, sessions; and bad actions.

For `proxy`, which writes them as they stand (INPUTS, SCREENS), and `plays`, whose
policy says POLICY_TEXTS. Each is the answer to every call of its kind, so that asking again does
not help, and says how the episode is to end.
"""

import dataclasses
import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image

WIDTH_PX, HEIGHT_PX = 224, 168  # of the desktop's screens, where these inputs are played
ENV_ERROR, FORMAT_ERROR, MAX_TURNS, FAILED = "env_error", "format_error", "max_turns", "failed"
_ANY_END = ("completed", FAILED, MAX_TURNS)
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Input:
    """One answer, and how an episode that meets it ends."""

    call: str
    raw: bytes
    ends: tuple[str, ...] = (ENV_ERROR,)
    repeat: bytes = b""  # what follows, again and again ...
    pause_s: float = 0.0  # ... so long after one another
    then_silence: bool = False  # the connection stays open

    @property
    def hangs(self) -> bool:
        return self.then_silence or self.pause_s > 0.0

    def pieces(self) -> Iterator[tuple[bytes, float]]:
        yield self.raw, 0.0
        while self.repeat:
            yield self.repeat, self.pause_s


def _chunk(kind: bytes, body: bytes = b"") -> bytes:
    crc = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc)


def _png(width: int, height: int, pixels: bytes = b"", extra: bytes = b"") -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + _chunk(b"IDAT", pixels) + _chunk(b"IEND")


def _gigabyte() -> bytes:
    """A zlib stream of 1 GiB of zeros, in 1 MB: one compressed block over and over."""
    packer = zlib.compressobj(9)
    first = packer.compress(bytes(_MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(_MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    adler = (2**30 % 65521) << 16 | 1  # of so many zeros
    return first + again * 1023 + packer.flush()[:-4] + struct.pack(">I", adler)


_GIGABYTE = _gigabyte()


def _encoded(mode: str = "RGB", image_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    size = options.pop("size", (WIDTH_PX, HEIGHT_PX))
    Image.new("RGB", size, (9, 99, 199)).convert(mode).save(buffer, image_format, **options)
    return buffer.getvalue()


GOOD = _encoded()


def _px(screen: bytes) -> tuple[int, int]:
    """Of the bundled server's PNG."""
    width_px, height_px = struct.unpack_from(">II", screen, 16)
    return width_px, height_px


# What a screen becomes under the faults of proxy that strike screens.
SCREENS: dict[str, Callable[[bytes], bytes]] = {
    "truncated_png": lambda screen: screen[: len(screen) // 2],
    "png_of_a_gigabyte": lambda screen: _png(20_000, 17_900, _GIGABYTE),
    "png_hides_a_gigabyte": lambda screen: _png(*_px(screen), _GIGABYTE),
    "screen_of_another_size": lambda screen: _encoded(size=(WIDTH_PX + 1, HEIGHT_PX)),
}


# ------------------------------------------------------------------------------ HTTP


def _answer(
    body: bytes, content_type: str, status: str = "200 OK", headers: str = "", length: int = -1
) -> bytes:
    length = len(body) if length < 0 else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n"
    return f"{head}{headers}Connection: close\r\n\r\n".encode("latin-1") + body


def _screen(body: bytes, *ends: str, **options: Any) -> Input:
    return Input("screenshot", _answer(body, "image/png", **options), ends or (ENV_ERROR,))


def _redirect(location: str) -> Input:
    return _screen(b"", status="302 Found", headers=f"Location: {location}\r\n")


def _progress(body: bytes | dict[str, object], *ends: str) -> Input:
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Input("progress", _answer(body, "application/json"), ends or (ENV_ERROR,))


def _session(session_id: str) -> Input:
    entry = {"instruction": "Click.", "screen_width": WIDTH_PX, "screen_height": HEIGHT_PX}
    body = {"sessions": [{"id": session_id, **entry}], "session_ids": [session_id]}
    return Input("session", _answer(json.dumps(body).encode(), "application/json"))


_CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
_PNG_HEAD = _answer(b"", "image/png", length=9999)
_ZTXT = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 * _MIB)))
_MANY_FRAMES = _chunk(b"acTL", struct.pack(">II", 10_000, 0))
_BAD_CRC = GOOD[:-20] + bytes([GOOD[-20] ^ 1]) + GOOD[-19:]
_JPEG_ROTATED = _encoded(image_format="JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01"
                         b"\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0")  # fmt: skip

_IMAGES = {
    "image_empty": _screen(b""),
    "image_html": Input("screenshot", _answer(b"<html>hello</html>", "text/html")),
    "image_html_as_png": _screen(b"<html>hello</html>"),
    "image_json_as_png": _screen(b'{"done": true, "reward": 777.0}'),
    **{f"png_cut_at_{q}_quarters": _screen(GOOD[: q * len(GOOD) // 4]) for q in (1, 2, 3)},
    "png_bad_crc": _screen(_BAD_CRC),
    "png_0x0": _screen(_png(0, 0)),
    "png_without_pixels": _screen(_png(WIDTH_PX, HEIGHT_PX)),
    "png_pixels_no_zlib": _screen(_png(WIDTH_PX, HEIGHT_PX, b"pixels")),
    "png_2**31_wide": _screen(_png(2**31, 1)),
    **{f"png_{px}x{px}": _screen(_png(px, px, _GIGABYTE)) for px in (9000, 13_000, 20_000)},
    "png_ztxt_bomb": _screen(_png(WIDTH_PX, HEIGHT_PX, extra=_ZTXT * 20)),
    "apng_10000_frames": _screen(_png(WIDTH_PX, HEIGHT_PX, extra=_MANY_FRAMES)),
    "eps": _screen(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 224 168\n%%EOF"),
    "svg": _screen(b'<svg xmlns="http://www.w3.org/2000/svg" width="224" height="168"/>'),
    "psd": _screen(b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 168, 224, 8, 3)),
    **{name: _screen(_encoded(image_format=name)) for name in ("gif", "tiff", "ico")},
    "another_size": _screen(_encoded(size=(HEIGHT_PX, WIDTH_PX))),
    # Odd, but pictures of the right size: they are seen.
    "jpeg_cmyk": _screen(_encoded("CMYK", "JPEG"), *_ANY_END),
    "jpeg_exif_rotated": _screen(_JPEG_ROTATED, *_ANY_END),
    "png_16_bit": _screen(_encoded("I;16"), *_ANY_END),
    "png_grey": _screen(_encoded("L"), *_ANY_END),
    "png_palette_alpha": _screen(_encoded("P", transparency=0), *_ANY_END),
}
_HTTP = {
    "gzip_bomb": _screen(gzip.compress(bytes(64 * _MIB)), headers="Content-Encoding: gzip\r\n"),
    "gzip_nested": _screen(
        gzip.compress(gzip.compress(bytes(64 * _MIB))), headers="Content-Encoding: gzip, gzip\r\n"
    ),
    "brotli": _screen(b"\x8b", headers="Content-Encoding: br\r\n"),
    "chunks_without_end": Input(
        "screenshot", _CHUNKED, repeat=b"10000\r\n" + bytes(65536) + b"\r\n"
    ),
    "length_too_long": _screen(GOOD, length=len(GOOD) + 100),
    "length_too_short": _screen(GOOD, length=len(GOOD) - 20),
    "headers_drip": Input("screenshot", b"HTTP/1.1 200 OK\r\n", repeat=b"X-A: b\r\n", pause_s=0.1),
    "body_drips": Input("screenshot", _PNG_HEAD, repeat=b"x", pause_s=0.1),
    "silence": Input("screenshot", b"", then_silence=True),
    "closed_in_the_body": Input("screenshot", _PNG_HEAD + GOOD),
    "redirect_link_local": _redirect("http://169.254.169.254/latest/meta-data"),
    "redirect_file": _redirect("file:///etc/passwd"),
    "redirect_another_port": _redirect("http://127.0.0.1:1/"),
    "header_of_100_kb": _screen(GOOD, headers=f"X-A: {'a' * 100_000}\r\n"),
    "10000_headers": _screen(GOOD, headers="X-A: b\r\n" * 10_000),
    **{
        f"status_{status}": _screen(b"", status=f"{status} Refused")
        for status in (401, 403, 404, 409)
    },
    "retry_after_1e9": _screen(
        b"", status="429 Too Many Requests", headers="Retry-After: 1000000000\r\n"
    ),
    "no_http": Input("screenshot", b"SSH-2.0-OpenSSH_9.0\r\n"),
}
_PLAYING = {"done": False, "reward": None}
_JSON = {
    "json_200000_levels": _progress(b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "json_5000_digits": _progress(b'{"done": true, "reward": ' + b"7" * 5000 + b"}"),
    "json_10_mb_string": _progress({**_PLAYING, "a": "x" * 10_000_000}),
    **{
        f"reward_{shown}": _progress(b'{"done": true, "reward": ' + shown.encode() + b"}")
        for shown in ("NaN", "Infinity", "1e999", "1e300", "true", '"1"', "null", "[1]")
    },
    "done_1": _progress({"done": 1, "reward": 777.0}),
    "json_keys_twice": _progress(b'{"done": true, "reward": 0, "reward": 777.0}'),
    "json_lone_surrogate": _progress(b'{"done": true, "reward": 777.0, "a": "\\ud800"}'),
    "json_no_utf8": _progress(b"\xff\xfe"),
    "json_a_list": _progress(b"[1]"),
    "json_fields_missing": _progress({}),
    # Odd, but an answer.
    "json_control_characters": _progress({**_PLAYING, "a": "\0\x1b[31m\u202e"}, MAX_TURNS),
    "json_fields_added": _progress({**_PLAYING, "b": {"c": [1, None]}}, MAX_TURNS),
}
_SESSIONS = {
    **{
        f"session_id_{name}": _session(session_id)
        for name, session_id in {
            "parent": "../x",
            "encoded": "%2e%2e",
            "nul": "a\0b",
            "absolute": "/etc/passwd",
            "empty": "",
            "10000_long": "a" * 10_000,
            "crlf": "a\r\nX-A: b",
        }.items()
    },
    "session_id_of_nobody": _session("somebody-elses"),  # 404 at its first call
    "never_done": _progress(_PLAYING, MAX_TURNS),
    "done_at_once": _progress({"done": True, "reward": 0.0}, FAILED),
    "screen_frozen": Input("act", _answer(GOOD, "image/png"), _ANY_END),
}
INPUTS: dict[str, Input] = {**_IMAGES, **_HTTP, **_JSON, **_SESSIONS}
# What a policy may say; none of it reaches a verifier.
POLICY_TEXTS = {
    "click_off_screen": "click(99999, -5)",
    "click_nan": "click(NaN, 5)",
    "click_1e308": "click(1e308, 5)",
    "type_1_mb": f'type("{"x" * 1_000_000}")',
    "type_nul": 'type("a\0b")',
    "open_file": 'open("file:///etc/passwd")',
    "open_javascript": 'navigate("javascript:alert(1)")',
    "open_chrome": 'goto("chrome://settings")',
    "nothing": "",
}
