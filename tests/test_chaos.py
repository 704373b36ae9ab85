"""The chaos: its supervision, its account and its table; and a small one that really runs."""

import dataclasses
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tiny_model
from tools.bucket_emulator import Emulator, emulator
from tools.bucket_emulator.objects import Condition
from tools.chaos import __main__ as chaos
from tools.chaos import account, processes
from tools.chaos.account import Account, Sight
from uirl_jax.learner.hosts import Decision
from uirl_jax.shards.reader import RecordRef

ROOT = Path(__file__).parents[1]
# Seed whose first three kills hit an actor, a parent and a child of the learner.
SEED = next(
    seed
    for seed in itertools.count()
    if {target.rstrip("-01234") for target in itertools.islice(processes.targets(seed), 3)}
    == {"actor", "learner", "child of learner"}
)


# ---------------------------------------------------------------------------------- supervision


@dataclasses.dataclass(frozen=True)
class Scripts(processes.Command):
    """Starts small scripts in place of the roles; `scripts` says what each start of a name runs."""

    scripts: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def start(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        given = self.scripts.get(name, [])
        script = given.pop(0) if given else "import time; time.sleep(60)"
        with self.output(name).open("ab") as log:
            command = [sys.executable, "-S", "-c", script]
            return subprocess.Popen(command, stdout=log, stderr=log)


def fleet_of(tmp_path: Path, **scripts: str) -> processes.Fleet:
    """The scripts are separated by `|`; names are written with an underscore."""
    given = {name.replace("_", "-"): script.split("|") for name, script in scripts.items()}
    return processes.Fleet(Scripts([], tmp_path, {}, given))


def run_until_done(fleet: processes.Fleet) -> None:
    deadline_s = time.monotonic() + 30
    try:
        while fleet.keep_running():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    finally:
        fleet.end(0.0)


def test_learner_that_ends_with_75_is_started_again_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "RESTART_S", 0.1)
    end = "raise SystemExit(75)|raise SystemExit(0)"
    fleet = fleet_of(tmp_path, learner_0=end, learner_1=end, actor_2="raise SystemExit(0)")
    run_until_done(fleet)
    assert fleet.starts == 2 * processes.PROCESSES + processes.ACTORS
    assert len(fleet.unexplained) == processes.PROCESSES  # nobody had struck it


def test_learner_process_that_stays_when_another_has_ended_is_ended_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "RESTART_S", 0.0)
    monkeypatch.setattr(processes, "END_S", 0.3)
    done = "raise SystemExit(0)"
    fleet = fleet_of(
        tmp_path,
        learner_0=f"raise SystemExit(75)|{done}",
        learner_1=f"import time; print('waits', flush=True); time.sleep(60)|{done}",
    )
    run_until_done(fleet)
    assert fleet.learner_starts == 2
    assert fleet.unexplained[1:] == ["learner-1: still there 0 s after another's end: waits"]


def test_mistake_of_the_user_ends_the_chaos_with_its_line(tmp_path):
    fleet = fleet_of(tmp_path, actor_1="print('error: no model'); raise SystemExit(1)")
    with pytest.raises(processes.GivenUpError, match="actor-1: exit code 1: error: no model"):
        run_until_done(fleet)


def test_killed_actor_is_started_again_and_its_end_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "RESTART_S", 0.0)
    fleet = fleet_of(tmp_path)
    try:
        fleet.keep_running()
        first = fleet.actors[3].process
        assert first is not None
        assert fleet.strike("actor-3", signal.SIGKILL)
        first.wait()
        assert not fleet.strike("actor-3", signal.SIGKILL)  # it does not run
        assert not fleet.strike("child of learner-0", signal.SIGKILL)  # it has none
        fleet.keep_running()
        assert fleet.actors[3].process is not first
        assert fleet.unexplained == []
    finally:
        fleet.end(0.0)


def test_kills_hit_each_process_once_before_any_twice():
    drawn = list(itertools.islice(processes.targets(0), 16))
    assert len(set(drawn[:8])) == 8 and sorted(drawn[:8]) == sorted(drawn[8:])
    assert drawn == list(itertools.islice(processes.targets(0), 16))
    assert drawn != list(itertools.islice(processes.targets(1), 16))


# -------------------------------------------------------------------------------------- account


def put(service: Emulator, name: str, lines: list[dict]) -> None:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    service.server.buckets.write("runs", f"run/{name}", content, Condition())


def decide(service: Emulator, step: int, *episodes: str) -> None:
    """As learner.hosts writes it, an update for each episode."""
    records = tuple((RecordRef("shards/a0/s", 0, 9, episode),) for episode in episodes)
    put(service, f"decisions/{step:08d}.json", [Decision(step, "", records)._asdict()])


GOOD = Account(
    published=24,
    trained=16,
    stale=0,
    quarantined=0,
    duplicate=8,
    pending=0,
    started=30,
    env_error=4,
    lost=2,
    actors_published=24,
    late=8,
    trained_twice=0,
    wrong=(),
)


