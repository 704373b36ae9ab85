"""Publishing and loading adapters: whole versions only, nothing believed unchecked."""

import concurrent.futures
import dataclasses
import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import pytest

from uirl_jax import policy_sync
from uirl_jax.errors import PolicyError, RestartError
from uirl_jax.store import StoreUnavailableError, open_store
from uirl_jax.store.local import LocalStore

ADAPTERS = {
    "blocks/q/lora_a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "blocks/q/lora_b": np.linspace(-3, 3, 10).astype(ml_dtypes.bfloat16).reshape(2, 5),
    "scale": np.full((), 2.5, np.float16),
    "strided": np.arange(12, dtype=np.int32).reshape(3, 4).T,
    "empty": np.zeros((0, 4), np.float32),
}


def publish(workdir: Path, version: int, adapters: Any = ADAPTERS) -> policy_sync.Manifest:
    return policy_sync.publish(
        open_store(workdir),
        version=version,
        step=10 * version,
        arrays=adapters,
        base_hash="base",
        run_id="run",
        extra={"lr": 0.5, "notes": [1, None]},
    )


def versions(workdir: Path) -> list[str]:
    return sorted(path.name for path in (workdir / "policy").iterdir())


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype, name
        assert got[name].shape == array.shape, name
        assert got[name].tobytes() == array.tobytes(), name


def test_read_manifest_before_first_publication_is_none(tmp_path: Path) -> None:
    assert policy_sync.read_manifest(open_store(tmp_path)) is None
    (tmp_path / "policy").mkdir()
    assert policy_sync.read_manifest(open_store(tmp_path)) is None


def test_publish_then_load_returns_the_same_bytes(tmp_path: Path) -> None:
    published = publish(tmp_path, 0)
    manifest = policy_sync.read_manifest(open_store(tmp_path))
    assert manifest == published
    assert (manifest.version, manifest.step, manifest.base_hash) == (0, 0, "base")
    assert manifest.extra == {"lr": 0.5, "notes": [1, None]}
    assert manifest.path == "policy/0/adapters.safetensors"
    assert manifest.crc32c == google_crc32c.value((tmp_path / manifest.path).read_bytes())
    assert_same(policy_sync.load(open_store(tmp_path), manifest, "base", run_id="run"), ADAPTERS)
    assert_same(policy_sync.load(open_store(tmp_path), manifest, "base"), ADAPTERS)


def test_publish_keeps_three_versions_and_no_leftovers(tmp_path: Path) -> None:
    for version in range(5):
        publish(tmp_path, version)
    (tmp_path / "policy" / ".7-dead.tmp").mkdir()  # of a publisher that was killed
    (tmp_path / "policy" / ".manifest-dead.tmp").write_text("{")
    publish(tmp_path, 5)
    assert versions(tmp_path) == ["3", "4", "5", "manifest.json"]
    # A learner that fell back to an older checkpoint publishes lower versions again.
    publish(tmp_path, 4)
    assert versions(tmp_path) == ["3", "4", "manifest.json"]
    assert policy_sync.read_manifest(open_store(tmp_path)).version == 4


def test_publish_same_version_again_replaces_it(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    inode = (tmp_path / "policy/1/adapters.safetensors").stat().st_ino
    publish(tmp_path, 1)  # equal adapters: a reader in the middle of them is not disturbed
    assert (tmp_path / "policy/1/adapters.safetensors").stat().st_ino == inode
    other = {"scale": np.zeros((), np.float32)}
    publish(tmp_path, 1, other)
    manifest = policy_sync.read_manifest(open_store(tmp_path))
    assert_same(policy_sync.load(open_store(tmp_path), manifest, "base"), other)
    assert versions(tmp_path) == ["1", "manifest.json"]


def test_load_of_another_model_or_run_is_refused(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 0)
    with pytest.raises(PolicyError, match="belongs to base model base, this process loaded other"):
        policy_sync.load(open_store(tmp_path), manifest, "other")
    with pytest.raises(PolicyError, match="is from run run, this process belongs to run mine"):
        policy_sync.load(open_store(tmp_path), manifest, "base", run_id="mine")


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "missing", "directory"])
def test_load_of_damaged_adapters_is_refused(tmp_path: Path, damage: str) -> None:
    manifest = publish(tmp_path, 0)
    file = tmp_path / manifest.path
    contents = bytearray(file.read_bytes())
    if damage == "flip":
        contents[-5] ^= 4
        file.write_bytes(contents)
    elif damage == "truncate":
        file.write_bytes(contents[:-1])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        if damage == "directory":
            file.mkdir()
    with pytest.raises(PolicyError, match=r"policy/0/adapters\.safetensors: ") as caught:
        policy_sync.load(open_store(tmp_path), manifest, "base")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("contents", [b"", b"no safetensors", b"\xff" * 64])
