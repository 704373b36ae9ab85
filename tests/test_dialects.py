"""The client in the dialects of the field, against servers that speak them; and the doctor."""

import asyncio
import json
import logging
import re
import struct
import zlib

import pytest
from aiohttp import web

from tests import actor_world as world
from tests.field_servers import SHEET, Container, Proxy, Sessions, serving
from uirl_jax import actions
from uirl_jax.errors import (
    ActionError,
    ActUncertainError,
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    VerifierError,
)
from uirl_jax.store import open_store
from uirl_jax.types import Action, StopReason, TaskSpec
from uirl_jax.verifiers import dialects, doctor
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.client.rules import DataEntryRule, data_entry_rule, find_rule
from uirl_jax.verifiers.client.token import read_token
from uirl_jax.verifiers.client.transport import ClientLimits
from uirl_jax.verifiers.client.used_containers import InStore
from uirl_jax.verifiers.server.server import serve
from uirl_jax.verifiers.tasks import desktop

# The test sheet has three rows; this task wants all of them.
TASK = TaskSpec("simple_data_entry", 0, "rows=2-4,count=3,wrong=0.25,duplicate=0.1,turn=0.01", 40)
LIMITS = ClientLimits(backoff_s=0.01, read_timeout_s=2.0, attempt_timeout_s=3.0)


def client_of(url, dialect, **options):
    return VerifierClient(url, dialect=dialect, **{"limits": LIMITS, **options})


def scripted():
    """The demonstrator's actions on the sheet, one after the other."""
    import numpy as np

    session, rng = desktop.open_session(SHEET), np.random.default_rng(0)
    while not session.progress()["done"]:
        action = desktop.scripted_action(session, rng)
        session.act(action)
        yield action


@pytest.mark.parametrize("dialect", ["g2a", "g2b", "g3"])
def test_client_does_the_whole_task_in_a_container(dialect):
    async def run():
        container = Container("g2a" if dialect == "g2a" else "g2b")
        async with serving(container) as url, serving(Proxy({"ab12": url})) as proxy:
            base = f"{proxy}/proxy/ab12" if dialect == "g3" else url
            async with client_of(base, dialect) as client:
                session = await client.create(TASK)
                assert "are to be submitted: 2, 3, 4.\n" in session.instruction
                assert (session.width_px, session.height_px) == (448, 336)
                turns = 0
                for action in scripted():
                    assert (await client.progress(session.id))["done"] is False
                    await client.act(session.id, action, f"r{turns}")
                    turns += 1
                progress = await client.progress(session.id)
                assert progress["done"] is True and progress["success"] is True
                assert progress["reward"] == pytest.approx(1.0 - 0.01 * turns)
                raw = "num_correct_submissions" if dialect == "g2a" else "submitted_row_indices"
                assert progress[raw] in (3, [0, 1, 2])
                await client.delete(session.id)  # nothing is sent: there is no such call
            assert "keys=ctrl%2Bc" in " ".join(container.requests)
            assert all("request_id" not in request for request in container.requests)

    asyncio.run(run())


def test_g1_sessions_are_opened_used_and_deleted():
    async def run():
        server = Sessions()
        async with serving(server) as url, client_of(url, "g1") as client:
            session = await client.create(TASK)
            assert (session.id, session.width_px) == ("1", 448)
            await client.act(session.id, Action("click", x=5, y=6), "r1")
            assert server.open[1].acts[-1]["action_type"] == "left_click"
            assert (await client.progress(session.id))["num_correct_submissions"] == 0
            await client.delete(session.id)
            assert not server.open
            await client.delete(session.id)  # gone already

    asyncio.run(run())


def test_g1_session_whose_first_screenshot_is_wrong_is_not_leaked():
    async def run():
        server = Sessions()

        async def broken(request):
            return web.Response(body=b"GIF89a", content_type="image/png")

        server.screenshot = broken
        async with serving(server) as url, client_of(url, "g1") as client:
            with pytest.raises(VerifierError, match="first screenshot"):
                await client.create(TASK)
            assert server.infos and not server.open

    asyncio.run(run())


