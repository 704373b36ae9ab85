"""The actor's client of one verifier: sessions in every dialect; no answer is trusted.

Opens sessions, acts, fetches screenshots and progress. Every fault of the server (an image of
another size, a reward that is not a number, a session that was used before) raises VerifierError,
which ends the episode as `env_error`. `transport` does the HTTP, `answers`
checks what comes back, `dialects` has the calls of each dialect, `rules` turns counts into rewards.

Retries: reads, DELETE, and an `act` with a request_id, which a g1+ server applies only once.
`POST /session` only if the connection was refused, since a lost answer would leak a session. An
`act` without a request_id only if it was not applied for certain, since it would click twice;
where it may have been applied, ActUncertainError is raised.
"""

import asyncio
import contextlib
import dataclasses
from types import TracebackType
from typing import Any, Self

from uirl_jax.errors import (
    ActUncertainError,
    ImageError,
    NotFoundError,
    RequestRefusedError,
    UserCodeError,
    VerifierError,
)
from uirl_jax.types import Action, Rule, TaskSpec
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers import dialects, wire
from uirl_jax.verifiers.client import answers
from uirl_jax.verifiers.client.answers import Session
from uirl_jax.verifiers.client.image_header import image_size
from uirl_jax.verifiers.client.rules import FindOwnRule, find_rule, no_own_rule
from uirl_jax.verifiers.client.transport import JSON_TYPE, ClientLimits, Transport
from uirl_jax.verifiers.client.used_containers import InMemory, UsedContainers

_IMAGE_TYPES = frozenset(wire.IMAGE_FORMATS.values())
_TEXT_TYPES = frozenset({"text/plain"})
_READY_POLL_S = 1.0  # a container that is starting


@dataclasses.dataclass
class _Open:
    """What is known of an open session beside what its episode is told."""

    session: Session
    rule: Rule | None  # None: the server judges
    has_own_rule: bool = False  # the user's: the progress may hold anything
    turns: int = 0
    # The last counts; within a session they never fall.
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)
    start_time: str = ""  # of its container, as that tells it


