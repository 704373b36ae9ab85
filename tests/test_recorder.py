"""A session that a person plays, and its page over HTTP: what is recorded, and who may speak."""

import asyncio
import contextlib
import dataclasses
import json
import socket
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from tests import actor_world as world
from tests.recorded_rows import InMemory, row, step
from tools.recorder import site
from tools.recorder.episode import Agent, Demonstration, End
from uirl_jax.config import schema
from uirl_jax.demonstrations.scripted import demonstrate
from uirl_jax.errors import ConfigError, VerifierError
from uirl_jax.families.chat import Chat
from uirl_jax.run import client_options
from uirl_jax.shards import reader
from uirl_jax.shards.writer import write_shard
from uirl_jax.types import Action, Judgement, Rule, StopReason, TaskSpec
from uirl_jax.verifiers.client import rules
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.client.transport import ClientLimits
from uirl_jax.verifiers.recorded.sets import RecordedSets
from uirl_jax.verifiers.server.server import serve

TEXT = TaskSpec("desktop/enter_text", seed=3, max_turns=5)
MOUSE = {"kind": "mouse", "button": "left", "clicks": 1, "held_s": 0.1, "x": 9, "y": 8}
MOUSE |= {"x2": 9, "y2": 8}


def scripted(task: TaskSpec):
    """The scripted demonstrator's episode: in place of a person's."""
    return demonstrate(task, world.chat(), world.inputs(), np.random.default_rng(0))


def agent(talk: Chat | None = None, **changes) -> Agent:
    return dataclasses.replace(
        Agent(talk or world.chat(), world.inputs(), 1024, 64, 1.0), **changes
    )


@contextlib.asynccontextmanager
async def recording(
    out: Path,
    task: TaskSpec = TEXT,
    *,
    whom: Agent | None = None,
    episodes=1,
    recorded: RecordedSets | None = None,
    **options,
):
    """(recorder, http session on its page, client of the verifier). Args: options: the client's."""

    def save(trajectory):
        path = out / f"{trajectory.episode_id}.tfrecord"
        write_shard(path, [trajectory], base_hash="", layout=world.layout())
        return path

    async with (
        serve(recorded=recorded) as port,
        VerifierClient(f"http://127.0.0.1:{port}", **options) as client,
    ):
        recorder = site.Recorder(
            lambda one: Demonstration.open(client, one, whom or agent()),
            lambda instance: dataclasses.replace(task, seed=task.seed + instance),
            save,
            episodes,
        )
        await recorder.open()
        async with site.serve(recorder) as address, aiohttp.ClientSession(address) as http:
            yield recorder, http, client
        await recorder.close()


async def do(http, **gesture):
    async with http.get("state") as answer:
        screen = (await answer.json())["screen"]
    async with http.post("gesture", json={"screen": screen, **gesture}) as answer:
        assert answer.status == 200
        return await answer.json()


async def end(http, how):
    async with http.post("end", json={"how": how}) as answer:
        return await answer.json()


def as_gesture(action: Action) -> dict:
    if action.kind == "click":
        return {**MOUSE, "x": action.x, "y": action.y, "x2": action.x, "y2": action.y}
    assert action.kind == "type", action
    return {"kind": "text", "text": action.text}


def test_what_is_shown_on_the_page_is_the_record_that_a_script_would_have_made(tmp_path):
    expected = scripted(TEXT)

    async def run():
        async with recording(tmp_path) as (recorder, http, _):
            for turn in expected.turns:
                state = await do(http, **as_gesture(turn.action))
                assert state["message"] == ""
            assert state["solved"] and state["ended"] and state["reward"] == 1.0
            refused = await do(http, **MOUSE)
            assert "has ended" in refused["message"]
            state = await end(http, "save")
            assert state["finished"] and recorder.finished.is_set()

    asyncio.run(run())
    (path,) = tmp_path.iterdir()
    header, (got,) = reader.read_shard(path)
    assert (header.lowest_version, header.highest_version, header.base_hash) == (-1, -1, "")
    assert (got.success, got.reward, got.stop_reason) == (True, 1.0, StopReason.COMPLETED)
    assert (got.task, got.instruction) == (TEXT, expected.instruction)
    assert got.images == expected.images and len(got.turns) == len(expected.turns)
    for ours, theirs in zip(got.turns, expected.turns, strict=True):
        assert (ours.text, ours.action, ours.image_keys) == (
            theirs.text,
            theirs.action,
            theirs.image_keys,
        )
        np.testing.assert_array_equal(ours.context_ids, theirs.context_ids)
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        assert (ours.policy_versions == -1).all() and (ours.logprobs == 0).all()


