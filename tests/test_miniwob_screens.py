"""What the sixteen tasks look like and pay, as Playwright drove them before this repo's own CDP.

tests/data/miniwob_screens.png has the screens of a demonstrator's episode of each task, one beside
the other, miniwob_screens.json what it was told and paid. Another Chromium draws otherwise: then
`python -m tests.test_miniwob_screens` records both anew, to be looked at.
"""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from configs.miniwob_tasks import MAX_TURNS
from tests.chromium import needs_chromium, pool_and_runner
from uirl_jax.types import TaskSpec

pytestmark = needs_chromium

SHEET = Path(__file__).parent / "data" / "miniwob_screens.png"
TOLD = SHEET.with_suffix(".json")
SEED = 5
WIDTH_PX, HEIGHT_PX, COLUMNS = 160, 210, 8
SHADES = 3  # a line between pixels is drawn in shades that differ, with Playwright too


async def play(pool, name):
    """(instruction, reward, the screens) of a demonstrator's episode."""
    from uirl_jax.verifiers.browser.miniwob import MiniWob

    session = await MiniWob.open(pool, TaskSpec(f"miniwob/{name}", SEED))
    rng = np.random.default_rng(0)
    screens = [await session.screenshot("png")]
    progress = await session.progress()
    while not progress["done"] and len(screens) < 8:
        await session.act(await session.scripted_action(rng))
        screens.append(await session.screenshot("png"))
        progress = await session.progress()
    await session.close()
    pixels = [np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) for png in screens]
    return session.instruction, progress["reward"], pixels


async def renderer(pool):
    from uirl_jax.verifiers.browser import rendering

    tab = await pool.acquire()
    try:
        return await rendering.fingerprint(tab)
    finally:
        await pool.release(tab)


def recorded():
    """{task: (instruction, reward, the screens)}"""
    sheet = np.asarray(Image.open(SHEET).convert("RGB"))
    cells = iter(
        sheet[y : y + HEIGHT_PX, x : x + WIDTH_PX]
        for y in range(0, sheet.shape[0], HEIGHT_PX)
        for x in range(0, sheet.shape[1], WIDTH_PX)
    )
    return {
        name: (told["instruction"], told["reward"], [next(cells) for _ in range(told["screens"])])
        for name, told in json.loads(TOLD.read_text())["tasks"].items()
    }


def test_sixteen_tasks_are_drawn_and_paid_as_with_playwright():
    expected = recorded()
    assert set(expected) == set(MAX_TURNS)
    with pool_and_runner(warm=1, max_browsers=1) as (pool, runner):
        if runner.run(renderer(pool)) != json.loads(TOLD.read_text())["renderer"]:
            pytest.skip("recorded with another Chromium, which draws otherwise")
        for name, (instruction, reward, screens) in expected.items():
            told, paid, seen = runner.run(play(pool, name))
            assert (told, paid, len(seen)) == (instruction, reward, len(screens)), name
            for turn, pair in enumerate(zip(seen, screens, strict=True)):
                shades = np.abs(pair[0].astype(int) - pair[1].astype(int)).max()
                assert shades <= SHADES, (name, turn)


def record():
    with pool_and_runner(warm=1, max_browsers=1) as (pool, runner):
        fingerprint = runner.run(renderer(pool))
        played = {name: runner.run(play(pool, name)) for name in sorted(MAX_TURNS)}
    cells = [screen for _, _, screens in played.values() for screen in screens]
    sheet = Image.new("RGB", (COLUMNS * WIDTH_PX, -(-len(cells) // COLUMNS) * HEIGHT_PX))
    for number, cell in enumerate(cells):
        row, column = divmod(number, COLUMNS)
        sheet.paste(Image.fromarray(cell), (column * WIDTH_PX, row * HEIGHT_PX))
    sheet.save(SHEET, optimize=True)
    tasks = {
        name: {"instruction": instruction, "reward": reward, "screens": len(screens)}
        for name, (instruction, reward, screens) in played.items()
    }
    told = {"renderer": fingerprint, "tasks": tasks}
    TOLD.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    record()
