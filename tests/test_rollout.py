"""One episode over real HTTP: every way it can end, what its record holds, and no session left."""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import math
import struct
import zlib

import numpy as np
import pytest

from tests import actor_world as world
from uirl_jax import actions
from uirl_jax.actor.rollout import RolloutConfig, RolloutSetup, derive_seed, run_episode
from uirl_jax.engine.engine import Engine, SampleRequest
from uirl_jax.errors import ConfigError, VerifierError
from uirl_jax.shards import record
from uirl_jax.types import Action, StopReason, TaskSpec
from uirl_jax.verifiers.tasks import desktop

BUTTON = TaskSpec("desktop/click_button", seed=3, max_turns=1)
TEXT = TaskSpec("desktop/enter_text", seed=3, max_turns=8)
ENTRY = TaskSpec("desktop/data_entry", seed=3, max_turns=60)


def demonstrator(task: TaskSpec, quality: float = 1.0):
    """Texts of the scripted demonstrator, which follows the episode in a desktop of its own."""
    session = desktop.open_session(task)
    rng = np.random.default_rng(0)

    def say(turn: int) -> str:
        action = desktop.scripted_action(session, rng, quality)
        session.act(action)
        return actions.format_action(action, (session.width_px, session.height_px))

    return say


def play(task, engine, *, fault=None, cfg=None, seed=0, **options):
    """(trajectory, sessions still open on the server)."""

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            url = target = await stack.enter_async_context(world.verifier())
            if fault is not None:
                url, _ = await stack.enter_async_context(world.faulty(target, fault))
            client = await stack.enter_async_context(world.client(url))
            if isinstance(engine, Engine):
                await stack.enter_async_context(engine)
            trajectory = await run_episode(
                task,
                RolloutSetup(client, engine, world.chat(), world.inputs(), cfg or RolloutConfig()),
                seed=seed,
                group_id="g",
                run_id="run",
                actor_id="a0",
                **options,
            )
            return trajectory, await world.open_sessions(target)

    return asyncio.run(run())


def test_episode_right_click_completes_with_the_verifiers_reward():
    waits_s = {}
    trajectory, still_open = play(
        BUTTON, world.ScriptedEngine(demonstrator(BUTTON)), waits_s=waits_s
    )
    session = desktop.open_session(BUTTON)
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert (trajectory.reward, trajectory.success) == (1.0, True)
    assert trajectory.instruction == session.instruction
    (turn,) = trajectory.turns
    x0, y0, x1, y1 = session.targets[session.goal]
    assert turn.action.kind == "click" and x0 <= turn.action.x < x1 and y0 <= turn.action.y < y1
    assert turn.progress["done"] is True and turn.progress["reward"] == 1.0
    assert (turn.reward, turn.policy_version, turn.error) == (1.0, 3, "")
    assert actions.parse(turn.text, (session.width_px, session.height_px)) == turn.action
    assert turn.token_ids[-1] == world.chat().end_token_ids[0]
    assert still_open == 0
    assert waits_s.keys() == {"environment", "engine"}
    assert (trajectory.run_id, trajectory.actor_id, trajectory.group_id) == ("run", "a0", "g")


def test_stop_strings_of_the_config_reach_the_engine_and_no_empty_one_is_taken():
    engine = world.ScriptedEngine(demonstrator(BUTTON))
    rollout = dataclasses.replace(world.ROLLOUT, stop_strings=("\n", "</tool_call>"))
    play(BUTTON, engine, cfg=rollout)
    assert engine.requests[0].stop_strings == ("\n", "</tool_call>")
    with pytest.raises(ConfigError, match="empty text"):
        dataclasses.replace(rollout, stop_strings=("",))


def test_episode_wrong_click_is_failed():
    engine = world.ScriptedEngine(demonstrator(BUTTON, quality=0.0))
    trajectory, _ = play(BUTTON, engine)
    assert trajectory.stop_reason is StopReason.FAILED
    assert (trajectory.reward, trajectory.success) == (0.0, False)


def test_episode_of_many_turns_keeps_screens_once_and_grows_its_context():
    engine = world.ScriptedEngine(demonstrator(TEXT))
    trajectory, still_open = play(TEXT, engine)
    assert trajectory.stop_reason is StopReason.COMPLETED and still_open == 0
    turns = trajectory.turns
    assert len(turns) >= 3
    for before, after in itertools.pairwise(turns):
        whole = np.concatenate([before.context_ids, before.token_ids])
        np.testing.assert_array_equal(after.context_ids[: len(whole)], whole)
        assert after.image_keys[:-1] == before.image_keys
    for key, data in trajectory.images.items():
        assert hashlib.sha256(data).hexdigest() == key
    assert set(turns[-1].image_keys) == set(trajectory.images) == set(trajectory.image_tokens)
    placeholders = np.sum(turns[-1].context_ids == world.chat().image_token_id)
    assert placeholders == 12 * len(turns)
    assert [turn.reward for turn in turns] == [0.0] * (len(turns) - 1) + [1.0]
    assert record.decode(record.encode(trajectory, world.layout()), world.layout()).turns[
        -1
    ].progress == dict(turns[-1].progress)
    # What the engine was given is what the record says.
    asked = [tuple(screen.key for screen in request.screens) for request in engine.requests]
    assert asked == [turn.image_keys for turn in turns]
    assert len({request.seed for request in engine.requests}) == len(turns)


