"""Plays many episodes: for an evaluation (`run_tasks`), or in groups for training (`run_actor`).

On the data path: verifiers --`rollout`--> here --`shards.writer`--> learner, and back through
`policy_sync`. This module handles the environment's faults: it repeats failed episodes, waits while
no verifier is available, and accounts for every started episode as a record or in a counter.
"""

import asyncio
import bisect
import collections
import contextlib
import dataclasses
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from uirl_jax import policy_sync
from uirl_jax.actor.admission import Ledger, PublishedShards, ShardGroup, group_id, has_ended
from uirl_jax.actor.claims import Claims
from uirl_jax.actor.journal import Journal
from uirl_jax.actor.player import Player
from uirl_jax.actor.rollout import derive_seed, uninterrupted
from uirl_jax.errors import PolicyError, RecordError, RestartError, ShardError
from uirl_jax.log_lines import key_values
from uirl_jax.policy_sync import Manifest
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import ShardWriter
from uirl_jax.store import StoreUnavailableError, open_store
from uirl_jax.types import StopReason, TaskSpec, Trajectory

T = TypeVar("T")


async def run_tasks(
    player: Player,
    tasks: Sequence[TaskSpec],
    *,
    seed: int = 0,
    env_retries: int = 5,
    on_done: Callable[[Trajectory], None] = lambda trajectory: None,
    keep_images: int | None = None,
) -> list[Trajectory]:
    """Plays one episode of each task; returns them in the order of the tasks.

    See `play_numbered`; `on_done` is called with each task's final episode.

    Args:
      keep_images: so many episodes keep their images, the first ones that are no env_error; None:
        all. Those of 100,000 episodes are more than a host has memory.
    """
    done: dict[int, Trajectory] = {}
    with_images: list[int] = []  # ascending

    def keep(trajectory: Trajectory) -> None:
        number = int(trajectory.group_id)
        done[number] = trajectory
        on_done(trajectory)
        if keep_images is None:
            return
        dropped = number
        if trajectory.stop_reason is not StopReason.ENV_ERROR:
            bisect.insort(with_images, number)
            if len(with_images) <= keep_images:
                return
            dropped = with_images.pop()
        done[dropped] = dataclasses.replace(done[dropped], images={})

    await play_numbered(player, list(enumerate(tasks)), keep, seed=seed, env_retries=env_retries)
    return [done[number] for number in range(len(tasks))]


async def play_numbered(
    player: Player,
    tasks: Sequence[tuple[int, TaskSpec]],
    on_done: Callable[[Trajectory], None],
    *,
    seed: int = 0,
    env_retries: int = 5,
) -> None:
    """Plays one episode of each task, and keeps none.

    An episode that ends in env_error is repeated up to env_retries times, with growing pauses of
    its verifier; after that the last env_error counts.

    Args:
      tasks: each with a number, which decides with `seed` what is sampled; it is the group id.
      on_done: called with each task's final episode.
    """

    async def play(number: int, task: TaskSpec) -> None:
        for retries_left in reversed(range(1 + env_retries)):
            attempt = await player.play(task, derive_seed(seed, number), group_id(number))
            failed = attempt.trajectory.stop_reason is StopReason.ENV_ERROR
            if not failed or not retries_left:
                on_done(attempt.trajectory)
                return
        raise ValueError(f"env_retries={env_retries}, expected 0 or more")

    await _all([play(number, task) for number, task in tasks])


