"""One open session of the bundled verifier: its state, and an `act` on it.

The calls (`sessions` for G1+, `field_calls` for G2 and G3) use it to drive the task that shows a
screen. It has the limits on what a caller can make grow, and how fast.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import math
import time
from typing import Any

from aiohttp import web

from uirl_jax.errors import ConfigError, UserCodeError
from uirl_jax.log_lines import key_values
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers import wire
from uirl_jax.verifiers.server.session_types import RunningTask

logger = logging.getLogger(__name__)

_ANSWERS_KEPT = 4  # per session: a client repeats its latest request, never an older one


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """What a caller can make grow."""

    max_sessions: int = 256  # open at once; each is some kilobytes and its last few answers
    max_browsers: int = 16  # of them, and waiting for one; 80 to 200 MB each
    warm_browsers: int = 2  # kept waiting, from the first session on that needs one
    max_body_bytes: int = 64 * 1024
    max_delay_s: float = wire.MAX_BUNDLED_DELAY_S  # of one action
    max_actions_per_s: float = 100.0  # of a session: no policy comes near it, a wild loop does
    idle_time_s: float = 1800.0  # longer than any compilation that the actor waits for

    def __post_init__(self) -> None:
        if not 0.0 < self.max_actions_per_s < math.inf:
            raise ConfigError(
                f"verifier: max_actions_per_s={self.max_actions_per_s:g}, expected more than 0"
            )


class ActionRate:
    """How many actions may come now: a bucket of one second's, filled as time goes by."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._left = self._most = max(1.0, per_s)
        self._counted_s = time.monotonic()

    def take(self) -> float:
        """0.0 and one action less; or the seconds until there is one."""
        now_s = time.monotonic()
        filled = self._left + (now_s - self._counted_s) * self._per_s
        self._left, self._counted_s = min(self._most, filled), now_s
        if self._left < 1.0:
            return (1.0 - self._left) / self._per_s
        self._left -= 1.0
        return 0.0


@dataclasses.dataclass
class OpenSession:
    """A running task, and what its callers did. The lock is held around every use of the task."""

    session_id: str
    type_name: str
    task: RunningTask
    rate: ActionRate
    touched_s: float = dataclasses.field(default_factory=time.monotonic)
    start_time_unix_s: float = dataclasses.field(default_factory=time.time)
    action_count: int = 0
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    answers: collections.OrderedDict[str, tuple[bytes, str] | None] = dataclasses.field(
        default_factory=collections.OrderedDict
    )  # request_id -> body, content type; None: the action was applied, its screen is not drawn yet

    def info(self, stop_time_unix_s: float | None = None) -> dict[str, Any]:
        return {
            "id": self.session_id,
            "start_time": self.start_time_unix_s,
            "display": None,  # G1 names its X display here; nothing here has one
            "action_count": self.action_count,
            "stop_time": stop_time_unix_s,
        }

    @property
    def screen_size(self) -> tuple[int, int]:
        return self.task.width_px, self.task.height_px

    async def act(self, call: wire.ActCall) -> web.Response:
        """Applies an action, waits, and answers with the screen. Raises as `apply` does."""
        # Looked up under the lock: a repeated request waits for the first one's answer.
        if (known := self.answers.get(call.request_id)) is not None:
            body, content_type = known
            return web.Response(body=body, content_type=content_type)
        if call.request_id not in self.answers:
            await self.apply(call)
        image = await self.task.screenshot(call.image_format)
        answer = _image_response(image, call.image_format)
        self._remember(call.request_id, (image, answer.content_type))
        return answer

    async def apply(self, call: wire.ActCall) -> None:
        """Applies an action, and waits.

        Raises:
          web.HTTPTooManyRequests: too many lately; nothing was applied.
          web.HTTPUnprocessableEntity: the code of a task of one's own raised.
          web.HTTPNotFound: the session was ended meanwhile.
        """
        if call.action is not None:
            wait_s = self.rate.take()
            if wait_s > 0.0:
                raise refusal(
                    web.HTTPTooManyRequests,
                    f"too many actions a second in this session; wait {wait_s:.3g} s",
                    headers={"Retry-After": str(math.ceil(wait_s))},
                )
            try:
                await self.task.act(call.action)
            except UserCodeError as error:  # it may have acted: a 500 would be sent again
                logger.error("event=act_failed session=%s", self.session_id, exc_info=error)
                reason = untrusted_json.printable(str(error), 300)
                raise refusal(web.HTTPUnprocessableEntity, reason) from None
            # From here on: where no screen can be drawn, the repeated request is not applied again.
            self._remember(call.request_id, None)
            self.action_count += 1
            await self.pause(0.0 if self.task.is_still else call.delay_s)
        self.touched_s = time.monotonic()

    def _remember(self, request_id: str, answer: tuple[bytes, str] | None) -> None:
        if request_id:
            self.answers[request_id] = answer
            if len(self.answers) > _ANSWERS_KEPT:
                self.answers.popitem(last=False)

    async def pause(self, seconds: float) -> None:
        """Waits for the screen; no longer than the session lasts.

        Raises:
          web.HTTPNotFound: it was ended.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended.wait()
        self.check_open()

    def check_open(self) -> None:
        """Raises HTTPNotFound for a session that was ended: what it held is another's by now."""
        if self.ended.is_set():
            raise refusal(web.HTTPNotFound, "Session not found")

    async def image(self, image_format: str) -> web.Response:
        """The screen as it stands."""
        return _image_response(await self.task.screenshot(image_format), image_format)


async def close_task(task: RunningTask, label: str) -> None:
    """Closes a task. What its `close` raises is logged: the other sessions go on.

    Args: label: the session's id or the task's name, for the log.
    """
    try:
        await task.close()
    except Exception as error:  # of browsers, or of the code of others (examples/browsergym_bridge)
        line = key_values("close_failed", session=label, reason=error)
        logger.warning(line, exc_info=error)


def _image_response(image: bytes, image_format: str) -> web.Response:
    return web.Response(body=image, content_type=wire.IMAGE_FORMATS[image_format])


def refusal(
    kind: type[web.HTTPException], detail: str, *, capacity: int = 0, **options: Any
) -> web.HTTPException:
    """An error whose JSON body has the reason, and with `capacity` the sessions that fit."""
    content = {"detail": detail} | ({"capacity": capacity} if capacity else {})
    body = web.json_response(content).text
    return kind(text=body, content_type="application/json", **options)
