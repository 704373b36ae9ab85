"""Which host reads and builds what: parts of batches, decisions on disk, records that come late."""

import dataclasses
import math
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests import packed_records, sample_trajectories
from uirl_jax.errors import RestartError
from uirl_jax.learner import hosts as hosts_module
from uirl_jax.learner.algorithm import Chosen
from uirl_jax.learner.cluster import Cluster
from uirl_jax.learner.hosts import ENDED, Decision, Hosts
from uirl_jax.models import sharding
from uirl_jax.shards import batching, reader
from uirl_jax.shards.batching import Part
from uirl_jax.shards.plan import BatchPlan, _spread
from uirl_jax.shards.reader import RecordRef
from uirl_jax.shards.writer import put_shard
from uirl_jax.store import StoreUnavailableError, open_store
from uirl_jax.store.local import LocalStore

CFG = packed_records.LAYOUTS["packed"]


class Messages:
    """The coordination service's key-value store, for processes that are objects of one test."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def key_value_set(self, key: str, text: str) -> None:
        if key in self.texts:
            raise RuntimeError("ALREADY_EXISTS")
        self.texts[key] = text

    def key_value_try_get(self, key: str) -> str:
        if key not in self.texts:
            raise RuntimeError("NOT_FOUND")
        return self.texts[key]


def mesh_of_one() -> Mesh:
    return sharding.make_mesh(devices=jax.devices()[:1])


def make_hosts(workdir, cluster: Cluster) -> Hosts:
    store = open_store(workdir)
    return Hosts(cluster, store, "run", mesh_of_one(), packed_records.INPUTS, CFG)


def test_storage_that_does_not_answer_ends_the_learner_to_be_started_again(tmp_path, monkeypatch):
    def away(*args):
        raise StoreUnavailableError(5, "away")

    messages = Messages()
    hosts = make_hosts(tmp_path, Cluster(0, 2, messages))
    monkeypatch.setattr(LocalStore, "put", away)
    with pytest.raises(RestartError, match="away; the storage does not answer"):
        hosts.end(3, "for a test")
    assert not messages.texts


@pytest.mark.parametrize("data_and_fsdp", [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("layout", ["packed", "prompts shared"])
def test_parts_of_a_batch_are_its_rows_and_together_the_whole(data_and_fsdp, layout):
    records, _ = packed_records.records()
    cfg = dataclasses.replace(packed_records.LAYOUTS[layout], image_rows=(16,), rows=8)
    pieces = batching.cut(dict(enumerate(records)), packed_records.INPUTS)
    needed, parts = [], math.prod(data_and_fsdp)
    for plan in batching.plan_of(pieces, cfg, data_and_fsdp):
        plan = BatchPlan.from_json(plan.to_json())
        whole = batching.assemble(plan, pieces, cfg)
        for index in range(parts):
            size, images = cfg.rows // parts, plan.image_rows // parts
            rows, image_rows = (
                range(index * count, (index + 1) * count) for count in (size, images)
            )
            numbers = plan.records(rows, image_rows)
            needed.append(len(numbers))
            own = batching.cut({n: records[n] for n in sorted(numbers)}, packed_records.INPUTS)
            part = batching.assemble(plan, own, cfg, Part(rows, image_rows))
            for field in dataclasses.fields(part):
                array, expected = getattr(part, field.name), getattr(whole, field.name)
                if field.name == "vision":
                    for name in array:
                        np.testing.assert_array_equal(
                            array[name][image_rows], expected[name][image_rows], err_msg=name
                        )
                elif isinstance(array, np.ndarray) and field.name not in (
                    "trajectory_bs",
                    "token_bs",
                ):
                    axis = 1 if field.name == "positions_abt" else 0
                    np.testing.assert_array_equal(
                        array.take(rows, axis), expected.take(rows, axis), err_msg=field.name
                    )
    # A host reads its share and, where a prompt or a screenshot is another's, a few more.
    assert max(needed) <= len(records) if parts == 1 else max(needed) < len(records)


def test_filled_rows_are_spread_over_the_parts_in_turn():
    assert _spread(4, 8, 2) == [0, 4, 1, 5]
    assert _spread(3, 8, 1) == [0, 1, 2]
    assert _spread(3, 6, 4) == [0, 1, 2]  # four parts do not divide six rows


def test_decision_reaches_the_other_process_whole(tmp_path):
    messages = Messages()
    leader = make_hosts(tmp_path, Cluster(0, 2, messages))
    follower = make_hosts(tmp_path, Cluster(1, 2, messages))
    records, _ = packed_records.records()
    refs = {
        r.episode_id: RecordRef("shards/a0/x", n, 1, r.episode_id) for n, r in enumerate(records)
    }
    leader.decide(1, Chosen([records], [records[:8], records[8:]]), refs)
    leader.end(1, ENDED)
    decision = follower.next_decision(1.0)
    assert (decision.step, decision.ends) == (1, "")
    assert decision.records == (tuple(refs.values())[:8], tuple(refs.values())[8:])
    pieces = batching.cut(dict(enumerate(records)), packed_records.INPUTS)
    assert {
        span.record for plan in decision.plans[1] for row in plan.rows.values() for span in row
    } == (set(range(8)))
    assert {key for plan in decision.plans[0] for key, *_ in plan.screens} <= pieces.screens.keys()
    assert follower.next_decision(1.0) == Decision(1, ENDED)


def test_decision_file_of_before_a_restart_is_not_taken(tmp_path):
    messages = Messages()
    store = open_store(tmp_path)
    make_hosts(tmp_path, Cluster(0, 2, messages)).end(3, ENDED)
    name = "decisions/00000003-end.json"
    written = store.read(name)
    store.put(name, b"{}")  # what a slow file system still shows
    follower = make_hosts(tmp_path, Cluster(1, 2, messages))
    threading.Timer(0.2, store.put, (name, written)).start()
    assert follower.next_decision(10.0).step == 3
    with pytest.raises(RestartError, match="all hosts must see one workdir"):
        store.put(name, b"{}")
        make_hosts(tmp_path, Cluster(1, 2, messages)).next_decision(0.1)


def test_record_that_a_host_sees_late_is_waited_for_and_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hosts_module, "_SAY_AFTER_S", 0.05)
    records = [sample_trajectories.make_trajectory(f"e{n}") for n in range(2)]
    layout, name = sample_trajectories.LAYOUT, "shards/a0/late.tfrecord"
    store = open_store(tmp_path)
    put_shard(open_store(tmp_path / "other"), name, records, base_hash="base", layout=layout)
    content = open_store(tmp_path / "other").read(name)
    _, entries = reader.scan_shard(open_store(tmp_path / "other"), name)
    refs = [
        RecordRef(name, entry.offset, entry.size_bytes, record.episode_id)
        for entry, record in zip(entries, records, strict=True)
    ]
    waiting = make_hosts(tmp_path, Cluster(1, 2, Messages()))

    def read():
        return reader.read_refs(store, refs, layout)

    threading.Timer(0.3, store.put, (name, content)).start()
    started_s = time.monotonic()
    found = waiting._once_visible(name, read, 10.0)
    assert time.monotonic() - started_s >= 0.25
    assert [record.episode_id for record in found] == ["e0", "e1"]
    assert "event=waiting_for_file" in capsys.readouterr().out
    store.put(name, content[: len(content) // 2])
    with pytest.raises(RestartError, match=r"late.tfrecord: process 0 has it, this host does not"):
        waiting._once_visible(name, read, 0.1)
