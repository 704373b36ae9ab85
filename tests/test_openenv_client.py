"""The client of OpenEnv servers: whole episodes, and servers that break each rule."""

import asyncio
import base64
import io
import json
import types

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image

from tests import actor_world as world
from tests import openenv_world
from tests.openenv_world import TASK, error, observation, serving
from tests.recorded_rows import InMemory, row, step
from uirl_jax import actions
from uirl_jax.actor.rollout import RolloutConfig, RolloutSetup, run_episode
from uirl_jax.config.schema import VerifierConfig
from uirl_jax.errors import (
    ActionError,
    ActUncertainError,
    InvalidRequestError,
    RequestRefusedError,
    UserCodeError,
    VerifierError,
    VerifierFullError,
)
from uirl_jax.run import Run
from uirl_jax.types import Action, Judgement, Rule, StopReason, TaskSpec
from uirl_jax.verifiers import doctor
from uirl_jax.verifiers.client import openenv_actions, openenv_answers
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.client.openenv import OpenEnvClient
from uirl_jax.verifiers.client.transport import ClientLimits
from uirl_jax.verifiers.recorded.sets import RecordedSets
from uirl_jax.verifiers.server.server import serve
from uirl_jax.verifiers.tasks import desktop

LIMITS = ClientLimits(
    attempts=2,
    backoff_s=0.01,
    attempt_timeout_s=5.0,
    max_image_bytes=1_000_000,
    max_json_bytes=20_000,
)
CLICK = Action("click", x=3, y=2)
BUTTON = TaskSpec("desktop/click_button", seed=3, max_turns=1)


def kind_of(schema):
    return openenv_actions.find_kind(schema["action"], "here")


# --------------------------------------------------------------------------------- connecting


def test_a_redirect_of_the_socket_is_not_followed():
    async def run():
        asked = []

        async def elsewhere(request: web.Request) -> web.StreamResponse:
            asked.append(request.path)
            raise web.HTTPFound("/secret")

        app = web.Application()
        app.add_routes(
            [
                web.get("/schema", openenv_world.always(openenv_world.BROWSERGYM)),
                web.get("/{path:ws|secret}", elsewhere),
            ]
        )
        async with (
            TestServer(app) as server,
            OpenEnvClient(str(server.make_url("")), limits=LIMITS) as client,
        ):
            with pytest.raises(InvalidRequestError, match="HTTP 302, redirects are not followed"):
                await client.create(TASK)
        assert asked == ["/ws"]

    asyncio.run(run())


# ----------------------------------------------------------------------------------- actions


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (CLICK, "mouse_click(3, 2, 'left')"),
        (Action("right_click", x=3, y=2), "mouse_click(3, 2, 'right')"),
        (Action("double_click", x=3, y=2), "mouse_dblclick(3, 2)"),
        (Action("move", x=3, y=2), "mouse_move(3, 2)"),
        (Action("drag", x=3, y=2, x2=5, y2=7), "mouse_drag_and_drop(3, 2, 5, 7)"),
        (Action("scroll", direction="up", amount=300), "scroll_at(11, 12, 0, -300)"),
        (Action("scroll", direction="right", amount=9, x=3, y=2), "scroll_at(3, 2, 9, 0)"),
        (Action("type", text="it's \"\n"), "keyboard_type('it\\'s \"\\n')"),
        (Action("keys", keys="ctrl+shift+a"), "keyboard_press('Control+Shift+a')"),
        (Action("keys", keys="pagedown"), "keyboard_press('PageDown')"),
        (Action("wait", seconds=0.25), "noop(250)"),
        (Action("navigate_back"), "go_back()"),
    ],
)
def test_browsergym_action_is_its_string(action, text):
    kind = kind_of(openenv_world.BROWSERGYM)
    openenv_actions.check_action(kind, action)
    place = (action.x, action.y) if action.x is not None else (11, 12)
    assert kind.payload(action, place, 0.0) == {"action_str": text}