def test_episode_same_screen_twice_is_kept_once():
    task = TaskSpec("desktop/enter_text", seed=3, max_turns=3)
    trajectory, _ = play(task, world.ScriptedEngine(lambda turn: "wait(0)"))
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert [len(turn.image_keys) for turn in trajectory.turns] == [1, 2, 3]
    assert len(trajectory.images) == 1
    assert not trajectory.success and trajectory.reward == 0.0


def test_episode_claim_of_success_pays_nothing():
    trajectory, still_open = play(TEXT, world.ScriptedEngine(lambda turn: "terminate(success)"))
    assert trajectory.stop_reason is StopReason.FAILED
    assert (trajectory.reward, trajectory.success, still_open) == (0.0, False, 0)
    assert trajectory.turns[0].progress["done"] is False  # the verifier was asked


def test_episode_text_that_is_no_action_is_a_format_error_and_forfeits_what_was_earned():
    say_right, earned = demonstrator(ENTRY), desktop.open_session(ENTRY)

    def say(turn):
        if (earned.progress()["reward"] or 0.0) > 0.0:
            return "I am done here"
        text = say_right(turn)
        earned.act(actions.parse(text, (earned.width_px, earned.height_px)))
        return text

    trajectory, still_open = play(
        ENTRY, world.ScriptedEngine(say), cfg=RolloutConfig(max_context_tokens=100_000)
    )
    last = trajectory.turns[-1]
    assert trajectory.stop_reason is StopReason.FORMAT_ERROR and still_open == 0
    assert last.action is None and "I am done here" in last.error
    assert (trajectory.reward, trajectory.success) == (0.0, False)
    rewards = [turn.reward for turn in trajectory.turns]
    assert max(rewards) > 0.0 and math.isclose(sum(rewards), 0.0, abs_tol=1e-9)
    assert last.progress == trajectory.turns[-2].progress


def test_episode_sample_cut_short_is_read_as_it_stands():
    engine = world.ScriptedEngine(demonstrator(BUTTON), stopped=False)
    trajectory, _ = play(BUTTON, engine)
    assert trajectory.stop_reason is StopReason.COMPLETED
    cut = world.ScriptedEngine(lambda turn: "click(10", stopped=False)
    trajectory, _ = play(BUTTON, cut)
    assert trajectory.stop_reason is StopReason.FORMAT_ERROR
    assert trajectory.turns[0].text == "click(10"


def test_episode_context_that_no_longer_fits_is_max_tokens():
    engine = world.ScriptedEngine(lambda turn: "wait(0)")
    trajectory, still_open = play(TEXT, engine)
    first, second = (len(turn.context_ids) for turn in trajectory.turns[:2])
    cfg = RolloutConfig(max_context_tokens=second - 1)
    trajectory, still_open = play(TEXT, engine, cfg=cfg)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert (len(trajectory.turns), still_open) == (1, 0)
    # With not even the first screenshot there is nothing to train on.
    trajectory, still_open = play(TEXT, engine, cfg=RolloutConfig(max_context_tokens=first - 1))
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert (trajectory.turns, still_open) == ((), 0)


@pytest.mark.parametrize("kind", ["error", "lost"])
@pytest.mark.parametrize(
    ("call", "number", "turns", "tainted"),
    [
        ("session", 0, 0, False),
        ("screenshot", 0, 0, False),
        ("act", 0, 1, True),
        ("act", 1, 2, True),
        ("progress", 1, 2, True),
    ],
)
def test_episode_fault_of_the_verifier_is_env_error_without_reward(
    kind, call, number, turns, tainted
):
    def fault(seen_call, seen):
        return kind if (seen_call, seen) == (call, number) else None

    trajectory, still_open = play(TEXT, world.ScriptedEngine(demonstrator(TEXT)), fault=fault)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert (trajectory.reward, trajectory.success) == (0.0, False)
    assert len(trajectory.turns) == turns
    assert [bool(turn.error) for turn in trajectory.turns] == [False] * (turns - 1) + [True] * (
        tainted
    )
    lost_answer_to_create = kind == "lost" and call == "session"  # its id never reached us
    assert still_open == int(lost_answer_to_create)
    record.encode(trajectory, world.layout())  # a record all the same


