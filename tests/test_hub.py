"""Models named on the Hugging Face hub, against a server on loopback that speaks its API."""

import dataclasses
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub.utils import close_session

import uirl_jax
from tests import tiny_config
from tests.hub_server import Answer, Repo, error, hub_server
from tools import export
from tools.planner import programs as plan_programs
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ModelError, ModelUnavailableError
from uirl_jax.families import loading
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.models import hub as model_hub
from uirl_jax.models.lora import LoraConfig

TINY = Path(uirl_jax.__file__).parent / "assets" / "tiny-ui-base"
NAME = "lab/tiny-ui"
FILES = {path.name: path.read_bytes() for path in TINY.iterdir()}
NEVER = {  # beside the model, and never asked for
    "pytorch_model.bin": b"\x80\x04pickle",
    "modeling_tiny.py": b"raise SystemExit('ran')",
    "onnx/model.safetensors": b"another export",
    "onnx/config.json": b"{}",
    "training_args.bin": b"",
}
WANTED = {name for name in FILES if name != "README.md"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model, and an empty cache of this test's own."""
    constants = huggingface_hub.constants
    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between huggingface_hub's retries
        server.repos[NAME] = Repo(FILES | NEVER, ("main", "v1", "refs/pr/4"))
        yield server
        close_session()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refused(name: str | Path, *said: str, **options) -> None:
    with pytest.raises(ModelError) as caught:
        model_hub.model_directory(name, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400, message
    for part in said:
        assert part in message


# ------------------------------------------------------------------------------ names


def test_directory_is_itself_and_asks_nobody(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab" / "tiny-ui").mkdir(parents=True)
    for name in (TINY, str(TINY), NAME):
        assert model_hub.model_directory(name) == Path(name)
    for name in ("/nowhere", "nowhere", "one/two/three", "./a/b", "../a/b", "a/b@", "a/../b"):
        assert model_hub.model_directory(name) == Path(name)  # whoever reads it says what is wrong
    assert not hub.requests


@pytest.mark.parametrize("revision", ["", "@main", "@v1", "@refs/pr/4", "@COMMIT"])
def test_hub_name_fetches_the_files_of_its_revision(hub, revision):
    revision = revision.replace("COMMIT", hub.repos[NAME].commit)
    directory = model_hub.model_directory(f"hf://{NAME}{revision}")
    assert directory.name == hub.repos[NAME].commit
    assert contents(directory) == {name: FILES[name] for name in WANTED}
    assert hub.files_sent() == WANTED


def test_hub_name_that_went_through_pathlib_means_the_same(hub):
    assert str(Path(f"hf://{NAME}@v1")) == f"hf:/{NAME}@v1"
    expected = model_hub.model_directory(f"hf://{NAME}@v1")
    assert model_hub.model_directory(Path(f"hf://{NAME}@v1")) == expected


def test_loaded_weights_equal_those_of_the_directory(hub):
    images = {"min_pixels": 3136, "max_pixels": 12_845_056}  # its own file, and no default, says so
    files = FILES | {"preprocessor_config.json": json.dumps(images).encode()}
    hub.repos[NAME] = Repo(files, ("v1",))
    ours = loading.load(TINY, lora=LoraConfig(), seed=0)
    fetched = uirl_jax.VLM.from_pretrained(f"hf://{NAME}@v1").model
    assert fetched.base_hash == ours.base_hash
    assert dataclasses.replace(fetched.cfg, images=ours.cfg.images) == ours.cfg
    assert fetched.cfg.images == ImageConfig(**images) != ours.cfg.images
    jax.tree.map(np.testing.assert_array_equal, fetched.frozen, ours.frozen)
    assert hub.files_sent() == WANTED


def test_family_that_is_not_supported_costs_no_weights(hub):
    another = json.loads(FILES["config.json"]) | {"model_type": "another"}
    hub.repos[NAME] = Repo(FILES | {"config.json": json.dumps(another).encode()})
    with pytest.raises(ModelError, match="another"):
        loading.load(f"hf://{NAME}", lora=None, seed=0)
    assert hub.files_sent() == WANTED - {"model.safetensors"}


def test_tools_that_need_no_weights_fetch_none(hub):
    expected = plan_programs.find_model(str(TINY))
    assert plan_programs.find_model(f"hf://{NAME}@v1") == expected
    assert hub.files_sent() == WANTED - {"model.safetensors"}
    hub.forget()
    plan_programs.find_model("hf://Qwen/Qwen2-VL-2B-Instruct")  # its dimensions ship
    assert not hub.requests


def test_export_finds_the_base_of_a_run_by_its_hub_name(hub, tmp_path):
    cfg = tiny_config.get_config()
    cfg.model.path = f"hf://{NAME}"
    base = export.base_of(tmp_path, reading.from_config(RunConfig, cfg))
    assert contents(base) == {name: FILES[name] for name in WANTED}


# ------------------------------------------------------------------------------ the cache


def test_second_call_fetches_no_file_and_a_commit_asks_nobody(hub):
    first = model_hub.model_directory(f"hf://{NAME}")
    hub.forget()
    assert model_hub.model_directory(f"hf://{NAME}") == first
    assert not hub.files_sent() and {method for method, _ in hub.requests} == {"GET"}
    hub.forget()
    assert model_hub.model_directory(f"hf://{NAME}@{hub.repos[NAME].commit}") == first
    assert not hub.requests


def test_branch_that_moved_is_fetched_again_and_a_tag_is_not(hub):
    first = model_hub.model_directory(f"hf://{NAME}@v1")
    hub.move(NAME, Repo(FILES | {"merges.txt": b"#version: 0.2\n"}))
    assert model_hub.model_directory(f"hf://{NAME}@v1") == first
    second = model_hub.model_directory(f"hf://{NAME}")
    assert second != first
    assert (second / "merges.txt").read_bytes() == b"#version: 0.2\n"
    assert (first / "merges.txt").read_bytes() == FILES["merges.txt"]


def test_branch_that_moves_during_a_download_gives_one_commit(hub):
    def fault(method: str, path: str) -> None:
        if path.endswith("/config.json") and len(hub.repos[NAME].files) > 1:
            hub.move(NAME, Repo({"config.json": b"{}"}))

    hub.fault = fault
    directory = model_hub.model_directory(f"hf://{NAME}")
    assert contents(directory) == {name: FILES[name] for name in WANTED}


def test_bare_name_is_taken_from_the_cache_and_never_fetched(hub):
    refused(NAME, NAME, "not a directory", "Hugging Face cache", f"hf://{NAME} to download it")
    refused("lab/model", "lab/model: not a directory", "give the path of a model directory")
    assert not hub.requests
    fetched = model_hub.model_directory(f"hf://{NAME}@v1")
    hub.forget()
    assert model_hub.model_directory(f"{NAME}@v1") == fetched
    refused(f"{NAME}@v2", f"hf://{NAME}@v2 to download it")
    assert not hub.requests


def test_offline_uses_the_cache_and_refuses_what_it_lacks(hub, monkeypatch):
    fetched = model_hub.model_directory(f"hf://{NAME}@v1")
    hub.forget()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for revision in ("v1", hub.repos[NAME].commit):
        assert model_hub.model_directory(f"hf://{NAME}@{revision}") == fetched
    refused(f"hf://{NAME}", "HF_HUB_OFFLINE is set", "unset it")
    refused("hf://lab/other@v1", "hf://lab/other@v1", "HF_HUB_OFFLINE is set")
    assert not hub.requests


def test_snapshot_without_its_weights_is_not_complete(hub, tmp_path, monkeypatch):
    directory = model_hub.model_directory(f"hf://{NAME}", weights=False)
    assert "model.safetensors" not in contents(directory)
    assert model_hub.model_directory(NAME, weights=False) == directory
    refused(NAME, "no complete model")
    # As other programs leave it: single files, and no listing that says what is missing.
    copy = tmp_path / "copy"
    shutil.copytree(huggingface_hub.constants.HF_HUB_CACHE, copy, symlinks=True)
    shutil.rmtree(next(copy.rglob("trees")))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(copy))
    assert model_hub.model_directory(NAME, weights=False).is_relative_to(copy)
    refused(NAME, "no complete model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(f"hf://{NAME}", "no complete copy")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert "model.safetensors" in contents(model_hub.model_directory(f"hf://{NAME}"))


@pytest.mark.parametrize("status", [503, 429, None])
def test_hub_that_is_down_leaves_the_cached_model_usable(hub, monkeypatch, caplog, status):
    fetched = model_hub.model_directory(f"hf://{NAME}")
    if status is None:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", closed_port())
    else:
        hub.fault = lambda method, path: error(status)
    assert model_hub.model_directory(f"hf://{NAME}") == fetched
    (record,) = [record for record in caplog.records if record.name == model_hub.__name__]
    assert f"model=hf://{NAME} cached={fetched}" in record.getMessage()


# ------------------------------------------------------------------------------ refusals


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "name", ["hf://", "hf://tiny", "hf://a/b/c", "hf://a/b@", "hf://a/b@../x", "hf:///etc/passwd"]
)
def test_malformed_hub_name_is_refused_before_anything_is_asked(hub, name):
    refused(name, "expected hf://owner/name or hf://owner/name@revision")
    assert not hub.requests


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("hf://lab/none", None, ("/lab/none does not exist or is private", "hf auth login")),
        ("hf://lab/a--b", None, ("hf://lab/a--b",)),
        (f"hf://{NAME}@v9", None, ("has no revision 'v9'", "a branch, a tag")),
        (f"hf://{NAME}", error(404, "RepoNotFound"), ("does not exist or is private",)),
        (f"hf://{NAME}", error(401), ("does not exist or is private", "HF_TOKEN")),
        (f"hf://{NAME}", error(401, "GatedRepo", "\x1b[31m"), ("is gated", "accept its terms")),
        (f"hf://{NAME}", error(403, "GatedRepo"), ("is gated", "hf auth login")),
        (f"hf://{NAME}", error(403), ("HTTP 403", "token")),
        (f"hf://{NAME}", error(429), ("answered HTTP 429; try again later",)),
        (f"hf://{NAME}", error(503), ("answered HTTP 503; try again later",)),
        (f"hf://{NAME}", Answer(200, b"<html>Log in to the hotel"), ("HF_ENDPOINT",)),
        (f"hf://{NAME}", Answer(200, b'{"id": "x"}'), ("HF_ENDPOINT",)),
        (f"hf://{NAME}", Answer(200, b"[]"), ("HF_ENDPOINT",)),
        (f"hf://{NAME}", Answer(200, b"{}" * 99, sent=5), ("cut the connection",)),
    ],
)
def test_refusal_of_the_hub_is_one_line_that_says_what_to_do(hub, name, answer, said):
    hub.fault = lambda method, path: answer
    refused(name, name, *said)
    assert not hub.files_sent()


