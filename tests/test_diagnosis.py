"""Why a run learns nothing: each rule where its cause is, and silence where it is not."""

import dataclasses
import json

import pytest

from tests.sample_trajectories import make_trajectory
from uirl_jax import evaluation
from uirl_jax.learner import bookkeeping
from uirl_jax.learner.bookkeeping import ActorReports
from uirl_jax.learner.loop import StepReport
from uirl_jax.types import StopReason
from uirl_jax.watch import diagnosis, write_report
from uirl_jax.watch.diagnosis import Evidence, Watcher, diagnose

HEALTHY = {
    "stop_reason/format_error": 0.1,
    "groups/with_signal": 0.7,
    "success/mean": 0.4,
    "reward/mean": 0.4,
    "learner/lr": 1e-4,
    "learner/update_norm": 0.01,
    "offpolicy/drift": 1e-3,
    "offpolicy/staleness": 0.0,
    "records/published": 100.0,
    "records/stale": 0.0,
    "actor/published": 100.0,
    "actor/env_error": 1.0,
}


def rows(**changes):
    """Five steps of a healthy run with these values; counters grow by 8 records a step."""
    found = []
    for step in range(5):
        row = HEALTHY | {name: HEALTHY[name] + 8 * step for name in HEALTHY if "published" in name}
        found.append(row | {k: v(step) if callable(v) else v for k, v in changes.items()})
    return found


CAUSES = [
    ("environment", {"actor/env_error": lambda step: 20.0 * step, "actor/published": 100.0}),
    ("renderers", {}),
    ("stale", {"records/stale": lambda step: 5.0 * step}),
    ("format_errors", {"stop_reason/format_error": 0.95, "groups/with_signal": 0.0}),
    ("too_long", {"stop_reason/max_tokens": 0.22}),
    ("no_signal", {"groups/with_signal": 0.0}),
    ("saturated", {"success/mean": 1.0, "groups/with_signal": 0.0}),
    ("drift", {"offpolicy/drift": 0.5}),
    ("learning_rate", {"learner/lr": 0.0, "learner/update_norm": 0.0}),
    ("no_update", {"learner/update_norm": 0.0}),
]


@pytest.mark.parametrize(("cause", "changes"), CAUSES, ids=[cause for cause, _ in CAUSES])
def test_each_cause_is_named_and_no_other(cause, changes):
    assert diagnose(Evidence(rows())) == {}
    drawn = {"stage before": ["5c5d"], "training": ["5c5d", "77aa"] if not changes else ["5c5d"]}
    assert list(diagnose(Evidence(rows(**changes), renderers=drawn))) == [cause]
    # One good step among five, and the rule is silent.
    mixed = rows(**changes)
    if not any(callable(value) for value in changes.values()):
        mixed[2] = rows()[2] | ({"stop_reason/format_error": 0.5} if "format" in cause else {})
        assert cause not in diagnose(Evidence(mixed))


def test_every_rule_has_a_test():
    assert [cause for cause, _ in CAUSES] == [rule.__name__ for rule in diagnosis.RULES]


def test_signals_that_look_alike_are_no_cause():
    # Drift of an older policy is staleness; failures alone are no lack of signal.
    late = rows(**{"offpolicy/drift": 0.5, "offpolicy/staleness": 1.0})
    assert diagnose(Evidence(late)) == {}
    kept_back = rows(**{"offpolicy/drift": 0.5, "offpolicy/steps_kept_back": 2.0})
    assert diagnose(Evidence(kept_back)) == {}
    assert diagnose(Evidence(rows(**{"success/mean": 0.0, "reward/mean": 0.0}))) == {}
    assert diagnose(Evidence([])) == {}
    assert diagnose(Evidence(rows(**{"success/mean": 1.0}))) == {}  # with signal: still learning


def report(step, **changes):
    wrong = dataclasses.replace(
        make_trajectory(f"e{step}", versions=(0,)), stop_reason=StopReason.FORMAT_ERROR
    )
    turn = dataclasses.replace(wrong.turns[0], text="Sure!\x1b[2J", error="is not an action")
    return StepReport(step, rows(**changes)[0], [[dataclasses.replace(wrong, turns=(turn,))]])


def test_watcher_says_it_once_with_examples_and_when_it_is_over(tmp_path, capsys):
    watcher = Watcher(tmp_path, steps=100)
    bad = {"stop_reason/format_error": 1.0, "groups/with_signal": 0.0}
    for step in range(1, 5):
        watcher(report(step, **bad))
    assert capsys.readouterr().out == "" and not (tmp_path / "findings.json").exists()
    for step in range(5, 8):
        watcher(report(step, **bad))
    said = capsys.readouterr().out
    assert said.count("event=diagnosis ") == 1 and "step=5 cause=format_errors" in said
    assert "Sure!?[2J" in said and "\x1b" not in said and "docs/action_formats.md" in said
    found = json.loads((tmp_path / "findings.json").read_text())
    assert list(found) == ["format_errors"] and found["format_errors"]["since_step"] == 5
    page = write_report(tmp_path).read_text()
    assert "<h2>Diagnosis</h2>" in page and "Since step 5: 100% of the episodes" in page
    # A restart says nothing twice; a run that has recovered says so.
    again = Watcher(tmp_path, steps=100)
    for step in range(8, 14):
        again(report(step, **bad))
    assert "event=diagnosis " not in capsys.readouterr().out
    for step in range(14, 20):
        again(report(step))
    assert "event=diagnosis_over step=14 cause=format_errors" in capsys.readouterr().out
    assert json.loads((tmp_path / "findings.json").read_text()) == {}
    assert "<h3>Diagnosis</h3>" not in write_report(tmp_path).read_text()


