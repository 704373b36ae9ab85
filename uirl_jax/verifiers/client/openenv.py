"""The actor's client of an OpenEnv server (dialect `openenv`): a session is a WebSocket.

Has the methods of `client.VerifierClient`. `openenv_socket` asks, `openenv_answers` checks what is
answered, `openenv_actions` has the environment's actions, which `GET /schema` tells.

The protocol has no request ids and no call that only looks. So an act is sent once; where its
answer is lost, ActUncertainError is raised and the session ends, for nobody can see what happened.
`screenshot` is the picture of the last answer. A reward is a step's; `progress` adds them up.

Source: openenv 0.10.0 (PyPI), core/env_client.py, core/env_server/http_server.py;
huggingface/OpenEnv (385de5e), envs/browsergym_env, envs/openapp_env.
"""

import asyncio
import dataclasses
import random
import uuid
from typing import Any, Self

import aiohttp

from uirl_jax.errors import (
    ActUncertainError,
    InvalidRequestError,
    RequestRefusedError,
    UserCodeError,
    VerifierError,
)
from uirl_jax.types import Action, Rule, TaskSpec
from uirl_jax.untrusted import text as untrusted_text
from uirl_jax.untrusted.http import open_session
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers import dialects, wire
from uirl_jax.verifiers.client import answers, openenv_actions, openenv_answers
from uirl_jax.verifiers.client.answers import Session
from uirl_jax.verifiers.client.openenv_answers import Observation
from uirl_jax.verifiers.client.openenv_socket import Socket, refuse_redirects
from uirl_jax.verifiers.client.rules import FindOwnRule, no_own_rule
from uirl_jax.verifiers.client.transport import ClientLimits, Transport

_PICTURE_BYTES = 256 * 1024  # longer answers are read in a thread
_TOLD = ("url", "app_state", "task_info")  # of an observation, for a rule of the user's own
_PROBE = Action("move", x=1, y=1)  # changes nothing that a task looks at


@dataclasses.dataclass
class _Open:
    """What is known of an open session."""

    session: Session
    socket: Socket
    rule: Rule | None
    latest: Observation
    image: bytes
    pointer: tuple[int, int]
    reward: float = 0.0  # of all steps
    turns: int = 0  # acts, whether applied or not
    broken: str = ""  # why its screen is not known any more