def png_of(width_px: int, height_px: int, pixels: bytes) -> bytes:
    """A PNG with this header and whatever its one chunk of pixels is, every checksum right."""
    data = b"\x89PNG\r\n\x1a\n"
    head = struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    for kind, body in ((b"IHDR", head), (b"IDAT", pixels), (b"IEND", b"")):
        crc = zlib.crc32(kind + body)
        data += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc)
    return data


@pytest.mark.parametrize("call", ["screenshot", "act"])
@pytest.mark.parametrize("pixels", [b"", b"no zlib", zlib.compress(bytes(1000))])
def test_episode_screen_that_only_decoding_finds_broken_is_env_error(pixels, call):
    own = desktop.open_session(TEXT)
    broken = png_of(own.width_px, own.height_px, pixels)
    trajectory, still_open = play(
        TEXT,
        world.ScriptedEngine(demonstrator(TEXT)),
        fault=lambda seen_call, seen: broken if seen_call == call else None,
    )
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert len(trajectory.turns) == (1 if call == "act" else 0)
    assert (trajectory.reward, still_open) == (0.0, 0)
    assert broken not in trajectory.images.values(), "nobody could ever read it"


def test_episode_env_error_after_a_reward_has_none():
    say_right, own, earning_turns = demonstrator(ENTRY), desktop.open_session(ENTRY), []

    def say(turn):
        text = say_right(turn)
        own.act(actions.parse(text, (own.width_px, own.height_px)))
        earning_turns.extend([turn] * (own.progress()["reward"] > 0.0))
        return text

    def fault(call, number):
        return "error" if call == "act" and number - 1 in earning_turns else None

    cfg = RolloutConfig(max_context_tokens=100_000)
    trajectory, _ = play(ENTRY, world.ScriptedEngine(say), fault=fault, cfg=cfg)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert max(turn.reward for turn in trajectory.turns) > 0.0
    assert (trajectory.reward, trajectory.success) == (0.0, False)


@pytest.mark.parametrize(
    "progress",
    [
        {},
        {"done": 1, "reward": 1.0},
        {"done": True, "reward": None},
        {"done": True, "reward": True},
        {"done": False, "reward": "1"},
        {"done": True, "reward": math.nan},
        {"done": True, "reward": math.inf},
        {"done": True, "reward": 10**400},
    ],
)
def test_episode_progress_that_is_no_verdict_is_env_error(progress):
    class Lying:
        async def __aenter__(self):
            return self

        def __init__(self, honest):
            self.honest = honest
            self.create, self.screenshot = honest.create, honest.screenshot
            self.act, self.delete = honest.act, honest.delete
            self.check_action, self.dialect = honest.check_action, honest.dialect

        async def progress(self, session_id):
            return progress

    async def run():
        async with world.verifier() as url, world.client(url) as client:
            trajectory = await run_episode(
                BUTTON,
                RolloutSetup(
                    Lying(client),
                    world.ScriptedEngine(demonstrator(BUTTON)),
                    world.chat(),
                    world.inputs(),
                    RolloutConfig(),
                ),
                seed=0,
                group_id="g",
            )
            return trajectory, await world.open_sessions(url)

    trajectory, still_open = asyncio.run(run())
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert (trajectory.reward, trajectory.success, still_open) == (0.0, False, 0)
    assert "progress has done=" in trajectory.turns[0].error


class Hanging(world.ScriptedEngine):
    """Takes one turn, or none, and never answers again."""

    def __init__(self, turns: int) -> None:
        super().__init__(lambda turn: "wait(0)")
        self._turns = turns
        self.hangs = asyncio.Event()

    async def sample(self, request: SampleRequest):
        if len(self.requests) == self._turns:
            self.hangs.set()
            await asyncio.Event().wait()
        return await super().sample(request)


@pytest.mark.parametrize(
    ("turns", "stop_reason"), [(1, StopReason.TIMEOUT), (0, StopReason.ENV_ERROR)]
)
def test_episode_out_of_time_keeps_its_turns(turns, stop_reason):
    trajectory, still_open = play(TEXT, Hanging(turns), cfg=RolloutConfig(episode_timeout_s=2.0))
    assert trajectory.stop_reason is stop_reason
    assert (len(trajectory.turns), still_open) == (turns, 0)
    assert 2.0 <= trajectory.duration_s < 5.0


