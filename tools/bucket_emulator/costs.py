"""What a run in a bucket costs: real actors and a real queue against the emulator, counted.

    python -m tools.bucket_emulator.costs --actors=8 --minutes=5

Everything between the processes and the bucket is the package's own code: run_actor with claims,
shards, leases and the manifest; the learner's queue, publication and lease. Only the playing and
the learning are replaced by waiting. Checkpoints are not part of it: Orbax's requests a save do not
depend on the actors (docs/buckets.md has them). All actors are tasks of one process, each with a
store of its own, as on hosts of their own.
"""

import argparse
import asyncio
import collections
import concurrent.futures
import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tools.bucket_emulator.running import emulator
from uirl_jax import policy_sync
from uirl_jax.actor import host
from uirl_jax.actor.player import Attempt
from uirl_jax.shards.queue import ShardQueue
from uirl_jax.shards.record import TokenLayout
from uirl_jax.store import lease
from uirl_jax.store.bucket import BucketStore
from uirl_jax.types import StopReason, TaskSpec, Trajectory, Turn

ADDRESS = "gs://runs/run"
LAYOUT = TokenLayout(vocab_size=100, image_token_id=9)
ADAPTER_BYTES = 1 << 20


def trajectory(group: str, version: int) -> Trajectory:
    """A record of one turn without a screenshot: its size does not change the requests."""
    turn = Turn(
        context_ids=np.array([1, 2, 3], np.int32),
        token_ids=np.array([4, 5], np.int32),
        logprobs=np.full(2, -0.5, np.float32),
        full_logprobs=np.full(2, -0.5, np.float32),
        policy_versions=np.full(2, version, np.int32),
        image_keys=(),
        text="wait()",
        action=None,
        error="no action",
        reward=0.0,
        progress={},
    )
    return Trajectory(
        episode_id=uuid.uuid4().hex,
        group_id=group,
        task=TaskSpec("desktop/click_button", seed=1, variant="", max_turns=1),
        instruction="Wait",
        turns=(turn,),
        images={},
        image_tokens={},
        stop_reason=StopReason.FAILED,
        reward=0.0,
        success=False,
    )


class WaitingPlayer:
    """Plays an episode by waiting; the rest of the actor does not see a difference."""

    def __init__(self, actor_id: str, members: int, episode_s: float) -> None:
        self.actor_id, self.run_id, self.concurrency = actor_id, "run", members
        self.engine = self.statistics = self
        self._episode_s, self._version = episode_s, 0

    def set_policy(self, lora: object, version: int) -> None:
        del lora
        self._version = version

    def read(self) -> dict[str, float]:
        return {}

    metrics = read

    async def play(
        self, task: TaskSpec, seed: int, group: str, on_start: Callable[[], None]
    ) -> Attempt:
        del task, seed
        on_start()
        version = self._version
        await asyncio.sleep(self._episode_s)
        return Attempt(trajectory(group, version), False)


async def act(args: argparse.Namespace, folder: Path, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(64))
    stores = [BucketStore(ADDRESS) for _ in range(args.actors)]
    host.open_store = lambda workdir: stores[int(Path(workdir).name)]

    async def one(number: int) -> None:
        await asyncio.sleep(5.0 * number / args.actors)  # hosts do not start in one moment
        actor_id = f"a{number}"
        held = await asyncio.to_thread(stores[number].claim, f"actor-{actor_id}.lock", actor_id)
        with lease.renewed(held, stop.set):
            await host.run_actor(
                WaitingPlayer(actor_id, args.members, args.episode_s),
                host.ActorConfig(args.members, args.actors, max_staleness=2),
                host.LearnerLink(folder / str(number), "base", LAYOUT, lambda adapters: None),
                host.TaskSource(lambda index, tallies: TaskSpec("t", 1, "", 1), 0),
                stop,
            )

    async with asyncio.TaskGroup() as tasks:
        for number in range(args.actors):
            tasks.create_task(one(number))


def learn(args: argparse.Namespace, ended: threading.Event, result: dict[str, Any]) -> None:
    """One step per round of groups, one group of each actor."""
    store = BucketStore(ADDRESS)
    held = store.claim(lease.LEARNER, "the learner")
    queue = ShardQueue(store, "run", "base")
    states: collections.deque[dict[str, Any]] = collections.deque(maxlen=3)
    trained: list[int] = []
    version, busy_s, started_s = 0, 0.0, time.monotonic()

    def publish() -> None:
        policy_sync.publish(
            store,
            version=version,
            step=version,
            arrays={"adapters": np.full(ADAPTER_BYTES // 4, version, np.float32)},
            base_hash="base",
            run_id="run",
            extra={"groups_trained": ranges(trained)},
        )

    with lease.renewed(held, ended.set):
        publish()
        while not ended.is_set():
            before_s = time.monotonic()
            queue.poll()
            groups = queue.take_groups(args.actors, version, 2)
            if groups:
                trained += [int(group[0].group_id) for group in groups]
                version += 1
                states.append(queue.state())
                publish()
                if len(states) == states.maxlen:
                    queue.committed(states[0])
            busy_s += time.monotonic() - before_s
            ended.wait(store.poll_s)
    seconds = time.monotonic() - started_s
    result.update(steps=version, learner_storage_s=busy_s, seconds=seconds, **queue.accounting())


def ranges(indices: list[int]) -> list[list[int]]:
    pairs: list[list[int]] = []
    for index in sorted(indices):
        if pairs and pairs[-1][1] == index:
            pairs[-1][1] += 1
        else:
            pairs.append([index, index + 1])
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bucket_emulator.costs")
    parser.add_argument("--actors", type=int, default=8)
    parser.add_argument("--members", type=int, default=8, help="episodes of a group")
    parser.add_argument("--episode_s", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--start_s", type=float, default=30.0, help="not counted: the start")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with emulator() as service, TemporaryDirectory() as folder:
        os.environ["STORAGE_EMULATOR_HOST"] = service.address
        ended = threading.Event()
        learner = threading.Thread(target=learn, args=(args, ended, result))
        learner.start()

        async def run() -> None:
            stop = asyncio.Event()
            acting = asyncio.create_task(act(args, Path(folder), stop))
            await asyncio.sleep(args.start_s)
            service.reset()
            await asyncio.wait([acting], timeout=60 * args.minutes)
            counters = service.counters()
            hours = counters["seconds"] / 3600
            result["per_hour"] = {
                **{name: round(n / hours) for name, n in counters["requests"].items()},
                **{f"class {name}": round(n / hours) for name, n in counters["billed"].items()},
                "usd": round(counters["billed_usd"] / hours, 3),
            }
            result["too_fast"] = counters["overwritten_too_fast"]
            stop.set()
            await acting

        try:
            with contextlib.redirect_stdout(None):
                asyncio.run(run())
        finally:
            ended.set()
            learner.join()
    print(json.dumps({"actors": args.actors, "episode_s": args.episode_s, **result}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
