"""How pages are drawn: the fonts that a browser may use, and a fingerprint of what comes out.

Pixels depend on Chromium's version and on the fonts of the machine. `environment` limits a browser
to two font packages, whatever else is installed. `fingerprint` draws a page with text, controls and
shapes: machines with the same fingerprint draw equal seeds alike.
"""

import asyncio
import hashlib
import io
import logging
import os
from pathlib import Path

from PIL import Image

from uirl_jax import assets
from uirl_jax.verifiers.browser.tab import Tab

logger = logging.getLogger(__name__)

FONTS = assets.DIRECTORY / "fonts.conf"
_FONT_FILES = (
    ("LiberationSans-Regular.ttf", ("liberation", "liberation2")),
    ("DejaVuSans.ttf", ("dejavu",)),
)
_FOLDER = Path("/usr/share/fonts/truetype")
_URL = "https://fingerprint.invalid/"
_SIZE_PX = (320, 240)
_PAGE = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:4px">
<p style="font:16px Arial">Hamburgefonstiv 0123456789 <b>bold</b> <i>italic</i></p>
<p style="font:13px sans-serif">Hamburgefonstiv äöü ß Λλ ж → ✓</p>
<p style="font:13px serif">Hamburgefonstiv</p><p style="font:13px monospace">Hamburgefonstiv</p>
<button>OK</button> <input value="text" size=6> <input type=checkbox checked> <input type=radio>
<select><option>one</select>
<div style="width:60px;height:20px;border-radius:9px;background:linear-gradient(red,blue);
  transform:rotate(7deg)"></div>"""


def missing_fonts() -> list[str]:
    """Files of the two font packages that are not on this machine."""
    return [
        name
        for name, folders in _FONT_FILES
        if not any((_FOLDER / folder / name).is_file() for folder in folders)
    ]


def environment() -> dict[str, str]:
    """The environment variables of a browser: with the fonts of FONTS alone, where they are."""
    if missing := missing_fonts():
        logger.warning(
            'event=fonts_missing files="%s" reason="pages are drawn with other fonts than those '
            "that the shipped agents were trained on: apt-get install fonts-liberation "
            'fonts-dejavu-core"',
            " ".join(missing),
        )
        return {**os.environ, "TZ": "UTC"}
    return {**os.environ, "TZ": "UTC", "FONTCONFIG_FILE": str(FONTS)}


async def fingerprint(tab: Tab) -> str:
    """16 hex digits of the pixels of a test page. The tab must be renewed afterwards."""

    def files(url: str) -> tuple[bytes, str] | None:
        return (_PAGE.encode(), "text/html; charset=utf-8") if url == _URL else None

    await tab.load(_URL, files, screen_px=_SIZE_PX, trusted=True)
    await tab.settle()
    data = await tab.screenshot("png")
    return await asyncio.to_thread(_digest, data)


def _digest(data: bytes) -> str:
    with Image.open(io.BytesIO(data)) as image:
        pixels = image.convert("RGB").tobytes()
    return hashlib.sha256(pixels).hexdigest()[:16]