def test_watcher_compares_what_is_trained_on_with_the_evaluations(tmp_path, capsys):
    before = evaluation.count("before", [], [])
    (tmp_path / "eval").mkdir()
    evaluation.write_json(
        tmp_path / "eval" / "before.json",
        dataclasses.asdict(dataclasses.replace(before, renderers=["5c5d"])),
    )
    watcher = Watcher(tmp_path, steps=1)
    for step, renderer in enumerate(("5c5d", "", "77aa"), 1):
        played = dataclasses.replace(make_trajectory(f"e{step}", versions=(0,)), renderer=renderer)
        watcher(StepReport(step, rows()[0], [[played]]))
        said = capsys.readouterr().out
        assert ("stage before: 5c5d; training: 5c5d, 77aa" in said) == (step == 3), said


def test_short_run_is_judged_by_all_its_steps(tmp_path, capsys):
    watcher = Watcher(tmp_path, steps=2)
    for step in (1, 2):
        watcher(report(step, **{"groups/with_signal": 0.0}))
    assert "cause=no_signal" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": 1}', b"\xff", b"[" * 200_000])
def test_damaged_findings_are_left_out(tmp_path, content):
    (tmp_path / "findings.json").write_bytes(content)
    assert diagnosis.read_findings(tmp_path) == {}
    assert "<h3>Diagnosis</h3>" not in write_report(tmp_path).read_text()


def write_actor_log(workdir, number, **fields):
    log = workdir / "logs" / f"actor-a{number}.jsonl"
    log.parent.mkdir(exist_ok=True)
    log.write_text('{"unix_s": 1}\n' + json.dumps(fields) + '\n{"torn')


def test_waiting_learner_is_told_what_the_actors_say(tmp_path, capsys):
    watcher = Watcher(tmp_path, steps=9)
    watcher.waiting(60.0)
    assert "no actor has reported yet" in capsys.readouterr().out
    reasons = {"HTTP N from /session": 30, "no answer within N s": 2}
    counts = {"actor/env_error": 30.0, "actor/published": 0.0}
    write_actor_log(tmp_path, 0, **counts, env_error_reasons=reasons)
    write_actor_log(tmp_path, 1, **counts, env_error_reasons={"no answer within N s": 5})
    watcher.waiting(120.0)
    said = capsys.readouterr().out
    assert "seconds=120" in said and "60 episodes ended as env_error while 0 were played" in said
    assert "HTTP N from /session (30 times); no answer within N s (7 times)" in said


def test_actor_metrics_add_counters_and_average_the_rest(tmp_path):
    assert ActorReports(tmp_path).metrics() == {}
    write_actor_log(tmp_path, 0, **{"actor/published": 8, "engine/busy_s": 2.0, "unix_s": 5})
    write_actor_log(tmp_path, 1, **{"actor/published": 4, "engine/busy_s": 4.0, "x/text": "a"})
    assert ActorReports(tmp_path).metrics() == {"actor/published": 12.0, "engine/busy_s": 3.0}
    # The last report of one that is gone: what it published was published.
    values = {"actor/published": 6, "actor/running": 8, "engine/busy_s": 2.0}
    write_actor_log(tmp_path, 0, **values, unix_s=1000.0)
    write_actor_log(tmp_path, 1, **values | {"actor/running": 3, "engine/busy_s": 4.0}, unix_s=1090)
    write_actor_log(tmp_path, 2, **values | {"actor/running": 4, "engine/busy_s": 6.0}, unix_s=1100)
    expected = {"actor/published": 18.0, "actor/running": 7.0, "engine/busy_s": 5.0}
    assert ActorReports(tmp_path).metrics() == expected


def test_actor_of_a_host_whose_clock_is_ahead_does_not_make_the_others_gone(tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(bookkeeping.time, "monotonic", lambda: now_s)
    clocks = {0: 10_000.0, 1: 10_900.0, 2: 9_000.0}  # 2 has died long ago

    def report(*numbers: int) -> None:
        for number in numbers:
            clocks[number] += 10.0
            fields = {"actor/running": 1, "actor/published": 5, "unix_s": clocks[number]}
            write_actor_log(tmp_path, number, **fields)

    reports = ActorReports(tmp_path)
    report(0, 1, 2)
    reports.metrics()
    for _ in range(3):
        now_s += 300.0
        report(0, 1)
        assert reports.metrics() == {"actor/running": 2.0, "actor/published": 15.0}
    clocks[3] = 5_000.0  # a new one, whose clock is behind
    report(3)
    now_s += 10.0
    assert reports.metrics()["actor/running"] == 3.0
    for _ in range(10):  # 1 dies
        now_s += 10.0
        report(0, 3)
        found = reports.metrics()
    assert found == {"actor/running": 2.0, "actor/published": 20.0}
    now_s += 600.0  # nobody reports: the storage was away
    assert reports.metrics() == found
