"""Recorded sessions: rows of seeds, one step, walks, pictures, weights; over HTTP and not."""

import asyncio
import io
import itertools

import numpy as np
import pytest
from PIL import Image

from tests.recorded_rows import (
    SIZE,
    InMemory,
    click,
    grounding_set,
    picture,
    row,
    step,
    walk_row,
)
from uirl_jax import seeds
from uirl_jax.errors import ConfigError, InvalidRequestError, VerifierError
from uirl_jax.types import Action, Judgement, Rule, TaskSpec
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.client.rules import no_own_rule
from uirl_jax.verifiers.recorded import history, rewards, rules
from uirl_jax.verifiers.recorded.draw import Draw, pick_step
from uirl_jax.verifiers.recorded.in_process import RecordedClient
from uirl_jax.verifiers.recorded.row import Box, Step
from uirl_jax.verifiers.recorded.sets import RecordedSets
from uirl_jax.verifiers.recorded.task import MAX_TURNS, RecordedTask
from uirl_jax.verifiers.server.server import serve

NAME = "recorded/made"
HIT, MISS = Action("click", x=41, y=61), Action("click", x=0, y=0)


def task(seed=0, variant="", name=NAME):
    return TaskSpec(name, seed, variant)


def opened(rows, seed=0, variant="") -> RecordedTask:
    return asyncio.run(RecordedSets({"made": rows}).open(task(seed, variant)))


def progress_after(session: RecordedTask, *taken: Action) -> dict:
    async def play():
        for action in taken:
            await session.act(action)
        return await session.progress()

    return asyncio.run(play())


# ------------------------------------------------------------------------------ seeds to rows


def test_evaluation_plays_each_row_of_test_once_and_then_again_in_the_same_order():
    draw = Draw(grounding_set(train=12, test=4))
    played = [draw.pick(task(seeds.eval_seed(n))) for n in range(8)]
    assert sorted(drawn.row for drawn in played[:4]) == [12, 13, 14, 15]
    assert [drawn.row for drawn in played[:4]] == [drawn.row for drawn in played[4:]]
    assert [drawn.round for drawn in played] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("split", "seed_of"), [("test", seeds.eval_seed), ("validation", seeds.tune_seed)]
)
def test_the_first_instances_are_of_every_part_of_a_file(split, seed_of):
    draw = Draw(InMemory([row(n, [click()], split) for n in range(400)]))
    played = [draw.pick(task(seed_of(n))).row for n in range(100)]
    of_parts = np.bincount(np.array(played) // 100, minlength=4)  # 25 of each are expected
    assert min(of_parts) >= 10, of_parts
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(played)) < 5


def test_ranges_of_seeds_draw_from_disjoint_rows():
    draw = Draw(grounding_set(train=200, test=40))
    ranges = (
        [seeds.train_seed(3, n) for n in range(4000)],
        [seeds.eval_seed(n) for n in range(100)],
        [seeds.tune_seed(n) for n in range(100)],
    )
    rows = [{draw.pick(task(seed)).row for seed in each} for each in ranges]
    assert not rows[0] & rows[1] and not rows[0] & rows[2] and not rows[1] & rows[2]
    assert rows[1] == set(range(200, 240)) and 3 <= len(rows[2]) <= 20
    assert rows[0] | rows[2] == set(range(200))


def test_a_split_validation_is_what_tuning_plays_and_train_stays_whole():
    parts = ["train"] * 30 + ["validation"] * 2
    draw = Draw(InMemory([row(n, [click()], split) for n, split in enumerate(parts)]))
    assert {draw.pick(task(seeds.tune_seed(n))).row for n in range(4)} == {30, 31}
    assert {draw.pick(task(n)).row for n in range(30)} == set(range(30))


def test_a_seed_without_rows_is_refused_with_the_split():
    with pytest.raises(VerifierError, match=r"recorded/made: has no rows of split 'test'"):
        opened(grounding_set(test=0), seeds.eval_seed(0))
    with pytest.raises(VerifierError, match="seed -1, expected 0"):
        opened(grounding_set(), -1)


def test_rounds_go_through_the_steps_of_a_row():
    rows = InMemory([walk_row(0, "test"), walk_row(1, "test")])
    draw = Draw(rows)
    played = [draw.pick(task(seeds.eval_seed(n))) for n in range(6)]
    steps = [(drawn.row, pick_step(rows[drawn.row], drawn)) for drawn in played]
    assert len(set(steps)) == 6