def test_g1_progress_that_is_not_implemented_is_an_env_error():
    async def run():
        async with serving(Sessions(counting=None)) as url, client_of(url, "g1") as client:
            session = await client.create(TASK)
            with pytest.raises(VerifierError, match=r"progress: HTTP 500 \(3 attempts\)"):
                await client.progress(session.id)

    asyncio.run(run())


def test_wait_is_done_by_the_client_and_sends_no_act():
    async def run():
        container = Container("g2b")
        async with serving(container) as url, client_of(url, "g2b") as client:
            session = await client.create(TASK)
            loop = asyncio.get_running_loop()
            before_s = loop.time()
            await client.act(session.id, Action("wait", seconds=0.2), "r1")
            assert loop.time() - before_s >= 0.2
        assert not container.screen.acts

    asyncio.run(run())


@pytest.mark.parametrize("corner", [(0, 0), (447, 0), (0, 335), (447, 335)])
def test_click_in_a_corner_does_not_trip_the_fail_safe(corner):
    async def run():
        container = Container("g2b")
        async with serving(container) as url, client_of(url, "g2b") as client:
            session = await client.create(TASK)
            await client.act(session.id, Action("click", x=corner[0], y=corner[1]))
            await client.act(session.id, Action("click", x=0, y=100))  # an edge is no corner
        x, y = (int(container.screen.acts[0][name]) for name in "xy")
        assert (abs(x - corner[0]), abs(y - corner[1])) == (1, 1)
        assert container.screen.acts[1]["x"] == "0"

    asyncio.run(run())


def test_server_without_that_care_does_trip():
    """The test server is what the care is for: without it the next act fails too."""

    async def run():
        container = Container("g2b")
        async with serving(container) as url, client_of(url, "g2b") as client:
            await client.create(TASK)
            for x in ("0", "5"):
                query = {"action_type": "left_click", "x": x, "y": "0", "delay": "0"}
                with pytest.raises(VerifierError, match="HTTP 500"):
                    await client._image("GET", ("act",), query=query, again_if="refused")

    asyncio.run(run())


@pytest.mark.parametrize("answer", ["500", "html", "cut"])
def test_act_that_may_have_been_applied_is_sent_once_and_told_apart(answer):
    answers = {
        "500": lambda: web.Response(status=500),
        "html": lambda: web.Response(text="<html>", content_type="text/html"),
        "cut": lambda: web.Response(body=b"\x89PNG\r\n", content_type="image/png"),
    }

    async def run():
        clicks = "left_click"
        container = Container(
            "g2b", lambda request: answers[answer]() if clicks in request.query_string else None
        )
        async with serving(container) as url, client_of(url, "g2b") as client:
            session = await client.create(TASK)
            with pytest.raises(ActUncertainError):
                await client.act(session.id, Action("click", x=5, y=6), "r1")
            assert len(container.screen.acts) == 1  # applied, and not twice
            assert await client.screenshot(session.id)

    asyncio.run(run())


def test_act_on_a_session_that_is_gone_is_refused_and_not_uncertain():
    async def run():
        server = Sessions()
        async with serving(server) as url, client_of(url, "g1") as client:
            session = await client.create(TASK)
            server.open.clear()
            with pytest.raises(VerifierError, match=r"404.*Session not found") as caught:
                await client.act(session.id, Action("click", x=5, y=6))
            assert not isinstance(caught.value, ActUncertainError)

    asyncio.run(run())


def test_container_that_was_used_is_refused():
    async def run():
        container = Container("g2b")
        async with serving(container) as url:
            async with client_of(url, "g2b") as client:
                session = await client.create(TASK)
                with pytest.raises(VerifierError, match="used before"):
                    await client.create(TASK)
                await client.delete(session.id)
                with pytest.raises(VerifierError, match="start a new container"):
                    await client.create(TASK)
            container.screen.desktop.judge._num_incorrect = 1
            async with client_of(url, "g2b") as client:
                with pytest.raises(VerifierError, match="used before"):
                    await client.create(TASK)

    asyncio.run(run())


