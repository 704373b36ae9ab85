"""One page (a target) of a Chromium process: its set-up, its files, its document, its frames.

A page has no network: each request is answered from `files` or fails. Dialogs are answered, second
windows closed (`Pages`). Not here: mouse and keyboard, and what a session is (`tab`).
"""

import asyncio
import base64
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from uirl_jax.errors import PageError
from uirl_jax.log_lines import key_values
from uirl_jax.verifiers.browser.cdp import CdpError, Chromium

logger = logging.getLogger(__name__)

Files = Callable[[str], tuple[bytes, str] | None]  # URL -> (body, content type); None: no such file

_ATTACH = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True}
_MEDIA = {
    "prefers-color-scheme": "light",
    "prefers-reduced-motion": "reduce",
    "forced-colors": "none",
    "prefers-contrast": "no-preference",
}
_SERIF, _SANS = "Times New Roman", "Arial"
_SET_UP: tuple[tuple[str, Mapping[str, Any]], ...] = (  # of a page, and of a frame that is apart
    ("Page.enable", {}),
    ("Fetch.enable", {"patterns": [{"urlPattern": "*"}]}),
    ("Target.setAutoAttach", _ATTACH),
    ("Emulation.setFocusEmulationEnabled", {"enabled": True}),
    (
        "Page.setFontFamilies",
        {
            "fontFamilies": {
                **{"standard": _SERIF, "serif": _SERIF, "sansSerif": _SANS, "fixed": "Monospace"},
                **{"cursive": "Comic Sans MS", "fantasy": "Impact"},
            }
        },
    ),
    (
        "Emulation.setEmulatedMedia",
        {"features": [{"name": name, "value": value} for name, value in _MEDIA.items()]},
    ),
    ("LayerTree.enable", {}),
    ("Runtime.runIfWaitingForDebugger", {}),
)
# A screencast begins with the frame that the compositor has. On a busy machine that can be one of
# before the last change: the next frames are not begun until those under way have been drawn.
_DRAWN = """new Promise(done => {
  requestAnimationFrame(() => requestAnimationFrame(() => done()));
})"""
# What a call fails with when the page goes to another document meanwhile. The first two were seen
# here (156.0.8078.108), the others are V8's for a context that is gone, or not there yet.
_NAVIGATING = (
    "Inspected target navigated or closed",
    "Not attached to an active page",
    "Execution context was destroyed",
    "Cannot find default execution context",
)
_AGAIN_S = 0.01
_DRAWN_S = 1.0  # bound: a page may be busy with itself, or have its own requestAnimationFrame


