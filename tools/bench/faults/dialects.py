"""Faults in the dialects of the field, for `plays`: containers (g2a, g2b, g3) and g1.

The bundled server speaks g2b and g3 before each of its sessions; g2a are its counts in other words,
and g1 its sessions without seeds (`proxy` translates). Nobody there says what an episode
pays: the client judges counts, and every faulty answer claims that all is done. What is checked is
that an episode pays what the counts are worth that the server itself gave last.
"""

import asyncio
import collections
import dataclasses
from typing import Any

import aiohttp

from tools.bench.faults.actor import LANES, LIMITS, ROLLOUT, RUN_SEED, World
from tools.bench.faults.proxy import SHEET_VARIANT
from uirl_jax.actor.rollout import RolloutSetup, derive_seed, run_episode
from uirl_jax.types import StopReason, TaskSpec, Trajectory
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.client.rules import find_rule

DIALECTS = ("g1", "g2a", "g2b", "g3")
PLAN = "mixed-10"
TASK = TaskSpec("simple_data_entry", 0, "rows=2", max_turns=10)  # the first of the two
# g1 has five actions of the mouse, which fill in no form: what it pays a fault has paid.
CLICK = "click(5, 6)"


@dataclasses.dataclass(frozen=True)
class Played:
    trajectory: Trajectory
    session_id: str  # "": of g1, which nobody else knows


async def play(world: World, dialect: str, episodes: int, concurrency: int) -> dict[str, Any]:
    """So many episodes, none of them again, each in a container of its own where there are some;
    how they ended, and the proxy's report."""
    places = asyncio.Semaphore(concurrency)

    async def one(index: int, http: aiohttp.ClientSession) -> Played:
        async with places:
            return await _play_one(world, dialect, index, http)

    async with aiohttp.ClientSession(f"http://127.0.0.1:{world.port}") as http:
        # Everything that escapes an episode is a defect, and ends the bench.
        played = await asyncio.gather(*(one(index, http) for index in range(episodes)))
    report = await world.report(f"{PLAN}-{dialect}")
    counts = report.pop("counts")
    ends = collections.Counter(str(one.trajectory.stop_reason) for one in played)
    return report | {
        "wanted": episodes,
        "episodes": len({one.trajectory.episode_id for one in played}),
        "ends": dict(sorted(ends.items())),
        "uncertain_turns": sum(
            turn.error.startswith("env_error") for one in played for turn in one.trajectory.turns
        ),
        "slowest_s": max(one.trajectory.duration_s for one in played),
        "paid": sum(one.trajectory.success for one in played),
        "paid_wrongly": sum(
            paid_wrongly(one.trajectory, counts.get(one.session_id)) for one in played
        ),
    }


def paid_wrongly(trajectory: Trajectory, counts: dict[str, Any] | None) -> bool:
    """Whether an episode has a reward that these counts, the last that a server gave, are not
    worth."""
    reward, success = 0.0, False
    if trajectory.stop_reason is not StopReason.ENV_ERROR and counts is not None:
        judged = find_rule(TASK).judge(counts, len(trajectory.turns))
        reward, success = judged.reward, judged.success
    return (trajectory.reward, trajectory.success) != (reward, success)


async def _play_one(world: World, dialect: str, index: int, http: aiohttp.ClientSession) -> Played:
    sheet = TaskSpec("desktop/data_entry", index, SHEET_VARIANT)
    seed, lane = derive_seed(RUN_SEED, index), index % LANES
    plan, session_id = f"{PLAN}-{dialect}", ""
    url = f"http://127.0.0.1:{world.port}/{plan}/{lane}"
    if dialect != "g1":
        query = {"type": sheet.name, "seed": str(index), "variant": sheet.variant}
        opened = await _ask(http, "POST", f"/none/{lane}/session", query)
        session_id = opened["session_ids"][0]
        url += f"/{'g2a' if dialect == 'g2a' else 'proxy'}/{session_id}"
    world.engine.expect(seed, sheet, CLICK if dialect == "g1" else None)
    async with VerifierClient(url, dialect=dialect, limits=LIMITS) as client:
        trajectory = await run_episode(
            TASK,
            RolloutSetup(client, world.engine, world.chat, world.inputs, ROLLOUT),
            seed=seed,
            group_id=f"{dialect}-{index}",
        )
    if session_id:
        await _ask(http, "DELETE", f"/none/{lane}/session/{session_id}")
    return Played(trajectory, session_id)


async def _ask(
    http: aiohttp.ClientSession, method: str, path: str, query: dict[str, str] | None = None
) -> dict[str, Any] | None:
    """Behind the proxy's faults: what the server says; None where there is no such session."""
    while True:
        async with http.request(method, path, params=query) as response:
            if response.status != 502:  # it is just being restarted
                return await response.json() if response.status == 200 else None
        await asyncio.sleep(0.05)
