"""Plays episodes with a limit on concurrency, each on a working verifier.

Sits between `host`, which decides what is played and handles failed episodes, and `rollout`, which
plays one episode. It does not retry, and keeps only statistics.
"""

import asyncio
import collections
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from uirl_jax.actor.fleet import Fleet
from uirl_jax.actor.rollout import RolloutConfig, RolloutSetup, run_episode
from uirl_jax.engine.interface import SamplingEngine
from uirl_jax.errors import VerifierFullError
from uirl_jax.families.border import Inputs
from uirl_jax.families.chat import Chat
from uirl_jax.types import StopReason, TaskSpec, Trajectory, Turn
from uirl_jax.untrusted import json as untrusted_json

MAX_REASONS = 50  # distinct ones that are counted: a verifier's messages may be endless


class Attempt(NamedTuple):
    trajectory: Trajectory
    # env_error before the first turn, and no episode ended on any verifier in the meantime. Not if
    # a recorded row does not fit: played again it would not fit either, however often.
    fleet_down: bool


class Player:
    """Plays single episodes, at most `concurrency` at a time.

    Args:
        fleet, engine: opened by the caller, who also closes them after the last episode.
    """

    def __init__(
        self,
        fleet: Fleet,
        engine: SamplingEngine,
        chat: Chat,
        inputs: Inputs,
        cfg: RolloutConfig,
        *,
        concurrency: int,
        run_id: str = "",
        actor_id: str = "",
    ) -> None:
        self.fleet, self.engine, self.chat, self.inputs = fleet, engine, chat, inputs
        self.cfg, self.run_id, self.actor_id = cfg, run_id, actor_id
        self.concurrency = concurrency
        self.statistics = Statistics()
        self._slots = asyncio.Semaphore(concurrency)  # first come, first served

    async def play(
        self,
        task: TaskSpec,
        seed: int,
        group: str,
        on_start: Callable[[], None] | None = None,
        *,
        repeat: Sequence[Turn] = (),
    ) -> Attempt:
        """Waits for a slot and a verifier, then plays one episode.

        Args: repeat: see `run_episode`.
        Raises: ConfigError: no verifier can play this task with this config.
        """
        async with self._slots:
            waits_s: dict[str, float] = {}
            mismatches: list[str] = []
            while True:
                verifier = await self.fleet.next(task.name)
                started_s = time.monotonic()
                try:
                    if on_start is not None:
                        on_start()
                        on_start = None  # once, also if the verifier is full
                    trajectory = await run_episode(
                        task,
                        RolloutSetup(
                            verifier.client, self.engine, self.chat, self.inputs, self.cfg
                        ),
                        seed=seed,
                        group_id=group,
                        run_id=self.run_id,
                        actor_id=self.actor_id,
                        repeat=repeat,
                        waits_s=waits_s,
                        on_mismatch=mismatches.append,
                        on_env_error=self.statistics.add_env_error,
                    )
                    break
                except VerifierFullError as error:
                    self.fleet.full(verifier, error.capacity, error.wait_s)
                except BaseException:
                    self.fleet.left(verifier)
                    raise
            turns = len(trajectory.turns)
            if trajectory.stop_reason is not StopReason.ENV_ERROR:
                turn_s = waits_s.get("environment", 0.0) / max(1, turns)
                self.fleet.worked(verifier, turn_s, task.name)
            elif mismatches:
                self.fleet.mismatched(verifier, task, mismatches[0])
            elif turns:
                self.fleet.broke(verifier)
            else:
                self.fleet.failed(verifier)
        self.statistics.add(trajectory, waits_s)
        # A refusal is an answer: of this instance alone, if others can be played.
        refused = bool(mismatches)
        fleet_down = not (trajectory.turns or refused or self.fleet.worked_since(started_s))
        return Attempt(trajectory, fleet_down)


class Statistics:
    """Means over the episodes that ended since the last `read`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = collections.defaultdict(float)
        self._since_s = time.monotonic()
        self.env_error_reasons: collections.Counter[str] = collections.Counter()  # since the start

    def add_env_error(self, reason: str) -> None:
        """Counts the reason; numbers in it (ports, sessions, pixels) make no reason of its own."""
        shown = re.sub(r"\d+", "N", untrusted_json.printable(reason, 160))
        known = shown in self.env_error_reasons or len(self.env_error_reasons) < MAX_REASONS
        self.env_error_reasons[shown if known else "other reasons"] += 1

    def add(self, trajectory: Trajectory, waits_s: dict[str, float]) -> None:
        if trajectory.stop_reason is StopReason.ENV_ERROR:
            self._sums["env_errors"] += 1
            return
        for name, value in {
            "episodes": 1,
            "reward": trajectory.reward,
            "success": trajectory.success,
            "turns": len(trajectory.turns),
            "tokens": sum(len(turn.token_ids) for turn in trajectory.turns),
            "duration_s": trajectory.duration_s,
            "engine_s": waits_s.get("engine", 0.0),
            "environment_s": waits_s.get("environment", 0.0),
        }.items():
            self._sums[name] += value

    def read(self) -> dict[str, float]:
        """Returns the metrics since the last call and resets them; means are 0 without episodes."""
        sums, elapsed_s = self._sums, max(1e-9, time.monotonic() - self._since_s)
        episodes = max(1, sums["episodes"])
        self._sums, self._since_s = collections.defaultdict(float), time.monotonic()
        return {
            "actor/episodes_per_s": sums["episodes"] / elapsed_s,
            "actor/tokens_per_s": sums["tokens"] / elapsed_s,
            "actor/env_errors": float(sums["env_errors"]),
            "actor/reward": sums["reward"] / episodes,
            "actor/success": sums["success"] / episodes,
            "actor/turns": sums["turns"] / episodes,
            "actor/episode_s": sums["duration_s"] / episodes,
            "agent_loop/generate_sequences/mean": sums["engine_s"] / episodes,
            "agent_loop/tool_calls/mean": sums["environment_s"] / episodes,
        }
