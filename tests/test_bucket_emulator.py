"""The emulator refuses what the service refuses, and counts; asked by the clients of a run."""

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import GCSStore, S3Store

from tests.processes import killed
from tools.bucket_emulator import Faults, emulator
from tools.bucket_emulator.__main__ import main
from tools.bucket_emulator.objects import Condition

ROOT = Path(__file__).parents[1]


def google(address: str, bucket: str = "runs") -> GCSStore:
    return GCSStore(
        bucket,
        config={"base_url": address, "bearer_token": "test"},
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


def amazon(address: str, bucket: str = "runs") -> S3Store:
    return S3Store(
        bucket,
        config={
            "endpoint": address,
            "region": "us-east-1",
            "access_key_id": "test",
            "secret_access_key": "test",
        },
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


def version(result) -> dict[str, str]:
    """What the next conditional write names; S3 gives an ETag only."""
    return {key: value for key, value in result.items() if value is not None}


def ask(address: str, path: str, body: bytes | None = None, method: str = "", **headers: str):
    request = urllib.request.Request(
        address + path,
        data=body,
        headers={key.replace("_", "-"): value for key, value in headers.items()},
        method=method or ("GET" if body is None else "POST"),
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


@pytest.fixture
def service():
    with emulator() as running:
        yield running


@pytest.mark.parametrize("client", [google, amazon])
def test_conditional_writes_ranges_listings_and_deletions_through_obstore(service, client):
    store = client(service.address)
    made = version(obstore.put(store, "a/1", b"first", mode="create"))
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a/1", b"again", mode="create")
    newer = version(obstore.put(store, "a/1", b"second", mode=made))
    with pytest.raises(PreconditionError):
        obstore.put(store, "a/1", b"third", mode=made)
    obstore.put(store, "a/1", b"third", mode=newer)
    assert obstore.get_range(store, "a/1", start=1, length=3).to_bytes() == b"hir"
    for name in ("a/2", "a/10", "ab/1", "b/x/y"):
        obstore.put(store, name, name.encode())
    listed = [meta["path"] for page in obstore.list(store, "a", offset="a/10") for meta in page]
    assert listed == ["a/2"]
    below = obstore.list_with_delimiter(store)
    assert sorted(below["common_prefixes"]) == ["a", "ab", "b"]
    obstore.copy(store, "a/2", "c")
    obstore.delete(store, ["a/1", "a/2"])
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "a/1")
    assert service.objects("runs").keys() == {"a/10", "ab/1", "b/x/y", "c"}
    assert service.counters()["classes"]["A"] == 12


@pytest.mark.parametrize("client", [google, amazon])
def test_a_large_put_in_parts_and_a_listing_in_pages(service, client):
    store = client(service.address)
    content = bytes(range(256)) * 50_000
    obstore.put(store, "large", content, use_multipart=True, chunk_size=5 << 20)
    assert service.objects("runs")["large"] == content
    for n in range(1100):
        service.server.buckets.write("runs", f"many/{n:05d}", b"", Condition())
    listed = [meta["path"] for page in obstore.list(store, "many") for meta in page]
    assert listed == [f"many/{n:05d}" for n in range(1100)]
    counters = service.counters()
    assert counters["requests"]["list"] == 2
    assert counters["requests"]["upload_part"] == 3


def test_json_api_preconditions_listing_and_resumable_upload(service):
    insert = "/upload/storage/v1/b/runs/o?uploadType=media&name=a%2F1"
    status, body, _ = ask(service.address, f"{insert}&ifGenerationMatch=0", b"x")
    generation = json.loads(body)["generation"]
    assert status == 200
    assert ask(service.address, f"{insert}&ifGenerationMatch=0", b"y")[0] == 412
    assert ask(service.address, f"{insert}&ifGenerationMatch={generation}", b"y")[0] == 200
    assert ask(service.address, f"{insert}&ifGenerationMatch=one", b"y")[0] == 400
    read = "/storage/v1/b/runs/o/a%2F1"
    assert ask(service.address, f"{read}?alt=media", Range="bytes=0-0")[:2] == (206, b"y")
    assert ask(service.address, f"{read}?alt=media", Range="bytes=5-")[0] == 416
    assert ask(service.address, f"{read}?alt=media&generation={generation}")[0] == 404
    newest = json.loads(ask(service.address, read)[1])["generation"]
    assert ask(service.address, f"{read}?ifGenerationNotMatch={newest}")[0] == 304
    assert ask(service.address, f"{read}?ifGenerationMatch={generation}", method="DELETE")[0] == 412

    for name in ("b/1", "b/2", "b/c/3", "b/d"):
        ask(service.address, f"/upload/storage/v1/b/runs/o?uploadType=media&name={name}", b"")
    names, prefixes, token = [], [], ""
    while True:
        path = f"/storage/v1/b/runs/o?prefix=b/&delimiter=/&maxResults=1&startOffset=b/2{token}"
        page = json.loads(ask(service.address, path)[1])
        names += [item["name"] for item in page.get("items", ())]
        prefixes += page.get("prefixes", ())
        if "nextPageToken" not in page:
            break
        token = f"&pageToken={page['nextPageToken']}"
    assert (names, prefixes) == (["b/2", "b/d"], ["b/c/"])

    begin = "/upload/storage/v1/b/runs/o?uploadType=resumable&name=large"
    where = ask(service.address, begin, b"{}")[2]["Location"].removeprefix(service.address)
    part, end = b"p" * (256 << 10), b"end"
    first = ask(service.address, where, part, "PUT", Content_Range=f"bytes 0-{len(part) - 1}/*")
    assert (first[0], first[2]["Range"]) == (308, f"bytes=0-{len(part) - 1}")
    odd = ask(service.address, where, b"odd", "PUT", Content_Range="bytes 262144-262146/*")
    assert odd[0] == 400
    total = len(part) + len(end)
    span = f"bytes {len(part)}-{total - 1}/{total}"
    assert ask(service.address, where, end, "PUT", Content_Range=span)[0] == 200
    assert service.objects("runs")["large"] == part + end
    # A client that has missed the answer sends the last part again, or asks.
    again = ask(service.address, where, end, "PUT", Content_Range=span)
    asked = ask(service.address, where, b"", "PUT", Content_Range=f"bytes */{total}")
    assert again[0] == asked[0] == 200 and json.loads(again[1]) == json.loads(asked[1])
    assert service.objects("runs")["large"] == part + end


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/storage/v1/b/nobody/o", None, 404),
        ("/storage/v1/b/denied/o", None, 403),
        ("/storage/v1/b/UPPER/o", None, 400),
        ("/nobody?list-type=2", None, 404),
        ("/denied/name", None, 403),
        ("/upload/storage/v1/b/runs/o?uploadType=media&name=" + "n" * 1025, b"x", 400),
        ("/upload/storage/v1/b/runs/o?uploadType=media&name=a%0Ab", b"x", 400),
        ("/upload/storage/v1/b/runs/o?uploadType=other&name=a", b"x", 400),
        ("/runs?list-type=1", None, 400),
    ],
)
def test_what_the_service_refuses_is_refused(service, path, body, status):
    assert ask(service.address, path, body)[0] == status


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--port=70000", "'70000' is no port; expected 0 to 65535"),
        ("--faults=all", "--faults=all: "),
        ('--faults={"internl": 0.1}', "internl"),
        ('--faults={"internal": 3}', "internal=3, expected 0 to 1"),
        ('--faults={"internal": "x"}', "not supported between"),
    ],
)
def test_flag_that_says_nothing_is_one_line(flag, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bucket_emulator", flag])
    monkeypatch.setattr("asyncio.run", lambda serving: serving.close() or pytest.fail("it serves"))
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_google_write_with_the_header_of_s3_is_refused(service):
    assert ask(service.address, "/runs/a", b"x", "PUT", If_None_Match="*")[0] == 400


def test_second_write_of_a_name_within_a_second_is_counted_and_refused_on_request():
    for refuses in (False, True):
        with emulator(refuse_fast_writes=refuses) as service:
            store = google(service.address)
            obstore.put(store, "a", b"1")
            refused = pytest.raises(Exception, match="429") if refuses else contextlib.nullcontext()
            with refused:
                obstore.put(store, "a", b"2")
            assert service.counters()["overwritten_too_fast"] == 1
            assert service.objects("runs")["a"] == (b"1" if refuses else b"2")


def test_lost_answer_has_written_and_false_conflict_has_not():
    with emulator(faults=Faults(lost_answer=1.0)) as service:
        for n in range(4):
            with pytest.raises(Exception, match=r"503|error sending|connection"):
                obstore.put(google(service.address), f"a{n}", b"x", mode="create")
        assert len(service.objects("runs")) == 4
    with emulator(faults=Faults(false_conflict=1.0)) as service:
        with pytest.raises(AlreadyExistsError):
            obstore.put(google(service.address), "a", b"x", mode="create")
        assert service.objects("runs") == {}


def test_faults_of_one_seed_are_the_same_twice():
    runs = []
    for _ in range(2):
        with emulator(faults=Faults(internal=0.2, too_many=0.2, seed=7)) as service:
            runs.append([ask(service.address, "/runs?list-type=2")[0] for _ in range(40)])
    assert runs[0] == runs[1] and set(runs[0]) == {200, 429, 500}


def test_command_serves_and_writes_its_port(tmp_path):
    command = [sys.executable, "-m", "tools.bucket_emulator", "--port_file", tmp_path / "port"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with killed(process):
        address = process.stdout.readline().strip().removeprefix("STORAGE_EMULATOR_HOST=")
        assert ask(address, "/_emulator/counters")[0] == 200
        assert address == f"http://127.0.0.1:{(tmp_path / 'port').read_text().strip()}"
        process.terminate()
        assert process.wait(10) == 0