def test_container_that_is_starting_is_waited_for(monkeypatch):
    monkeypatch.setattr("uirl_jax.verifiers.client.client._READY_POLL_S", 0.05)

    async def run():
        pods = {}
        async with serving(Container("g2b")) as url, serving(Proxy(pods)) as proxy:
            async with client_of(f"{proxy}/proxy/late", "g3") as client:
                creation = asyncio.create_task(client.create(TASK))
                await asyncio.sleep(0.2)
                assert not creation.done()  # 404 Pod not found
                pods["late"] = url
                await creation
            hasty = ClientLimits(create_timeout_s=0.2, attempts=1)
            async with client_of(f"{proxy}/proxy/never", "g3", limits=hasty) as client:
                said = r"no session after 0\.2 s; .*HTTP 404.*doctor .* says which dialect"
                with pytest.raises(VerifierError, match=said):
                    await client.create(TASK)

    asyncio.run(run())


@pytest.mark.parametrize("dialect", ["g1+", "g1"])
def test_server_without_the_call_is_told_by_a_way_to_its_dialect(dialect):
    async def run():
        async with serving(Container("g2b")) as url, client_of(url, dialect) as client:
            said = rf"HTTP 40[45].*; a server of the dialect {re.escape(dialect)} has this call; .*"
            with pytest.raises(NotFoundError, match=f"{said}doctor {url} says which dialect"):
                await client.create(TASK)

    asyncio.run(run())


@pytest.mark.parametrize(("pinned", "counting"), [("g2a", "g2b"), ("g2b", "g2a")])
def test_server_of_another_dialect_than_pinned_is_named(pinned, counting):
    async def run():
        async with serving(Container(counting)) as url, client_of(url, pinned) as client:
            with pytest.raises(VerifierError, match=f"a server of {pinned} counts .*doctor"):
                await client.create(TASK)

    asyncio.run(run())


def test_typed_text_is_in_no_message_and_no_log(caplog):
    secret = "s3cret pass"

    async def run():
        def broken(request):
            if "type" in request.query_string:
                request.transport.write(b"HTTP/1.1 2oo OK\r\n\r\n")
            return web.Response(status=500)

        container = Container("g2b", lambda r: broken(r) if "text=" in r.query_string else None)
        async with serving(container) as url, client_of(url, "g2b") as client:
            session = await client.create(TASK)
            with pytest.raises(ActUncertainError) as caught:
                await client.act(session.id, Action("type", text=secret))
            assert any("s3cret" in request for request in container.requests)
            return str(caught.value)

    with caplog.at_level(logging.INFO):
        message = asyncio.run(run())
    assert "s3cret" not in message and "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("dialect", "action"),
    [
        ("g1", Action("type", text="a")),
        ("g2b", Action("drag", x=1, y=2, x2=3, y2=4)),
        ("g2b", Action("scroll", direction="left", amount=5)),
        ("g3", Action("navigate_back")),
    ],
)
def test_action_that_a_dialect_lacks_is_the_policys_error(dialect, action):
    with pytest.raises(ActionError, match=dialect):
        dialects.check_action(dialects.DIALECTS[dialect], action)
    dialects.check_action(dialects.DIALECTS["g1+"], action)


def test_delay_beyond_what_the_proxy_bears_is_refused():
    with pytest.raises(VerifierError, match="at most 25 s"):
        VerifierClient("http://localhost:1/proxy/a", dialect="g3", delay_s=26.0)
    with pytest.raises(VerifierError, match="expected one of g1"):
        VerifierClient("http://localhost:1", dialect="g4")


def play(container, task, say):
    """One whole episode on a container, by an engine that says what it is told to."""
    from uirl_jax.actor.rollout import RolloutSetup, run_episode

    async def run():
        async with serving(container) as url, client_of(url, "g2b") as client:
            return await run_episode(
                task,
                RolloutSetup(
                    client,
                    world.ScriptedEngine(say),
                    world.chat(),
                    world.inputs(),
                    world.RolloutConfig(max_new_tokens=64, max_context_tokens=100_000),
                ),
                seed=0,
                group_id="g",
            )

    return asyncio.run(run())