class VerifierClient:
    """One verifier. An async context manager; leaving it closes the connections, not the sessions.

    Args:
      base_url: http or https, host, port, perhaps a path. All requests go there and nowhere else.
      dialect: one of dialects.DIALECTS; what `doctor` finds out and a config pins.
      delay_s: what every act asks the server to wait before its screenshot; 0 suits the hermetic
        desktop, whose screen is never behind.
      image_format: png, jpeg or webp; g1+ alone has a choice.
      token: sent as a bearer token.
      used: marks of used containers; None: those of this client alone.
      find_own_rule: the user's own rule of a task, if there is one; it comes before the server's.

    Raises:
      VerifierError: base_url, dialect, delay_s or image_format is not valid. All methods raise
        VerifierError and, but for cancellation, nothing else; `create` and `progress` also
        UserCodeError, where the user's own rule raises or has no instruction.
    """

    def __init__(
        self,
        base_url: str,
        *,
        dialect: str = "g1+",
        limits: ClientLimits | None = None,
        delay_s: float = 0.0,
        image_format: str = "png",
        token: str | None = None,
        used: UsedContainers | None = None,
        find_own_rule: FindOwnRule = no_own_rule,
    ) -> None:
        self._find_own_rule = find_own_rule
        self.dialect = dialects.find_dialect(dialect)
        if dialect == dialects.OPENENV:
            raise VerifierError(
                "verifier client: the dialect openenv has a client of its own (client.openenv), "
                "which runs and evaluations use; this command plays the others"
            )
        if delay_s > self.dialect.max_delay_s:
            raise VerifierError(
                f"verifier client: a delay of {delay_s:g} s; a server of {dialect} is to be asked "
                f"for at most {self.dialect.max_delay_s:g} s"
            )
        self._limits = limits or ClientLimits()
        self.transport = Transport(
            base_url, self._limits, keep_alive_s=self.dialect.keep_alive_s, token=token
        )
        self._base = self.transport.base
        self._opening = f"POST {self._base}/session"  # for errors
        self._delay_s = delay_s
        try:
            self._image_format = wire.read_image_format(image_format)
        except ValueError as error:
            raise VerifierError(f"verifier client: {error}") from error
        self._open: dict[str, _Open] = {}
        self._used = used or InMemory()

    async def __aenter__(self) -> Self:
        await self.transport.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.transport.__aexit__(kind, error, traceback)

    def check_action(self, action: Action) -> None:
        """Raises ActionError for an action that this verifier has no call for."""
        dialects.check_action(self.dialect, action)

    async def create(self, task: TaskSpec) -> Session:
        """Opens a session of the task. The caller deletes it in a `finally`.

        Where the server is the one session there is, it waits until that is ready, and refuses one
        that was used before.

        Raises: NotFoundError: the server lacks a call; it says how to find out its dialect.
        """
        try:
            return await self._create(task)
        except NotFoundError as error:
            raise NotFoundError(f"{error}; {self._which_dialect()}") from error

    def _which_dialect(self) -> str:
        return (
            f"a server of the dialect {self.dialect.name} has this call; "
            f"python -m uirl_jax.verifiers.doctor {self._base} says which dialect this one has"
        )

    async def _create(self, task: TaskSpec) -> Session:
        own = self._find_own_rule(task)
        if self.dialect.judges:
            query = {"type": task.name, "n": "1", "seed": str(task.seed), "variant": task.variant}
            answer = await self._post_session(query)
            session_id, entry = answers.read_created(answer, self._opening, self._open)
            try:
                session = answers.read_session(session_id, entry, self._opening, self._limits)
            except VerifierError:
                await self._delete_unknown(session_id)
                raise
            if own is not None:
                instruction = own.instruction or session.instruction
                session = dataclasses.replace(session, instruction=instruction, judged_here=True)
            self._open[session.id] = _Open(session, own, has_own_rule=own is not None)
            return session
        rule, start_time = own or find_rule(task), ""
        if not rule.instruction:
            raise UserCodeError(
                f"the rule of task {task.name!r} has no instruction, and a server of "
                f"{self.dialect.name} has none either"
            )
        if self.dialect.has_sessions:
            answer = await self._post_session({"type": task.name, "n": "1"})
            session_id = answers.read_session_id(answer, self._opening, self._open)
        else:
            start_time = await self._take_container(counts=own is None)
            session_id = "container"
        try:
            data = await self._fetch_screen(session_id)
            size = self._image_size(data, f"the first screenshot at {self._base}")
        except BaseException:
            if self.dialect.has_sessions:
                await self._delete_unknown(session_id)
            else:  # nothing has happened in the container yet
                with contextlib.suppress(OSError):
                    self._used.unmark(str(self._base), start_time)
            raise
        session = Session(session_id, rule.instruction, *size, judged_here=True)
        self._open[session_id] = _Open(session, rule, own is not None, start_time=start_time)
        return session

    async def _delete_unknown(self, session_id: str) -> None:
        """Deletes a session that `create` has opened and does not return."""
        with contextlib.suppress(VerifierError):
            await asyncio.shield(self.delete(session_id))

    async def look(self) -> tuple[int, int]:
        """Checks the one session of a container as `create` does, without taking it.

        Returns: (width, height) of its screen in pixels.
        """
        await self._check_container()
        data = await self._fetch_screen("container")
        return self._image_size(data, f"the screenshot at {self._base}")

    async def screenshot(self, session_id: str) -> bytes:
        """The screen as a whole encoded image that says it has the announced size. Its pixels are
        not looked at: whoever decodes it may find it broken."""
        session = self._find(session_id).session
        data = await self._fetch_screen(session_id)
        return self._checked(data, session, "screenshot")

    async def act(self, session_id: str, action: Action, request_id: str | None = None) -> bytes:
        """Applies an action and returns the screen after it, checked as by `screenshot`.

        Args:
          action: one that `check_action` lets through. Waiting is done here where the dialect has
            no call for it.
          request_id: new for every action; a g1+ server applies it once however often it arrives.
            Without one, or in another dialect, the action is never sent again.

        Raises:
          ActUncertainError: nobody knows whether it was applied. `screenshot` shows.
        """
        entry = self._find(session_id)
        entry.turns += 1
        if self.dialect.judges and request_id is not None:
            return await self._act_once(entry.session, action, request_id)
        if not self.dialect.judges and action.kind == "wait":
            await asyncio.sleep(action.seconds or 0.0)
            return await self.screenshot(session_id)
        session = entry.session
        path: tuple[str, ...] = ("act",)
        if self.dialect.has_sessions:
            path = ("session", session_id, "act")
        if self.dialect.judges:
            said = session.judges_every_action
            fields = {**wire.action_fields(action, said=said), "delay": self._delay_s}
            query = {k: str(v) for k, v in {**fields, "format": self._image_format}.items()}
        else:
            size = (session.width_px, session.height_px)
            query = dialects.act_query(action, size, self._delay_s)
        try:
            data = await self._image(
                "GET",
                path,
                query=query,
                again_if="refused",
                extra_s=self._delay_s
                + (action.seconds or 0.0)
                + wire.KEY_S * len(action.text or ""),
            )
            return self._checked(data, session, "act")
        except RequestRefusedError:
            raise
        except VerifierError as error:
            raise ActUncertainError(str(error)) from error

    async def progress(self, session_id: str) -> dict[str, Any]:
        """What the task counts, as it came, with `done`: bool and `reward`: a finite float or None.
        Where the server does not judge, or the user's own rule does, it is judged here."""
        answers.check_id(session_id)
        path = ("session", session_id, "progress") if self.dialect.has_sessions else ("progress",)
        progress = await self.transport.json("GET", path, again_if="failed")
        where = f"progress of session {session_id} at {self._base}"
        entry = self._find(session_id)
        if not self.dialect.judges:
            if not entry.has_own_rule:
                self._check_counts(progress, where)
                answers.check_not_reset(progress, entry.counts, where)
                entry.counts = progress
            await self._check_not_restarted(entry, where)
        if entry.rule is not None:
            return {**progress, **entry.rule.judge(progress, entry.turns)._asdict()}
        return answers.check_verdict(progress, where)

    async def delete(self, session_id: str) -> None:
        """Ends a session; one that is gone already is fine. A container is ended by who runs it."""
        answers.check_id(session_id)
        self._open.pop(session_id, None)
        if self.dialect.has_sessions:
            await self.transport.send(
                "DELETE",
                ("session", session_id),
                content_types=frozenset({JSON_TYPE}),
                max_bytes=self._limits.max_json_bytes,
                again_if="failed",
                gone_is_fine=True,
            )

    async def root(self) -> str:
        """What the server says about itself. It answers once it is ready."""
        data = await self.transport.send(
            "GET", ("",), content_types=_TEXT_TYPES, max_bytes=4096, again_if="refused"
        )
        return data.decode("utf-8", "replace")

    async def _post_session(self, query: dict[str, str]) -> dict[str, Any]:
        return await self.transport.json(
            "POST",
            ("session",),
            query=query,
            again_if="refused",
            opens_session=True,
            extra_s=self._limits.create_timeout_s - self._limits.attempt_timeout_s,
        )

    async def _take_container(self, *, counts: bool) -> str:
        """Takes the one session there is; its start time. Raises for one that was used.

        Args:
          counts: whether its progress must be that of the dialect, and show no use.
        """
        start_time = await self._check_container(counts=counts)
        if self._open or not self._mark(start_time):
            raise self._was_used()
        return start_time

    async def _check_container(self, *, counts: bool = True) -> str:
        """Waits until the container answers; its start time.

        Args:
          counts: whether its progress must be that of the dialect.
        Raises: VerifierError: also for counts that show that it was used.
        """
        last: VerifierError | str = "it does not answer"
        try:
            async with asyncio.timeout(self._limits.create_timeout_s):
                while True:
                    try:
                        text = await self.root()
                        break
                    except VerifierError as error:
                        last = error
                    await asyncio.sleep(_READY_POLL_S)
        except TimeoutError:
            hint = f"; {self._which_dialect()}" if isinstance(last, NotFoundError) else ""
            raise VerifierError(
                f"{self._base}: no session after {self._limits.create_timeout_s:g} s; {last}{hint}"
            ) from None
        if counts:
            progress = await self.transport.json("GET", ("progress",), again_if="failed")
            self._check_counts(progress, f"progress at {self._base}")
            if any(progress.values()):
                raise self._was_used()
        return answers.start_time(text)

    def _was_used(self) -> VerifierError:
        return VerifierError(
            f"{self._base}: its session was used before, and cannot be reset; start a new "
            "container for every episode"
        )

    def _mark(self, start_time: str) -> bool:
        """Marks the container as used; one without a start time cannot be told from the next."""
        try:
            return not start_time or self._used.mark(str(self._base), start_time)
        except OSError as error:
            raise VerifierError(
                f"{self._base}: cannot be marked as used: {error}; free the disk of the workdir"
            ) from error

    async def _check_not_restarted(self, entry: _Open, where: str) -> None:
        """Raises: VerifierError: the container has another start time."""
        if self.dialect.has_sessions or not entry.start_time:
            return
        if (now := answers.start_time(await self.root())) != entry.start_time:
            raise VerifierError(
                f"{where}: the container was restarted during the episode, at "
                f"{untrusted_json.printable(now) or 'an unknown time'}"
            )

    def _check_counts(self, progress: dict[str, Any], where: str) -> None:
        if not any(keys <= set(progress) for keys in self.dialect.counts):
            expected = " or ".join(", ".join(sorted(keys)) for keys in self.dialect.counts)
            got = untrusted_json.printable(", ".join(progress))
            raise VerifierError(
                f"{where}: has {got or 'nothing'}, a server of {self.dialect.name} counts "
                f"{expected}; python -m uirl_jax.verifiers.doctor {self._base} says what it is"
            )

    def _find(self, session_id: str) -> _Open:
        return answers.find_open(self._open, session_id)

    async def _act_once(self, session: Session, action: Action, request_id: str) -> bytes:
        answers.check_id(request_id, "request_id")
        body = {
            **wire.action_fields(action, said=session.judges_every_action),
            "delay": self._delay_s,
            "format": self._image_format,
            "request_id": request_id,
        }
        data = await self._image(
            "POST",
            ("session", session.id, "act"),
            body=body,
            again_if="failed",
            extra_s=self._delay_s + (action.seconds or 0.0) + wire.KEY_S * len(action.text or ""),
        )
        return self._checked(data, session, "act")

    async def _fetch_screen(self, session_id: str) -> bytes:
        if not self.dialect.has_sessions:
            query, path = {"action_type": "screenshot"}, ("act",)
        else:
            query = {"format": self._image_format} if self.dialect.judges else None
            path = ("session", session_id, "screenshot")
        return await self._image("GET", path, query=query, again_if="failed")

    async def _image(self, method: str, path: tuple[str, ...], **request: Any) -> bytes:
        return await self.transport.send(
            method,
            path,
            content_types=_IMAGE_TYPES,
            max_bytes=self._limits.max_image_bytes,
            **request,
        )

    def _checked(self, data: bytes, session: Session, call: str) -> bytes:
        where = f"{call} of session {session.id} at {self._base}"
        size = self._image_size(data, where)
        if size != (session.width_px, session.height_px):
            raise VerifierError(
                f"{where}: the image has {size[0]}x{size[1]} pixels, "
                f"the session announced {session.width_px}x{session.height_px}"
            )
        return data

    def _image_size(self, data: bytes, where: str) -> tuple[int, int]:
        try:
            return image_size(data, max_pixels=self._limits.max_image_pixels)
        except ImageError as error:
            raise VerifierError(f"{where}: {error}") from error
