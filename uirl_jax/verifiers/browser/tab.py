"""One page in a Chromium process of its own: files in, screenshots out, mouse and keyboard.

`pool` starts the process; a task says what the page shows and judges it. The calls of every turn
(mouse, screenshot, waiting until the page has settled) use raw CDP; Playwright starts the page and
types, because it knows the keyboard's layout. A page has no network: each request is answered from
`files` or fails. Each session has a process, because the pages of one process share a clipboard.
"""

import asyncio
import base64
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from playwright.async_api import Browser, BrowserContext, CDPSession, Dialog, Page, Request, Route
from playwright.async_api import Error as PlaywrightError

from uirl_jax.errors import VerifierError
from uirl_jax.types import Action
from uirl_jax.verifiers.browser import BrowserError

logger = logging.getLogger(__name__)

Files = Callable[[str], tuple[bytes, str] | None]  # URL -> (body, content type); None: no such file

SETTLE_S = 1.0  # bound: a page that moves for ever is shown as it is then
ANSWER_S = 10.0  # of silence before a page counts as hung
MAX_PRESS_S = 5.0
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

_KEY_NAMES = {
    **{"ctrl": "Control", "alt": "Alt", "shift": "Shift", "win": "Meta", "cmd": "Meta"},
    **{"enter": "Enter", "tab": "Tab", "space": "Space", "backspace": "Backspace"},
    **{"delete": "Delete", "insert": "Insert", "esc": "Escape", "home": "Home", "end": "End"},
    **{"up": "ArrowUp", "down": "ArrowDown", "left": "ArrowLeft", "right": "ArrowRight"},
    **{"pageup": "PageUp", "pagedown": "PageDown"},
    **{f"f{n}": f"F{n}" for n in range(1, 13)},
}
_SCROLL = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_CLICKS = {"click": 1, "double_click": 2, "triple_click": 3}