def test_every_key_of_an_action_has_a_name_in_browsergym():
    kind = kind_of(openenv_world.BROWSERGYM)
    for name in actions.NAMED_KEYS:
        text = kind.payload(Action("keys", keys=name), (0, 0), 0.0)["action_str"]
        assert text[len("keyboard_press('")].isupper(), text


def test_action_that_an_environment_lacks_is_the_policys_error():
    with pytest.raises(ActionError, match=r"browsergym.* has no triple_click"):
        openenv_actions.check_action(
            kind_of(openenv_world.BROWSERGYM), Action("triple_click", x=1, y=1)
        )
    with pytest.raises(ActionError, match=r"openapp.* has no click.*by their id"):
        openenv_actions.check_action(kind_of(openenv_world.OPENAPP), CLICK)
    assert kind_of(openenv_world.OWN).payload(CLICK, (0, 0), 0.5) == {
        "action_type": "left_click",
        "x": 3,
        "y": 2,
        "delay": 0.5,
    }
    with pytest.raises(VerifierError, match="has the fields message; known are action_str"):
        openenv_actions.find_kind({"properties": {"message": {}, "metadata": {}}}, "here")


# ------------------------------------------------------------------------- hostile servers


def scripted(*answers, reset=None):
    """Answers a reset rightly, a state rightly, and steps with what is given, in turn."""
    left = list(answers)

    async def answer(message, socket):
        if message["type"] == "state":
            await socket.send_json({"type": "state", "data": openenv_world.STATE})
            return
        said = reset or observation()
        if message["type"] == "step" and not _is_trial(message):
            said = left.pop(0)
        elif message["type"] == "step":
            said = observation()
        if callable(said):
            await said(socket)
        elif isinstance(said, str):
            await socket.send_str(said)
        else:
            await socket.send_json(said)

    return answer


def _is_trial(message):
    return message["data"].get("action_str") == "mouse_move(1, 1)"


def test_picture_does_not_count_as_json():
    noise = np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)
    png = io.BytesIO()
    Image.fromarray(noise).save(png, "PNG")
    picture = base64.b64encode(png.getvalue()).decode()
    assert len(picture) > LIMITS.max_json_bytes
    for screenshot in (picture, noise.tolist()):
        data = json.dumps(observation(screenshot=screenshot, metadata=[0] * 6_000)).encode()
        assert openenv_answers.read_observation(data, LIMITS, "here").size_px == (90, 90)


def with_client(answer, use, *, schema=openenv_world.BROWSERGYM, limits=LIMITS, **options):
    async def run():
        async with (
            serving(answer, schema) as url,
            OpenEnvClient(url, limits=limits, **options) as client,
        ):
            return await use(client)

    return asyncio.run(run())


async def _create(client):
    return await client.create(TASK)


async def _close(socket):
    await socket.close()


async def _bytes(socket):
    await socket.send_bytes(b"\x00")


async def _huge(socket):
    await socket.send_str("x" * 2_000_000)


async def _silent(socket):
    await asyncio.sleep(0)


def changed(**fields):
    message = observation()
    message["data"] |= fields
    return message


