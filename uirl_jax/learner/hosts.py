"""Which host reads and builds what: process 0 decides each step, all processes compute it.

Between `loop` (process 0) and `follow` (the others). Process 0 alone scans the shards, chooses the
groups and plans the batches. It writes that as a decision, a JSON object beside the data cursor:

    decisions/00000012.json    run, step, where each record is, the plans of all batches

and tells its name and hash through `cluster`. The others read the decision, then only the records
that the rows of their own devices need. With one process nothing is written.

Advantages are computed by process 0 and sent as arrays (`algorithm.update`); checkpoints are saved
by all processes together. This module decides nothing and computes no loss.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax

from uirl_jax.errors import RecordError, RestartError, ShardError
from uirl_jax.families.border import Inputs
from uirl_jax.learner.algorithm import Chosen
from uirl_jax.learner.cluster import Cluster
from uirl_jax.log_lines import key_values
from uirl_jax.models import sharding
from uirl_jax.shards import batching
from uirl_jax.shards.batching import Part
from uirl_jax.shards.plan import BatchConfig, BatchPlan
from uirl_jax.shards.reader import RecordRef, read_each, read_refs
from uirl_jax.shards.record import TokenLayout
from uirl_jax.store import Store, StoreUnavailableError, restart_error
from uirl_jax.types import TrainBatch, Trajectory

T = TypeVar("T")
DECISIONS = "decisions"
KEPT_DECISIONS = 3  # of the last steps, for a look at what was trained
SCHEMA = 1
PUBLISHED = "published"  # the key under which process 0 tells that its first policy is
# Why no step follows.
ENDED = "ended"  # the last step is done, or a callback has ended the run
STOPPED = "stopped"  # by a signal: the same command continues the run
_PAUSE_S = 0.05  # between two tries to read what another host's file system does not show yet
_SAY_AFTER_S = 1.0


class Decision(NamedTuple):
    """What the other processes learn of one step, or of the end.

    Attributes:
      step: from 1; of an end: the last step that was taken.
      ends: why no step follows: ENDED or STOPPED; empty for a step.
      records: where the records of each update are; a plan names them by their number there.
      plans: of the batches of each update.
    """

    step: int
    ends: str
    records: tuple[tuple[RecordRef, ...], ...] = ()
    plans: tuple[tuple[BatchPlan, ...], ...] = ()


class Hosts:
    """The batches of a step, built by the processes of a learner for their own devices.

    Args:
      mesh: of all processes' devices.
    """

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        run_id: str,
        mesh: jax.sharding.Mesh,
        inputs: Inputs,
        cfg: BatchConfig,
    ) -> None:
        self._cluster, self._store, self._run_id = cluster, store, run_id
        self._mesh, self._inputs, self._cfg = mesh, inputs, cfg
        self._told = 0  # decisions so far

    # ------------------------------------------------------------------ process 0

    def decide(
        self, step: int, chosen: Chosen, refs: Mapping[str, RecordRef]
    ) -> list[list[TrainBatch]]:
        """Plans the batches of each update, tells the other processes, and builds its own rows.

        Args:
          refs: where the record of each episode is.
        Raises: ShardError: the decision cannot be written. RestartError: the storage is away.
        """
        parts = sharding.batch_parts(self._mesh)
        pieces, plans = [], []
        for records in chosen.parts:
            pieces.append(batching.cut(dict(enumerate(records)), self._inputs))
            plans.append(tuple(batching.plan_of(pieces[-1], self._cfg, parts)))
        if self._cluster.count > 1:
            where = tuple(tuple(refs[r.episode_id] for r in part) for part in chosen.parts)
            self._tell(Decision(step, "", where, tuple(plans)))
        return [
            [batching.assemble(plan, known, self._cfg, self.part_of(plan)) for plan in update]
            for update, known in zip(plans, pieces, strict=True)
        ]

    def end(self, step: int, reason: str) -> None:
        """Tells the other processes that no step follows this one."""
        if self._cluster.count > 1:
            self._tell(Decision(step, reason))

    def _tell(self, decision: Decision) -> None:
        name = f"{DECISIONS}/{decision.step:08d}{'-end' if decision.ends else ''}.json"
        content = {
            "schema": SCHEMA,
            "run_id": self._run_id,
            **decision._asdict(),
            "plans": [[plan.to_json() for plan in update] for update in decision.plans],
        }
        text = json.dumps(content).encode()
        try:
            self._store.put(name, text)
            known = self._store.names(DECISIONS)
            self._store.delete(*(other for other in known[:-KEPT_DECISIONS] if other != name))
        except StoreUnavailableError as error:
            raise restart_error(self._store.location(name), error) from None
        except OSError as error:
            raise ShardError(
                f"{self._store.location(name)}: {error.strerror}: the step's decision was not "
                "written; free disk space and run the same command again"
            ) from None
        self._cluster.tell(f"decision/{self._told}", f"{name} {_hash(text)}")
        self._told += 1

    # ------------------------------------------------------------------ the other processes

    def next_decision(self, timeout_s: float) -> Decision:
        """Waits for process 0's next decision.

        Args:
          timeout_s: for the file, once process 0 has told its name.
        Raises: RestartError: the file does not appear, or is another one.
        """
        name, expected = self._cluster.wait_for(f"decision/{self._told}").split()
        self._told += 1

        def read() -> bytes:
            text = self._store.read(name)
            if _hash(text) != expected:  # an earlier one of this name, from before a restart
                raise OSError("its content is not what process 0 has written")
            return text

        content = json.loads(self._once_visible(name, read, timeout_s))
        if (content["schema"], content["run_id"]) != (SCHEMA, self._run_id):
            raise RestartError(
                f"{self._store.location(name)}: is of schema {content['schema']} and run "
                f"{content['run_id']}, expected {SCHEMA} and {self._run_id}"
            )
        return Decision(
            content["step"],
            content["ends"],
            tuple(tuple(RecordRef(*ref) for ref in update) for update in content["records"]),
            tuple(
                tuple(BatchPlan.from_json(plan) for plan in update) for update in content["plans"]
            ),
        )

    def build(
        self, decision: Decision, layout: TokenLayout, timeout_s: float
    ) -> list[list[TrainBatch]]:
        """Reads the records that this process's rows need, and builds these rows.

        Raises: RestartError: a record does not appear in timeout_s, or is damaged.
        """

        def read(refs: list[RecordRef]) -> list[Trajectory]:
            once = functools.partial(read_refs, self._store, refs, layout)
            return self._once_visible(refs[0].name, once, timeout_s)

        batches = []
        for update, refs in zip(decision.plans, decision.records, strict=True):
            parts = [self.part_of(plan) for plan in update]
            needed = {
                number
                for plan, part in zip(update, parts, strict=True)
                for number in plan.records(part.rows or (), part.image_rows or ())
            }
            of_shard: dict[str, list[int]] = {}
            for number in sorted(needed):
                of_shard.setdefault(refs[number].name, []).append(number)
            found = read_each(
                self._store, read, [[refs[n] for n in numbers] for numbers in of_shard.values()]
            )
            records = {
                number: record
                for numbers, of_one in zip(of_shard.values(), found, strict=True)
                for number, record in zip(numbers, of_one, strict=True)
            }
            pieces = batching.cut({n: records[n] for n in sorted(needed)}, self._inputs)
            batches.append(
                [
                    batching.assemble(plan, pieces, self._cfg, part)
                    for plan, part in zip(update, parts, strict=True)
                ]
            )
        return batches

    def _once_visible(self, name: str, read: Callable[[], T], timeout_s: float) -> T:
        """The result of `read`, tried until it succeeds: a file may reach this host late."""
        started_s, said = time.monotonic(), False
        while True:
            try:
                return read()
            except (OSError, ShardError, RecordError) as error:
                waited_s, reason = time.monotonic() - started_s, error
            where = self._store.location(name)
            if waited_s > timeout_s:
                raise RestartError(
                    f"process {self._cluster.index}: {where}: process 0 has it, this host does "
                    f"not after {waited_s:.0f} s ({reason}); all hosts must see one workdir: "
                    "check the mount or use a bucket"
                )
            if waited_s > _SAY_AFTER_S and not said:
                said = True
                print(key_values("waiting_for_file", path=where, reason=reason), flush=True)
            time.sleep(_PAUSE_S)

    # ------------------------------------------------------------------ both

    def part_of(self, plan: BatchPlan) -> Part:
        """The rows of a batch that this process's devices hold."""
        return Part(
            sharding.rows_here(self._mesh, self._cfg.rows),
            sharding.rows_here(self._mesh, plan.image_rows),
        )


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