class OpenEnvClient:
    """One OpenEnv server. An async context manager; leaving it closes every session.

    Args:
      base_url: http or https, host, port, perhaps a path.
      delay_s: what every act asks the server to wait before its screenshot; only the bundled
        server takes it.
      token: sent as a bearer token.
      find_own_rule: the user's own rule of a task, if there is one.

    Raises:
      VerifierError: base_url is not valid. All methods raise VerifierError and, but for
        cancellation, nothing else; `create` and `progress` also UserCodeError, where the user's own
        rule raises or has no instruction.
    """

    def __init__(
        self,
        base_url: str,
        *,
        limits: ClientLimits | None = None,
        delay_s: float = 0.0,
        token: str | None = None,
        find_own_rule: FindOwnRule = no_own_rule,
    ) -> None:
        self.dialect = dialects.DIALECTS[dialects.OPENENV]
        self._limits = limits or ClientLimits()
        self._delay_s, self._find_own_rule = delay_s, find_own_rule
        self.transport = Transport(
            base_url, self._limits, keep_alive_s=self.dialect.keep_alive_s, token=token
        )
        self._base = self.transport.base
        self._http: aiohttp.ClientSession | None = None
        self._kind: openenv_actions.Kind | None = None
        self._takes_places: bool | None = None  # BrowserGym's action set; None: not tried yet
        self._trying = asyncio.Lock()
        self._open: dict[str, _Open] = {}

    async def __aenter__(self) -> Self:
        await self.transport.__aenter__()
        # Sockets stay open for an episode each: no limit, that would be one on episodes.
        self._http = open_session(
            max_connections=0,
            keep_alive_s=self.dialect.keep_alive_s,
            headers=self.transport.headers,
            middlewares=(refuse_redirects,),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for session_id in list(self._open):
            await self.delete(session_id)
        if self._http is not None:
            await self._http.close()
            self._http = None
        await self.transport.__aexit__(None, None, None)

    def check_action(self, action: Action) -> None:
        """Raises ActionError for an action that the environment has no call for."""
        if self._kind is not None:  # `create` has found it
            openenv_actions.check_action(self._kind, action)

    async def kind(self) -> openenv_actions.Kind:
        """What kind of environment it is, by the schema of its actions."""
        if self._kind is None:
            schemas = await self.transport.json("GET", ("schema",), again_if="failed")
            where = f"GET {self._base}/schema"
            action = schemas.get("action")
            if not isinstance(action, dict):
                raise VerifierError(f"{where}: it has no `action`; is this an OpenEnv server?")
            self._kind = openenv_actions.find_kind(action, where)
        return self._kind

    async def played_task(self) -> str:
        """The name of the task that this server plays, or of one of them."""
        kind = await self.kind()
        if kind.name == "openapp":
            return "openapp/task"
        socket = await self._connect()  # by HTTP the state has no name in it
        try:
            return _task_told(kind, await self._state(socket))
        finally:
            await asyncio.shield(socket.close())

    async def create(self, task: TaskSpec) -> Session:
        """Connects and resets the environment. The caller deletes the session in a `finally`.

        Raises:
          InvalidRequestError: this environment cannot play the task.
          VerifierFullError: it has no room for another session at present.
        """
        kind = await self.kind()
        socket = await self._connect()
        try:
            if kind.name == "browsergym":
                await self._try_places(kind, task, socket)
            return await self._begin(kind, task, socket)
        except BaseException:
            await asyncio.shield(socket.close())
            raise

    async def screenshot(self, session_id: str) -> bytes:
        """The screen as the last answer showed it: the protocol has no call for another look."""
        entry = self._find(session_id)
        if entry.broken:
            raise VerifierError(
                f"session {session_id} at {self._base}: its screen is not known since "
                f"{entry.broken}"
            )
        return entry.image

    async def act(self, session_id: str, action: Action, request_id: str | None = None) -> bytes:
        """Applies an action and returns the screen after it.

        Args:
          request_id: not sent: the protocol has none, and the action is never sent again.

        Raises:
          ActUncertainError: nobody knows whether it was applied; the session has ended.
          RequestRefusedError: the environment did not take it.
        """
        entry, kind = self._find(session_id), await self.kind()
        if action.kind in wire.SAID and not entry.session.judges_every_action:
            raise VerifierError(f"an action {action.kind!r} cannot be sent to a verifier")
        entry.turns += 1
        if action.x is not None and action.y is not None:
            entry.pointer = (action.x, action.y)
        data = kind.payload(action, entry.pointer, self._delay_s)
        if action.kind == "drag" and action.x2 is not None and action.y2 is not None:
            entry.pointer = (action.x2, action.y2)
        where = f"act of session {session_id} at {self._base}"
        if action.kind == "wait" and kind.name == "openapp":  # it has no call for it
            await asyncio.sleep(action.seconds or 0.0)
        extra_s = self._delay_s + (action.seconds or 0.0)
        try:
            seen = await self._observe(
                entry.socket, "step", data, self._limits.attempt_timeout_s + extra_s, where
            )
            self._check_size(seen, entry.session, where)
        except RequestRefusedError:
            raise
        except VerifierError as error:
            entry.broken = str(error)
            raise ActUncertainError(str(error)) from error
        except asyncio.CancelledError:
            entry.broken = f"{where} was cancelled"
            raise
        entry.latest, entry.image = seen, seen.image
        entry.reward += seen.reward
        return seen.image

    async def progress(self, session_id: str) -> dict[str, Any]:
        """done, reward (of all steps so far), step_reward, steps, and last_action_error: why the
        environment could not do the last action, empty where it did. From the bundled server also
        the task's counts. A rule of the user's own decides done and reward."""
        entry = self._find(session_id)
        seen = entry.latest
        counts = seen.fields.get("progress")
        progress: dict[str, Any] = counts if isinstance(counts, dict) else {}
        progress = progress | {
            "done": seen.done,
            "reward": entry.reward,
            "step_reward": seen.reward,
            "steps": entry.turns,
            "last_action_error": seen.action_error,
        }
        if entry.rule is None:
            return progress
        progress |= {name: seen.fields[name] for name in _TOLD if name in seen.fields}
        return {**progress, **entry.rule.judge(progress, entry.turns)._asdict()}

    async def delete(self, session_id: str) -> None:
        """Ends a session; one that is gone already is fine."""
        entry = self._open.pop(answers.check_id(session_id), None)
        if entry is not None:
            await entry.socket.close()

    async def root(self) -> str:
        """What the server says about itself: name and description on one line."""
        metadata = await self.transport.json("GET", ("metadata",), again_if="refused")
        texts = (metadata.get("name"), metadata.get("description"))
        told = ": ".join(printable(text, 200) for text in texts if isinstance(text, str) and text)
        return f"OpenEnv: {told or 'an environment without a name'}\n"

    # ------------------------------------------------------------------------------ sessions

    async def _connect(self) -> Socket:
        """Opens a WebSocket; only this is tried again, for then nothing was done yet."""
        if self._http is None:
            raise VerifierError(f"{self._base}: the client is not open (use `async with`)")
        limits = self._limits
        for attempt in range(1, limits.attempts + 1):
            try:
                return await Socket.connect(
                    self._http,
                    self._base / "ws",
                    max_bytes=openenv_answers.max_message_bytes(limits),
                    timeout_s=limits.attempt_timeout_s,
                )
            except InvalidRequestError:
                raise
            except RequestRefusedError:
                if attempt == limits.attempts:
                    raise
            await asyncio.sleep(limits.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _begin(self, kind: openenv_actions.Kind, task: TaskSpec, socket: Socket) -> Session:
        where = f"reset at {self._base}"
        seen = await self._observe(
            socket, "reset", _reset_fields(kind, task, where), self._limits.create_timeout_s, where
        )
        await self._check_task(kind, task, socket, seen)
        if not seen.image:
            raise InvalidRequestError(
                f"{where}: the observation has no `screenshot`, which a policy of pixels needs "
                "(docs/openenv.md)"
            )
        rule = self._find_own_rule(task)
        instruction = rule.instruction if rule is not None else ""
        goal = seen.fields.get("goal") or seen.fields.get("instruction") or ""
        if not instruction:
            if not isinstance(goal, str) or len(goal) > self._limits.max_instruction_chars:
                most = self._limits.max_instruction_chars
                raise VerifierError(f"{where}: the goal is not text of 1-{most} characters")
            instruction = untrusted_text.readable(goal)
        if not instruction.strip():
            raise UserCodeError(
                f"{where}: the environment tells no goal of task {task.name!r}: give the task a "
                "rule with an instruction (docs/own_code.md)"
            )
        renderer = answers.read_renderer(seen.fields, where)
        width_px, height_px = seen.size_px
        judges = kind.name == "uirl_jax" and answers.read_judges(seen.fields, where)
        session = Session(
            uuid.uuid4().hex, instruction, width_px, height_px, rule is not None, renderer, judges
        )
        middle = (width_px // 2, height_px // 2)
        self._open[session.id] = _Open(session, socket, rule, seen, seen.image, middle)
        return session

    async def _check_task(
        self, kind: openenv_actions.Kind, task: TaskSpec, socket: Socket, seen: Observation
    ) -> None:
        """Raises InvalidRequestError where the server plays another task than the config names.

        A BrowserGym server has one task, from its environment's variables; the task that a reset
        names changes its state's words alone.
        """
        told = ""
        if kind.name == "browsergym":
            told = _task_told(kind, await self._state(socket))
        elif kind.name == "openapp" and isinstance(info := seen.fields.get("task_info"), dict):
            told = f"openapp/{info.get('task_name')}"
        if told and task.name != told:
            raise InvalidRequestError(
                f"{self._base}: this server plays {printable(told)!r}, the config asks for "
                f"{task.name!r}"
            )

    async def _try_places(self, kind: openenv_actions.Kind, task: TaskSpec, socket: Socket) -> None:
        """Moves the pointer before the first episode: OpenEnv's own BrowserGym server refuses every
        action with coordinates, and each would count as the policy's fault.

        Raises: InvalidRequestError: it does.
        """
        async with self._trying:
            if self._takes_places is None:
                where = f"a trial at {self._base}"
                timeout_s = self._limits.create_timeout_s  # the first step may be a slow one
                fields = _reset_fields(kind, task, where)
                await self._observe(socket, "reset", fields, timeout_s, where)
                data = kind.payload(_PROBE, (1, 1), 0.0)
                seen = await self._observe(socket, "step", data, timeout_s, where)
                self._takes_places = not seen.action_error
        if not self._takes_places:
            raise InvalidRequestError(
                f"{self._base}: its action set has no coordinates; {openenv_actions.PLACES_HINT}"
            )

    async def _state(self, socket: Socket) -> dict[str, Any]:
        data = await socket.ask({"type": "state"}, self._limits.create_timeout_s)
        return openenv_answers.read_state(data, self._limits, f"state at {self._base}")

    async def _observe(
        self, socket: Socket, kind: str, data: dict[str, Any], timeout_s: float, where: str
    ) -> Observation:
        answer = await socket.ask({"type": kind, "data": data}, timeout_s)
        if len(answer) < _PICTURE_BYTES:
            return openenv_answers.read_observation(answer, self._limits, where)
        return await asyncio.to_thread(
            openenv_answers.read_observation, answer, self._limits, where
        )

    def _check_size(self, seen: Observation, session: Session, where: str) -> None:
        if not seen.image:
            reason = seen.action_error or "no reason given"
            raise VerifierError(f"{where}: the observation has no screenshot ({reason})")
        if seen.size_px != (session.width_px, session.height_px):
            raise VerifierError(
                f"{where}: the image has {seen.size_px[0]}x{seen.size_px[1]} pixels, "
                f"the session began with {session.width_px}x{session.height_px}"
            )

    def _find(self, session_id: str) -> _Open:
        return answers.find_open(self._open, session_id)


def _task_told(kind: openenv_actions.Kind, state: dict[str, Any]) -> str:
    """The task that a state names."""
    if kind.name == "browsergym":
        return printable(f"browsergym/{state.get('benchmark')}.{state.get('task_name')}")
    return printable(str(state.get("task")))


def _reset_fields(kind: openenv_actions.Kind, task: TaskSpec, where: str) -> dict[str, Any]:
    """The parameters of a reset. Raises InvalidRequestError for a variant that cannot be sent."""
    if kind.name == "uirl_jax":
        return {"task": task.name, "seed": task.seed, "variant": task.variant}
    if task.variant:
        raise InvalidRequestError(
            f"{where}: variant {task.variant!r} of {task.name!r}: this environment has none"
        )
    # OpenApp's reset takes no seed, and its server ignores what it does not take.
    return {"seed": task.seed}
