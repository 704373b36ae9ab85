"""G2b on a port of its own and G3 in front of G1+ sessions, through the project's own client; the
doctor; how many actions a second a session takes."""

import asyncio
import contextlib

import aiohttp
import numpy as np
import pytest

from tests.chromium import needs_chromium
from uirl_jax.errors import ActUncertainError, ConfigError, VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers import doctor
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.client.transport import ClientLimits
from uirl_jax.verifiers.dialects import DATA_ENTRY
from uirl_jax.verifiers.server import open_session, server, sessions
from uirl_jax.verifiers.server.open_session import ActionRate, ServerLimits
from uirl_jax.verifiers.server.server import serve
from uirl_jax.verifiers.server.session_types import SessionTypes
from uirl_jax.verifiers.tasks import desktop

SHEET = TaskSpec("desktop/data_entry", seed=5, variant="rows=3,columns=1")
# The client's own task on that sheet: all three rows.
TASK = TaskSpec("simple_data_entry", 0, "rows=2-4,count=3", 40)
LIMITS = ClientLimits(backoff_s=0.01, read_timeout_s=10.0, attempt_timeout_s=15.0)
CLICK = {"action_type": "left_click", "x": 5, "y": 6, "delay": 0}


@contextlib.asynccontextmanager
async def container(dialect, task=SHEET, **options):
    """(base URL in the dialect, HTTP session) of one session of the task."""
    single = task if dialect == "g2b" else None
    async with (
        serve(single=single, **options) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        base = f"http://127.0.0.1:{port}"
        if dialect == "g3":
            query = {"type": task.name, "seed": task.seed, "variant": task.variant}
            async with http.post("/session", params=query) as response:
                base += f"/proxy/{(await response.json())['session_ids'][0]}"
        yield base, http


def client_of(base, dialect):
    return VerifierClient(base, dialect=dialect, limits=LIMITS)


@pytest.mark.parametrize("dialect", ["g2b", "g3"])
def test_client_does_the_whole_task_on_the_bundled_desktop(dialect):
    async def run():
        local, rng = desktop.open_session(SHEET), np.random.default_rng(0)
        async with container(dialect) as (base, http), client_of(base, dialect) as client:
            session = await client.create(TASK)
            assert "are to be submitted: 2, 3, 4.\n" in session.instruction
            assert (session.width_px, session.height_px) == (448, 336)
            while not local.progress()["done"]:
                assert (await client.progress(session.id))["done"] is False
                action = desktop.scripted_action(local, rng)
                local.act(action)
                await client.act(session.id, action, "r")
            progress = await client.progress(session.id)
            assert progress["done"] and progress["success"] and progress["reward"] == 1.0
            async with http.get(f"{base}/progress") as response:
                counts = {"submitted_row_indices": [0, 1, 2], "num_incorrect_submissions": 0}
                assert await response.json() == counts  # and neither done nor reward
            await client.delete(session.id)
            with pytest.raises(VerifierError, match="used before, and cannot be reset"):
                await client.create(TASK)

    asyncio.run(run())


@pytest.mark.parametrize("dialect", ["g2b", "g3"])
def test_doctor_tells_the_shape(dialect):
    async def run():
        async with container(dialect) as (base, _):
            return await doctor.examine(base)

    found = asyncio.run(run())
    assert found.dialect == dialect and found.usable, found.fails
    assert {"screenshot", "progress", "screen 448x336"} <= set(found.works)
    assert found.says.startswith("UI Verifiers Session Server")


@pytest.mark.parametrize("dialect", ["g2b", "g3"])
@pytest.mark.parametrize(
    ("method", "path", "query", "status", "word"),
    [
        ("GET", "/", {}, 200, "Start time: "),
        ("GET", "/act", {"action_type": "screenshot"}, 200, ""),
        ("GET", "/act", {**CLICK, "action_type": "drag"}, 422, "is 'drag', known: screenshot, "),
        ("GET", "/act", {"action_type": "tap"}, 422, "action_type is 'tap'"),
        ("GET", "/act", {"action_type": "left_click", "x": 1}, 422, "lacks an argument"),
        ("GET", "/act", {**CLICK, "request_id": "a"}, 422, "unknown parameter 'request_id'"),
        ("GET", "/act", {**CLICK, "delay": 11}, 422, "delay is 11 s"),
        ("GET", "/act", {"action_type": "scroll", "direction": "left"}, 422, "none of up and down"),
        ("POST", "/act", CLICK, 405, "Method Not Allowed"),
        ("DELETE", "/", {}, 405, "Method Not Allowed"),
        ("GET", "/screenshot", {}, 404, "Not Found"),
        ("POST", "/session", {"type": SHEET.name}, 404, "Not Found"),
        ("GET", "/../status", {}, 404, ""),
    ],
)
def test_calls_are_those_of_a_container_and_no_others(dialect, method, path, query, status, word):
    async def run():
        async with (
            container(dialect) as (base, http),
            http.request(method, f"{base}{path}", params=query) as response,
        ):
            # A URL with ".." is resolved before it is sent: the proxy's parent has no such page.
            body = await response.read()
            assert response.status == status and word in body.decode("utf-8", "replace")
            if query.get("action_type") == "screenshot":
                assert response.content_type == "image/png"

    asyncio.run(run())


def test_act_waits_a_second_unless_it_is_told_otherwise(monkeypatch):
    slept_s = []

    async def counted_pause(session, seconds):
        slept_s.append(seconds)

    async def run():
        async with container("g2b") as (base, http):
            monkeypatch.setattr(open_session.OpenSession, "pause", counted_pause)
            for query in ({}, {"delay": 0.25}):
                fields = {"action_type": "mouse_move", "x": 1, "y": 1, **query}
                async with http.get(f"{base}/act", params=fields) as response:
                    assert response.status == 200
            assert slept_s == [1.0, 0.25]

    asyncio.run(run())


def test_proxy_finds_no_pod_after_the_session_ended():
    async def run():
        async with container("g3") as (base, http):
            session = base.replace("/proxy/", "/session/")
            async with http.delete(session) as response:
                assert response.status == 200
            for url in (f"{base}/", f"{base}/act", base.rpartition("/")[0] + "/unknown/progress"):
                async with http.get(url) as response:
                    assert (response.status, await response.text()) == (404, "Pod not found")

    asyncio.run(run())


def test_proxy_gives_up_after_its_time_and_the_session_does_not(monkeypatch):
    monkeypatch.setattr(sessions, "_PROXY_TIMEOUT_S", 0.2)

    async def run():
        async with container("g3") as (base, http):
            async with http.get(f"{base}/act", params={**CLICK, "delay": 5}) as response:
                assert (response.status, await response.text()) == (500, "no answer within 0.2 s")
            monkeypatch.setattr(sessions, "_PROXY_TIMEOUT_S", 30.0)
            async with http.get(f"{base}/act", params=CLICK) as response:
                assert response.status == 200

    asyncio.run(run())


def test_session_that_counts_no_rows_is_refused_as_a_single_one(capsys):
    with pytest.raises(ConfigError, match=r"click_button: counts .*submitted_row_indices"):
        asyncio.run(_serve_single(TaskSpec("desktop/click_button", 0)))
    with pytest.raises(VerifierError, match="did you mean 'desktop/data_entry'"):
        asyncio.run(_serve_single(TaskSpec("desktop/data_enty", 0)))
    with pytest.raises(SystemExit):
        server.main(["--variant=rows=2"])
    assert "those of --single" in capsys.readouterr().err


async def _serve_single(task):
    async with serve(single=task):
        pass


class TestBrowser:
    pytestmark = needs_chromium

    def test_single_data_entry_is_done_by_the_client_in_its_dialect(self):
        from uirl_jax.verifiers.browser.data_entry import make_sheet

        task = TaskSpec(DATA_ENTRY, seed=3, variant="size=small,within=8")
        row = make_sheet(task).wanted[0]

        async def run():
            types, rng = SessionTypes(warm_browsers=0, max_browsers=1), np.random.default_rng(0)
            async with container("g2b", task) as (base, http), client_of(base, "g2b") as client:
                session = await client.create(TaskSpec(DATA_ENTRY, 0, f"rows={row + 2}"))
                assert f"are to be submitted: {row + 2}.\n" in session.instruction
                local = await types.open(task)  # the demonstrator looks into a page of its own
                try:
                    while not (await local.progress())["done"]:
                        action = await local.scripted_action(rng)
                        await local.act(action)
                        await client.act(session.id, action)
                finally:
                    await local.close()
                    await types.close()
                progress = await client.progress(session.id)
                assert progress["success"] and progress["reward"] == 1.0
                async with http.get(f"{base}/progress") as response:
                    counts = {"submitted_row_indices": [row], "num_incorrect_submissions": 0}
                    assert await response.json() == counts

        asyncio.run(run())


def test_bucket_holds_one_second_of_actions(monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(open_session.time, "monotonic", lambda: now_s[0])
    rate = ActionRate(2.0)
    assert [rate.take() for _ in range(3)] == [0.0, 0.0, 0.5]
    now_s[0] += 0.25
    assert rate.take() == 0.25
    now_s[0] += 0.25
    assert [rate.take(), rate.take()] == [0.0, 0.5]
    now_s[0] += 3600.0  # it holds no more than a second's
    assert [rate.take() for _ in range(3)] == [0.0, 0.0, 0.5]
    slow = ActionRate(0.5)
    assert [slow.take(), slow.take()] == [0.0, 2.0]


@pytest.mark.parametrize("shape", ["g1+", "g2b", "g3"])
def test_rate_is_told_with_retry_after_in_every_shape(shape):
    async def run():
        limits = ServerLimits(max_actions_per_s=0.05)
        dialect = "g3" if shape == "g1+" else shape
        async with container(dialect, limits=limits) as (base, http):
            url = base if shape != "g1+" else base.replace("/proxy/", "/session/")
            answers = []
            for _ in range(3):
                async with http.get(f"{url}/act", params=CLICK) as response:
                    answers.append((response.status, response.headers.get("Retry-After")))
            async with http.get(f"{url}/act", params={"action_type": "screenshot"}) as response:
                assert response.status == 200  # looking is not an action
            assert answers == [(200, None), (429, "20"), (429, "20")]

    asyncio.run(run())


def test_client_waits_as_it_is_told_and_its_act_is_applied_once():
    async def run():
        limits = ServerLimits(max_actions_per_s=1.0)
        async with container("g3", limits=limits) as (base, http), client_of(base, "g3") as client:
            session = await client.create(TASK)
            for _ in range(2):
                await client.act(session.id, Action("move", x=5, y=6))
            async with http.get(base.replace("/proxy/", "/session/")) as response:
                assert (await response.json())["action_count"] == 2

    asyncio.run(run())


def test_act_that_was_never_let_through_is_refused_and_not_uncertain():
    async def run():
        limits = ServerLimits(max_actions_per_s=0.05)
        patience = ClientLimits(attempts=2, backoff_s=0.01, max_retry_after_s=0.01)
        async with (
            container("g2b", limits=limits) as (base, _),
            VerifierClient(base, dialect="g2b", limits=patience) as client,
        ):
            session = await client.create(TASK)
            await client.act(session.id, Action("move", x=5, y=6))
            with pytest.raises(VerifierError, match=r"HTTP 429 .* \(2 attempts\)") as caught:
                await client.act(session.id, Action("move", x=5, y=6))
            assert not isinstance(caught.value, ActUncertainError)

    asyncio.run(run())


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_rate_that_is_none_is_refused(rate, capsys):
    assert server.main([f"--max-actions-per-s={rate}"]) == 1
    assert "expected more than 0" in capsys.readouterr().err
