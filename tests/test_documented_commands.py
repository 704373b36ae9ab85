"""Every command of the documentation: its kind is in docs/commands.md, with a test that calls it;
its flags, config keys and files exist."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import PAGES, ROOT, commands, name_of
from uirl_jax.config.schema import RunConfig

TABLE = ROOT / "docs" / "commands.md"
_START = re.compile(r"(?:\S*python3? -m |bash (?=launch/|tests/)|pytest |uirl-jax )")
_OTHERS = ("pip", "venv", "verl")  # other projects' modules
_FLAG = re.compile(r"--(no)?([a-zA-Z_][\w-]*)")
_ABSL = {"config", "help", "helpfull", "verbosity"}


def documented() -> Iterator[tuple[str, str]]:
    """(page, command) without what follows in a pipe, a comment or another sentence."""
    for page in PAGES:
        for line in commands(page).splitlines():
            start = _START.search(line)
            if start is not None:
                command = line[start.start() :].split(" #")[0].split(" |")[0].split(" && ")[0]
                yield name_of(page), " ".join(command.split())


COMMANDS = sorted({command: page for page, command in documented()}.items())


def kind_of(command: str) -> str:
    """What the table calls it; empty: another project's."""
    words = [word.strip("'\"`();,") for word in command.split()]
    if words[0] in ("bash", "pytest", "uirl-jax"):
        return " ".join(words[:2]) if words[0] == "bash" else words[0]
    module = words[words.index("-m") + 1]
    if module.startswith(_OTHERS) or module == "pytest":
        return "pytest" if module == "pytest" else ""
    role = re.search(r"--role=(\w+)", command)
    if module == "uirl_jax.main" and role is not None:
        return module if role[1] == "all" else f"{module} --role={role[1]}"
    rest = words[words.index("-m") + 2 :]
    if module in ("tools.bench", "tools.export") and rest and re.match("[a-z]", rest[0]):
        return f"{module} {rest[0]}"
    return module


def table() -> dict[str, str]:
    """Kind -> the test that runs it, or none."""
    rows = re.findall(r"^\| `([^`]+)` \| (?:`([^`]+)`|none) \|", TABLE.read_text(), re.MULTILINE)
    return dict(rows)


def test_commands_were_found():
    assert len(COMMANDS) > 90
    kinds = {kind_of(command) for command, _ in COMMANDS}
    assert {"bash launch/local.sh", "uirl_jax.main --role=eval", "tools.bench train"} <= kinds


@pytest.mark.parametrize(("command", "page"), COMMANDS)
def test_command_has_a_kind_in_the_table(command, page):
    kind = kind_of(command)
    known = table()
    whole = any(row.startswith(f"{kind} ") for row in known)  # named without its subcommand
    assert not kind or kind in known or whole, f"{page}: {command}: add {kind} to docs/commands.md"


@pytest.mark.parametrize(("kind", "test"), sorted(table().items()))
def test_test_of_a_kind_calls_it(kind, test):
    assert any(kind_of(command) == kind for command, _ in COMMANDS), "no page has it any more"
    if not test:
        return
    text = (ROOT / test).read_text(encoding="utf-8")
    module, _, argument = kind.removeprefix("bash ").partition(" ")
    package, _, name = module.rpartition(".")
    imported = rf"from {re.escape(package)} import [^\n]*\b{name}\b"
    named = rf"{re.escape(module)}|{imported}|command_world"
    assert re.search(named, text), f"{test} names no {module}"
    if argument:
        assert argument.removeprefix("--role=") in text