def test_load_of_another_format_under_a_right_checksum_is_refused(
    tmp_path: Path, contents: bytes
) -> None:
    manifest = publish(tmp_path, 0)
    (tmp_path / manifest.path).write_bytes(contents)
    manifest = dataclasses.replace(manifest, crc32c=google_crc32c.value(contents))
    with pytest.raises(PolicyError, match="not a safetensors file"):
        policy_sync.load(open_store(tmp_path), manifest, "base")


GOOD = {
    "version": 1,
    "step": 2,
    "path": "policy/1/adapters.safetensors",
    "crc32c": 3,
    "base_hash": "base",
    "run_id": "run",
    "extra": {},
    "published_unix_s": 1e9,
}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"version": 1', "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'{"version": ' + b"9" * 5000 + b"}", "not JSON"),
        (b" " * ((4 << 20) + 1), "more than 4194304 bytes"),
        (b"[1]", "is list"),
        (json.dumps({**GOOD, "published_unix_s": float("nan")}).encode(), "NaN is not JSON"),
        (json.dumps({**GOOD, "extra": {"x": float("inf")}}).encode(), "Infinity is not JSON"),
        (json.dumps(GOOD).replace("1000000000.0", "1e999").encode(), "published_unix_s is out of"),
        *[(json.dumps(without(name)).encode(), f"{name} is missing") for name in GOOD],
        (json.dumps({**GOOD, "more": 1}).encode(), "'more' is unknown"),
        *[
            (json.dumps({**GOOD, name: wrong}).encode(), f"{name} is {type(wrong).__name__}")
            for name, wrong in [
                ("version", "1"),
                ("version", True),
                ("version", 1.0),
                ("step", None),
                ("path", 1),
                ("crc32c", "ff"),
                ("base_hash", 1),
                ("run_id", []),
                ("extra", "x"),
                ("published_unix_s", False),
            ]
        ],
        (json.dumps({**GOOD, "version": -1}).encode(), "version is out of range"),
        (json.dumps({**GOOD, "crc32c": 2**32}).encode(), "crc32c is out of range"),
        *[
            (json.dumps({**GOOD, "path": path}).encode(), "is not below the workdir")
            for path in [
                "",
                "/etc/passwd",
                "../other/x",
                "policy/../../x",
                "a\\b",
                "a\x00b",
                "a\nb",
            ]
        ],
    ],
)
def test_read_manifest_garbage_is_refused_with_its_reason(
    tmp_path: Path, text: bytes, reason: str
) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "manifest.json").write_bytes(text)
    with pytest.raises(PolicyError) as caught:
        policy_sync.read_manifest(open_store(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/policy/manifest.json: ")
    assert reason in message
    assert "\n" not in message
    assert len(message) < 500


def test_load_never_follows_a_path_out_of_the_workdir(tmp_path: Path) -> None:
    workdir, outside = tmp_path / "run", tmp_path / "outside"
    manifest = publish(workdir, 0)
    publish(outside, 0)
    (workdir / "policy" / "link").symlink_to(outside / "policy" / "0")
    for path in ("../outside/policy/0/adapters.safetensors", str(outside / manifest.path)):
        with pytest.raises(PolicyError, match="not below the workdir"):
            policy_sync.load(open_store(workdir), dataclasses.replace(manifest, path=path), "base")
    with pytest.raises(PolicyError, match="is outside the workdir"):
        linked = dataclasses.replace(manifest, path="policy/link/adapters.safetensors")
        policy_sync.load(open_store(workdir), linked, "base")


def test_read_while_publishing_always_sees_a_whole_version(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    last = 60

    def read() -> list[int]:
        seen = [0]
        while seen[-1] < last:
            manifest = policy_sync.read_manifest(open_store(tmp_path))  # raises on a torn one
            adapters = policy_sync.load(open_store(tmp_path), manifest, "base")
            assert adapters["x"][0] == manifest.version
            seen.append(manifest.version)
            progress.release()
        return seen

    progress = threading.Semaphore(0)
    publish(tmp_path, 0, {"x": np.zeros(1000, np.float32)})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for version in range(1, last + 1):
            publish(tmp_path, version, {"x": np.full(1000, version, np.float32)})
            # Three versions stay, so a reader may fall two behind and no more.
            if version % 2 == 0 and version < last:
                while progress.acquire(blocking=False):
                    pass
                assert progress.acquire(timeout=10) or reading.result(timeout=0)
        seen = reading.result(timeout=10)
    assert seen == sorted(seen)
    assert len(set(seen)) > 10


def test_publish_killed_anywhere_leaves_a_whole_version(tmp_path: Path) -> None:
    script = (
        "import sys, numpy as np\n"
        "from uirl_jax import policy_sync\n"
        "from uirl_jax.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "for version in range(int(sys.argv[2]), 1_000_000):\n"
        "    policy_sync.publish(store, version=version, step=0, base_hash='base',\n"
        "        arrays={'x': np.full(100_000, version, np.float32)}, run_id='run', extra={})\n"
        "    print(version, flush=True)\n"
    )
    root = str(Path(policy_sync.__file__).parents[1])
    newest = 0
    for kill_after in (1, 4, 2, 7):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(newest + 1)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root},
        )
        acknowledged = [int(process.stdout.readline()) for _ in range(kill_after)][-1]
        process.kill()
        process.wait()
        process.stdout.close()
        manifest = policy_sync.read_manifest(open_store(tmp_path))
        assert manifest.version >= acknowledged
        assert policy_sync.load(open_store(tmp_path), manifest, "base")["x"][0] == manifest.version
        newest = manifest.version
    publish(tmp_path, newest + 1)
    assert not [name for name in versions(tmp_path) if name.startswith(".")]


def test_publish_on_a_full_disk_leaves_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 0)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PolicyError, match=r"version 1 was not published.*No space left"):
        publish(tmp_path, 1)
    monkeypatch.undo()
    manifest = policy_sync.read_manifest(open_store(tmp_path))
    assert manifest.version == 0
    assert_same(policy_sync.load(open_store(tmp_path), manifest, "base"), ADAPTERS)
    assert versions(tmp_path) == ["0", "manifest.json"]