def test_page_is_for_nobody_else(tmp_path):
    async def run():
        async with recording(tmp_path) as (recorder, http, _):
            state = recorder.state()
            base = str(http._base_url)
            body = {"screen": state["screen"], **MOUSE}
            other = base.replace("127.0.0.1", "localhost")
            asked = [
                await http.get(base[:-3] + "xx/state"),  # another token
                await http.get("state", headers={"Host": "evil.example"}),
                await http.get("state", headers={"Host": "127.0.0.1:"}),
                await http.get("state", headers={"Host": "[:x"}),
                await http.post("gesture", json=body, headers={"Origin": "http://evil.example"}),
                await http.post("gesture", data=json.dumps(body)),
                await http.post("gesture", json={"text": "x" * 70_000}),
                await http.post(
                    "gesture", data=b"[1", headers={"Content-Type": "application/json"}
                ),
                await http.get(other + "state"),
                await http.get(""),
            ]
            assert [one.status for one in asked] == [
                *(404, 404, 200, 404),
                *(403, 415, 413, 400, 200, 200),
            ]
            assert "default-src 'none'" in asked[-1].headers["Content-Security-Policy"]
            assert recorder.state() == state  # nothing was done

    asyncio.run(run())


def test_task_that_the_verifier_does_not_have_is_told(tmp_path):
    async def run():
        async with recording(tmp_path, TaskSpec("desktop/click_buton", seed=0)):
            pass

    with pytest.raises(VerifierError, match="did you mean 'desktop/click_button'"):
        asyncio.run(run())


def test_port_that_is_in_use_is_told(tmp_path):
    async def run(port):
        async with recording(tmp_path) as (recorder, _, _), site.serve(recorder, port):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port={port}: the port is in use"):
            asyncio.run(run(port))


def test_gesture_on_an_earlier_screen_is_not_done(tmp_path):
    async def run():
        async with recording(tmp_path) as (recorder, http, _):
            shown = recorder.state()["screen"]
            await do(http, **MOUSE)
            async with http.post("gesture", json={"screen": shown, **MOUSE}) as answer:
                state = await answer.json()
            assert "earlier screen" in state["message"] and len(state["turns"]) == 1

    asyncio.run(run())


def test_start_over_and_skip_drop_what_was_done(tmp_path):
    async def run():
        async with recording(tmp_path) as (_, http, client):
            assert "nothing was done" in (await end(http, "save"))["message"]
            await do(http, **MOUSE)
            state = await end(http, "again")
            assert (state["seed"], state["turns"]) == (TEXT.seed, [])
            await do(http, **MOUSE)
            state = await end(http, "skip")
            assert (state["seed"], state["turns"]) == (TEXT.seed + 1, [])
            assert "none of save" in (await end(http, "burn"))["message"]
            assert len(client._open) == 1  # the others were deleted

    asyncio.run(run())
    assert not list(tmp_path.iterdir())


def test_session_that_goes_away_leaves_what_was_recorded(tmp_path):
    async def run():
        async with recording(tmp_path, episodes=2) as (recorder, http, client):
            await do(http, **MOUSE)
            session_id = recorder.demonstration.session.id
            await client.transport.send(  # by somebody else
                "DELETE",
                ("session", session_id),
                content_types=frozenset({"application/json"}),
                max_bytes=1000,
                again_if="refused",
            )
            state = await do(http, **MOUSE)
            assert "session is lost" in state["message"] and state["ended"]
            assert len(state["turns"]) == 1
            state = await end(http, "save")
            assert state["open"] and state["turns"] == [] and len(state["saved"]) == 1

    asyncio.run(run())
    (path,) = tmp_path.iterdir()
    _, (got,) = reader.read_shard(path)
    assert (got.stop_reason, got.success, len(got.turns)) == (StopReason.ENV_ERROR, False, 1)


@pytest.mark.parametrize(
    ("words", "task", "ended", "stop_reason"),
    [
        ("terminate(success)", TEXT, End.TERMINATED, StopReason.FAILED),
        ("wait(0)", dataclasses.replace(TEXT, max_turns=1), End.MAX_TURNS, StopReason.MAX_TURNS),
        ("wait(0)", TEXT, End.NOT_YET, StopReason.MAX_TURNS),
    ],
)
def test_episode_that_is_not_solved_says_how_it_ended(tmp_path, words, task, ended, stop_reason):
    async def run():
        async with recording(tmp_path, task) as (recorder, http, _):
            state = await do(http, kind="words", text=words)
            assert state["turns"] == [words] and not state["solved"]
            assert recorder.demonstration.ended is ended
            return recorder.demonstration.trajectory()

    got = asyncio.run(run())
    assert (got.stop_reason, got.success) == (stop_reason, False)


def test_limits_of_the_agent_are_those_of_the_person(tmp_path):
    first = len(scripted(TEXT).turns[0].context_ids)

    async def run():
        async with recording(tmp_path, whom=agent(max_new_tokens=4)) as (_, http, _):
            state = await do(http, kind="text", text="much more than four tokens")
            assert "the agent says at most 4" in state["message"] and not state["turns"]
        async with recording(tmp_path, whom=agent(max_context_tokens=first)) as (_, http, _):
            state = await do(http, **MOUSE)
            assert f"at most {first} fit" in state["message"] and not state["ended"]

    asyncio.run(run())


