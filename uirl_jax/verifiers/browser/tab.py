"""What a session has of its Chromium process: a page with a mouse, a keyboard and a screen.

`pool` starts the process, `page` is a page, a task says what it shows and judges it. Each session
has a process, because the pages of one process share a clipboard. Pages that can begin anew stay in
it, beside each other, for sessions of their kind.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from uirl_jax.errors import VerifierError
from uirl_jax.types import Action
from uirl_jax.verifiers.browser import BrowserError, keyboard
from uirl_jax.verifiers.browser.cdp import CdpError, Chromium
from uirl_jax.verifiers.browser.page import Files, Page, Pages
from uirl_jax.verifiers.screenshots import encode_again
from uirl_jax.verifiers.wire import KEY_S

SETTLE_S = 1.0  # bound: a page that moves for ever is shown as it is then
ANSWER_S = 10.0  # of silence before a page counts as hung
MAX_PRESS_S = 5.0
KEPT_PAGES = 16  # that rest in a process: 202 MiB (PSS) after a while, 181 with one page
_DRAG_STEPS = 8
_TYPED_CHARS = 200  # what is longer goes in as a whole: key by key it takes 2 ms a character

# Two frames pass; the answer is how much was on its way in them: changes of the document, loading,
# animations that end (the compositor repaints nothing for those). LayerTree tells of what is
# painted without a change of the document (a canvas, a scroll), and not of all changes.
_TWO_FRAMES = """new Promise(done => {
  let changes = 0;
  const observer = new MutationObserver(records => { changes += records.length; });
  const all = {subtree: true, childList: true, attributes: true, characterData: true};
  observer.observe(document, all);
  requestAnimationFrame(() => requestAnimationFrame(() => {
    const ending = document.getAnimations().filter(a => a.playState === "running"
      && Number.isFinite(a.effect.getComputedTiming().endTime));
    changes += observer.takeRecords().length;
    observer.disconnect();
    done(changes + ending.length + (document.readyState === "complete" ? 0 : 1));
  }));
})"""
# A copy of nothing: what an earlier session copied cannot be pasted by the next one.
_CLEAR_CLIPBOARD = """document.addEventListener("copy", event => {
    event.clipboardData.setData("text/plain", ""); event.preventDefault(); }, {once: true});
  document.execCommand("copy")"""

# Whether the page has let a drag and drop begin.
_WATCH_DRAG = """(() => {
  let event = null;
  const seen = dragstart => { event = dragstart; };
  addEventListener("dragstart", seen, {capture: true, once: true});
  window.uirlDrag = {
    get began() { return event !== null && !event.defaultPrevented; },
    end() { removeEventListener("dragstart", seen, {capture: true}); delete window.uirlDrag; },
  };
})()"""

_SCROLL = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_CLICKS = {"click": 1, "double_click": 2, "triple_click": 3}


class _View(NamedTuple):
    """How a page is looked at."""

    screen_px: tuple[int, int] = (0, 0)
    viewport_px: tuple[int, int] = (0, 0)  # in the page's own pixels
    scale: int = 1  # pixels of the screen for one of the page
    trusted_url: str = ""  # of a page that leaves nothing to the next one in its context

    @property
    def middle_px(self) -> tuple[float, float]:
        """Where the mouse is said to be before it has moved."""
        return self.screen_px[0] / 2, self.screen_px[1] / 2


class Tab:
    """A page that a session owns. Every call raises BrowserError once the page has crashed."""

    def __init__(self, browser: Chromium) -> None:
        self.browser = browser
        self.broken = ""  # why, once the page is of no use any more
        self.num_sessions = 0  # that it served; the pool counts
        self.waiting_since_s = 0.0  # monotonic; the pool's too
        self.restarts: tuple[str, int] | None = None  # (URL, scale) of the page, if it can
        self.kept: dict[tuple[str, int], tuple[Page, _View]] = {}  # they rest; the oldest first
        self._pages = Pages(browser)
        self._page: Page  # the session's; none of the kept ones
        self._view = _View()
        self._empty: Page | None = None
        self._mouse_px = (0.0, 0.0)
        self._deadline: asyncio.Timeout | None = None

    async def renew(self) -> None:
        """After a session: no history, storage or clipboard is left, in the same process.

        A page that can begin anew stays as it is, and any other trusted one is emptied: a third of
        the CPU time of another context, which has a renderer of its own to start.
        """
        if self.restarts is not None and await self._rest():
            self.kept[self.restarts] = self._page, self._view
        elif self._view.trusted_url:
            await self._page.evaluate("window.name = ''")
            await self._page.go("about:blank")
            self._page.files = None
            await self._clear_storage()
            await self._page.evaluate(_CLEAR_CLIPBOARD)
            if self._empty is not None:
                await self._pages.close(self._empty)
            self._empty = self._page
        else:
            self.kept.clear()
            await self._pages.start()
            self._empty = await self._pages.open(self._crashed)
            await self._empty.evaluate(_CLEAR_CLIPBOARD)
        self.restarts, self._view = None, _View()

    async def _rest(self) -> bool:
        """Leaves the page to itself, the mouse beside the screen; False where it went elsewhere."""
        url = await self._page.evaluate(f"{_CLEAR_CLIPBOARD}; window.name = ''; location.href")
        if url != self._view.trusted_url:
            return False
        width, height = (side * self._view.scale for side in self._view.viewport_px)
        self._mouse_px = (width - 1.0, height - 1.0)
        await asyncio.gather(self._clear_storage(), self._mouse("mouseMoved"))
        return True

    async def _clear_storage(self) -> None:
        everything = {"origin": self._view.trusted_url, "storageTypes": "all"}
        await self._page.send("Storage.clearDataForOrigin", everything)

    async def check(self) -> None:
        """Raises BrowserError where the process does not answer."""
        page = self._empty or next(page for page, _ in self.kept.values())
        async with self._answering():
            await page.evaluate("1")

    def resume(self, wanted: tuple[str, int]) -> bool:
        """Gives the session the page of this kind that rests here, as the last one left it."""
        if wanted not in self.kept:
            return False
        self._page, self._view = self.kept.pop(wanted)
        self.restarts, self._mouse_px = wanted, self._view.middle_px
        return True

    async def load(
        self,
        url: str,
        files: Files,
        *,
        screen_px: tuple[int, int],
        viewport_px: tuple[int, int] | None = None,
        scale: int = 1,
        trusted: bool = False,
        restarts: bool = False,
    ) -> None:
        """Loads a page; `settle` waits until it has been drawn.

        Args:
          files: answers every request of the page; it must know `url`.
          screen_px: (width, height) of the screenshots and of the coordinates, in pixels.
          viewport_px: of the page in CSS pixels, where it is larger than the screen, which then is
            its upper left corner.
          scale: pixels of the screen for one CSS pixel.
          trusted: no page of a user's: emptied, it leaves nothing to the next session.
          restarts: a trusted page whose next episode, begun in it, is as in another one: it may
            rest until a session of its kind comes (`resume`), which does not load it.
        """
        viewport_px = viewport_px or (screen_px[0] // scale, screen_px[1] // scale)
        async with self._answering():
            self._page = await self._unused()
            self.restarts = (url, scale) if restarts else None
            self._view = _View(screen_px, viewport_px, scale, url if trusted else "")
            self._mouse_px = self._view.middle_px
            self._page.files = files
            await self._page.resize(viewport_px, screen_px, scale)
            await self._page.go(url)
            await self._page.send("Page.resetNavigationHistory")  # nothing to go back to

    async def _unused(self) -> Page:
        if self._empty is not None:
            page, self._empty = self._empty, None
            return page
        if len(self.kept) < KEPT_PAGES:
            return await self._pages.open(self._crashed)
        page, _ = self.kept.pop(next(iter(self.kept)))
        return page

    async def evaluate(self, expression: str) -> Any:
        """`Page.evaluate`, for the judge."""
        async with self._answering():
            return await self._page.evaluate(expression)

    async def screenshot(self, image_format: str) -> bytes:
        """The screen as it stands: png, jpeg or webp."""
        async with self._answering():
            image = await self._page.screenshot("jpeg" if image_format == "jpeg" else "png")
        if image_format != "webp":
            return image
        return await asyncio.to_thread(encode_again, image, "webp")

    async def act(self, action: Action) -> None:
        """Applies an action (pixels of the screen), and returns when the page has settled."""
        keys = _keys(action.text) if action.kind == "type" and action.text else 0
        async with self._answering(KEY_S * keys):
            if action.x is not None and action.y is not None:
                self._mouse_px = (action.x, action.y)
            await self._apply(action)
            await self._settle()

    async def _apply(self, action: Action) -> None:
        kind = action.kind
        if kind in _CLICKS:
            await self._click("left", _CLICKS[kind])
        elif kind in ("right_click", "middle_click"):
            await self._click(kind.removesuffix("_click"), 1)
        elif kind == "move":
            await self._mouse("mouseMoved")
        elif kind == "long_press":
            await self._mouse("mouseMoved")
            await self._mouse("mousePressed", button="left", clickCount=1)
            await asyncio.sleep(min(action.seconds or 1.0, MAX_PRESS_S))
            await self._mouse("mouseReleased", button="left", clickCount=1)
        elif kind == "drag":
            assert action.x2 is not None and action.y2 is not None
            await self._drag((action.x2, action.y2))
        elif kind == "scroll":
            assert action.direction is not None and action.amount is not None
            dx, dy = _SCROLL[action.direction]
            amount = action.amount / self._view.scale
            await self._mouse("mouseWheel", deltaX=dx * amount, deltaY=dy * amount)
        elif kind == "type":
            await self._type(action.text or "")
        elif kind == "keys":
            await self._press((action.keys or "").lower().split("+"))
        elif kind == "navigate_back":
            await self._page.evaluate("history.back()")

    async def _type(self, text: str) -> None:
        for number, part in enumerate(text.split("\t")):
            if number > 0:
                await self._press(["tab"])
            if len(part) > _TYPED_CHARS:
                await self._page.send("Input.insertText", {"text": part})
                continue
            for character in part:
                if keyboard.prints(character):
                    await self._press([character])
                else:
                    await self._page.send("Input.insertText", {"text": character})

    async def _press(self, names: list[str]) -> None:
        events = keyboard.press(names)
        # Sent at once and handled in this order, as clicks are.
        await asyncio.gather(*(self._page.send("Input.dispatchKeyEvent", e) for e in events))

    async def _drag(self, to_px: tuple[float, float]) -> None:
        """In steps; where the page begins a drag and drop of HTML's, that is what goes on."""
        (x, y), held = self._mouse_px, {"button": "left", "buttons": 1}
        await self._mouse("mouseMoved")
        await self._mouse("mousePressed", **held, clickCount=1)
        await self._page.evaluate(_WATCH_DRAG)
        data = None
        intercepted = self._page.intercept_drag()
        await self._page.send("Input.setInterceptDrags", {"enabled": True})
        for step in range(1, _DRAG_STEPS + 1):
            part = step / _DRAG_STEPS
            self._mouse_px = (x + (to_px[0] - x) * part, y + (to_px[1] - y) * part)
            if data is not None:
                await self._drag_event("dragOver", data)
                continue
            await self._mouse("mouseMoved", **held)
            if await self._page.evaluate("window.uirlDrag?.began"):  # none: a page loaded since
                data = await intercepted
                await self._drag_event("dragEnter", data)
        await self._page.send("Input.setInterceptDrags", {"enabled": False})
        if data is not None:
            await self._drag_event("drop", data)
        else:
            await self._mouse("mouseReleased", button="left", clickCount=1)
        await self._page.evaluate("window.uirlDrag?.end()")

    async def _drag_event(self, kind: str, data: Any) -> None:
        x, y = self._mouse_px
        await self._page.send(
            "Input.dispatchDragEvent", {"type": kind, "x": x, "y": y, "data": data}
        )

    async def _click(self, button: str, count: int) -> None:
        # Sent at once and handled in this order: a wait for each answer costs a third more.
        calls = [self._mouse("mouseMoved")]
        for number in range(1, count + 1):
            fields = {"button": button, "clickCount": number}
            calls += [self._mouse("mousePressed", **fields), self._mouse("mouseReleased", **fields)]
        await asyncio.gather(*calls)

    async def _mouse(self, kind: str, **fields: object) -> None:
        x, y = self._mouse_px
        await self._page.send("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **fields})

    async def settle(self) -> None:
        """Waits as after an action, where something else changed the page."""
        async with self._answering():
            await self._settle()

    async def _settle(self) -> None:
        """Until two frames pass without a paint, a request or a running animation."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while True:
                    before = self._page.paints
                    moving = await self._page.evaluate(_TWO_FRAMES)
                    if not moving and self._page.paints == before and not self._page.in_flight:
                        return

    @contextlib.asynccontextmanager
    async def _answering(self, more_s: float = 0.0) -> AsyncIterator[None]:
        """Raises BrowserError: what is called takes longer than ANSWER_S, and `more_s`."""
        most_s = ANSWER_S + more_s
        if self.broken:
            raise BrowserError(f"the browser of this session is lost: {self.broken}")
        try:
            async with asyncio.timeout(most_s) as self._deadline:
                yield
        except VerifierError:
            raise
        except (CdpError, TimeoutError) as error:
            reason = str(error).partition("\n")[0][:200] or f"no answer within {most_s:g} s"
            self.broken = self.broken or reason
            raise BrowserError(f"the browser of this session is lost: {self.broken}") from error

    def _crashed(self) -> None:
        self.broken = "its page crashed"
        if self._deadline is not None:  # whoever waits for the page need not wait any longer
            with contextlib.suppress(RuntimeError):  # nobody does
                self._deadline.reschedule(asyncio.get_running_loop().time())


def _keys(text: str) -> int:
    """How many keys are pressed for a text at most: tabs, and what is short between two."""
    return sum(1 + len(part) for part in text.split("\t") if len(part) <= _TYPED_CHARS)