@pytest.mark.parametrize(("status", "code"), [(401, 1), (404, 1), (429, 75), (503, 75)])
def test_run_is_started_again_where_the_hub_is_busy_and_not_where_a_name_is_wrong(
    hub, status, code
):
    """A preempted host comes back with an empty cache; its supervisor starts all but a 1 again."""
    hub.fault = lambda method, path: error(status)
    with pytest.raises(ModelError) as caught:
        model_hub.model_directory(f"hf://{NAME}")
    assert caught.value.exit_code == code


def test_gated_files_of_a_listed_model_are_one_line_too(hub):
    hub.fault = lambda method, path: error(403, "GatedRepo") if "/resolve/" in path else None
    refused(f"hf://{NAME}", f"hf://{NAME}", "is gated", "accept its terms")


def test_no_network_and_silent_hub_are_one_line(hub, monkeypatch):
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        refused(f"hf://{NAME}", url, "cannot be reached", "ReadTimeout", "HF_ENDPOINT")
    monkeypatch.setattr(constants, "ENDPOINT", closed_port())
    refused(f"hf://{NAME}", "cannot be reached", "ConnectError", "give its directory")
    with pytest.raises(ModelUnavailableError):
        model_hub.model_directory(f"hf://{NAME}")


def test_folder_of_a_config_that_was_never_made_is_not_looked_for_on_the_hub(hub):
    """`models/` and `runs/` of the shipped configs: hf://models/... has never existed."""
    refused("models/none", "no such directory", "the first lines of the config")
    with pytest.raises(ModelError) as caught:
        model_hub.model_directory("runs/none")
    assert "hf://runs" not in str(caught.value)
    assert not hub.requests


