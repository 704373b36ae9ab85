"""simple_data_entry: what is counted, what is paid, and the whole task played in a real browser."""

import asyncio

import aiohttp
import numpy as np
import pytest

from tests.chromium import needs_chromium, pool_and_runner
from uirl_jax.errors import VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers import wire
from uirl_jax.verifiers.server.server import serve

NAME = "simple_data_entry"

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def world():
    with pool_and_runner(warm=1) as (pool, runner):
        yield pool, runner


async def open_session(pool, seed=3, variant=""):
    from uirl_jax.verifiers.browser.data_entry import DataEntry

    return await DataEntry.open(pool, TaskSpec(NAME, seed, variant))


async def play(session, rng, quality=1.0, max_turns=200):
    """The demonstrator until the end; the last progress."""
    for _ in range(max_turns):
        progress = await session.progress()
        if progress["done"]:
            return progress
        await session.act(await session.scripted_action(rng, quality))
    raise AssertionError("the demonstrator does not finish")


@pytest.mark.parametrize(
    ("entered", "indices", "incorrect", "done", "reward"),
    [
        ([], [], 0, False, 0.0),
        ([0], [0], 0, False, 0.5),
        ([0, 4], [0, 4], 0, True, 1.0),
        ([4, 4, 0], [4, 4, 0], 0, True, 0.5),  # a duplicate is kept, and costs a row
        ([7, 0, 4], [7, 0, 4], 0, True, 0.5),  # so does a row that was not asked for
        ([None, 0], [0], 1, False, 0.0),
        ([None, None], [], 2, True, 0.0),
        ([None, None, None, 0], [0], 3, True, 0.0),  # three wrong ones and a right one
    ],
)
def test_progress_counts_as_the_protocol_and_pays_by_the_declared_rule(
    entered, indices, incorrect, done, reward
):
    from uirl_jax.verifiers.browser import data_entry

    sheet = data_entry.make_sheet(TaskSpec(NAME, 0, "rows=2"))
    sheet = data_entry.Sheet(sheet.columns, sheet.rows, wanted=(0, 4))
    forms = [["no", "such", "row", "1"] if i is None else list(sheet.rows[i]) for i in entered]
    assert data_entry.judge(sheet, forms) == {
        "submitted_row_indices": indices,
        "num_incorrect_submissions": incorrect,
        "done": done,
        "reward": reward,
    }


def test_white_space_around_a_value_is_forgiven_and_other_differences_are_not():
    from uirl_jax.verifiers.browser import data_entry

    sheet = data_entry.make_sheet(TaskSpec(NAME, 0))
    row = list(sheet.rows[5])
    assert data_entry.judge(sheet, [[f" {row[0]} ", *row[1:]]])["submitted_row_indices"] == [5]
    for wrong in ([row[0].lower(), *row[1:]], row[::-1], ["", *row[1:]]):
        assert data_entry.judge(sheet, [wrong])["num_incorrect_submissions"] == 1


def test_sheets_follow_from_seed_and_variant_and_name_their_rows_as_the_sheet_does():
    from uirl_jax.verifiers.browser import data_entry

    for seed in range(20):
        sheet = data_entry.make_sheet(TaskSpec(NAME, seed, "rows=3,within=8"))
        assert len(set(sheet.rows)) == 100 and len(set(sheet.wanted)) == 3
        assert max(sheet.wanted) < 8
        assert sheet == data_entry.make_sheet(TaskSpec(NAME, seed, "within=8,rows=3"))
        assert sheet.rows != data_entry.make_sheet(TaskSpec(NAME, seed + 1, "rows=3")).rows
    one = data_entry.Sheet(("Name",), (("a",), ("b",)), wanted=(1,))
    assert "Copy row 3 of the sheet" in one.instruction  # the sheet's row 2 is index 0


def test_unknown_variant_is_an_error_that_names_the_nearest():
    from uirl_jax.verifiers.browser import data_entry

    with pytest.raises(VerifierError, match="did you mean 'rows'"):
        data_entry.parse_variant("rows_=2")


def test_row_of_the_variant_is_the_one_that_the_instruction_names():
    from uirl_jax.verifiers.browser import data_entry

    for row in (2, 57, 101):
        sheets = [data_entry.make_sheet(TaskSpec(NAME, seed, f"row={row}")) for seed in range(5)]
        assert {sheet.instruction for sheet in sheets} == {
            f"Copy row {row} of the sheet into the form and submit it."
        }
        assert {sheet.wanted for sheet in sheets} == {(row - 2,)}
    several = data_entry.make_sheet(TaskSpec(NAME, 0, "row=57,rows=3"))
    assert len(set(several.wanted)) == 3 and 55 in several.wanted
    for row in (1, 102):
        with pytest.raises(VerifierError, match=f"row is '{row}', not one of 2, 3"):
            data_entry.parse_variant(f"row={row}")
    assert data_entry.make_sheet(TaskSpec(NAME, 0, "row=9,within=8")).wanted == (7,)
    with pytest.raises(VerifierError, match="row=10, expected at most 9, the last of within=8"):
        data_entry.parse_variant("row=10,within=8")


@pytest.mark.parametrize("variant", ["rows=2", "rows=1,size=small"])
def test_demonstrator_solves_it_with_mouse_and_keyboard(world, variant):
    pool, runner = world

    async def run():
        session = await open_session(pool, variant=variant)
        progress = await play(session, np.random.default_rng(0))
        await session.close()
        return progress, session.sheet.wanted

    progress, wanted = runner.run(run())
    assert progress["submitted_row_indices"] == list(wanted)
    assert progress["num_incorrect_submissions"] == 0 and progress["reward"] == 1.0