async def _all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all coroutines; if one fails, cancels the others and raises its error."""
    try:
        async with asyncio.TaskGroup() as owner:
            tasks = [owner.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


# ------------------------------------------------------------------------------ the actor of a run


@dataclasses.dataclass(frozen=True)
class ActorConfig:
    """How groups are sampled, and how far the actor may be ahead of the learner."""

    group_size: int
    groups_per_step: int  # of the learner
    max_staleness: int = 0  # of the learner
    steps: int | None = None  # of the learner: the actor ends then; None: it runs until `stop`
    env_retries: int = 3  # per member of a group, not counting faults while all verifiers fail
    # After this time the group of an actor no longer keeps others from starting one in its place.
    overdue_s: float = 600.0
    policy_lag: int = 0  # versions that the engine stays behind, to study staleness
    poll_s: float = 0.05  # between reads of the workdir
    report_s: float = 10.0  # between calls of on_report


Report = Callable[[dict[str, float]], None]
# Arguments: the group index, and the tallies of the policy's manifest (learner.curriculum).
TaskForGroup = Callable[[int, Any], TaskSpec]


@dataclasses.dataclass(frozen=True)
class LearnerLink:
    """The workdir that actor and learner share, and the base model of its records and policies."""

    workdir: str | os.PathLike[str]
    base_hash: str  # of the model that the engine holds
    layout: TokenLayout  # of that model
    # Adapters of a published policy by name -> the lora argument of `engine.set_policy`.
    to_trainable: Callable[[dict[str, np.ndarray]], Any]


@dataclasses.dataclass(frozen=True)
class TaskSource:
    """The tasks of a run's groups, and the seed of their sampling."""

    task_for_group: TaskForGroup
    # Member m of group i samples with the seed of (run_seed, i, m); its n-th attempt after
    # env_errors with that of (run_seed, i, m, n).
    run_seed: int


async def run_actor(
    player: Player,
    cfg: ActorConfig,
    link: LearnerLink,
    tasks: TaskSource,
    stop: asyncio.Event,
    on_report: Report | None = None,
) -> dict[str, float]:
    """Samples groups and publishes them until the learner's last step, or until `stop` is set.

    Group i has G episodes of one task. Groups that are lost with a killed process are played again.
    Each group becomes one shard, published after the running groups with lower indices.

    Args:
        on_report: called with the metrics every cfg.report_s, and at the end.

    Returns:
        The last report: started = published + env_error + running + lost, with running 0.

    Raises:
        PolicyError: the published policy is of another run or base model.
    """
    actor = _Actor(player, cfg, link, tasks, on_report)
    stopped = asyncio.create_task(stop.wait())
    try:
        await actor.look()
        actor.settle()
        while not stop.is_set() and not actor.finished:
            with actor.storage_may_be_away():
                await actor.publish_whole_groups()
                await actor.release_used_claims()
                await actor.start_admitted_groups()
            actor.report_if_due()
            await actor.pause(stopped)
            with actor.storage_may_be_away():
                await actor.look_if_due()
    finally:
        stopped.cancel()
        await uninterrupted(actor.close())
    return actor.report()


class _Abandoned(Exception):
    """A member of a group had too many env_errors. Caught within this file."""