def test_episode_on_a_container_is_paid_by_the_tasks_own_rule():
    script = [actions.format_action(action, (448, 336)) for action in scripted()]
    trajectory = play(Container("g2b"), TASK, lambda turn: script[turn])
    assert trajectory.stop_reason is StopReason.COMPLETED and trajectory.success
    assert trajectory.reward == pytest.approx(1.0 - 0.01 * len(script))
    assert trajectory.turns[-1].progress["submitted_row_indices"] == [0, 1, 2]
    assert sum(turn.reward for turn in trajectory.turns) == pytest.approx(trajectory.reward)


def test_episode_claim_of_success_pays_nothing():
    trajectory = play(Container("g2b"), TASK, lambda turn: "terminate(success)")
    assert trajectory.stop_reason is StopReason.FAILED and not trajectory.success
    assert trajectory.reward == 0.0


def test_episode_with_an_uncertain_act_goes_on_and_marks_the_turn():
    failures = []

    def second_click_fails(request):
        failures.append("left_click" in request.query_string)
        return web.Response(status=500) if failures.count(True) == 2 and failures[-1] else None

    script = [actions.format_action(action, (448, 336)) for action in scripted()]
    container = Container("g2b", second_click_fails)
    trajectory = play(container, TASK, lambda turn: script[turn])
    assert trajectory.stop_reason is StopReason.COMPLETED and trajectory.success
    errors = [turn.error for turn in trajectory.turns]
    assert [error != "" for error in errors].count(True) == 1
    assert next(filter(None, errors)).startswith("env_error: GET ")


def test_episode_with_acts_that_always_fail_is_an_env_error():
    container = Container("g2b", lambda r: web.Response(status=500) if "x=" in str(r.url) else None)
    trajectory = play(container, TASK, lambda turn: f"click({turn + 1}, 5)")
    assert trajectory.stop_reason is StopReason.ENV_ERROR and trajectory.reward == 0.0
    assert len(container.screen.acts) == 3


# rows, submissions (0-based), wrong ones, turns -> done, reward, success; worked by hand
@pytest.mark.parametrize(
    ("submitted", "wrong", "turns", "expected"),
    [
        ([], 0, 0, (False, 0.0, False)),
        ([0], 0, 10, (False, -0.1, False)),
        ([0, 3], 0, 10, (True, 0.9, True)),
        ([3, 0], 3, 0, (True, 0.25, False)),  # the reference rule calls this success
        ([0, 0, 3], 0, 0, (True, 0.9, False)),
        ([0, 1, 3], 0, 0, (True, 0.75, False)),  # row 1 was not asked for
    ],
)
def test_rule_pays_what_the_task_declares(submitted, wrong, turns, expected):
    rule = DataEntryRule((2, 5), wrong=0.25, duplicate=0.1, turn=0.01)
    progress = {"submitted_row_indices": submitted, "num_incorrect_submissions": wrong}
    verdict = rule.judge(progress, turns)
    assert (verdict.done, verdict.success) == (expected[0], expected[2])
    assert verdict.reward == pytest.approx(expected[1])


def test_rule_of_g2a_knows_counts_only():
    rule = DataEntryRule((2, 5), partial=True, duplicate=0.1)
    verdict = rule.judge({"num_correct_submissions": 1, "num_incorrect_submissions": 0}, 3)
    assert verdict == (False, 0.5, False)
    verdict = rule.judge({"num_correct_submissions": 3, "num_incorrect_submissions": 0}, 3)
    assert verdict == (True, 0.9, False)