class Tab:
    """A page that a session owns. Every call raises BrowserError once the page has crashed."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.broken = ""  # why, once the page is of no use any more
        self.num_sessions = 0  # that it served; the pool counts
        self.waiting_since_s = 0.0  # monotonic; the pool's too
        self.screen_px = (0, 0)
        # (URL, scale) of the page, if it can begin anew by itself: it waits for the next session.
        self.restarts: tuple[str, int] | None = None
        self._context: BrowserContext | None = None
        self._page: Page
        self._cdp: CDPSession
        self._files: Files | None = None
        self._trusted_url = ""  # of the page that was loaded, if it may be emptied
        self._scale = 1
        self._viewport_px = (0, 0)
        self._mouse_px = (0.0, 0.0)
        self._paints = 0
        self._in_flight = 0
        self._deadline: asyncio.Timeout | None = None

    async def renew(self) -> None:
        """A page without history, storage or clipboard, in the same process.

        One that can begin anew stays, and any other trusted one is emptied: a third of the CPU time
        of another page, which has a renderer of its own to start.
        """
        if self.restarts is None or not await self._rest():
            await (self._empty() if self._trusted_url else self._replace())
        await self.evaluate(_CLEAR_CLIPBOARD)

    async def _rest(self) -> bool:
        """Leaves the page to itself, the mouse beside the screen; False where it went elsewhere."""
        if await self._evaluate("window.name = '', location.href") != self._trusted_url:
            return False
        await self._clear_storage()
        self._mouse_px = (self._viewport_px[0] - 1.0, self._viewport_px[1] - 1.0)
        await self._mouse("mouseMoved")
        self._mouse_px = self._middle_px()
        return True

    async def _empty(self) -> None:
        await self._evaluate("window.name = ''")
        await self._page.goto("about:blank")
        self._files = None
        await self._clear_storage()
        self._trusted_url = ""
        self.restarts = None

    async def _clear_storage(self) -> None:
        everything = {"origin": self._trusted_url, "storageTypes": "all"}
        await self._cdp.send("Storage.clearDataForOrigin", everything)

    def _middle_px(self) -> tuple[float, float]:
        """Where the mouse is said to be before it has moved."""
        return self.screen_px[0] / self._scale / 2, self.screen_px[1] / self._scale / 2

    async def _replace(self) -> None:
        if self._context is not None:
            await self._context.close()
        self._files, self._paints, self._in_flight = None, 0, 0
        self._context = await self.browser.new_context(
            no_viewport=True,  # `load` sets it, and the scale with it
            locale="en-US",
            timezone_id="UTC",
            reduced_motion="reduce",
            accept_downloads=False,
        )
        await self._context.route("**/*", self._answer)
        self._page = await self._context.new_page()
        self._page.on("crash", self._crashed)
        self._page.on("dialog", _dismiss)
        self._context.on("page", _close)  # a second window would be one that nobody can see
        self._cdp = await self._context.new_cdp_session(self._page)
        self._cdp.on("LayerTree.layerTreeDidChange", self._painted)
        await self._cdp.send("LayerTree.enable")

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
            wait for a session of its kind (`BrowserPool.acquire`), which does not load it.
        """
        self.restarts = (url, scale) if restarts else None
        self._trusted_url = url if trusted else ""
        self.screen_px, self._scale, self._files = screen_px, scale, files
        self._viewport_px = viewport_px or (screen_px[0] // scale, screen_px[1] // scale)
        width, height = self._viewport_px
        async with self._answering():
            await self._cdp.send(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False},
            )
            await self._page.goto(url)
            await self._cdp.send("Page.resetNavigationHistory")  # nothing to go back to
            self._mouse_px = self._middle_px()

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression (awaited), as JSON has it. For the judge.

        Raises:
          VerifierError: it threw; the page is as good as before.
        """
        async with self._answering():
            return await self._evaluate(expression)

    async def screenshot(self, image_format: str) -> bytes:
        """The screen as it stands: png, jpeg or webp."""
        width, height = self.screen_px
        fields: dict[str, Any] = {"format": image_format, "optimizeForSpeed": True}
        if image_format != "png":
            fields["quality"] = 90
        if (width, height) != tuple(self._scale * side for side in self._viewport_px):
            clip = {"x": 0, "y": 0, "width": width / self._scale, "height": height / self._scale}
            fields["clip"] = {**clip, "scale": 1}
        async with self._answering():
            answer = await self._cdp.send("Page.captureScreenshot", fields)
        return base64.b64decode(answer["data"])

    async def act(self, action: Action) -> None:
        """Applies an action (pixels of the screen), and returns when the page has settled."""
        async with self._answering():
            if action.x is not None and action.y is not None:
                self._mouse_px = (action.x / self._scale, action.y / self._scale)
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
            mouse = self._page.mouse  # it knows HTML's own drag and drop
            await mouse.move(*self._mouse_px)
            await mouse.down()
            self._mouse_px = (action.x2 / self._scale, action.y2 / self._scale)
            await mouse.move(*self._mouse_px, steps=_DRAG_STEPS)
            await mouse.up()
        elif kind == "scroll":
            assert action.direction is not None and action.amount is not None
            dx, dy = _SCROLL[action.direction]
            amount = action.amount / self._scale
            await self._mouse("mouseWheel", deltaX=dx * amount, deltaY=dy * amount)
        elif kind == "type":
            await self._type(action.text or "")
        elif kind == "keys":
            names = [_KEY_NAMES.get(key, key) for key in (action.keys or "").lower().split("+")]
            await self._page.keyboard.press("+".join(names))
        elif kind == "navigate_back":
            await self._evaluate("history.back()")

    async def _type(self, text: str) -> None:
        keyboard = self._page.keyboard
        for number, part in enumerate(text.split("\t")):
            if number > 0:
                await keyboard.press("Tab")
            if len(part) <= _TYPED_CHARS:
                await keyboard.type(part)
            else:
                await keyboard.insert_text(part)

    async def _click(self, button: str, count: int) -> None:
        # Sent at once and handled in this order: a wait for each answer costs a third more.
        calls = [self._mouse("mouseMoved")]
        for number in range(1, count + 1):
            fields = {"button": button, "clickCount": number}
            calls += [self._mouse("mousePressed", **fields), self._mouse("mouseReleased", **fields)]
        await asyncio.gather(*calls)

    async def _mouse(self, kind: str, **fields: object) -> None:
        x, y = self._mouse_px
        await self._cdp.send("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **fields})

    async def settle(self) -> None:
        """Waits as after an action, where something else changed the page."""
        async with self._answering():
            await self._settle()

    async def _settle(self) -> None:
        """Until two frames pass without a paint, a request or a running animation."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while True:
                    before = self._paints
                    moving = await self._evaluate(_TWO_FRAMES)
                    if not moving and self._paints == before and not self._in_flight:
                        return

    async def _evaluate(self, expression: str) -> Any:
        fields = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = await self._cdp.send("Runtime.evaluate", {**fields, "userGesture": True})
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"].get("exception", {})
            raise VerifierError(f"the page threw {thrown.get('description', thrown)}"[:500])
        return answer["result"].get("value")

    async def _answer(self, route: Route, request: Request) -> None:
        """Answers a request of the page. Nothing is ever asked of the network."""
        self._in_flight += 1
        try:
            found = self._files(request.url) if self._files is not None else None
            if found is not None:
                body, content_type = found
                await route.fulfill(body=body, content_type=content_type)
            elif request.is_navigation_request():
                await route.fulfill(status=204)  # a link elsewhere: the page stays
            else:
                await route.abort("blockedbyclient")
        except PlaywrightError:
            logger.debug("event=request_gone")  # the page was closed meanwhile
        finally:
            self._in_flight -= 1

    @contextlib.asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        if self.broken:
            raise BrowserError(f"the browser of this session is lost: {self.broken}")
        try:
            async with asyncio.timeout(ANSWER_S) as self._deadline:
                yield
        except VerifierError:
            raise
        except Exception as error:  # Playwright raises just that when its driver has died
            reason = str(error).partition("\n")[0][:200] or f"no answer within {ANSWER_S:g} s"
            self.broken = self.broken or reason
            raise BrowserError(f"the browser of this session is lost: {self.broken}") from error

    def _painted(self, event: object) -> None:
        self._paints += 1

    def _crashed(self, page: Page) -> None:
        self.broken = "its page crashed"
        if self._deadline is not None:  # whoever waits for the page need not wait any longer
            with contextlib.suppress(RuntimeError):  # nobody does
                self._deadline.reschedule(asyncio.get_running_loop().time())


async def _dismiss(dialog: Dialog) -> None:
    """An alert is drawn by nobody here and would block the page."""
    with contextlib.suppress(PlaywrightError):
        await dialog.dismiss()


async def _close(page: Page) -> None:
    with contextlib.suppress(PlaywrightError):
        await page.close()