# ---------------------------------------------------------------------------------- one step


def test_one_action_ends_an_episode_with_every_part():
    session = opened(grounding_set(elements=[Box(0, 0, 9, 9)]))
    before = progress_after(session)
    assert (before["done"], before["reward"], before["state"]) == (False, None, "pending")
    progress = progress_after(session, HIT)
    assert (progress["done"], progress["reward"], progress["success"]) == (True, 1.0, True)
    assert set(progress["parts"]) == set(rules.NAMES)
    assert progress["parts"]["gaussian"] == pytest.approx(np.exp(-(1 + 1) / 400 / 2))
    assert progress["parts"]["completion"] == 1.0
    assert (progress["row"], progress["source"], progress["step"]) == ("r0", "made_here", 0)
    assert progress_after(session, MISS) == progress  # nothing changes after the end


def test_a_miss_is_done_and_pays_its_form_alone():
    progress = progress_after(opened(grounding_set()), Action("click", x=99, y=199))
    assert (progress["done"], progress["reward"], progress["success"]) == (True, 0.0, False)
    assert progress["parts"]["form"] == progress["parts"]["type"] == 1.0
    assert progress["parts"]["point_in_box"] == progress["parts"]["completion"] == 0.0


def test_a_claim_of_success_pays_only_where_it_was_recorded():
    claim = Action("terminate", text="success")
    assert progress_after(opened(grounding_set()), claim)["reward"] == 0.0
    ends = InMemory([row(0, [step(claim)])])
    assert progress_after(opened(ends), claim)["reward"] == 1.0
    failure = Action("terminate", text="failure")
    assert progress_after(opened(ends), failure)["reward"] == 0.0


def test_an_instruction_tells_what_was_done_before_in_words():
    rows = [walk_row()]
    assert history.instruction(rows[0], 0) == "Do task 0"
    assert history.instruction(rows[0], 2) == 'Do task 0\nDone so far: 1. click 2. type "Musk"'
    assert history.instruction(rows[0], None) == "Do task 0"
    told = row(1, [click(instruction="tap the\n search bar"), click(instruction="tap Send")])
    assert history.instruction(told, 1) == "Do task 1\nDone so far: 1. tap the search bar"
    assert history.instruction(told, 1, low=True).endswith("\nNow: tap Send")
    long = row(2, [click(instruction="x" * 500)] * 40)
    text = history.instruction(long, 39)
    assert text.count("xxx...") == history.SHOWN_STEPS and "Done so far: ... 32. x" in text
    assert len(history.instruction(row(3, [click()] * 2), 1)) <= history.MAX_CHARS


@pytest.mark.parametrize(
    ("variant", "fault"),
    [
        ("walks=1", "unknown key 'walks', did you mean 'walk'"),
        ("walk=2", "walk is '2', not one of 0, 1"),
        ("step=one,walk=1", "step=one or walk=1"),
    ],
)
def test_an_invalid_variant_is_refused(variant, fault):
    with pytest.raises(VerifierError, match=fault):
        opened(grounding_set(), variant=variant)


def test_a_picture_of_another_size_than_the_row_says_is_refused():
    lies = InMemory([row(0, [Step(picture((50, 60)), *SIZE, HIT, None)])])
    with pytest.raises(VerifierError, match="picture of 50x60 pixels, the row says 100x200"):
        opened(lies)
    broken = InMemory([row(0, [Step(b"GIF89a", *SIZE, HIT, None)])])
    with pytest.raises(VerifierError, match="row 'r0' of made_here: 6 bytes are not a readable"):
        opened(broken)


def test_an_unknown_set_is_refused_with_the_nearest():
    sets = RecordedSets({"made": grounding_set()})
    with pytest.raises(VerifierError, match=r"did you mean 'recorded/made'\?; recorded sets are"):
        asyncio.run(sets.open(task(name="recorded/mode")))


# ------------------------------------------------------------------------------------- walks