@pytest.mark.parametrize(
    "progress",
    [
        {"submitted_row_indices": "0", "num_incorrect_submissions": 0},
        {"submitted_row_indices": [True], "num_incorrect_submissions": 0},
        {"submitted_row_indices": [0.5], "num_incorrect_submissions": 0},
        {"submitted_row_indices": [], "num_incorrect_submissions": -1},
        {"submitted_row_indices": [], "num_incorrect_submissions": None},
        {"num_correct_submissions": True, "num_incorrect_submissions": 0},
    ],
)
def test_rule_with_a_progress_that_is_none_raises(progress):
    with pytest.raises(VerifierError, match="progress has"):
        DataEntryRule((2,)).judge(progress, 0)


def test_find_rule_makes_wrong_submissions_and_repetitions_cost_by_default():
    rule = find_rule(TaskSpec("simple_data_entry", 0, "rows=7"))

    def reward(submitted: list[int], wrong: int) -> float:
        counts = {"submitted_row_indices": submitted, "num_incorrect_submissions": wrong}
        return rule.judge(counts, 10).reward

    assert reward([5], 0) == 1.0
    assert reward([5], 3) == reward([5, 5, 5, 5], 0) == reward([5, 8, 9, 10], 0) == 0.25


def test_data_entry_rule_draws_rows_by_seed_and_refuses_other_words():
    def rows(seed):
        return data_entry_rule(TaskSpec("simple_data_entry", seed, "rows=2-101,count=3")).rows

    assert rows(1) == rows(1) and len({rows(seed) for seed in range(20)}) > 10
    assert all(2 <= row <= 101 for seed in range(50) for row in rows(seed))
    assert data_entry_rule(TaskSpec("simple_data_entry", 3, "rows=7")).rows == (7,)
    for variant in ("rows=1-5", "rows=5-4", "count=0", "count=200", "bonus=1", "wrong=-1", "turn"):
        with pytest.raises(InvalidRequestError, match="variant"):
            find_rule(TaskSpec("simple_data_entry", 0, variant))
    with pytest.raises(InvalidRequestError, match="neither what it asks for"):
        find_rule(TaskSpec("desktop/click_button", 0))


def test_doctor_tells_every_dialect_and_what_to_pin(tmp_path):
    async def run():
        async with (
            serving(Sessions()) as g1,
            serving(Sessions(counting=None)) as silent,
            serving(Container("g2a")) as g2a,
            serving(Container("g2b")) as g2b,
            serving(Proxy({"ab": g2b})) as proxy,
            world.verifier() as ours,
        ):
            urls = [g1, silent, g2a, g2b, f"{proxy}/proxy/ab", ours, f"{proxy}/proxy/no"]
            command = asyncio.to_thread(doctor.main, [*urls, f"--json={tmp_path / 'd.json'}"])
            return urls, await command

    urls, code = asyncio.run(run())
    found = json.loads((tmp_path / "d.json").read_text())
    assert code == 1 and [f["url"] for f in found] == urls
    assert [f["dialect"] for f in found] == ["g1", "g1", "g2a", "g2b", "g3", "g1+", ""]
    assert [f["usable"] for f in found] == [True, False, True, True, True, True, False]
    assert "progress: " in found[1]["fails"][0] and "HTTP 404" in found[6]["fails"][0]
    for finding in found[:6]:
        assert any(word.startswith("screen ") for word in finding["works"])
        assert finding["latency_ms"]["screenshot"] > 0


def test_doctor_leaves_no_session_and_prints_the_config_line(capsys):
    async def run():
        server = Sessions()
        async with serving(server) as url:
            code = await asyncio.to_thread(doctor.main, [url])
        return server, url, code

    server, url, code = asyncio.run(run())
    assert code == 0 and server.infos and not server.open
    out = capsys.readouterr().out
    assert f"pin: cfg.verifier.dialect = 'g1'; cfg.verifier.urls = (\"{url}\",)" in out