def test_sight_counts_an_episode_that_two_steps_were_decided_on():
    with emulator() as service:
        sight = Sight(service, "runs", "run")
        sight.look()
        assert (sight.step, sight.steps()) == (0, [])
        decide(service, 1, "a", "b")
        put(service, "metrics.jsonl", [{"step": 0}, {"step": 1}])
        sight.look()
        assert (sight.step, sight.steps(), sight.trained_twice()) == (1, [1], 0)
        decide(service, 2, "c", "a")
        sight.look()
        assert sight.trained_twice() == 1
        decide(service, 2, "c", "d")  # the step was repeated after a kill, on other records
        sight.look()
        assert sight.trained_twice() == 0
        put(service, "decisions/00000002-end.json", [{"records": []}])
        put(service, "metrics.jsonl", [{"step": 1}, {"step": 2}])
        sight.look()
        assert account._wrong(GOOD, sight, 2) == []
        assert len(account._wrong(GOOD, sight, 3)) == 2
        put(service, "metrics.jsonl", [{"step": 1}, {"step": 2}, {"step": 2}])
        assert account._wrong(GOOD, sight, 2) == ["every step once in metrics.jsonl"]


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        ("trained", 15, "published = "),
        ("late", 0, "no record lost"),
        ("trained_twice", 1, "no record trained twice"),
        ("lost", 1, "started = "),
    ],
)
def test_account_that_does_not_add_up_is_wrong(field, value, wrong):
    with emulator() as service:
        sight = Sight(service, "runs", "run")
        assert account._wrong(GOOD, sight, 0) == []
        found = account._wrong(dataclasses.replace(GOOD, **{field: value}), sight, 0)
    assert [line for line in found if line.startswith(wrong)] == found != []


def test_signals_are_counted_with_their_median_and_worst_recovery():
    blows = [chaos.Blow("SIGKILL actor", 0.0, 3, recovered_s=s) for s in (1.0, 9.0, 2.0)]
    blows.append(chaos.Blow("SIGTERM learner", 0.0, 7))  # in the last step
    assert chaos._by_kind(blows) == {
        "SIGKILL actor": {
            "injected": 3,
            "survived": 3,
            "recover_median_s": 2.0,
            "recover_worst_s": 9.0,
        },
        "SIGTERM learner": {
            "injected": 1,
            "survived": 1,
            "recover_median_s": None,
            "recover_worst_s": None,
        },
    }


def test_recovery_from_the_end_of_an_actor_is_the_next_step():
    blow = chaos.Blow("SIGKILL actor", at_s=10.0, step=3)
    blow.look(11.0, 3, learner_starts=1)
    assert blow.recovered_s is None
    blow.look(14.0, 4, learner_starts=1)
    blow.look(19.0, 5, learner_starts=1)
    assert blow.recovered_s == 4.0


def test_recovery_from_the_end_of_the_learner_is_the_first_step_after_its_restart():
    blow = chaos.Blow("SIGTERM learner", at_s=10.0, step=3, learner_starts=1)
    blow.look(12.0, 4, learner_starts=1)  # the step in progress
    blow.look(20.0, 4, learner_starts=2)
    blow.look(30.0, 4, learner_starts=2)
    assert blow.recovered_s is None
    blow.look(42.0, 5, learner_starts=2)
    assert blow.recovered_s == 32.0


def test_success_is_below_another_if_the_intervals_do_not_meet():
    low, middle, high = (
        {"success": {"low": at - 0.04, "high": at + 0.04}} for at in (0.85, 0.9, 0.95)
    )
    assert chaos.is_below(low, high)
    assert not chaos.is_below(low, middle) and not chaos.is_below(high, low)


def test_flags_that_are_not_of_the_config_are_refused(capsys):
    assert chaos.flags_from(["--config.learner.steps=3"]).values == ["--config.learner.steps=3"]
    with pytest.raises(SystemExit):
        chaos.flags_from(["--minute=3"])
    assert "unknown flags: --minute=3" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ a real one


@pytest.mark.slow  # minutes: the learner starts four times
def test_chaos_with_a_kill_of_each_kind_loses_nothing(tmp_path):
    model_dir = tiny_model.write(tmp_path / "model")
    command = [
        *(sys.executable, "-m", "tools.chaos", "--runs=chaos", "--minutes=1", "--steps=8"),
        *(f"--seed={SEED}", "--kill_every_s=18", "--term_every_s=50"),
        *(f"--config={tiny_model.CONFIG}", f"--config.model.path={model_dir}"),
        "--config.actor.concurrency=4",  # one group each
        *(f"--json={tmp_path / 'chaos.json'}", f"--directory={tmp_path / 'chaos'}"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "chaos.json").read_text())["chaos"]
    kinds = {"SIGTERM learner", *(f"SIGKILL {k}" for k in ("actor", "learner", "child of learner"))}
    assert set(result["signals"]) == kinds
    assert (result["wrong"], result["records_lost"], result["trained_twice"]) == ([], 0, 0)
    assert result["trained"] >= 8 * 2 * 4
    assert min(sum(counts.values()) for counts in result["injected"].values()) > 10