class _Actor:
    """The state of run_actor: running groups, and the ledger of all groups."""

    def __init__(
        self,
        player: Player,
        cfg: ActorConfig,
        link: LearnerLink,
        tasks: TaskSource,
        on_report: Report | None,
    ) -> None:
        self._player, self._cfg, self._link, self._tasks = player, cfg, link, tasks
        self._store = open_store(link.workdir)
        self._on_report = on_report
        self._journal = Journal(link.workdir, player.actor_id, player.run_id)
        self._writer = ShardWriter(
            self._store, player.actor_id, player.run_id, link.base_hash, layout=link.layout
        )
        own = player.actor_id if self._store.poll_s else ""  # see PublishedShards
        self._shards = PublishedShards(self._store, player.run_id, own)
        # At first what an earlier process of this actor has published in a bucket.
        self._on_disk = frozenset(g.index for g in self._shards.poll()) if own else frozenset[int]()
        self._claims = Claims(
            self._store,
            player.run_id,
            player.actor_id,
            overdue_s=cfg.overdue_s,
            kept=self._on_disk,
        )
        self._manifest: Manifest | None = None  # the newest one whose policy was loaded
        self._seen: Manifest | None = None  # at the last look; its policy may not be loaded
        # Its policy and up to policy_lag earlier ones, as (lora, version), oldest first; the engine
        # samples with the first.
        self._policies: collections.deque[tuple[Any, int]] = collections.deque(
            maxlen=cfg.policy_lag + 1
        )
        self._ledger: Ledger | None = None  # None until the first policy
        self._groups: dict[int, asyncio.Task[list[Trajectory] | None]] = {}  # by index
        self._members_playing = 0  # or waiting for a slot of the player
        # Started episodes that are not published yet, by group.
        self._in_memory: collections.Counter[int] = collections.Counter()
        self._publish_again_s = 0.0
        self._next_look_s = 0.0
        self._last_report_s = time.monotonic()
        self._last_warning = ""

    # -------------------------------------------------------------- called by run_actor

    @property
    def finished(self) -> bool:
        steps, manifest = self._cfg.steps, self._manifest
        return manifest is not None and steps is not None and has_ended(manifest, steps)

    @contextlib.contextmanager
    def storage_may_be_away(self) -> Iterator[None]:
        """Running groups go on while the storage does not answer; the rest is tried again."""
        try:
            yield
        except StoreUnavailableError as error:
            self._warn_once("storage_unavailable", str(error))

    async def look_if_due(self) -> None:
        """`look`, not more often than the store allows: in a bucket each look is paid for."""
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + self._store.poll_s
            await self.look()

    async def look(self) -> None:
        """Reads claims, shards and manifest; loads a new policy."""
        await asyncio.to_thread(self._claims.poll)  # before the shards, see there
        on_disk = await asyncio.to_thread(self._shards.poll)  # before the manifest, see poll
        self._on_disk = frozenset(group.index for group in on_disk)
        manifest: Manifest | None = None
        try:
            manifest = await asyncio.to_thread(policy_sync.read_manifest, self._store)
            self._seen = manifest
            if manifest is None:
                self._warn_once("no_policy", "none is published yet, waiting for the learner")
                return
            # Also if the policy cannot be loaded: what is trained must not be played again.
            self._ledger = Ledger.of(manifest, on_disk, self._cfg.max_staleness)
            if manifest != self._manifest:
                lora = await asyncio.to_thread(self._load, manifest)
                if self._policies and self._policies[-1][1] == manifest.version:
                    self._policies.pop()  # the same version was published again
                self._policies.append((lora, manifest.version))
                self._player.engine.set_policy(*self._policies[0])
                self._manifest = manifest
        except PolicyError as error:
            ours = (self._link.base_hash, self._player.run_id)
            if manifest is not None and (manifest.base_hash, manifest.run_id) != ours:
                raise  # waiting cannot fix this
            self._warn_once("policy_not_taken", str(error))  # being replaced: read again later
        except RestartError as error:  # the storage is away: read again later, without a restart
            self._warn_once("storage_unavailable", str(error.__cause__))

    def settle(self) -> None:
        """At the start: counts and prints the episodes that an earlier process of it lost."""
        trained = self._ledger or ()
        lost = self._journal.settle(lambda index: index in self._on_disk or index in trained)
        if self._journal.total("started"):
            line = key_values("actor_restarted", actor=self._player.actor_id, episodes_lost=lost)
            print(f"{line} {self._counters_line()}", flush=True)
        if self._journal.damaged_lines:
            damaged = self._journal.damaged_lines
            print(key_values("journal_damaged", path=self._journal.path, lines=damaged), flush=True)

    async def publish_whole_groups(self) -> None:
        """Publishes complete groups in order of their index, up to the first one still running.

        Marks those that were abandoned: here, because one thread at a time may change the claims.
        """
        for task in self._groups.values():
            if task.done():
                task.result()  # an unexpected error ends the actor
        for index, task in list(self._groups.items()):
            if task.done() and task.result() is None:
                await uninterrupted(self._abandon(index))
                del self._groups[index]
        for index in sorted(self._groups):
            if not self._groups[index].done() or time.monotonic() < self._publish_again_s:
                return
            trajectories = self._groups[index].result()
            assert trajectories is not None  # abandoned above
            await uninterrupted(self._publish(index, trajectories))

    async def start_admitted_groups(self) -> None:
        """Starts groups while the limit admits them and the player has free slots."""
        cfg, ledger, manifest = self._cfg, self._ledger, self._manifest
        if ledger is None or manifest is None:
            return
        behind = ledger.version - manifest.version  # its successor cannot be loaded yet
        if behind < 0:
            return  # the learner went back: what this policy samples comes from a lost future
        await asyncio.to_thread(self._claims.check_alive_if_due)
        skipped: set[int] = set()
        races_lost = 0
        while self._members_playing < self._player.concurrency:
            index = ledger.next_index(
                # What was skipped is probably claimed. Not counted, it would let this actor go
                # beyond the limit, to groups that become stale.
                dict.fromkeys(skipped, manifest.version) | self._claims.in_flight(),
                self._claims.unavailable() | self._groups.keys() | skipped,
                groups_per_step=cfg.groups_per_step,
                # The policy lags behind: its groups are older than the manifest from the start.
                max_staleness=cfg.max_staleness - cfg.policy_lag - behind,
                steps=cfg.steps,
            )
            if index is None:
                return
            try:
                taken = await asyncio.to_thread(self._claims.take, index, manifest.version)
            except OSError as error:
                self._warn_once("group_not_claimed", f"{self._store.location()}: {error}")
                return
            if not taken:
                # Another actor has claimed it since the last look. In a bucket looks are seconds
                # apart, and 200 actors would try all indices one after the other.
                if self._store.poll_s:
                    races_lost += 1
                    skipped |= set(range(index, index + random.randrange(2 ** min(races_lost, 8))))
                continue
            if await asyncio.to_thread(self._learner_went_on):
                # Nobody waited for this group before it was claimed: it may be trained by now, or
                # the policy that this actor holds too old for it.
                await asyncio.to_thread(self._claims.release, index)
                self._next_look_s = 0.0
                return
            self._members_playing += cfg.group_size
            task = self._tasks.task_for_group(index, manifest.extra.get("tallies"))
            self._groups[index] = asyncio.create_task(self._sample_group(index, task))

    async def release_used_claims(self) -> None:
        """Deletes claims of groups that are trained, or that the learner cannot use any more."""
        if self._ledger is not None:
            held = self._groups.keys() | self._ledger.pending
            used = [index for index in self._claims.own() if index not in held]
            await asyncio.to_thread(self._claims.release, *used)

    async def pause(self, stopped: asyncio.Task[bool]) -> None:
        """Waits until a group ends, the actor is stopped or poll_s have passed."""
        running = [task for task in self._groups.values() if not task.done()]
        await asyncio.wait(
            [stopped, *running],
            timeout=self._cfg.poll_s,
            return_when=asyncio.FIRST_COMPLETED,
        )

    def report_if_due(self) -> None:
        if time.monotonic() - self._last_report_s >= self._cfg.report_s:
            self.report()

    def report(self) -> dict[str, float]:
        """Metrics of the episodes since the last report, and totals over all restarts."""
        self._last_report_s = time.monotonic()
        metrics = self._player.statistics.read() | self._player.engine.metrics()
        metrics |= {f"actor/{name}": float(n) for name, n in self._counters().items()}
        if self._on_report is not None:
            self._on_report(metrics)
        return metrics

    async def close(self) -> None:
        """Cancels running groups, publishes complete ones (unless finished), counts the rest."""
        for task in self._groups.values():
            task.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)
        for index in sorted(self._groups):
            task = self._groups[index]
            if task.cancelled():
                continue
            if (error := task.exception()) is not None:
                print(key_values("group_failed", group=index, reason=error), flush=True)
                continue
            if (trajectories := task.result()) is None:
                await self._abandon(index)
            elif not self.finished:
                await self._publish(index, trajectories)
        for index in list(self._in_memory):
            self._lose(index)
        kept: frozenset[int] = frozenset()
        if self._store.poll_s:  # others know what this actor has published by its claims alone
            kept = self._ledger.pending if self._ledger is not None else self._on_disk
        with contextlib.suppress(OSError):  # they no longer count once this process has ended
            self._claims.release(*(i for i in self._claims.own() if i not in kept))
        self._journal.close()
        actor_id = self._player.actor_id
        print(f"{key_values('actor_ended', actor=actor_id)} {self._counters_line()}", flush=True)

    # -------------------------------------------------------------- groups

    async def _sample_group(self, index: int, task: TaskSpec) -> list[Trajectory] | None:
        """G trajectories, none of them env_error; None if the group was abandoned."""
        try:
            members = range(self._cfg.group_size)
            return await _all([self._sample_member(index, member, task) for member in members])
        except _Abandoned:
            print(key_values("group_abandoned", group=index, task=task.name), flush=True)
            return None
        finally:
            self._members_playing -= self._cfg.group_size

    async def _sample_member(self, index: int, member: int, task: TaskSpec) -> Trajectory:
        seed = derive_seed(self._tasks.run_seed, index, member)

        def on_start() -> None:
            self._journal.add("started", index, 1)
            self._in_memory[index] += 1

        env_errors = 0
        while env_errors <= self._cfg.env_retries:
            if env_errors:  # what was sampled may be what failed
                seed = derive_seed(self._tasks.run_seed, index, member, env_errors)
            attempt = await self._player.play(task, seed, group_id(index), on_start)
            if attempt.trajectory.stop_reason is not StopReason.ENV_ERROR:
                return attempt.trajectory
            self._journal.add("env_error", index, 1)
            self._in_memory[index] -= 1
            env_errors += not attempt.fleet_down
        raise _Abandoned

    async def _publish(self, index: int, trajectories: list[Trajectory]) -> None:
        """Writes a group as one shard. Tries again later if it cannot; drops invalid records."""
        self._journal.add("publishing", index, len(trajectories))
        try:
            name = await asyncio.to_thread(self._writer.publish, trajectories)
        except (ShardError, StoreUnavailableError) as error:
            self._publish_again_s = time.monotonic() + 20 * self._cfg.poll_s
            self._warn_once("shard_not_published", str(error))
            return
        except RecordError as error:
            print(key_values("group_abandoned", group=index, reason=error), flush=True)
            await self._abandon(index)
        else:
            self._journal.add("published", index, len(trajectories))
            self._in_memory.pop(index)
            oldest, newest = zip(*(t.policy_versions for t in trajectories), strict=True)
            self._shards.note(name, ShardGroup(index, min(oldest), max(newest)))
            assert self._ledger is not None  # a group was admitted
            pending = self._ledger.pending | {index}
            self._ledger = dataclasses.replace(self._ledger, pending=pending)
        del self._groups[index]

    async def _abandon(self, index: int) -> None:
        self._journal.add("abandoned", index, 0)
        self._lose(index)
        try:
            await asyncio.to_thread(self._claims.abandon, index)
        except OSError as error:  # the group may be tried again
            self._warn_once("group_not_abandoned", f"{self._store.location()}: {error}")

    def _lose(self, index: int) -> None:
        if episodes := self._in_memory.pop(index, 0):
            self._journal.add("lost", index, episodes)

    # -------------------------------------------------------------- the workdir

    def _learner_went_on(self) -> bool:
        """Whether the manifest is another one than at the last look. Costs one read."""
        try:
            return policy_sync.read_manifest(self._store) != self._seen
        except (PolicyError, RestartError):  # it says nothing; `look` tells about it
            return False

    def _load(self, manifest: Manifest) -> Any:
        link = self._link
        adapters = policy_sync.load(
            self._store, manifest, link.base_hash, run_id=self._player.run_id
        )
        return link.to_trainable(adapters)

    # -------------------------------------------------------------- counters and warnings

    def _counters(self) -> dict[str, int]:
        names = ("started", "published", "env_error", "lost")
        totals = {name: self._journal.total(name) for name in names}
        return totals | {"running": self._in_memory.total()}

    def _counters_line(self) -> str:
        counters = self._counters()
        return " ".join(f"{name}={n}" for name, n in counters.items())

    def _warn_once(self, event: str, reason: str) -> None:
        if reason != self._last_warning:  # not again at every poll
            print(key_values(event, reason=reason), flush=True)
        self._last_warning = reason
