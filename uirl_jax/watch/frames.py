"""One turn as a picture: the screenshot, its action's mark, and texts that are safe to show.

Used by the report and the viewer. Screenshots and texts are untrusted: bytes that are no PNG, JPEG
or WEBP of a reasonable size are not shown, and invisible characters become escapes. HTML is escaped
by the templates, not here.
"""

import base64
import dataclasses
import io
import unicodedata
import warnings
from collections.abc import Callable
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from uirl_jax.types import Action, StopReason, Trajectory, Turn

MAX_TEXT_CHARS = 600
FRAME_WIDTH_PX = 448  # small screens are enlarged by an integer factor up to this width
# A browser decodes every pixel: what declares more than any screen has is not handed to it.
MAX_SIDE_PX, MAX_PIXELS, MAX_PICTURE_BYTES = 16_384, 40_000_000, 32 * 2**20

_IMAGE_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


@dataclasses.dataclass(frozen=True)
class Mark:
    """The point of the screen that an action touches, in screen pixels."""

    x: float
    y: float
    x2: float | None  # the end of a drag
    y2: float | None
    off_screen: bool  # drawn at the nearest edge


@dataclasses.dataclass(frozen=True)
class Frame:
    """A turn as shown on the page. Without a screenshot `source` is "" and `alt` has the reason."""

    number: int
    source: str  # data URI, or the address of the screenshot
    width_px: int
    height_px: int
    shown_px: int  # width on the page
    alt: str
    mark: Mark | None
    text: str
    error: str


class Picture(NamedTuple):
    """What the header of a screenshot says."""

    media_type: str
    width_px: int
    height_px: int


def outcome_text(success: bool, stop_reason: str) -> str:
    """ "success", or why the episode ended."""
    done = stop_reason == StopReason.COMPLETED
    return "success" if success and done else stop_reason.replace("_", " ")


def frame(
    number: int,
    turn: Turn,
    trajectory: Trajectory,
    *,
    address: Callable[[bytes, Picture], str] | None = None,
    max_text_chars: int = MAX_TEXT_CHARS,
) -> Frame:
    """One turn of a trajectory.

    Args:
      number: of the turn, from 1.
      address: where a page finds the screenshot; None: in the page itself.
    """
    data = trajectory.images.get(turn.image_keys[-1], b"") if turn.image_keys else b""
    picture = picture_of(data)
    error = visible(turn.error)
    if turn.action is None and not error:
        error = "no action"
    width_px, height_px = (picture.width_px, picture.height_px) if picture else (0, 0)
    point = mark(turn.action, width_px, height_px) if picture else None
    if picture is None:
        alt = "no screenshot was recorded for this turn"
        if data:
            alt = "no screenshot is shown: the bytes are no PNG, JPEG or WEBP of a screen's size"
    elif point is None:
        alt = f"Screenshot before action {number}, which has no screen position"
    else:
        alt = f"Screenshot before action {number}, which is at x {point.x:.0f}, y {point.y:.0f}"
    return Frame(
        number=number,
        source=(address or data_uri)(data, picture) if picture else "",
        width_px=width_px,
        height_px=height_px,
        shown_px=shown_width(width_px),
        alt=alt,
        mark=point,
        text=visible(turn.text, max_text_chars),
        error=error,
    )


def picture_of(data: bytes) -> Picture | None:
    """None for bytes that are no screenshot. Reads the header only; the browser decodes."""
    if len(data) > MAX_PICTURE_BYTES:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=tuple(_IMAGE_TYPES)) as image:
                kind, (width_px, height_px) = _IMAGE_TYPES[str(image.format)], image.size
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    except Image.DecompressionBombWarning:
        return None
    if max(width_px, height_px) > MAX_SIDE_PX or width_px * height_px > MAX_PIXELS:
        return None
    return Picture(kind, width_px, height_px)


def data_uri(data: bytes, picture: Picture) -> str:
    return f"data:{picture.media_type};base64,{base64.b64encode(data).decode()}"


def shown_width(width_px: int) -> int:
    """Width on the page; small screens are enlarged by an integer factor to keep pixels square."""
    return width_px * max(1, FRAME_WIDTH_PX // width_px) if width_px else FRAME_WIDTH_PX


def mark(action: Action | None, width_px: int, height_px: int) -> Mark | None:
    if action is None or action.x is None or action.y is None:
        return None

    def inside(value: int, size_px: int) -> float:
        return min(max(value, 0), size_px - 1) + 0.5  # the middle of the pixel

    pairs = ((action.x, action.y), (action.x2, action.y2))
    points = [(x, y) for x, y in pairs if x is not None and y is not None]
    off_screen = not all(0 <= x < width_px and 0 <= y < height_px for x, y in points)
    (x, y), *end = [(inside(x, width_px), inside(y, height_px)) for x, y in points]
    x2, y2 = end[0] if end else (None, None)
    return Mark(x=x, y=y, x2=x2, y2=y2, off_screen=off_screen)


def visible(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """At most max_chars of untrusted text, with invisible characters as \\u escapes.

    HTML escaping removes markup; this prevents control characters, such as a right-to-left
    override, from changing how the text is displayed.
    """
    cut = text[:max_chars]
    left = len(text) - len(cut)
    escaped = without_invisible(cut)
    return f"{escaped} … and {left} more characters" if left else escaped


def without_invisible(text: str) -> str:
    """The text with invisible characters as \\u escapes, line ends and tabs as they are."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        else f"\\u{ord(char):04x}"
        for char in text
    )
