"""The wheel: built from the sources, installed apart from them, run from an empty folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from uirl_jax import assets
from uirl_jax.errors import ModelError

ROOT = Path(__file__).parents[1]
PACKAGES = ("uirl_jax", "configs", "tools")
# A step of the quickstart with programs as small as they get.
SMALL = (
    *("--config.learner.steps=1", "--config.learner.groups_per_step=1"),
    *("--config.evaluation.episodes=2", "--config.actor.concurrency=8"),
    *("--config.engine.batch_sizes=(8,)", "--config.learner.batch.rows=1"),
)


def run(*command: str, cwd: Path, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
    """In an environment where `packages` is found before anything that is installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if packages is not None:
        environment |= {"PYTHONPATH": str(packages), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: setuptools leaves its build folder beside the sources."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation")
    process = run(*pip, f"--wheel-dir={built}", str(source), cwd=source)
    assert process.returncode == 0, process.stderr[-2000:]
    (path,) = built.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel's packages, and bin/uirl-jax."""
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet")
    process = run(*pip, f"--target={target}", str(wheel), cwd=target)
    assert process.returncode == 0, process.stderr[-2000:]
    return target


def test_wheel_holds_every_file_of_the_packages(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = set()
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()):
        file = path.relative_to(ROOT)
        if not any(part == "__pycache__" or part.startswith(".") for part in file.parts):
            wanted.add(file.as_posix())
    assert wanted - packed == set()
    assert {name for name in packed - wanted if ".dist-info/" not in name} == set()


def test_command_help_names_the_flags_and_how_to_name_a_config(installed, tmp_path):
    process = run(str(installed / "bin/uirl-jax"), "--help", cwd=tmp_path, packages=installed)
    words = " ".join(process.stdout.split())
    assert process.returncode == 0
    assert "uirl-jax --config=quickstart --workdir=runs/quickstart" in words, process.stderr
    for flag in ("--config: config file", "--workdir: ", "--role: ", "--actors: "):
        assert flag in words


def test_command_with_an_unknown_config_lists_the_shipped_ones(installed, tmp_path):
    command = (str(installed / "bin/uirl-jax"), "--config=quikstart", "--workdir=run")
    process = run(*command, cwd=tmp_path, packages=installed)
    assert process.returncode == 1 and process.stderr.count("\n") == 1
    assert "--config=quikstart: no such file; shipped configs: " in process.stderr
    assert " quickstart, " in process.stderr
    assert list(tmp_path.iterdir()) == []


def test_command_trains_the_quickstart_in_an_empty_folder(installed, tmp_path):
    command = (str(installed / "bin/uirl-jax"), "--config=quickstart", "--workdir=run", *SMALL)
    process = run(*command, cwd=tmp_path, packages=installed)
    assert process.returncode == 0, process.stderr[-2000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["before"]["attempts"] == summary["after"]["attempts"] == 2
    assert summary["episodes"]["trained"] == 8
    assert "click the" in (tmp_path / "run/report.html").read_text().lower()
    # What was run is what was installed, and no source of it.
    modules = ("import uirl_jax, configs.quickstart, tools.bench.__main__ as bench",)
    show = "print(uirl_jax.__file__, configs.quickstart.__file__, bench.__file__, sep='\\n')"
    process = run(
        sys.executable, "-c", "; ".join((*modules, show)), cwd=tmp_path, packages=installed
    )
    files = process.stdout.split()
    assert len(files) == 3 and all(Path(file).is_relative_to(installed) for file in files), files


def test_find_takes_an_asset_by_its_name_and_other_paths_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert assets.find("asset:tiny-ui-base") == assets.DIRECTORY / "tiny-ui-base"
    assert assets.find(Path("asset:miniwob-pages/grpo")) == assets.DIRECTORY / "miniwob-pages/grpo"
    assert assets.find("models/mine") == Path("models/mine")
    with pytest.raises(
        ModelError, match=r"no such asset; there are asset:miniwob-pages/grpo, .*tiny-ui"
    ):
        assets.find("asset:tiny")


@pytest.mark.parametrize("module", ["uirl_jax.main", "uirl_jax"])
def test_interrupt_while_it_imports_ends_without_a_traceback(tmp_path, module):
    flags = ("--config=quickstart", f"--workdir={tmp_path / 'run'}")
    command = [sys.executable, "-X", "importtime", "-m", module, *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        imported = []
        for line in process.stderr:
            imported.append(line)
            if "jax._src.basearray" in line:  # of the first third of the imports
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == -signal.SIGINT, rest
    assert "Traceback" not in "".join(imported) + rest
    assert not (tmp_path / "run").exists()


def test_find_config_takes_a_name_only_where_the_folder_has_no_such_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert assets.find_config("quickstart") == ROOT / "configs/quickstart.py"
    assert assets.find_config("configs/quickstart.py") == Path("configs/quickstart.py")
    assert assets.find_config("unknown") == Path("unknown")
    Path("quickstart").write_text("")
    assert assets.find_config("quickstart") == Path("quickstart")
