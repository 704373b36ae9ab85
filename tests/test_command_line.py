"""An error ends every command of tools in one line, before the work where it can be known then."""

import argparse
import ast
import json
from pathlib import Path

import pytest

from tools import command_line, curves
from tools.bench import __main__ as bench
from tools.bench import client as bench_client
from tools.chaos import __main__ as chaos
from uirl_jax.errors import ConfigError, RestartError, one_line

ROOT = Path(__file__).parents[1]
# These read no path that a user gives, or print what is wrong as a finding of theirs.
NO_ERRORS = {"config_reference", "doctor"}


@pytest.mark.parametrize(
    ("error", "exit_code", "expected"),
    [
        (ConfigError("--x=1: expected 2"), None, (1, "error: --x=1: expected 2\n")),
        (RestartError("stopped"), None, (75, "error: stopped\n")),
        (
            FileNotFoundError(2, "No such file", "a"),
            None,
            (1, "error: [Errno 2] No such file: 'a'\n"),
        ),
        (ConfigError("no episode"), 2, (2, "error: no episode\n")),
        (PermissionError(13, "Denied", "a"), 2, (2, "error: [Errno 13] Denied: 'a'\n")),
    ],
)
def test_error_is_one_line_and_an_exit_code(capsys, error, exit_code, expected):
    @command_line.one_line_errors(exit_code=exit_code)
    def main() -> int:
        raise error

    assert (main(), capsys.readouterr().err) == expected


@pytest.mark.parametrize(
    ("error", "max_chars", "expected"),
    [
        (ValueError(" a\n  b\tc "), None, "a b c"),
        (KeyError(), 300, "KeyError"),
        ("\n a \r\n", 300, "a"),
        ("", 300, ""),
        (ValueError("x" * 300), 300, "x" * 300),
        (ValueError("b" * 200 + "m\n" * 99 + "e" * 95), 300, f"{'b' * 200} ... {'e' * 95}"),
        (ValueError("x" * 999), None, "x" * 999),
    ],
)
def test_one_line_of_an_error_of_others(error, max_chars, expected):
    assert one_line(error, max_chars) == expected


def test_other_exception_is_a_bug_and_keeps_its_traceback():
    @command_line.one_line_errors()
    def main(number: int) -> int:
        return 1 // number

    assert main(1) == 1
    with pytest.raises(ZeroDivisionError):
        main(0)


def test_file_that_cannot_be_written_is_refused_before_and_nothing_is_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^--json=.*: is a directory; give a file$"):
        command_line.check_file("--json", tmp_path)
    for check in (command_line.check_file, command_line.check_folder):
        with pytest.raises(ConfigError, match=r"^--to=.*file/new: .*/file is no folder that can"):
            check("--to", tmp_path / "file/new")
        check("--to", tmp_path / "new/new")
        check("--to", None)
    with pytest.raises(ConfigError, match="is no folder"):
        command_line.check_folder("--out", tmp_path / "file")
    command_line.check_file("--json", tmp_path / "file")
    command_line.check_file("--json", Path("/dev/stdout"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_json_is_written_where_the_check_allowed_it(tmp_path):
    path = tmp_path / "new/new/numbers.json"
    command_line.check_file("--json", path)
    command_line.write_json(path, {"a": [1, "ä"]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1, "ä"]}


def test_curves_in_no_folder_are_one_line(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "success/mean": 0.5}\n')
    (tmp_path / "file").touch()
    assert curves.main([f"--out={tmp_path}/file/curves.svg", f"a={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "file" in said


def _no_work(*_: object) -> dict[str, object]:
    raise AssertionError("the work has started")


def test_place_of_json_is_checked_before_minutes_of_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_client, "run", _no_work)
    monkeypatch.setattr(chaos, "play", _no_work)
    for main, arguments in ((bench.main, ["client"]), (chaos.main, [])):
        assert main([*arguments, f"--json={tmp_path}"]) == 1
        assert capsys.readouterr().err == f"error: --json={tmp_path}: is a directory; give a file\n"


def test_bench_that_runs_out_of_disk_is_one_line(monkeypatch, capsys):
    def run(_: argparse.Namespace) -> dict[str, object]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench_client, "run", run)
    assert bench.main(["client"]) == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


def test_every_command_that_returns_its_exit_code_ends_so():
    """make_base_model and make_page_model return none: argparse ends them."""
    without = set()
    for path in [*ROOT.glob("tools/*.py"), *ROOT.glob("tools/*/__main__.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name != "main":
                continue
            returned = node.returns and ast.unparse(node.returns)
            decorated = any("one_line_errors" in ast.unparse(one) for one in node.decorator_list)
            if returned == "int" and not decorated:
                without.add(path.stem)
    assert without == NO_ERRORS
