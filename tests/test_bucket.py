"""The store in a bucket over lost answers, false conflicts, hangs and cut bodies; its errors."""

import threading
import time

import pytest

from tests.buckets import bucket_store, point_to
from tools.bucket_emulator import Faults, emulator
from uirl_jax.store import StoreUnavailableError, open_store
from uirl_jax.store.bucket import BucketStore

# Far more faults than HARD, so that a few dozen requests meet all of them.
OFTEN = Faults(
    too_many=0.05,
    internal=0.05,
    unavailable=0.05,
    false_conflict=0.1,
    lost_answer=0.3,
    hang=0.01,
    slow_body=0.2,
    hang_s=1.5,
    slow_s=0.02,
)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_conditional_writes_with_lost_answers_know_their_own_writes(monkeypatch, scheme):
    faults = Faults(lost_answer=0.6, false_conflict=0.1, seed=1)
    with bucket_store(scheme, monkeypatch, faults=faults) as (store, service):
        for n in range(8):
            name = f"a/{n}"
            version = store.put_version(name, b"first", "")
            assert version
            assert not store.put_new(name, b"first")  # the content is equal, the write is not ours
            version = store.put_version(name, b"second", version)
            assert version and store.read(name) == b"second"
        injected = service.counters()["injected"]
        assert injected["lost"] > 8 and injected["412"] > 1


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_put_new_of_several_processes_with_all_faults_is_written_by_one(monkeypatch, scheme):
    # How many requests meet which fault depends on how the threads take turns: until all were met.
    to_meet = {"429", "500", "503", "412", "lost"}
    with bucket_store(scheme, monkeypatch, faults=OFTEN, request_s=0.5) as (store, service):
        for n in range(200):
            if n >= 8 and to_meet <= set(service.counters()["injected"]):
                return
            wrote: list[bytes] = []

            def write(content: bytes, n: int = n, wrote: list[bytes] = wrote) -> None:
                if store.put_new(f"claims/{n}", content):
                    wrote.append(content)

            threads = [threading.Thread(target=write, args=(bytes([k]),)) for k in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert wrote == [store.read(f"claims/{n}")]
    pytest.fail("some kinds of faults were never met")


def test_reading_moving_listing_and_deleting_with_all_faults_lose_nothing(monkeypatch):
    with bucket_store("gs", monkeypatch, faults=OFTEN, request_s=0.5) as (store, service):
        contents = {f"a/{n:02d}": bytes([n]) * 100_000 for n in range(8)}
        for name, content in contents.items():
            store.put(name, content)
        for name, content in contents.items():
            assert store.read(name) == content
            with store.open(name) as file:
                file.seek(50_000)
                assert (file.read(10), file.tell()) == (content[:10], 50_010)
            store.move(name, f"b/{name}")
        assert store.names("a") == []
        assert store.names("b") == [f"b/{name}" for name in contents]
        store.delete(*(f"b/{name}" for name in contents))
        assert service.objects("runs") == {}


def test_error_whose_answer_breaks_off_is_asked_for_again(monkeypatch):
    faults = Faults(slow_body=0.2, slow_s=0.01, seed=1)
    with bucket_store("gs", monkeypatch, faults=faults) as (store, service):
        for n in range(30):
            with pytest.raises(FileNotFoundError):
                store.read(f"missing/{n}")
            assert store.names("missing") == []
        assert service.counters()["injected"]["slow"] > 6


def test_put_of_a_large_content_is_sent_in_parts(monkeypatch):
    with bucket_store("gs", monkeypatch) as (store, service):
        content = bytes(range(256)) * (150 << 10)
        store.put("large", content)
        assert service.counters()["requests"]["upload_part"] == 3
        assert store.read("large") == content


def test_content_that_is_replaced_while_it_is_read_is_said_so(monkeypatch):
    with bucket_store("gs", monkeypatch) as (store, _):
        store.put("a", bytes(10 << 20))
        with store.open("a") as file:
            assert file.read(10) == bytes(10)
            store.put("a", b"x" * (10 << 20))
            file.seek(8 << 20)
            with pytest.raises(OSError, match="was replaced while it was read"):
                file.read(10)


def test_a_hanging_service_is_given_up_in_time(monkeypatch):
    faults = Faults(hang=1.0, hang_s=30.0)
    with bucket_store("gs", monkeypatch, faults=faults, request_s=0.2) as (store, _):
        for call in (
            lambda: store.read("a"),
            lambda: store.put("a", b"x"),
            lambda: store.names("a"),
        ):
            started_s = time.monotonic()
            with pytest.raises(StoreUnavailableError):
                call()
            assert time.monotonic() - started_s < 2.0


@pytest.mark.parametrize(
    ("bucket", "error"),
    [
        ("nobody", "the bucket nobody does not exist; create it, or correct --workdir"),
        ("denied", "permission denied; give this process's account the role"),
    ],
)
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_bucket_that_cannot_be_used_is_named_with_the_way_out(monkeypatch, scheme, bucket, error):
    with emulator() as service:
        point_to(service, monkeypatch)
        store = open_store(f"{scheme}://{bucket}/run")
        for call in (
            lambda: store.read("a"),
            lambda: store.put("a", b"x"),
            lambda: store.put_new("a", b"x"),
            lambda: store.names("a"),
            lambda: store.claim("learner.lock", "me"),
        ):
            with pytest.raises(OSError, match=error) as caught:
                call()
            assert not isinstance(caught.value, FileNotFoundError | StoreUnavailableError)
            assert caught.value.strerror and caught.value.filename.startswith(
                f"{scheme}://{bucket}"
            )


@pytest.mark.parametrize("address", ["gs://", "gs://UPPER/run", "s3://ab/run", "gs://a_b/../c"])
def test_address_that_is_none_is_refused(address):
    with pytest.raises(OSError, match=r"not the address of a bucket|invalid name") as caught:
        BucketStore(address)
    assert caught.value.strerror


def test_open_store_keeps_one_connection_an_address(monkeypatch):
    with emulator() as service:
        point_to(service, monkeypatch)
        assert open_store("gs://runs/run") is open_store("gs://runs/run/")
        assert open_store("gs://runs/run") is not open_store("gs://runs/other")
        assert open_store("gs://runs/run").poll_s > 0 == open_store("runs/run").poll_s