def test_storage_that_does_not_answer_asks_for_a_restart(tmp_path, monkeypatch):
    manifest, store = publish(tmp_path, 0), open_store(tmp_path)

    def away(*_: object) -> None:
        raise StoreUnavailableError(errno.EIO, "away")

    for name in ("open", "read", "read_version"):
        monkeypatch.setattr(LocalStore, name, away)
    for act in (
        lambda: policy_sync.read_manifest(store),
        lambda: policy_sync.load(store, manifest, "base"),
        lambda: policy_sync.load_version(store, 0),
        lambda: policy_sync.seal(store),
        lambda: publish(tmp_path, 1),
    ):
        with pytest.raises(RestartError, match=f"^{tmp_path}/policy/.*: away; .* run the same"):
            act()


def test_versions_that_are_kept_are_loaded_and_others_are_none(tmp_path):
    publish(tmp_path, 0)
    store = open_store(tmp_path)
    assert_same(policy_sync.load_version(store, 0), ADAPTERS)
    assert policy_sync.load_version(store, 1) is None
    (tmp_path / "policy/0/adapters.safetensors").write_bytes(b"damaged")
    with pytest.raises(PolicyError, match=r"adapters\.safetensors: not a safetensors file"):
        policy_sync.load_version(store, 0)


def test_manifest_of_the_largest_pool_is_read_and_a_larger_one_is_not_published(tmp_path):
    """Actors would poll a manifest that they refuse for ever."""
    played = {
        str(entry): [99.125, 127.875, 100.125, -1.2345678901234567e-100] for entry in range(20_000)
    }
    store = open_store(tmp_path)
    ours = {"version": 1, "step": 1, "arrays": ADAPTERS, "base_hash": "base", "run_id": "run"}
    policy_sync.publish(store, **ours, extra={"tallies": played})
    manifest = policy_sync.read_manifest(store)
    assert manifest is not None and manifest.extra["tallies"] == played
    with pytest.raises(PolicyError, match="at most 4194304; the tallies"):
        policy_sync.publish(store, **ours | {"version": 2}, extra={"notes": "x" * (4 << 20)})
    again = policy_sync.read_manifest(store)
    assert again is not None and again.version == 1