@pytest.mark.parametrize(
    ("task", "broken", "stop_reason", "turns"),
    [(BUTTON, False, StopReason.COMPLETED, 1), (TEXT, True, StopReason.ENV_ERROR, 2)],
)
def test_episode_time_that_passes_while_the_session_is_deleted_changes_nothing(
    task, broken, stop_reason, turns
):
    """Neither a success nor a fault of the verifier, here of the second act, becomes a time-out."""

    def fault(call, number):
        return {"act": "error" if broken and number else None, "delete": 2.0}.get(call)

    trajectory, still_open = play(
        task,
        world.ScriptedEngine(demonstrator(task)),
        fault=fault,
        cfg=RolloutConfig(episode_timeout_s=2.0),
    )
    assert (trajectory.stop_reason, len(trajectory.turns)) == (stop_reason, turns)
    assert (trajectory.success, still_open) == (not broken, 0)
    assert trajectory.duration_s >= 2.0


@pytest.mark.parametrize("turns", [0, 1])
def test_engine_that_refuses_a_later_turn_is_no_fault_of_the_verifier(turns):
    say, mismatches = demonstrator(TEXT), []

    def refuse(turn):
        if turn == turns:
            raise ConfigError("raise engine.image_tokens")
        return say(turn)

    engine = world.ScriptedEngine(refuse)
    if turns:
        with pytest.raises(ConfigError, match=r"raise engine\.image_tokens"):
            play(TEXT, engine, on_mismatch=mismatches.append)
        assert mismatches == []
    else:
        trajectory, _ = play(TEXT, engine, on_mismatch=mismatches.append)
        assert trajectory.stop_reason is StopReason.ENV_ERROR
        assert mismatches == ["raise engine.image_tokens"]
    assert len(engine.released) == 1


def test_episode_whose_session_cannot_be_deleted_ends_in_time():
    trajectory, _ = play(
        BUTTON,
        world.ScriptedEngine(demonstrator(BUTTON)),
        fault=lambda call, number: 30.0 if call == "delete" else None,
        cfg=RolloutConfig(delete_timeout_s=0.2),
    )
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.duration_s < 10.0


@pytest.mark.parametrize("moment", ["creating", "sampling", "deleting"])
def test_episode_cancelled_at_any_moment_leaves_no_session(moment):
    reached = asyncio.Event()

    def fault(call, number):
        if (call, moment) in (("session", "creating"), ("delete", "deleting")):
            reached.set()
            return 0.3
        return None

    async def run():
        engine = Hanging(0) if moment == "sampling" else world.ScriptedEngine(demonstrator(BUTTON))
        async with (
            world.verifier() as target,
            world.faulty(target, fault) as (url, _),
            world.client(url) as client,
        ):
            before = world.our_tasks()
            episode = asyncio.create_task(
                run_episode(
                    BUTTON,
                    RolloutSetup(client, engine, world.chat(), world.inputs(), RolloutConfig()),
                    seed=0,
                    group_id="g",
                )
            )
            await (engine.hangs if moment == "sampling" else reached).wait()
            await asyncio.sleep(0.1)  # so that the server has opened the session
            episode.cancel()
            await asyncio.sleep(0)
            episode.cancel()  # an impatient caller
            with pytest.raises(asyncio.CancelledError):
                await episode
            assert world.our_tasks() == before
            return await world.open_sessions(target)

    assert asyncio.run(run()) == 0


def test_episode_of_the_real_engine_repeats_with_its_seed_and_decodes():
    def tokens(seed):
        trajectory, still_open = play(world.TASK, world.engine(), seed=seed, cfg=world.ROLLOUT)
        assert still_open == 0 and trajectory.stop_reason is not StopReason.ENV_ERROR
        decoded = record.decode(record.encode(trajectory, world.layout()), world.layout())
        assert decoded.images == trajectory.images
        for turn in decoded.turns:
            assert turn.action == Action("click", x=turn.action.x, y=turn.action.y)
            assert np.all(turn.logprobs < 0.0)
        return [turn.token_ids.tolist() for turn in trajectory.turns]

    by_seed = [tokens(seed) for seed in range(6)]
    assert by_seed[0] == tokens(0)
    assert len({str(sampled) for sampled in by_seed}) > 1


def test_derive_seed_differs_along_every_part_of_its_path():
    seeds = {
        derive_seed(run, group, member) for run in (0, 1) for group in (0, 1) for member in (0, 1)
    }
    assert len(seeds) == 8
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)


def test_engine_error_is_no_env_error():
    class Broken(world.ScriptedEngine):
        async def sample(self, request):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        play(BUTTON, Broken(lambda turn: ""))


def test_verifier_that_is_not_there_is_env_error():
    async def run():
        async with world.client("http://127.0.0.1:9") as client:
            with pytest.raises(VerifierError):
                await client.create(BUTTON)
            return await run_episode(
                BUTTON,
                RolloutSetup(
                    client,
                    world.ScriptedEngine(lambda turn: ""),
                    world.chat(),
                    world.inputs(),
                    RolloutConfig(),
                ),
                seed=0,
                group_id="g",
            )

    assert asyncio.run(run()).stop_reason is StopReason.ENV_ERROR