def test_a_walk_goes_through_its_states():
    session = opened(InMemory([walk_row()]), variant="walk=1")
    states = [session.state]

    async def play():
        screens = [await session.screenshot("png")]
        states.append(session.state)
        for action in (
            MISS,
            HIT,
            Action("type", text="musk"),
            Action("terminate", text="success"),
        ):
            await session.act(action)
            states.append(session.state)
            screens.append(await session.screenshot("png"))
        return screens, await session.progress()

    screens, progress = asyncio.run(play())
    assert states == ["pending", *["generating"] * 4, "terminated"]
    assert screens == [picture(shade=shade) for shade in (1, 1, 2, 3, 3)]  # a miss stays
    assert progress["success"] and progress["reward"] == 1.0 and progress["turns"] == 4
    assert progress["parts"]["match"] == 1.0 and progress["parts"]["completion"] == 1.0
    assert progress["parts"]["text_f1"] == pytest.approx(1 / 3)  # of three steps


def test_a_claim_of_success_ends_a_walk_unpaid():
    session = opened(InMemory([walk_row()]), variant="walk=1")
    progress = progress_after(session, HIT, Action("terminate", text="success"))
    assert (progress["done"], progress["success"], progress["reward"]) == (True, False, 0.0)
    assert progress["parts"]["match"] == pytest.approx(1 / 3) and progress["walked"] == 1


def test_a_walk_ends_after_20_turns():
    session = opened(InMemory([walk_row()]), variant="walk=1")
    assert not progress_after(session, *[MISS] * (MAX_TURNS - 1))["done"]
    progress = progress_after(session, HIT)
    assert (progress["done"], progress["success"], progress["walked"]) == (True, False, 1)


def test_screens_of_a_turned_phone_are_scaled_with_their_places():
    turned = click(100, 20, Box(80, 10, 120, 30), size=(200, 100), shade=9)
    session = opened(InMemory([row(0, [click(), turned])]), variant="walk=1")

    async def play():
        await session.act(HIT)
        shown = Image.open(io.BytesIO(await session.screenshot("png")))
        recorded = await session.scripted_action(np.random.default_rng(0))
        assert recorded == Action("click", x=50, y=41)  # the middle of (100, 20) of 200x100
        await session.act(Action("click", x=50, y=40))
        return shown.size, await session.progress()

    size, progress = asyncio.run(play())
    assert size == SIZE and progress["success"]
    near = np.exp(-(1 + 1) / 400 / 2)  # of the first step; the second is hit in its centre
    assert progress["parts"]["gaussian"] == pytest.approx((near + 1.0) / 2)


# ----------------------------------------------------------------------------- weights, wires


def test_weights_are_a_weighted_sum_of_the_parts():
    weights = {"point_in_box": 1.0, "type": 0.1, "completion": 0.5}
    rule = rewards.weighted_rule(weights)
    hit = progress_after(opened(grounding_set()), HIT)
    assert rule.judge(hit, 1) == (True, pytest.approx(1.6), True)
    missed = progress_after(opened(grounding_set()), Action("click", x=99, y=199))
    assert rule.judge(missed, 1) == (True, pytest.approx(0.1), False)


@pytest.mark.parametrize(
    "progress",
    [
        {},
        {"done": True, "success": 1, "parts": {}},
        {"done": True, "success": True, "parts": [1]},
        {"done": True, "success": True, "parts": {"type": 1e9}},
        {"done": True, "success": True, "parts": {"type": float("nan")}},
        {"done": True, "success": True, "parts": {}},
    ],
)
def test_progress_of_another_task_cannot_be_judged(progress):
    with pytest.raises(VerifierError, match="progress has"):
        rewards.weighted_rule({"type": 1.0}).judge(progress, 1)


def test_weights_and_sets_of_a_config_are_checked_together():
    with pytest.raises(ConfigError) as caught:
        rewards.RecordedConfig({"A b": "x"}, {"point_in_bax": 1.0})
    assert "the name 'A b'" in str(caught.value)
    assert "no rule 'point_in_bax', did you mean 'point_in_box'?" in str(caught.value)
    assert rewards.read_weights("type=0.2, form=1") == {"type": 0.2, "form": 1.0}
    for text in ("type", "type=x", "type=inf", "typo=1"):
        with pytest.raises(ConfigError):
            rewards.read_weights(text)
    assert rewards.read_sets(["a=x/y.parquet", "z/b.parquet"]) == {
        "a": "x/y.parquet",
        "b": "z/b.parquet",
    }
    with pytest.raises(ConfigError, match="'b' is given twice"):
        rewards.read_sets(["b=1", "z/b.parquet"])