@pytest.mark.parametrize(
    ("size", "row"), [("small", row) for row in (7, 8, 9, 48, 49, 98, 99)] + [("full", 57)]
)
def test_demonstrator_scrolls_once_by_pages_and_shows_the_row(world, size, row):
    pool, runner = world

    async def run():
        session = await open_session(pool, row, f"size={size}")  # seed 50 asks for the 51st row
        first = await session.scripted_action(np.random.default_rng(0))
        await session.act(first)
        second = await session.scripted_action(np.random.default_rng(0))
        await session.close()
        return session.sheet.wanted, first, second

    wanted, first, second = runner.run(run())
    assert wanted == (row,)
    number = row + 2  # as the sheet counts
    assert [first.kind, second.kind] == (["scroll", "click"] if number >= 10 else ["click", "keys"])
    if size == "small" and number >= 10:
        begins_with = number // 10 * 10
        assert (first.direction, first.amount) == ("down", min((begins_with - 1) * 14, 1260))


@pytest.mark.parametrize(("seed", "near"), [(0, {1}), (41, {40, 42}), (99, {98})])
def test_demonstrator_with_mistakes_copies_the_row_above_or_below(world, seed, near):
    pool, runner = world

    async def run(of):
        session = await open_session(pool, seed, "size=small")
        progress = await play(session, np.random.default_rng(of), quality=0.0)
        await session.close()
        assert progress["num_incorrect_submissions"] == 0 and progress["reward"] == 0.0
        return progress["submitted_row_indices"]

    copied = [runner.run(run(of)) for of in range(6)]
    assert {indices[0] for indices in copied} == near
    assert all(len(indices) == 1 for indices in copied)


def test_demonstrator_makes_its_mistakes_form_by_form(world):
    pool, runner = world

    async def run():
        session = await open_session(pool, variant="rows=8,size=small")
        progress = await play(session, np.random.default_rng(0), quality=0.5)
        await session.close()
        return session.sheet.wanted, progress

    wanted, progress = runner.run(run())
    right = set(progress["submitted_row_indices"]) & set(wanted)
    assert 0 < len(right) < 8
    assert progress["num_incorrect_submissions"] == 0  # whole rows, all of them


def test_nothing_of_a_sheet_is_cut_off(world):
    pool, runner = world
    cut = "[...document.querySelectorAll('td')].filter(c => c.scrollWidth > c.clientWidth).length"

    async def run():
        counts = []
        for seed in range(4):
            for size in ("full", "small"):
                session = await open_session(pool, seed, f"size={size}")
                counts.append(await session._tab.evaluate(cut))
                await session.close()
        return counts

    assert runner.run(run()) == [0] * 8


def test_equal_specs_give_equal_pixels_and_other_seeds_do_not(world):
    pool, runner = world

    async def run():
        shots = []
        for seed in (1, 1, 2):
            session = await open_session(pool, seed)
            await session.act(Action("click", x=140, y=210))
            shots.append(await session.screenshot("png"))
            await session.close()
        return shots

    first, same, other = runner.run(run())
    assert first == same and first != other


def test_sheet_is_worked_by_keyboard_and_scrolls(world):
    pool, runner = world

    async def run():
        session = await open_session(pool)
        await session.act(Action("click", x=140, y=210))  # A5
        for keys in ("right", *["down"] * 30):
            await session.act(Action("keys", keys=keys))
        view = await session._tab.evaluate("[selected, at('sheet').scrollTop]")
        await session.close()
        return view

    selected, scroll_px = runner.run(run())
    assert selected == [34, 1] and scroll_px > 0


def test_session_is_played_over_http():
    from uirl_jax.verifiers.browser import data_entry

    async def run():
        async with (
            serve() as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):
            query = {"type": NAME, "seed": 3, "variant": "within=8"}
            async with http.post("/session", params=query) as response:
                (session,) = (await response.json())["sessions"]
            assert (session["screen_width"], session["screen_height"]) == (1280, 800)
            sheet = data_entry.make_sheet(TaskSpec(NAME, 3, "within=8"))
            assert session["instruction"] == sheet.instruction
            path = f"/session/{session['id']}"
            places = [(1040, 150 + 78 * column) for column in range(4)]
            actions = []
            for (x, y), text in zip(places, sheet.rows[sheet.wanted[0]], strict=True):
                actions += [Action("click", x=x, y=y), Action("type", text=text)]
            for action in [*actions, Action("keys", keys="enter")]:
                async with http.post(f"{path}/act", json=wire.action_fields(action)) as response:
                    body = await response.read()
                    assert response.status == 200 and body.startswith(b"\x89PNG")
            for image_format, magic in (("jpeg", b"\xff\xd8"), ("webp", b"RIFF")):
                async with http.get(f"{path}/screenshot?format={image_format}") as response:
                    assert (await response.read()).startswith(magic)
            async with http.get(f"{path}/progress") as response:
                return await response.json(), list(sheet.wanted)

    progress, wanted = asyncio.run(run())
    assert progress["submitted_row_indices"] == wanted and progress["reward"] == 1.0


def test_demonstration_is_a_trajectory_with_its_screenshots():
    from tests.actor_world import chat, inputs
    from uirl_jax.demonstrations.scripted import Demonstrator

    with Demonstrator() as demonstrator:
        task = TaskSpec(NAME, 3, "within=8,size=small", max_turns=20)
        rng = np.random.default_rng(0)
        trajectory = demonstrator.demonstrate(task, chat(), inputs(), rng)
    assert trajectory.success and trajectory.reward == 1.0
    assert [turn.action.kind for turn in trajectory.turns[:4]] == ["click", "keys", "click", "keys"]
    assert {key for turn in trajectory.turns for key in turn.image_keys} <= set(trajectory.images)