NO_OBSERVATION = {"type": "observation", "data": {"observation": [], "reward": 0, "done": False}}
BROKEN = {
    "not JSON": ("{", "is not JSON"),
    "an array": ("[]", "expected an object"),
    "a deep one": ("[" * 5000, "nested deeper"),
    "NaN": ('{"type": "observation", "data": {"reward": NaN}}', "NaN"),
    "no data": ({"type": "observation"}, "no `data`"),
    "another type": ({"type": "state", "data": {}}, "expected 'observation'"),
    "no observation": (NO_OBSERVATION, "no `observation`"),
    "done is a word": (changed(done="yes"), "done is not a boolean"),
    "done is missing": (changed(done=None), "done is not a boolean"),
    "reward is text": (changed(reward="1"), "reward is a str"),
    "reward is endless": ('{"type": "observation", "data": {"reward": 1e999}}', "infinite"),
    "a picture that is none": (observation(screenshot="AAAA"), "not a readable PNG"),
    "not base64": (observation(screenshot="!!"), "not base64"),
    "a number as picture": (observation(screenshot=7), "expected base64 or rows"),
    "rows that differ": (observation(screenshot=[[[1, 2, 3]], [[1, 2, 3]] * 2]), "rows differ"),
    "a flat list": (observation(screenshot=[1, 2, 3]), "not one of rows of pixels"),
    "another size": (observation(size=(9, 6)), "has 9x6 pixels, the session began with 8x6"),
    "no picture": (
        observation(screenshot=None, last_action_error=True, error="page crashed"),
        "no screenshot .page crashed",
    ),
    "it failed": (error("EXECUTION_ERROR"), "EXECUTION_ERROR: it failed"),
    "an unknown code": (error("ODD\nONE"), "ODD\\?ONE"),
    "it hangs up": (_close, "closed the connection"),
    "bytes": (_bytes, "expected text"),
    "much beside pixels": (observation(metadata=[0] * 9_000), "verifier.limits.max_json_bytes"),
    "much beside base64": (
        observation(screenshot="A" * 30_000, metadata=[0] * 9_000),
        r"of 27\d\d\d bytes without its screenshot, at most 20000",
    ),
    "too long": (_huge, "verifier.limits.max_image_bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_step_with_a_faulty_answer_is_uncertain_and_the_screen_unknown(name):
    said, reason = BROKEN[name]

    async def use(client):
        session = await client.create(TASK)
        with pytest.raises(ActUncertainError, match=reason) as caught:
            await client.act(session.id, CLICK)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 800
        with pytest.raises(VerifierError, match="its screen is not known since"):
            await client.screenshot(session.id)
        await client.delete(session.id)

    with_client(scripted(said), use)


@pytest.mark.parametrize("name", [name for name in BROKEN if name not in ("another size",)])
def test_reset_with_a_faulty_answer_opens_no_session(name):
    said, _ = BROKEN[name]

    async def use(client):
        with pytest.raises(VerifierError):
            await client.create(TASK)
        assert not client._open

    with_client(scripted(reset=said), use)


def test_silent_server_is_left_in_time_and_its_late_answer_is_not_taken():
    limits = ClientLimits(attempts=1, attempt_timeout_s=0.2)

    async def use(client):
        session = await client.create(TASK)
        with pytest.raises(ActUncertainError, match=r"no answer within 0.2 s"):
            await client.act(session.id, CLICK)
        with pytest.raises(ActUncertainError, match=r"no answer within 0.2 s"):
            await client.act(session.id, CLICK)

    with_client(scripted(_silent, observation()), use, limits=limits)


def test_answers_that_nobody_asked_for_are_not_taken_for_the_next_one():
    async def twice(socket):
        await socket.send_json(observation())
        await socket.send_json(observation(reward=1.0, done=True))

    async def use(client):
        session = await client.create(TASK)
        await client.act(session.id, CLICK)
        await asyncio.sleep(0.05)
        with pytest.raises(ActUncertainError, match="nobody asked for"):
            await client.act(session.id, CLICK)
        assert (await client.progress(session.id))["reward"] == 0.0

    with_client(scripted(twice, observation()), use)


def test_server_that_pings_keeps_a_session_whose_policy_thinks_for_long():
    async def run():
        answer = scripted(observation(reward=1.0, done=True))
        async with serving(answer, heartbeat_s=0.4) as url, OpenEnvClient(url) as client:
            session = await client.create(TASK)
            await asyncio.sleep(1.2)
            await client.act(session.id, CLICK)
            assert (await client.progress(session.id))["done"]

    asyncio.run(run())


def test_refusals_are_told_apart():
    async def full(client):
        with pytest.raises(VerifierFullError, match="CAPACITY_REACHED") as caught:
            await client.create(TASK)
        assert caught.value.capacity == 4

    with_client(scripted(reset=error("CAPACITY_REACHED", max_sessions=4)), full)

    async def invalid(client):
        with pytest.raises(InvalidRequestError, match="VALIDATION_ERROR"):
            await client.create(TASK)

    with_client(scripted(reset=error("VALIDATION_ERROR", errors=[{"loc": ["seed"]}])), invalid)

    async def refused(client):
        session = await client.create(TASK)
        with pytest.raises(RequestRefusedError):
            await client.act(session.id, CLICK)
        await client.act(session.id, CLICK)  # the session goes on
        assert (await client.progress(session.id))["reward"] == 0.5
        await client.act(session.id, CLICK)
        progress = await client.progress(session.id)
        assert (progress["reward"], progress["step_reward"]) == (0.75, 0.25)  # a step's add up

    answers = (error("VALIDATION_ERROR"), observation(reward=0.5), observation(reward=0.25))
    with_client(scripted(*answers), refused)


def test_full_server_that_says_so_before_it_is_asked():
    async def run():
        async def ws(request):
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            await socket.send_json(error("CAPACITY_REACHED", max_sessions=1))
            await socket.close()
            return socket

        app = web.Application()
        schema = openenv_world.always(openenv_world.OWN)
        app.add_routes([web.get("/ws", ws), web.get("/schema", schema)])
        runner = web.AppRunner(app, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with OpenEnvClient(url, limits=LIMITS) as client:
                with pytest.raises(VerifierFullError):
                    await client.create(BUTTON)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_server_that_is_none_or_of_another_kind():
    async def run():
        async with OpenEnvClient("http://127.0.0.1:9", limits=LIMITS) as client:
            with pytest.raises(RequestRefusedError, match="cannot connect"):
                await client.create(TASK)

    asyncio.run(run())
    for schema in ([], {}, {"action": 5}, {"action": {"properties": {"message": {}}}}):
        with pytest.raises(VerifierError):
            with_client(scripted(), _create, schema=schema)
    with pytest.raises(VerifierError, match=r"client of its own \(client\.openenv\)"):
        VerifierClient("http://localhost:1", dialect="openenv")


def test_task_that_the_server_does_not_play_is_refused():
    async def use(client):
        with pytest.raises(InvalidRequestError, match=r"plays 'browsergym/miniwob.click-test'"):
            await client.create(TaskSpec("browsergym/miniwob.click-link", 1))
        with pytest.raises(InvalidRequestError, match="this environment has none"):
            await client.create(TaskSpec(TASK.name, 1, variant="scale=2"))

    with_client(scripted(), use)


def test_renderer_that_is_no_fingerprint_is_refused():
    with pytest.raises(VerifierError, match=r"renderer is '\.\./x'"):
        with_client(scripted(reset=observation(renderer="../x")), _create)


def test_observation_without_screen_or_goal_is_refused():
    async def blind(client):
        with pytest.raises(InvalidRequestError, match=r"no `screenshot`.*docs/openenv.md"):
            await client.create(TaskSpec("openapp/task", 1))

    answer = scripted(reset=observation(screenshot=None))
    with_client(answer, blind, schema=openenv_world.OPENAPP)

    async def aimless(client):
        with pytest.raises(UserCodeError, match="a rule with an instruction"):
            await client.create(TASK)

    with_client(scripted(reset=observation(goal="")), aimless)


def test_openapp_is_played_by_its_own_actions_and_a_rule_of_the_users():
    sent = []
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6)).save(buffer, "PNG")
    screen = base64.b64encode(buffer.getvalue()).decode()

    async def answer(message, socket):
        sent.append(message)
        fields = {"screenshot": screen, "goal": "", "app_state": {"todo": len(sent)}}
        told = "Scroll failed" if len(sent) > 2 else None
        await socket.send_json(observation(reward=-0.1, last_action_error=told, **fields))

    def judge(progress, turns):
        done = progress["app_state"]["todo"] == 3
        return Judgement(done=done, reward=float(done), success=done)

    async def use(client):
        session = await client.create(TaskSpec("openapp/task", 1))
        assert (session.instruction, session.judged_here) == ("Do it.", True)
        assert await client.screenshot(session.id) == buffer.getvalue()
        await client.act(session.id, Action("type", text="milk"))
        await client.act(session.id, Action("scroll", direction="down", amount=10))
        progress = await client.progress(session.id)
        assert progress["last_action_error"] == "Scroll failed"
        assert progress["done"] is True and progress["reward"] == 1.0 and progress["steps"] == 2

    rule = Rule("Do it.", judge)
    with_client(answer, use, schema=openenv_world.OPENAPP, find_own_rule=lambda task: rule)
    assert [message["data"] for message in sent[1:]] == [
        {"action_type": "send_keys", "text": "milk"},
        {"action_type": "scroll", "direction": "down"},
    ]


# ----------------------------------------------------------------------- whole episodes


async def _play(client, task, say, max_turns=4):
    task = TaskSpec(task.name, task.seed, task.variant, max_turns)
    setup = RolloutSetup(
        client, world.ScriptedEngine(say), world.chat(), world.inputs(), RolloutConfig()
    )
    return await run_episode(task, setup, seed=0, group_id="g")


def demonstration(task):
    session = desktop.open_session(task)
    action = desktop.scripted_action(session, np.random.default_rng(0), 1.0)
    return actions.format_action(action, (session.width_px, session.height_px))


def test_episode_on_browsergyms_pixels_is_solved_and_recorded():
    environment = openenv_world.FakeBrowserGym(BUTTON)
    trajectory = with_client(
        environment, lambda client: _play(client, TASK, lambda turn: demonstration(BUTTON))
    )
    assert trajectory.stop_reason is StopReason.COMPLETED and trajectory.success
    assert trajectory.instruction == desktop.open_session(BUTTON).instruction
    (turn,) = trajectory.turns
    assert turn.reward == 1.0 and turn.progress["last_action_error"] == ""
    assert environment.actions[0] == "mouse_move(1, 1)"  # the trial, and then the click
    assert environment.actions[1].startswith("mouse_click(")
    image = Image.open(io.BytesIO(trajectory.images[turn.image_keys[0]]))
    expected = desktop.open_session(BUTTON).screenshot().convert("RGB")
    assert np.array_equal(np.asarray(image), np.asarray(expected))


def test_server_without_coordinates_ends_the_episode_before_a_turn_and_says_why():
    reasons = []

    async def use(client):
        setup = RolloutSetup(
            client, world.ScriptedEngine(str), world.chat(), world.inputs(), RolloutConfig()
        )
        return await run_episode(TASK, setup, seed=0, group_id="g", on_mismatch=reasons.append)

    environment = openenv_world.FakeBrowserGym(BUTTON, coordinates=False)
    trajectory = with_client(environment, use)
    assert trajectory.stop_reason is StopReason.ENV_ERROR and not trajectory.turns
    assert "action set has no coordinates" in reasons[0] and "docs/openenv.md" in reasons[0]


def test_episode_with_a_dropped_connection_is_env_error_and_keeps_its_turns():
    answer = scripted(observation(size=(224, 168)), _close, reset=observation(size=(224, 168)))
    trajectory = with_client(answer, lambda client: _play(client, TASK, lambda _: "click(60,40)"))
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert trajectory.reward == 0.0 and len(trajectory.turns) == 2


def test_episode_tells_what_the_environment_could_not_do_and_goes_on():
    metadata = {"browsergym_obs": {"last_action_error": "TimeoutError: 500ms"}}
    failed = observation(size=(224, 168), last_action_error=True, metadata=metadata)
    solved = observation(size=(224, 168), reward=1.0, done=True)
    answer = scripted(failed, solved, reset=observation(size=(224, 168)))
    trajectory = with_client(answer, lambda client: _play(client, TASK, lambda _: "click(60,40)"))
    assert trajectory.stop_reason is StopReason.COMPLETED
    errors = [turn.progress["last_action_error"] for turn in trajectory.turns]
    assert errors == ["TimeoutError: 500ms", ""]


def test_episode_through_the_door_equals_one_in_our_own_protocol():
    async def run():
        async with serve() as port:
            url = f"http://127.0.0.1:{port}"
            played = []
            for client in (VerifierClient(url), OpenEnvClient(url)):
                async with client:
                    for task in (BUTTON, TaskSpec("desktop/enter_text", 3)):
                        say = (lambda text: lambda turn: text)(demonstration(BUTTON))
                        played.append(await _play(client, task, say))
            return played

    *ours, button, text = asyncio.run(run())
    for one, other in zip(ours, (button, text), strict=True):
        assert one.instruction == other.instruction and one.images == other.images
        assert (one.reward, one.stop_reason) == (other.reward, other.stop_reason)
        assert len(one.turns) == len(other.turns)


def test_recorded_end_through_the_door_is_judged_and_a_format_error_keeps_its_labels():
    end = step(Action("terminate", text="success"))
    sets = RecordedSets({"made": InMemory([row(0, [end], labels={"platform": "web"})])})

    async def run():
        async with (
            serve(recorded=sets) as port,
            OpenEnvClient(f"http://127.0.0.1:{port}") as client,
        ):
            made = TaskSpec("recorded/made", 0)
            right = await _play(client, made, lambda turn: 'terminate("success")')
            broken = await _play(client, made, lambda turn: "no action")
            session = await client.create(BUTTON)
            with pytest.raises(VerifierError, match="'terminate' cannot be sent"):
                await client.act(session.id, Action("terminate", text="success"))
            return right, broken

    right, broken = asyncio.run(run())
    assert right.success and right.reward == 1.0
    assert broken.stop_reason is StopReason.FORMAT_ERROR
    assert broken.turns[0].progress["labels"] == {"platform": "web"}


def test_config_of_the_dialect_makes_this_client(tmp_path, monkeypatch):
    verifier = VerifierConfig(urls=("http://127.0.0.1:9",), dialect="openenv")
    run = types.SimpleNamespace(cfg=types.SimpleNamespace(verifier=verifier, rules={}))
    monkeypatch.setenv("UIRL_VERIFIER_TOKEN", "t" * 40)
    client = Run.make_client(run, "http://127.0.0.1:9", "actor", RecordedSets({}))
    assert isinstance(client, OpenEnvClient) and client.dialect.has_sessions
    assert client.transport.headers == {"Authorization": "Bearer " + "t" * 40}


# ------------------------------------------------------------------------------- doctor


def test_doctor_names_an_openenv_server_and_its_environment(capsys):
    async def run():
        async with serving(openenv_world.FakeBrowserGym(TaskSpec(BUTTON.name, 0))) as url:
            return await asyncio.to_thread(doctor.main, [url])

    assert asyncio.run(run()) == 0
    printed = capsys.readouterr().out
    assert "dialect   openenv  (OpenEnv: Fake: an environment of a test)" in printed
    assert "environment browsergym, task browsergym/miniwob.click-test" in printed
    assert "cfg.verifier.dialect = 'openenv'" in printed


def test_doctor_says_why_an_environment_cannot_be_played(capsys):
    async def run():
        schema = {"action": {"properties": {"tool_name": {}, "arguments": {}}}}
        async with serving(scripted(), schema) as url:
            return await asyncio.to_thread(doctor.main, [url])

    assert asyncio.run(run()) == 1
    assert "has the fields arguments, tool_name" in capsys.readouterr().out