class Page:
    """`Pages` opens it. Every call raises CdpError where the browser refuses or has ended."""

    def __init__(self, browser: Chromium, target: str, session: str, crashed: Callable[[], None]):
        self.files: Files | None = None
        self.paints = 0
        self.in_flight = 0  # requests
        self.target = target
        self._browser = browser
        self._session = session
        self._crashed = crashed
        self._loaded: asyncio.Future[None] | None = None
        self._num_shots = 0
        self._shot: asyncio.Future[bytes] | None = None
        self._shooting: asyncio.Task[bytes] | None = None
        self._dragged: asyncio.Future[dict[str, Any]] | None = None
        browser.listen(session, self._told)

    async def set_up(self) -> None:
        await asyncio.gather(*(self.send(method, fields) for method, fields in _SET_UP))

    def send(
        self, method: str, parameters: Mapping[str, Any] | None = None
    ) -> asyncio.Future[dict[str, Any]]:
        return self._browser.send(method, parameters, self._session)

    async def go(self, url: str) -> None:
        """Loads a document as a whole."""
        self._loaded = asyncio.get_running_loop().create_future()
        answer = await self.send("Page.navigate", {"url": url})
        if error := answer.get("errorText"):
            raise CdpError(f"{url}: {error}")
        await self._loaded

    async def resize(
        self, viewport_px: tuple[int, int], screen_px: tuple[int, int], scale: int
    ) -> None:
        """Lays the page out for a viewport, and draws its corner, scaled to the screen.

        The mouse's positions are then those of the screen.
        """
        (width, height), (visible_width, visible_height) = viewport_px, screen_px
        fields = {"width": width, "height": height, "deviceScaleFactor": scale, "scale": scale}
        fields |= {"mobile": False, "dontSetVisibleSize": True}
        await asyncio.gather(
            self.send("Emulation.setDeviceMetricsOverride", fields),
            self.send(
                "Emulation.setVisibleSize", {"width": visible_width, "height": visible_height}
            ),
        )

    async def screenshot(self, image_format: str) -> bytes:
        """What is drawn: png or jpeg.

        The first image of a screencast: one frame, and a third of the CPU time of
        `Page.captureScreenshot`, which lays the page out for its clip and back again.
        """
        if self._shooting is not None:  # its caller was cancelled: one screencast at a time
            await asyncio.wait([self._shooting])
        self._shooting = asyncio.create_task(self._shoot(image_format))
        self._shooting.add_done_callback(_read)
        return await asyncio.shield(self._shooting)

    async def _shoot(self, image_format: str) -> bytes:
        self._num_shots += 1
        self._shot = asyncio.get_running_loop().create_future()
        with contextlib.suppress(TimeoutError):  # a page that draws nothing is shown so
            await asyncio.wait_for(self.evaluate(_DRAWN), _DRAWN_S)
        await self._send_again("Page.startScreencast", {"format": image_format, "quality": 90})
        image = await self._shot
        self._tell(self._session, "Page.stopScreencast", {})
        return image

    def intercept_drag(self) -> asyncio.Future[dict[str, Any]]:
        """What the next drag and drop carries, once the page begins one."""
        self._dragged = asyncio.get_running_loop().create_future()
        return self._dragged

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression (awaited), as JSON has it.

        Where the page goes to another document, it is evaluated again, in that one.

        Raises:
          PageError: it threw; the page is as good as before.
        """
        fields = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = await self._send_again("Runtime.evaluate", {**fields, "userGesture": True})
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"].get("exception", {})
            raise PageError(f"the page threw {thrown.get('description', thrown)}"[:500])
        return answer["result"].get("value")

    async def _send_again(self, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """As `send`, and again while the page is between two documents; the caller bounds that."""
        while True:
            try:
                return await self.send(method, parameters)
            except CdpError as error:
                if not str(error).startswith(_NAVIGATING):
                    raise
            await asyncio.sleep(_AGAIN_S)

    def _told(self, session: str, method: str, fields: dict[str, Any]) -> None:
        """What the page, or a frame or worker of its own process, says by itself."""
        if method == "LayerTree.layerTreeDidChange":
            self.paints += 1
        elif method == "Fetch.requestPaused":
            self._answer(session, fields)
        elif method == "Page.loadEventFired" and session == self._session:
            if self._loaded is not None and not self._loaded.done():
                self._loaded.set_result(None)
        elif method == "Page.javascriptDialogOpening":
            # An alert is drawn by nobody here and would block the page.
            leave = fields["type"] == "beforeunload"
            self._tell(session, "Page.handleJavaScriptDialog", {"accept": leave})
        elif method == "Target.attachedToTarget":
            self._browser.listen(fields["sessionId"], self._told)
            for call, parameters in _SET_UP:
                self._tell(fields["sessionId"], call, parameters)
        elif method == "Target.detachedFromTarget":
            self._browser.listen(fields["sessionId"], None)
        elif method == "Page.screencastFrame":
            late = fields["sessionId"] != self._num_shots  # an image more of an earlier one
            if self._shot is not None and not self._shot.done() and not late:
                self._shot.set_result(base64.b64decode(fields["data"]))
        elif method == "Input.dragIntercepted":
            if self._dragged is not None and not self._dragged.done():
                self._dragged.set_result(fields["data"])
        elif method == "Inspector.targetCrashed":
            self._crashed()

    def _answer(self, session: str, request: dict[str, Any]) -> None:
        """Answers a request of the page. Nothing is ever asked of the network."""
        url, key = request["request"]["url"], {"requestId": request["requestId"]}
        found = self.files(url) if self.files is not None else None
        if found is not None:
            body, content_type = found
            headers = {"content-type": content_type, "content-length": str(len(body))}
            fields = {
                **key,
                "responseCode": 200,
                "responseHeaders": [{"name": k, "value": v} for k, v in headers.items()],
                "body": base64.b64encode(body).decode(),
            }
            call = self._tell(session, "Fetch.fulfillRequest", fields)
        elif request["resourceType"] == "Document":  # a link elsewhere: the page stays
            call = self._tell(session, "Fetch.fulfillRequest", {**key, "responseCode": 204})
        else:
            fields = {**key, "errorReason": "BlockedByClient"}
            call = self._tell(session, "Fetch.failRequest", fields)
        self.in_flight += 1
        call.add_done_callback(self._answered)

    def _answered(self, call: object) -> None:
        self.in_flight -= 1

    def _tell(
        self, session: str, method: str, parameters: Mapping[str, Any]
    ) -> asyncio.Future[dict[str, Any]]:
        """A call whose answer nobody waits for: what it was about may be gone."""
        call = self._browser.send(method, parameters, session)
        call.add_done_callback(_read)
        return call


class Pages:
    """Opens the pages of a browser, and closes every other one."""

    def __init__(self, browser: Chromium) -> None:
        self._browser = browser
        self._context = ""
        self._opening = False
        self._unknown: dict[str, str] = {}  # target -> session: seen since an opening began

    async def start(self) -> None:
        """A context without history, storage or pages; the one before is gone with its pages."""
        self._browser.listen("", self._told)
        if self._context:
            await self._browser.send(
                "Target.disposeBrowserContext", {"browserContextId": self._context}
            )
        else:
            await self._browser.send("Target.setAutoAttach", _ATTACH)
        self._context = (await self._browser.send("Target.createBrowserContext"))[
            "browserContextId"
        ]
        await self._browser.send(
            "Browser.setDownloadBehavior", {"behavior": "deny", "browserContextId": self._context}
        )

    async def open(self, crashed: Callable[[], None]) -> Page:
        """An empty page. One call at a time.

        Args:
          crashed: called once the page has.
        """
        self._opening = True
        try:
            answer = await self._browser.send(
                "Target.createTarget", {"url": "about:blank", "browserContextId": self._context}
            )
            target = answer["targetId"]
            page = Page(self._browser, target, self._unknown.pop(target), crashed)
        finally:
            self._opening = False
            self._close_unknown()
        await page.set_up()
        return page

    async def close(self, page: Page) -> None:
        await self._browser.send("Target.closeTarget", {"targetId": page.target})

    def _told(self, session: str, method: str, fields: dict[str, Any]) -> None:
        if method == "Target.attachedToTarget":
            self._unknown[fields["targetInfo"]["targetId"]] = fields["sessionId"]
            if not self._opening:  # a second window would be one that nobody can see
                self._close_unknown()
        elif method == "Target.detachedFromTarget":
            self._browser.listen(fields["sessionId"], None)

    def _close_unknown(self) -> None:
        while self._unknown:
            target, _ = self._unknown.popitem()
            call = self._browser.send("Target.closeTarget", {"targetId": target})
            call.add_done_callback(_read)


def _read(call: asyncio.Future[Any]) -> None:
    """Looks at what became of a call that nobody waits for."""
    with contextlib.suppress(asyncio.CancelledError):
        if (error := call.exception()) is not None:
            logger.debug(key_values("cdp_refused", reason=error))