def test_rule_of_the_config_judges_what_the_person_does(tmp_path):
    """The server pays for a click on the button; this rule pays for the second turn."""
    task = TaskSpec("desktop/click_button", 0, "misses=9", 4)

    def second_turn(task):
        return Rule("Click twice.", lambda _, turns: Judgement(turns == 2, 0.5, turns == 2))

    def find(task):
        return rules.own_rule(task, "tests:second_turn", second_turn)

    async def run():
        async with recording(tmp_path, task, find_own_rule=find) as (recorder, http, _):
            assert not (await do(http, **MOUSE))["solved"]
            assert (await do(http, **MOUSE))["solved"]
            return recorder.demonstration.trajectory()

    got = asyncio.run(run())
    assert (got.instruction, got.success, got.reward) == ("Click twice.", True, 0.5)


def test_rule_that_raises_ends_the_episode_and_what_was_recorded_can_be_saved(tmp_path):
    """The action was done: the next gesture must not be recorded on the screenshot before it."""

    def find(task):
        def judge(progress, turns):
            return Judgement(False, 1.0 / (2 - turns), False)  # raises after the second action

        def own(task):
            if task.seed > TEXT.seed:
                raise LookupError("only one instance")
            return Rule("Type.", judge)

        return rules.own_rule(task, "tests:own", own)

    async def run():
        async with recording(tmp_path, find_own_rule=find, episodes=2) as (recorder, http, _):
            assert not (await do(http, **MOUSE))["ended"]
            state = await do(http, **MOUSE)
            assert recorder.demonstration.ended is End.LOST and len(state["turns"]) == 1
            assert "tests:own" in state["message"] and "ZeroDivisionError" in state["message"]
            assert "has ended" in (await do(http, **MOUSE))["message"]
            state = await end(http, "save")
            assert "no session: tests:own" in state["message"] and len(state["saved"]) == 1

    asyncio.run(run())
    (path,) = tmp_path.iterdir()
    _, (got,) = reader.read_shard(path)
    assert (got.stop_reason, len(got.turns)) == (StopReason.ENV_ERROR, 1)


@pytest.mark.parametrize(
    "right", [Action("answer", text="42"), Action("terminate", text="success")]
)
def test_recorded_step_that_is_an_answer_or_the_end_is_judged(tmp_path, right):
    sets = RecordedSets({"made": InMemory([row(0, [step(right)])])})

    async def run():
        task = TaskSpec("recorded/made", seed=0, max_turns=2)
        async with recording(tmp_path, task, recorded=sets) as (recorder, http, _):
            words = {"answer": 'answer("42")', "terminate": "terminate(success)"}[right.kind]
            state = await do(http, kind="words", text=words)
            assert state["solved"] and state["ended"], state
            return recorder.demonstration.trajectory()

    assert asyncio.run(run()).success


def test_command_plays_with_what_the_config_says_of_its_verifiers(tmp_path, monkeypatch):
    monkeypatch.delenv("UIRL_VERIFIER_TOKEN", raising=False)
    (tmp_path / "token").write_text("t" * 40)
    urls = ("http://127.0.0.1:1",)
    cfg = schema.RunConfig(
        model=schema.ModelConfig(path="m"),
        tasks=(schema.TaskConfig("x", rule="examples.own_code.rules:first_rows"),),
        learner=schema.LearnerConfig(steps=1),
        verifier=schema.VerifierConfig(
            urls=urls,
            action_delay_s=0.5,
            token_file=str(tmp_path / "token"),
            limits=ClientLimits(attempts=7),
        ),
    )
    options = client_options(cfg, urls)
    assert (options["delay_s"], options["limits"].attempts) == (0.5, 7)
    assert "first 2 rows" in options["find_own_rule"](TaskSpec("x", 0, "2")).instruction
    assert options["token"] == "t" * 40
    assert client_options(cfg, ("http://127.0.0.1:2",))["token"] is None
    monkeypatch.setenv("UIRL_VERIFIER_TOKEN", "e" * 40)
    assert client_options(cfg, ("http://127.0.0.1:2",))["token"] == "e" * 40
    assert client_options(cfg, ())["token"] is None  # the server that it starts


def test_drag_of_a_format_that_starts_at_the_cursor_moves_there_first(tmp_path):
    async def run():
        whom = agent(world.talking("computer_use"), max_context_tokens=100_000, max_new_tokens=512)
        async with recording(tmp_path, whom=whom) as (recorder, http, _):
            state = await do(http, **(MOUSE | {"x2": 40}))
            assert len(state["turns"]) == 2, state
            return [turn.action for turn in recorder.demonstration.trajectory().turns]

    move, drag = asyncio.run(run())
    assert (move.kind, drag.kind) == ("move", "drag")
    assert (drag.x, drag.y) == (move.x, move.y) == (10, 8)  # its image has half the pixels: 9 is 10