async def told(client, spec, taken):
    """What a client tells of an episode, its pictures decoded."""
    session = await client.create(spec)
    screens, said = [await client.screenshot(session.id)], []
    for number, action in enumerate(taken):
        client.check_action(action)
        screens.append(await client.act(session.id, action, f"{spec.seed}-{number}"))
        said.append(await client.progress(session.id))
    await client.delete(session.id)
    pixels = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in screens]
    return (session.instruction, session.width_px, session.judged_here), said, pixels


@pytest.mark.parametrize("weights", [{}, {"gaussian": 1.0, "form": 0.1}])
def test_http_and_in_process_tell_the_same(weights):
    jpeg = click(image=picture(image_format="JPEG"))
    rows = InMemory([walk_row(0), row(1, [jpeg]), walk_row(2, "test")])
    find = rewards.with_weights(weights, no_own_rule)
    plays = [
        (task(0, "walk=1"), (MISS, HIT, Action("type", text="m"), Action("answer", text="5"))),
        (task(1), (HIT,)),
        (task(seeds.eval_seed(0)), (Action("terminate", text="success"),)),
    ]

    async def run():
        async with (
            serve(recorded=RecordedSets({"made": rows})) as port,
            VerifierClient(f"http://127.0.0.1:{port}", find_own_rule=find) as remote,
            RecordedClient(RecordedSets({"made": rows}), find_own_rule=find) as local,
        ):
            for spec, taken in plays:
                one, two = await told(remote, spec, taken), await told(local, spec, taken)
                assert one[:2] == two[:2]
                for far, near in zip(one[2], two[2], strict=True):
                    np.testing.assert_array_equal(far, near)
                assert one[0][2] == bool(weights)
            with pytest.raises(InvalidRequestError, match="has no rows of split 'validation'"):
                await local.create(task(seeds.tune_seed(0)))
            with pytest.raises(InvalidRequestError, match="has no rows of split 'validation'"):
                await remote.create(task(seeds.tune_seed(0)))

    asyncio.run(run())


def test_a_rule_of_ones_own_is_told_the_turns_in_process_too():
    seen = []

    def judge(progress, turns):
        seen.append((progress["turns"], turns))
        return Judgement(done=turns == 2, reward=0.5, success=False)

    async def run():
        sets = RecordedSets({"made": InMemory([walk_row()])})
        client = RecordedClient(sets, find_own_rule=lambda task: Rule("Mine.", judge))
        session = await client.create(task(variant="walk=1"))
        assert (session.instruction, session.judged_here) == ("Mine.", True)
        for action, done in ((MISS, False), (HIT, True)):
            await client.act(session.id, action)
            progress = await client.progress(session.id)
            assert (progress["done"], progress["reward"]) == (done, 0.5)

    asyncio.run(run())
    assert seen == [(1, 1), (2, 2)]


def test_a_session_on_a_screen_is_not_told_how_the_policy_ends():
    async def run():
        async with serve() as port, VerifierClient(f"http://127.0.0.1:{port}") as client:
            session = await client.create(TaskSpec("desktop/click_button", 0))
            assert not session.judges_every_action
            with pytest.raises(VerifierError, match="'terminate' cannot be sent"):
                await client.act(session.id, Action("terminate", text="success"), "1")
            url = f"http://127.0.0.1:{port}/session/{session.id}/act"
            async with client.transport._http.post(
                url, json={"action_type": "terminate", "text": "success"}
            ) as response:
                assert response.status == 422

    asyncio.run(run())


def test_in_process_refuses_what_a_server_would():
    async def run():
        small = RecordedClient(RecordedSets({"made": grounding_set()}), max_pixels=10)
        with pytest.raises(InvalidRequestError, match="100x200 pixels, at most 10"):
            await small.create(task())
        client = RecordedClient(RecordedSets({"made": grounding_set()}))
        session = await client.create(task())
        with pytest.raises(InvalidRequestError, match="off the screen"):
            await client.act(session.id, Action("click", x=500, y=0))
        await client.delete(session.id)
        with pytest.raises(VerifierError, match="not opened here"):
            await client.progress(session.id)

    asyncio.run(run())


def test_the_recording_is_its_own_demonstrator():
    session = opened(grounding_set())
    rng = np.random.default_rng(0)
    assert asyncio.run(session.scripted_action(rng)) == Action("click", x=40, y=60)
    assert asyncio.run(session.scripted_action(rng, 0.0)) != Action("click", x=40, y=60)