def test_model_without_safetensors_is_refused_before_its_weights(hub):
    files = FILES | NEVER
    del files["model.safetensors"]
    hub.repos[NAME] = Repo(files)
    refused(f"hf://{NAME}", "has no *.safetensors file (but pytorch_model.bin")
    assert not hub.files_sent() & set(NEVER)


def test_repository_without_config_is_no_model(hub):
    hub.repos[NAME] = Repo({"README.md": b"", "model.safetensors": b""})
    refused(f"hf://{NAME}", "has no config.json")
    assert not hub.files_sent()


def test_disk_that_is_too_small_is_said_before_the_weights(hub, monkeypatch):
    free = shutil._ntuple_diskusage(10**6, 0, 10**6)
    with monkeypatch.context() as patched:
        patched.setattr("uirl_jax.models.hub.shutil.disk_usage", lambda path: free)
        patched.setattr("huggingface_hub.file_download._check_disk_space", lambda *args: None)
        refused(f"hf://{NAME}", "needs 0.0 GB in", "set HF_HUB_CACHE to another disk")
    assert "model.safetensors" not in hub.files_sent()
    model_hub.model_directory(f"hf://{NAME}")


def test_disk_that_fills_up_and_cache_that_cannot_be_written_are_one_line(hub, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.file_download.http_get", full)
        refused(f"hf://{NAME}", "no space left", "HF_HUB_CACHE")
    not_a_folder = Path(huggingface_hub.constants.HF_HUB_CACHE + "-file")
    not_a_folder.write_text("")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(not_a_folder))
    refused(f"hf://{NAME}", str(not_a_folder), os.strerror(errno.ENOTDIR))


