"""Scores of suites on the pages of a run: counted again, compared, hostile and broken files."""

import asyncio
import json
from pathlib import Path

import pytest

from tests import viewer_world
from uirl_jax import watch
from uirl_jax.watch.suites import read_suites


def write_scores(workdir: Path, policy: str, counts: dict[str, tuple[int, int]]) -> None:
    def scores(successes: int, attempts: int) -> dict:
        # The rate is a lie: pages count again.
        return {"success": {"successes": successes, "attempts": attempts, "rate": 0.99}}

    directory = workdir / "eval" / "suites" / "clicks" / policy
    directory.mkdir(parents=True)
    all_of_them = [sum(column) for column in zip(*counts.values(), strict=True)]
    content = {
        "contender": policy,
        "all": scores(all_of_them[0], all_of_them[1]),
        "by_task": {task: scores(*pair) for task, pair in counts.items()},
    }
    (directory / "scores.json").write_text(json.dumps(content))


COMPARISON = {
    **{"first": "base", "second": "<b>new</b>", "instances": 40, "difference": 0.5},
    **{"low": 0.25, "high": 0.75, "first_only": 1, "second_only": 21, "p_value": 0.0001},
}


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    write_scores(tmp_path, "base", {"a/one": (4, 20), "a/two": (6, 20)})
    write_scores(tmp_path, "<b>new<b>", {"a/one": (20, 20), "a/two": (10, 20)})
    content = {"contenders": {}, "comparisons": [COMPARISON]}
    path = tmp_path / "eval" / "suites" / "clicks" / "scores.json"
    path.write_text(json.dumps(content))
    return tmp_path


def test_report_has_each_policy_by_task_and_the_comparison(workdir):
    page = watch.write_report(workdir).read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "Suite clicks" in page
    assert "25.0 %" in page and "75.0 %" in page and "99.0 %" not in page
    assert "10 of 40" in page and "30 of 40" in page
    assert "a/one" in page and "20.0 %" in page and "100 %" in page
    assert "against base: +50.0% (95 % interval +25.0% to +75.0%, 40 instances)" in page
    assert "<b>" not in page and "&lt;b&gt;new" in page


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"all": {"success": {"successes": 5, "attempts": 4}}, "by_task": {}}',
        '{"all": {"success": {"successes": true, "attempts": 4}}, "by_task": {}}',
        '{"all": {"success": {"successes": 1, "attempts": 1e300}}, "by_task": {}}',
        '{"all": {"success": {"successes": 1, "attempts": 4}}, "by_task": []}',
    ],
    ids=range(7),
)
def test_file_that_is_no_score_is_a_note_and_the_others_are_shown(workdir, content):
    (workdir / "eval" / "suites" / "clicks" / "base" / "scores.json").write_text(content)
    notes: list[str] = []
    (suite,) = read_suites(workdir, notes)
    assert list(suite.policies) == ["<b>new<b>"]
    assert len(notes) == 1 and "clicks/base/scores.json: no scores" in notes[0]


@pytest.mark.parametrize(
    "comparisons", ["{}", "[3]", '[{"first": "a"}]', json.dumps([{**COMPARISON, "low": "x"}])]
)
def test_comparison_that_is_none_is_a_note(workdir, comparisons):
    path = workdir / "eval" / "suites" / "clicks" / "scores.json"
    path.write_text(f'{{"comparisons": {comparisons}}}')
    notes: list[str] = []
    (suite,) = read_suites(workdir, notes)
    assert suite.comparisons == []
    assert not notes if comparisons == "{}" else "no comparisons" in notes[0]


def test_viewer_shows_a_suite_that_ends_while_it_is_open(tmp_path):
    async def follow(asked):
        assert "Suite clicks" not in await asked.page("/")
        write_scores(tmp_path, "base", {"a/one": (4, 20), "a/two": (6, 20)})
        await asyncio.to_thread(asked.follower.look)
        assert "Suite clicks" in await asked.page("/")
        write_scores(tmp_path, "version_4", {"a/one": (20, 20), "a/two": (6, 20)})
        await asyncio.to_thread(asked.follower.look)
        assert "26 of 40" in await asked.page("/")

    viewer_world.ask(tmp_path, follow)
