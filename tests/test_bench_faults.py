"""Every fault of the bench with a few episodes each; and that its checks notice what is wrong."""

import collections
import copy
import dataclasses

import pytest

from tests.sample_trajectories import make_trajectory
from tools.bench.faults import actor, checks, command, dialects, inputs, plays, proxy
from uirl_jax.types import StopReason

# One of each sort; each input alone is a test of the client or the record.
INPUTS = ("png_ztxt_bomb", "png_pixels_no_zlib", "png_palette_alpha", "gzip_bomb")
INPUTS += ("reward_NaN", "json_control_characters", "session_id_parent", "done_at_once")
SETTINGS = command.Settings(
    repeats=1,
    inputs=INPUTS,
    texts=("click_nan", "open_file"),
    mixed_episodes=24,
    dialect_episodes=24,
    at_once=6,
)


@pytest.fixture(scope="module")
def result():
    return command.play_all(SETTINGS, say=lambda line: None)


def test_actor_survives_every_fault_alone_and_mixed(result):
    assert result["wrong"] == []
    assert set(result["alone"]) == set(proxy.FAULTS)
    ends = collections.Counter()
    for row in result["alone"].values():
        ends.update(row["ends"])
    assert set(ends) == {"completed", "env_error", "failed"} and ends["failed"] < 15
    assert min(ends["completed"], ends["env_error"]) > 30
    account = result["mixed"]["account"]
    assert account["published"] == 24 and account["env_error"] > 0


def test_faults_that_pass_cost_retries_and_others_do_not(result):
    alone = result["alone"]
    assert all(alone[fault]["retries"] > 0 for fault in proxy.RETRIED)
    assert all(
        alone[fault]["retries"] == 0 for fault in ("http_404", "wrong_type", "redirect_loop")
    )
    # Three attempts of at most a second, and two pauses.
    assert actor.LIMITS.attempt_timeout_s * 2 < alone["drip"]["slowest_s"] < 15


def test_time_outs_are_short_only_where_something_hangs():
    plans = [*proxy.FAULTS, *inputs.INPUTS, "mixed-10", "none"]
    hanging = {plan for plan in plans if proxy.hangs(plan)}
    assert hanging == {"hang", "drip", "headers_drip", "body_drips", "silence", "mixed-10"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda r: r["alone"]["hang"].update(slowest_s=21.0), "hang: an episode took 21.0 s"),
        (lambda r: r["alone"]["cut"].update(peak_mib=101.0), "cut: 101 MiB on top"),
        (lambda r: r["alone"]["cut"].update(injected=0), "cut: was never injected"),
        (lambda r: r["inputs"]["gzip_bomb"].update(unlike=["completed"]), "gzip_bomb: completed"),
        (lambda r: r["dialects"]["g3"].update(episodes=23), "24 started, the accounts have 23"),
        (lambda r: r["dialects"]["g1"].update(paid=1), "g1: 1 episodes succeeded"),
        (lambda r: r["dialects"]["g2b"].update(paid_wrongly=1), "g2b: 1 episodes have a reward"),
        (lambda r: r["mixed"].update(paid_wrongly=1), "mixed: 1 episodes have a reward"),
        (lambda r: r["mixed"].update(strays=2), "2 requests went where a redirect led"),
        (lambda r: r["mixed"].update(growth_mib=25.0), "grew by 25 MiB"),
        (lambda r: r["mixed"].update(env_errors_in_shards=1), "1 env_errors were published"),
        (lambda r: r["mixed"]["account"].update(env_error=10**6), "but the account is"),
        (lambda r: r["mixed"].update(distinct=23), "23 of them distinct"),
    ],
)
def test_check_names_what_does_not_hold(result, change, word):
    changed = copy.deepcopy(result)
    change(changed)
    (line,) = checks.check(changed)
    assert word in line
    assert word in command.format_table(changed | {"wrong": [line]})


def test_other_dialects_survive_the_mixture_too(result):
    assert set(result["dialects"]) == {"g1", "g2a", "g2b", "g3"}
    for name, row in result["dialects"].items():
        assert row["episodes"] == 24 and row["injected"] > 20, name
        assert row["ends"]["env_error"] > 0 and len(row["ends"]) > 1, name
        assert (row["paid"] > 0) == (name != "g1"), name


def test_reward_in_another_dialect_is_what_the_counts_are_worth():
    def wrongly(reward, rows, **changes):
        trajectory = dataclasses.replace(
            make_trajectory(), **{"reward": reward, "success": reward == 1.0} | changes
        )
        counts = {"submitted_row_indices": rows, "num_incorrect_submissions": 0}
        return dialects.paid_wrongly(trajectory, counts)

    done = {"stop_reason": StopReason.COMPLETED}
    assert not wrongly(1.0, [0], **done) and not wrongly(0.75, [0, 0], **done)
    assert (
        wrongly(1.0, [], **done) and wrongly(1.0, [0, 0], **done) and wrongly(1.0, [0, 1], **done)
    )
    assert wrongly(1.0, [0], **done, success=False)
    assert wrongly(1.0, [0], stop_reason=StopReason.ENV_ERROR)
    assert not wrongly(0.0, [0], stop_reason=StopReason.ENV_ERROR, success=False)


def test_paid_wrongly_counts_rewards_that_no_server_gave():
    paid = make_trajectory()
    seed = str(paid.task.seed)

    def count(given, **changes):
        trajectory = dataclasses.replace(paid, **{"reward": 1.0, "success": True} | changes)
        return plays.paid_wrongly([trajectory], {"rewards": {seed: given}})

    done = {"stop_reason": StopReason.COMPLETED}
    assert count([1.0], **done) == 0
    assert count([], **done) == 1
    assert count([0.5], **done) == 1
    assert count([1.0], **done, success=False) == 1
    assert count([1.0], stop_reason=StopReason.ENV_ERROR) == 1
    assert count([1.0], stop_reason=StopReason.ENV_ERROR, reward=0.0, success=False) == 0


def test_survives_is_what_a_fault_can_do():
    assert proxy.strike("http_500", 2) == ("act", False)
    assert proxy.strike("http_500", 7) == ("act", True)
    assert proxy.survives("http_500", 2) and not proxy.survives("http_500", 7)
    assert not proxy.survives("http_500", 0)  # a session may have been opened: not again
    assert proxy.survives("http_500", 9)  # that it is not deleted changes nothing
    assert not proxy.survives("http_404", 2)


def test_bad_inputs_say_how_they_end():
    known = {str(reason) for reason in StopReason}
    for given in inputs.INPUTS.values():
        assert given.call in proxy.CALLS and set(given.ends) <= known and given.ends