# ------------------------------------------------------------------------------ cut downloads


def test_body_that_is_cut_is_resumed_and_whole(hub):
    cuts = iter([1000, 100_000])

    def fault(method: str, path: str) -> Answer | None:
        if method != "GET" or "/storage/" not in path:
            return None
        sent = next(cuts, None)
        data = FILES["model.safetensors"]
        return None if sent is None else Answer(200, data, {"Accept-Ranges": "bytes"}, sent=sent)

    hub.fault = fault
    directory = model_hub.model_directory(f"hf://{NAME}")
    assert contents(directory) == {name: FILES[name] for name in WANTED}


def test_body_that_is_always_cut_leaves_nothing_that_looks_like_a_model(hub):
    data = FILES["model.safetensors"]
    hub.fault = lambda method, path: Answer(200, data, sent=0) if "/storage/" in path else None
    refused(f"hf://{NAME}", "cut the connection")
    refused(NAME, "no complete model")
    hub.fault = lambda method, path: None
    assert contents(model_hub.model_directory(f"hf://{NAME}"))["model.safetensors"] == data


# ------------------------------------------------------------------------------ as a process


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_environment_of_huggingface_hub_is_honoured(hub, tmp_path):
    code = (
        "import sys; from uirl_jax.models import hub; "
        f"print(hub.model_directory('hf://{NAME}@v1')); assert 'jax' not in sys.modules"
    )
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""}
    environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    first = run(code, **environment)
    assert first.returncode == 0, first.stderr
    directory = Path(first.stdout.strip())
    assert directory.is_relative_to(tmp_path / "home" / "hub")
    assert first.stderr == ""  # no terminal, no progress bar
    assert contents(directory) == {name: FILES[name] for name in WANTED}
    allowed = rf"/api/models/{NAME}/(revision|tree)/\w+|/{NAME}/(resolve|storage)/\w+/[\w.]+"
    for _, path in hub.requests:  # nothing else is told to the hub
        assert re.fullmatch(allowed, path), path
    hub.forget()
    again = run(code, HF_HUB_OFFLINE="1", **environment)
    assert again.stdout == first.stdout and not hub.requests
    absent = run(code.replace("@v1", "@v2"), HF_HUB_OFFLINE="1", **environment)
    assert absent.returncode == 1 and "HF_HUB_OFFLINE is set" in absent.stderr
    assert not hub.requests


def test_command_and_package_import_neither_transformers_nor_the_hub():
    code = (
        "import sys, uirl_jax, uirl_jax.main, uirl_jax.vlm\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'transformers', 'huggingface_hub', 'httpx2', 'hf_xet', 'peft', 'trl'}))"
    )
    process = run(code)
    assert process.stdout.strip() == "[]", process.stderr
