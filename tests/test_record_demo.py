"""The command that records demonstrations, as a person uses it: a process, and its page."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests import actor_world as world
from tests.chromium import needs_chromium
from uirl_jax.demonstrations.scripted import demonstrate
from uirl_jax.families.screens import decode_image
from uirl_jax.shards import reader
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.tasks import desktop

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-m", "tools.record_demo", "--config=configs/sft.py:enter_text")


@contextlib.contextmanager
def started(out: Path, *arguments: str):
    """The tool as a process, and the page's address."""
    process = subprocess.Popen(
        [*COMMAND, f"--out={out}", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            line = process.stdout.readline()
            found = re.search(r"http://\S+/", line)
            assert found, line + process.stdout.read()
            yield process, found[0]
        finally:
            process.kill()


class TestInChromium:
    pytestmark = needs_chromium

    def test_person_solves_a_task_on_the_page_and_leaves_in_the_next_one(self, tmp_path):
        from playwright.async_api import async_playwright

        from uirl_jax.verifiers.browser.pool import find_chromium

        task = TaskSpec("desktop/enter_text", seed=11, max_turns=6)
        shown_how = demonstrate(task, world.chat(), world.inputs(), np.random.default_rng(0))
        script = [turn.action for turn in shown_how.turns]
        shown = desktop.open_session(task).screenshot()

        async def act(page, box, action):
            if action.kind == "type":
                await page.keyboard.type(action.text + "x")
                await page.keyboard.press("Backspace")  # corrected before it is sent
                return
            scale = box["width"] / shown.width
            x, y = (value * scale + scale / 2 for value in (action.x, action.y))
            await page.mouse.click(box["x"] + x, box["y"] + y)

        async def run(address):
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(
                    executable_path=find_chromium(), args=["--no-sandbox"]
                )
                page = await browser.new_page(viewport={"width": 1200, "height": 800})
                wrong = []
                page.on("pageerror", lambda error: wrong.append(str(error)))
                page.on("console", lambda said: wrong.append(said.text))
                await page.goto(address)
                await page.get_by_text(desktop.open_session(task).instruction).wait_for()
                screen = page.locator("#screen")
                box = await screen.bounding_box()
                seen = decode_image(await screen.screenshot())
                for number, action in enumerate(script):
                    await act(page, box, action)
                    if action.kind != "type":  # a text goes with the next click
                        await page.locator("#turns li").nth(number).wait_for()
                verdict = await page.locator("#verdict").inner_text()
                turns = await page.locator("#turns").inner_text()
                await page.locator("#save").click()
                await page.get_by_text("demonstration 2 of 2").wait_for()
                # Faster than the pauses after which a click and the wheel are done by themselves.
                await page.mouse.click(box["x"] + 9, box["y"] + 9)
                await page.keyboard.type("ab")
                await page.locator("#turns li").nth(0).wait_for()
                await page.wait_for_function("pending === 0")
                await page.mouse.wheel(0, 100)
                await page.keyboard.press("Control+a")
                await page.get_by_text("keys(ctrl+a)").wait_for()
                hasty = await page.locator("#turns li").all_inner_texts()
                await browser.close()
            return seen, verdict, turns, hasty, wrong

        arguments = ("--max_turns=6", "--seed=11", "--episodes=2")
        with started(tmp_path, *arguments) as (process, address):
            seen, verdict, turns, hasty, wrong = asyncio.run(run(address))
            process.send_signal(signal.SIGINT)  # in the second one
            said = process.stdout.read()
            assert process.wait(60) == 0, said
        assert wrong == []
        assert verdict == "Solved, reward 1."
        # What the person saw is the session's screen, three times as large.
        assert seen.size == tuple(3 * side for side in shown.size)
        np.testing.assert_array_equal(np.asarray(seen)[1::3, 1::3], np.asarray(shown))
        (path,) = tmp_path.glob("*.tfrecord")
        _, (got,) = reader.read_shard(path)
        assert [turn.action for turn in got.turns] == script
        assert turns.split("\n") == [turn.text for turn in got.turns]
        assert (got.reward, got.success, got.task) == (1.0, True, task)
        assert f"{path}: {len(script)} actions" in said
        assert [text.partition("(")[0] for text in hasty] == ["click", "type", "scroll", "keys"]
        assert "not saved and gone: a demonstration of 4 actions" in said
