"""Serves BrowserGym's environments as a verifier (dialects g1+ and openenv), by coordinates.

    python3.11 -m venv bg && bg/bin/pip install browsergym-miniwob==0.14.3 aiohttp obstore
    (cd .venv/lib/python3.11/site-packages/miniwob/html && python -m http.server 8888) &
    export MINIWOB_URL=http://127.0.0.1:8888/miniwob/ PYTHONPATH=.
    bg/bin/python examples/browsergym_bridge.py --chromium=/usr/lib/chromium/chromium-headless-shell

The virtual environment is its own, because BrowserGym pins Playwright 1.44. The server is the
bundled one, with its limits, request ids and checks; a task is named as BrowserGym names it,
`browsergym/miniwob.click-test`. Playwright's objects belong to one thread, so one action runs at a
time: for more, start more, each on a port of its own. docs/openenv.md has the traps.

Source: BrowserGym 0.14.3: core/env.py, core/chat.py, miniwob/base.py.
"""

import argparse
import asyncio
import importlib
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL import Image

from uirl_jax.errors import ActionError, VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.untrusted.http import port_number
from uirl_jax.verifiers.browser import BrowserError
from uirl_jax.verifiers.client import openenv_actions
from uirl_jax.verifiers.screenshots import encode_image
from uirl_jax.verifiers.server.open_session import ServerLimits
from uirl_jax.verifiers.server.server import serve
from uirl_jax.verifiers.server.session_types import SessionTypes

TASK = re.compile(r"browsergym/(([a-z]{1,40})\.[A-Za-z0-9_.-]{1,80})")
MakeEnv = Callable[[str], Any]  # the name of a task -> a gymnasium environment


def open_env(name: str, chromium: str) -> Any:
    """A BrowserGym environment that takes coordinates, without the browser that shows its chat.

    Raises: VerifierError: there is no such task, or its package is not installed.
    """
    import gymnasium
    from browsergym.core import env as core
    from browsergym.core.action.highlevel import HighLevelActionSet

    class Chat:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.messages: list[dict[str, Any]] = []

        def add_message(self, role: str, msg: str) -> None:
            self.messages.append({"role": role, "timestamp": 0.0, "message": msg})

        def close(self) -> None:
            pass

    core.Chat = Chat
    found = TASK.fullmatch(name)
    if found is None:
        raise VerifierError(f"unknown task {name!r}, expected browsergym/<benchmark>.<task>")
    options = {"pw_chromium_kwargs": {"executable_path": chromium}} if chromium else {}
    try:
        importlib.import_module(f"browsergym.{found[2]}")
        mapping = HighLevelActionSet(["coord", "nav"]).to_python_code
        env = gymnasium.make(name, headless=True, action_mapping=mapping, **options)
    except (ImportError, gymnasium.error.Error) as error:
        raise VerifierError(f"task {name!r}: {error}") from error
    if found[2] == "miniwob":
        make = env.unwrapped.task_entrypoint
        env.unwrapped.task_entrypoint = lambda seed, **rest: with_seed(
            make(seed=seed, **rest), seed
        )
    return env


def with_seed(task: Any, seed: int) -> Any:
    """A MiniWoB++ task whose page has the seed itself, as miniwob/<task> of the bundled server."""

    class PageSeed:
        def randint(self, low: int, high: int) -> str:
            return json.dumps(str(seed))  # goes into Math.seedrandom(...)

    task.random = PageSeed()
    return task


class BrowserGymTask:
    """A running session (server.session_types.RunningTask)."""

    delay_s = 0.0  # BrowserGym waits half a second by itself
    renderer = ""
    judges_every_action = False

    def __init__(self, env: Any, seen: dict[str, Any], thread: ThreadPoolExecutor) -> None:
        self._env, self._thread, self._seen = env, thread, seen
        self._reward, self._done, self._error = 0.0, False, ""
        self.instruction = seen["goal"]
        self.height_px, self.width_px = seen["screenshot"].shape[:2]
        self._pointer = (self.width_px // 2, self.height_px // 2)
        self._kind = openenv_actions.find_kind({"properties": {"action_str": {}}}, "BrowserGym")

    async def act(self, action: Action) -> None:
        try:
            openenv_actions.check_action(self._kind, action)
        except ActionError as error:  # nothing happens, as in the bundled server
            self._error = str(error)
            return
        if action.x is not None and action.y is not None:
            self._pointer = (action.x, action.y)
        text = self._kind.payload(action, self._pointer, 0.0)["action_str"]
        if not self._done:
            step = await self._call(lambda: self._env.step(text))
            self._seen, reward, terminated, truncated, _ = step
            self._reward += float(reward)
            self._done = bool(terminated or truncated)
            self._error = str(self._seen["last_action_error"])[:300]

    async def screenshot(self, image_format: str) -> bytes:
        return encode_image(Image.fromarray(self._seen["screenshot"]), image_format)

    async def progress(self) -> dict[str, Any]:
        """done, reward (of all steps), and why the last action could not be done."""
        return {"done": self._done, "reward": self._reward, "last_action_error": self._error}

    async def close(self) -> None:
        await self._call(self._env.close)

    async def scripted_action(self, rng: Any, quality: float = 1.0) -> Action | None:
        return None

    async def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except Exception as error:  # Playwright's and BrowserGym's are of many kinds
            raise BrowserError(f"{type(error).__name__}: {error}") from error


class BrowserGymTypes(SessionTypes):
    """Opens BrowserGym's tasks in place of the bundled server's own."""

    example = "browsergym/miniwob.click-test"

    def __init__(self, make_env: MakeEnv) -> None:
        super().__init__(warm_browsers=0, max_browsers=1)
        self._make_env = make_env
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="browsergym")

    def names(self) -> tuple[str, ...]:
        return ()  # as many as packages are installed; BrowserGym's documentation lists them

    async def open(self, task: TaskSpec) -> BrowserGymTask:
        if task.variant:
            raise VerifierError(f"task {task.name!r} has no variant, got {task.variant!r}")

        def start() -> BrowserGymTask:
            env = self._make_env(task.name)
            try:
                return BrowserGymTask(env, env.reset(seed=task.seed)[0], self._thread)
            except Exception as error:
                env.close()
                raise BrowserError(f"{task.name}: {type(error).__name__}: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, start)

    async def close(self) -> None:
        self._thread.shutdown()


async def run(port: int, make_env: MakeEnv, max_sessions: int) -> None:
    limits = ServerLimits(max_sessions=max_sessions)
    async with serve(port=port, limits=limits, types=BrowserGymTypes(make_env)) as actual:
        print(f"serving BrowserGym on http://127.0.0.1:{actual}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=port_number, default=8200)
    parser.add_argument("--chromium", default="", help="in place of the one of Playwright 1.44")
    parser.add_argument("--max-sessions", type=int, default=2, help="each is a browser")
    args = parser.parse_args()
    asyncio.run(run(args.port, lambda name: open_env(name, args.chromium), args.max_sessions))


if __name__ == "__main__":
    main()