def config_keys(cls: type, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from config_keys(typing.cast(type, hints[field.name]), f"{prefix}{field.name}.")


def flags_of(module: str) -> set[str]:
    """Names of flags in the sources of a module, or of its package."""
    path = ROOT / Path(*module.split("."))
    sources = list(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    if module == "examples.own_model.make_base":
        sources.append(ROOT / "tools" / "make_base_model.py")
    found = set()
    for source in sources:
        text = source.read_text(encoding="utf-8")
        found |= set(re.findall(r"\"--([\w-]+)", text))
        found |= set(re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", text))
        if 'f"--{name}_steps"' in text:
            found |= {f"{stage}_steps" for stage in ("finding", "telling", "acting")}
    return found


@pytest.mark.parametrize(("command", "page"), COMMANDS)
def test_flags_keys_and_files_of_a_command_exist(command, page):
    kind, keys = kind_of(command), set(config_keys(RunConfig))
    module = kind.split()[0] if kind else ""
    if module in ("bash", "uirl-jax"):
        module = "uirl_jax.main"
    wrong = []
    for no, name in _FLAG.findall(re.sub(r"--config\.[\w.]+", "", command)):
        if module in ("", "pytest") or kind == "bash tests/run.sh" or name in _ABSL:
            continue
        flags = flags_of(module)
        if name not in flags and no + name not in flags:
            wrong.append(f"--{no}{name}")
    for key in re.findall(r"--config\.([\w.]+)", command):
        if key not in keys and not key.endswith("."):
            wrong.append(f"--config.{key}")
    for path in re.findall(r"--config=(configs/\w+\.py|examples/[\w/]+\.py)", command):
        if not (ROOT / path).exists():
            wrong.append(path)
    assert not wrong, f"{page}: {command}: {wrong}"


def copied(tmp_path: Path, python_text: str) -> Path:
    """A copy of the tree, with an environment that is installed; the text is its Python."""
    tree = tmp_path / "uirl_jax"
    tree.mkdir()
    for name in ("configs", "tools", "uirl_jax", "requirements.txt", "pyproject.toml"):
        (tree / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "launch", tree / "launch")
    python = tree / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(python_text)
    python.chmod(0o755)
    names = ("requirements.txt", "pyproject.toml")
    content = b"".join((tree / name).read_bytes() for name in names)
    installed = subprocess.run(["cksum"], input=content, capture_output=True, check=True)
    (tree / ".venv" / ".installed").write_bytes(installed.stdout)
    return tree


def launch(tree: Path, script: str, *flags: str, **environment: str) -> str:
    """What the script printed."""
    done = subprocess.run(
        ["bash", str(tree / "launch" / script), *flags],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "installing" not in done.stdout
    return done.stdout


def launched(tmp_path: Path, script: str, *flags: str, **environment: str) -> tuple[Path, str]:
    """A copy of the tree, and what the script printed there."""
    tree = copied(tmp_path, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    return tree, launch(tree, script, *flags, **environment)


def test_first_command_trains_and_shows_its_result(tmp_path):
    flags = ("--config.learner.steps=2", "--config.evaluation.episodes=8")
    tree, printed = launched(tmp_path, "local.sh", *flags)
    assert re.search(r"after +\d+\.\d% .* \d/8", printed), printed
    assert (tree / "runs" / "quickstart" / "report.html").is_file()


NOTED_PYTHON = """#!/bin/sh
echo "$@" >>calls
for argument; do
  case $argument in --out=*) mkdir -p "${argument#--out=}" ;; esac
done
"""


@pytest.mark.browser
def test_grounder_draws_each_number_of_screens_once_into_a_folder_of_its_own(tmp_path):
    tree = copied(tmp_path, NOTED_PYTHON)
    for screens in ("20", "3000", "20"):
        launch(tree, "grounder.sh", UIRL_SCREENS=screens)
    calls = (tree / "calls").read_text().splitlines()
    drawing = "-m tools.make_grounding_data --out=runs/grounding"
    assert [call for call in calls if "make_grounding_data" in call] == [
        f"{drawing}-20/drawn-libraries --split=test --screens=20 --sources=bulma",
        f"{drawing}-20/drawn-screens --split=train --screens=20",
        f"{drawing}-3000/drawn-libraries --split=test --screens=500 --sources=bulma",
        f"{drawing}-3000/drawn-screens --split=train --screens=3000",
    ]
    prepared = [call for call in calls if "prepare_gui_data" in call]
    assert len(prepared) == 4 and prepared[0].endswith("--out=runs/grounding-20/libraries")
    trained = [call for call in calls if "uirl_jax.main" in call and "--role" not in call]
    assert [re.search(r"grounder\.py:(\S+)", call)[1] for call in trained] == [
        f"runs/grounding-{screens}" for screens in ("20", "3000", "20")
    ]


@pytest.mark.slow
@pytest.mark.browser
def test_grounder_is_trained_from_nothing(tmp_path):
    """Screens, sets, cold start, GRPO, and the comparison of the three models."""
    flags = [
        *("--config.cold_start.steps=1", "--config.cold_start.episodes=32"),
        *("--config.learner.steps=1", "--config.evaluation.episodes=8"),
    ]
    tree, printed = launched(tmp_path, "grounder.sh", *flags, UIRL_SCREENS="20")
    assert "drawn-screens: 20 screens" in printed and "drawn-libraries: 20 screens" in printed
    for task in ("screens", "libraries"):
        assert re.search(rf"recorded/{task}( +\d+/\d{{1,2}}\b){{3}}", printed), printed
    assert (tree / "runs" / "grounder" / "cold_start" / "model" / "config.json").is_file()
