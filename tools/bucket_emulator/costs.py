"""What a run in a bucket costs: real actors and a real queue against the emulator, counted.

    python -m tools.bucket_emulator.costs --actors=8 --minutes=5

Everything between the processes and the bucket is the package's own code: run_actor with claims,
shards, leases and the manifest; the learner's queue, publication and lease. Only the playing and
the learning are replaced by waiting. Checkpoints are not part of it: Orbax's requests a save do not
depend on the actors (docs/buckets.md has them). Actors, learner and emulator have a process each;
all actors are tasks of theirs, each with a store of its own, as on hosts of their own.
"""

import argparse
import asyncio
import collections
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import synchronize
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tools.bucket_emulator.running import Service
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
MAX_STALENESS = 2


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
                host.ActorConfig(args.members, args.actors, max_staleness=MAX_STALENESS),
                host.LearnerLink(folder / str(number), "base", LAYOUT, lambda adapters: None),
                host.TaskSource(lambda index, tallies: TaskSpec("t", 1, "", 1), 0),
                stop,
            )

    async with asyncio.TaskGroup() as tasks:
        for number in range(args.actors):
            tasks.create_task(one(number))


def learn(
    args: argparse.Namespace, ended: synchronize.Event, result: "multiprocessing.Queue[Any]"
) -> None:
    """One step per round of groups, one group of each actor."""
    store = BucketStore(ADDRESS)
    held = store.claim(lease.LEARNER, "the learner")
    queue = ShardQueue(store, "run", "base")
    states: collections.deque[dict[str, Any]] = collections.deque(maxlen=3)
    trained: list[int] = []
    of_actor: collections.Counter[str] = collections.Counter()
    staleness: collections.Counter[int] = collections.Counter()
    spent = collections.Counter[str]()
    version, started_s, started_cpu_s = 0, time.monotonic(), time.process_time()

    @contextlib.contextmanager
    def timed(what: str) -> Iterator[None]:
        before_s = time.monotonic()
        yield
        spent[what] += time.monotonic() - before_s

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
            look_s = time.monotonic() - before_s
            with timed("read"):
                groups = queue.take_groups(args.actors, version, MAX_STALENESS)
            # A look that finds too little delays nothing: the learner would wait anyway.
            spent["look" if groups else "look while waiting"] += look_s
            if groups:
                trained += [int(group[0].group_id) for group in groups]
                of_actor.update(group[0].actor_id for group in groups)
                staleness.update(version - group[0].policy_versions[0] for group in groups)
                version += 1
                states.append(queue.state())
                with timed("publish"):
                    publish()
                if len(states) == states.maxlen:
                    with timed("delete"):
                        queue.committed(states[0])
            ended.wait(store.poll_s)
    seconds = time.monotonic() - started_s
    groups_of = sorted(of_actor[f"a{number}"] for number in range(args.actors))
    result.put(
        {
            "steps": version,
            "seconds": round(seconds, 1),
            "learner_share": {what: round(s / seconds, 5) for what, s in spent.items()},
            "learner_cpu_share": round((time.process_time() - started_cpu_s) / seconds, 5),
            "staleness": dict(sorted(staleness.items())),
            "groups_of_an_actor": [groups_of[0], groups_of[len(groups_of) // 2], groups_of[-1]],
            **queue.accounting(),
        }
    )


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
    parser.add_argument("--latency_s", type=float, default=0.0, help="of every answer")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    ended, results = spawn.Event(), spawn.Queue()
    with TemporaryDirectory() as folder, _service(Path(folder), args.latency_s) as service:
        os.environ["STORAGE_EMULATOR_HOST"] = service.address
        learner = spawn.Process(target=learn, args=(args, ended, results))
        learner.start()
        try:
            with contextlib.redirect_stdout(None):
                counted = asyncio.run(count(args, Path(folder), service))
        finally:
            ended.set()
        result = results.get(timeout=120.0)
        learner.join()
    print(json.dumps({"actors": args.actors, "episode_s": args.episode_s, **counted, **result}))
    return 0


async def count(args: argparse.Namespace, folder: Path, service: Service) -> dict[str, Any]:
    """Lets the actors act; the requests of all processes, after the start."""
    stop = asyncio.Event()
    acting = asyncio.create_task(act(args, folder, stop))
    await asyncio.sleep(args.start_s)
    await asyncio.to_thread(service.reset)
    await asyncio.wait([acting], timeout=60 * args.minutes)
    counters = await asyncio.to_thread(service.counters)
    stop.set()
    await acting
    hours = counters["seconds"] / 3600
    per_hour = {
        **{name: round(n / hours) for name, n in counters["requests"].items()},
        **{f"class {name}": round(n / hours) for name, n in counters["billed"].items()},
        "usd": round(counters["billed_usd"] / hours, 3),
    }
    return {"per_hour": per_hour, "too_fast": counters["overwritten_too_fast"]}


@contextlib.contextmanager
def _service(folder: Path, latency_s: float) -> Iterator[Service]:
    """The emulator in a process of its own."""
    port_file = folder / "port"
    command = [sys.executable, "-m", "tools.bucket_emulator", f"--latency_s={latency_s}"]
    with subprocess.Popen(
        [*command, f"--port_file={port_file}"], stdout=subprocess.DEVNULL
    ) as process:
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    raise RuntimeError("the bucket emulator did not start")
                time.sleep(0.05)
            yield Service(f"http://127.0.0.1:{port_file.read_text().strip()}")
        finally:
            process.terminate()


if __name__ == "__main__":
    raise SystemExit(main())