@pytest.mark.parametrize("dialect", ["g2a", "g2b"])
@pytest.mark.parametrize("new_start_time", [True, False])
def test_container_restarted_within_an_episode_is_an_error(dialect, new_start_time):
    """It has forgotten a wrong submission: what follows would be paid in full."""

    async def run():
        container = Container(dialect)
        async with serving(container) as url, client_of(url, dialect) as client:
            session = await client.create(TASK)
            container.screen.desktop.judge._num_incorrect = 1
            assert (await client.progress(session.id))["num_incorrect_submissions"] == 1
            fresh = Container(dialect)
            container.screen = fresh.screen
            said = "num_incorrect_submissions fell from 1 to 0"
            if new_start_time:  # and a wrong submission in the new one, so that no count falls
                container._start_time = fresh._start_time
                fresh.screen.desktop.judge._num_incorrect = 1
                said = "was restarted during the episode"
            with pytest.raises(VerifierError, match=said):
                await client.progress(session.id)

    asyncio.run(run())


def test_container_restarted_is_noticed_also_after_another_create():
    """The refused `create` has read the new start time; it is not the session's."""

    async def run():
        container = Container("g2b")
        async with serving(container) as url, client_of(url, "g2b") as client:
            session = await client.create(TASK)
            container._start_time = Container("g2b")._start_time
            with pytest.raises(VerifierError, match="used before"):
                await client.create(TASK)
            with pytest.raises(VerifierError, match="was restarted during the episode"):
                await client.progress(session.id)

    asyncio.run(run())


def test_container_that_an_earlier_process_used_is_refused(tmp_path):
    """Its page may hold half an entry, which no count tells."""

    async def run():
        async with serving(Container("g2b")) as url:
            for number in range(2):  # a client for each process
                used = InStore(open_store(tmp_path))
                async with client_of(url, "g2b", used=used) as client:
                    if number == 0:
                        await client.create(TASK)
                    else:
                        with pytest.raises(VerifierError, match="used before"):
                            await client.create(TASK)

    asyncio.run(run())


def png_header(width_px: int, height_px: int) -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )


def test_doctor_reports_all_servers_though_some_are_hostile(capsys):
    """A screen of 3.6 gigapixels, a name with escape sequences, a port without a server."""
    hostile = Container("g2b")

    async def huge(request):
        return web.Response(body=png_header(60_000, 60_000), content_type="image/png")

    async def loud(request):
        return web.Response(text="\x1b]0;owned\x07\x1b[31mG1+ server")

    hostile.act = huge
    named = Container("g2b")
    named.root = loud

    async def run():
        async with (
            serving(hostile) as first,
            serving(named) as second,
            serving(Container("g2a")) as good,
        ):
            urls = [first, second, "http://127.0.0.1:1", good]
            return await asyncio.to_thread(doctor.main, urls)

    assert asyncio.run(run()) == 1
    out = capsys.readouterr().out
    assert "fails     screenshot: the screenshot at" in out and "Traceback" not in out
    assert "\x1b" not in out and "\x07" not in out and "owned" in out
    assert "cannot connect" in out and out.count("fails") == 3
    assert "cfg.verifier.dialect = 'g2a'" in out


def test_doctor_and_run_send_the_token(tmp_path, monkeypatch):
    """From a file or the environment; without it the server refuses."""
    token = "a-token-of-at-least-32-characters-x"
    file = tmp_path / "token"
    file.write_text(token + "\n")

    async def codes():
        async with serve(token=token) as port:
            url = f"http://127.0.0.1:{port}"
            without = await asyncio.to_thread(doctor.main, [url])
            by_file = await asyncio.to_thread(doctor.main, [url, f"--token-file={file}"])
            monkeypatch.setenv("UIRL_VERIFIER_TOKEN", token)
            by_variable = await asyncio.to_thread(doctor.main, [url])
        return without, by_file, by_variable

    monkeypatch.delenv("UIRL_VERIFIER_TOKEN", raising=False)
    assert asyncio.run(codes()) == (1, 0, 0)


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe", b"a\nb", b"x" * 5000])
def test_token_that_cannot_be_sent_is_refused_without_telling_it(tmp_path, content):
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="expected 1 to 4096 ASCII characters") as caught:
        read_token(file)
    assert "two words" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token(tmp_path / "nowhere")
