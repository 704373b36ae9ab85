"""The viewer in a real Chromium: clicks, filters, keyboard alone, a run that grows, axe-core.

Every page is opened with a listener for console messages and errors, and the tests fail for any.
The policy of the pages forbids eval, so conditions are awaited by locators and by `until`.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests import viewer_world as world
from tests.chromium import needs_chromium
from tests.viewer_world import ATTACK
from uirl_jax.metrics import MetricsWriter
from uirl_jax.store import open_store
from uirl_jax.watch import viewer
from uirl_jax.watch.follow import Follower

pytestmark = needs_chromium

WAIT_S = 20.0
AXE = "axe_playwright_python"  # of this package the tests use the file axe.min.js alone


@dataclasses.dataclass
class Open:
    """A page of a running viewer, and everything that its console said."""

    page: object
    address: str
    follower: Follower
    said: list[str]

    async def until(self, script: str, expected: object = True) -> None:
        """Waits until a script in the page gives a value."""
        async with asyncio.timeout(WAIT_S):
            while (found := await self.page.evaluate(script)) != expected:
                await asyncio.sleep(0.02)
        assert found == expected

    async def goto(self, path: str) -> None:
        await self.page.goto(self.address + path)


@contextlib.asynccontextmanager
async def opened(workdir: Path, *, scheme: str = "light", size=(1280, 900)):
    from playwright.async_api import async_playwright

    from uirl_jax.verifiers.browser.pool import find_chromium

    follower = Follower(str(workdir), every_s=0.1)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(follower.close)
        address = await stack.enter_async_context(viewer.serving(follower))
        await asyncio.to_thread(follower.look)
        follower.start()
        driver = await stack.enter_async_context(async_playwright())
        browser = await driver.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox"]
        )
        stack.push_async_callback(browser.close)
        context = await browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        page = await context.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(address) else said.append(f"request {request.url}")
            ),
        )
        yield Open(page, address.rstrip("/"), follower, said)
        assert said == []


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("viewer") / "run"
    world.make_run(workdir)
    world.make_suite(workdir)
    return workdir


ROWS = "[...document.querySelectorAll('#rows .row:not([hidden])')]"
FOCUSED = "document.activeElement.closest('.row')?.getAttribute('aria-rowindex')"


def test_clicks_lead_from_the_run_to_a_token_and_to_two_episodes(made):
    async def run():
        async with opened(made) as it:
            page = it.page
            await it.goto("/")
            assert await page.locator("h1").inner_text() == "run"
            await page.get_by_role("link", name="Episodes").click()
            await page.get_by_label("Task").select_option("desktop/enter_text")
            await page.get_by_text("11 of 29 episodes").wait_for()
            await page.get_by_label("Played in").select_option("training")
            await page.get_by_text("8 of 29 episodes").wait_for()
            await page.get_by_label("Outcome").select_option("success")
            await it.until(f"{ROWS}.every(row => row.children[2].textContent === 'success')")
            assert "task=desktop%2Fenter_text&outcome=success&place=training" in page.url
            await page.locator("#rows a").first.click()
            assert "desktop/enter_text" in await page.locator("h1").inner_text()
            # The ring is where the action was, in pixels of the screenshot.
            picture = page.locator(".turn-view img").first
            await picture.scroll_into_view_if_needed()
            await it.until("document.querySelector('.turn-view img').complete")
            wide = await page.evaluate("document.querySelector('.turn-view img').naturalWidth")
            box = await picture.bounding_box()
            ring = await page.locator(".turn-view circle.mark").first.bounding_box()
            action = await page.locator(".turn-view dd code").first.inner_text()
            x, y = (int(value) for value in re.findall(r"[xy]=(\d+)", action))
            scale = box["width"] / wide
            assert abs((ring["x"] + ring["width"] / 2 - box["x"]) / scale - x - 0.5) < 0.6
            assert abs((ring["y"] + ring["height"] / 2 - box["y"]) / scale - y - 0.5) < 0.6
            # Another colour for the tokens, with the number in words beside it.
            token = page.locator(".said .token").first
            colour = "getComputedStyle(document.querySelector('.said .token')).backgroundColor"
            before = await page.evaluate(colour)
            await page.get_by_label("advantage", exact=True).check()
            assert await page.evaluate(colour) != before
            assert "advantage" in await token.get_attribute("title")
            await page.get_by_text("The tokens of turn 1 as a table").click()
            assert await page.locator("table.tokens").first.is_visible()
            await page.get_by_role("button", name="Compare").click()
            await page.get_by_text("Two episodes of one group, side by side").wait_for()
            assert await page.locator(".compared-head").count() == 2
            left, right = [
                await page.locator(".compared-turn img").nth(n).bounding_box() for n in (0, 1)
            ]
            assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
            await page.get_by_role("link", name="Open the right episode alone").click()
            assert "/episode/" in page.url

    asyncio.run(run())


def test_everything_is_reached_by_keyboard_alone(made):
    async def run():
        async with opened(made) as it:
            page, keys = it.page, it.page.keyboard
            await it.goto("/episodes")
            await it.until(f"{ROWS}.length >= 20")
            await keys.press("Tab")
            assert await page.evaluate("document.activeElement.className") == "skip"
            await keys.press("Enter")
            # From the content on: the filters, two links and buttons, then one stop in the list.
            for _ in range(20):
                await keys.press("Tab")
                if await page.evaluate(FOCUSED):
                    break
            assert await page.evaluate(FOCUSED) == "2"
            for key, expected in (
                *(("ArrowDown", "3"), ("ArrowDown", "4"), ("ArrowUp", "3"), ("End", "30")),
                *(("ArrowDown", "30"), ("Home", "2"), ("ArrowUp", "2")),
            ):
                await keys.press(key)
                assert await page.evaluate(FOCUSED) == expected, key
                await it.until("document.activeElement.hasAttribute('href')")
            await keys.press("PageDown")
            assert int(await page.evaluate(FOCUSED)) > 8
            # The focused row is between the heading and the end of the list.
            seen = await page.evaluate(
                "(() => {const r = document.activeElement.closest('.row').getBoundingClientRect();"
                "const v = document.getElementById('view').getBoundingClientRect();"
                "return r.top >= v.top + 35 && r.bottom <= v.bottom + 1})()"
            )
            assert seen
            await keys.press("Home")
            await keys.press("Enter")
            await page.locator(".turn-view").first.wait_for()
            assert "/episode/" in page.url
            await page.goto(it.address + "/episodes?order=most+turns")
            await page.locator("#rows a[href]").first.click()
            await page.locator("#turn-2").wait_for()
            await page.locator("#turn-1").focus()
            for key, expected in (
                *(("ArrowRight", "turn-2"), ("ArrowRight", "turn-3")),
                *(("ArrowLeft", "turn-2"), ("ArrowLeft", "turn-1"), ("ArrowLeft", "turn-1")),
            ):
                await keys.press(key)
                assert await page.evaluate("document.activeElement.id") == expected

    asyncio.run(run())


def test_run_that_grows_is_followed_without_losing_the_place(tmp_path):
    world.make_run(tmp_path, groups=12, steps=3)
    store = open_store(tmp_path)

    async def run():
        async with opened(tmp_path, size=(1280, 600)) as it:
            page = it.page
            await it.goto("/")
            await page.get_by_text("in progress, 3 steps done").wait_for()
            await page.locator("summary", has_text="more curves").click()
            curve = "document.querySelector('.chart .line').getAttribute('d')"
            before = await page.evaluate(curve)
            with MetricsWriter(tmp_path, trackers=()) as writer:
                writer.write(4, {"reward/mean": 0.9, "success/mean": 0.9})
            world.write_manifest(tmp_path, 3)
            await page.get_by_text("in progress, 4 steps done").wait_for()
            await page.get_by_text("policy version 3").wait_for()
            assert await page.evaluate(curve) != before
            assert await page.evaluate("document.querySelector('.more').closest('details').open")
            assert await page.evaluate("document.activeElement.tagName") == "SUMMARY"
            # At the top of the list new episodes appear by themselves.
            await it.goto("/episodes")
            await page.get_by_text("51 of 51 episodes").wait_for()
            await asyncio.to_thread(world.writer_of(store, "a2").publish, world.make_group(20, 3))
            await page.get_by_text("55 of 55 episodes").wait_for()
            # Further down they wait, and the rows that are read stay where they are.
            await page.locator("#view").evaluate("view => { view.scrollTop = 400; }")
            await it.until(f"!{ROWS}.some(row => row.ariaRowIndex === '2')")  # the scroll is drawn
            await it.until(f"{ROWS}.every(row => row.querySelector('a').href)")
            texts = f"{ROWS}.map(row => row.ariaRowIndex + row.textContent).sort().join()"
            there = await page.evaluate(texts)
            await asyncio.to_thread(world.writer_of(store, "a3").publish, world.make_group(21, 3))
            await page.get_by_role("button", name="Show 4 newer episodes").wait_for()
            assert await page.evaluate(texts) == there
            await page.get_by_role("button", name="Show 4 newer episodes").click()
            await page.get_by_text("59 of 59 episodes").wait_for()
            assert await page.evaluate("document.getElementById('view').scrollTop") == 0
            await it.until("document.getElementById('progress').textContent",
                           "step 4, 59 episodes")  # fmt: skip

    asyncio.run(run())


def test_who_comes_back_from_an_episode_finds_the_list_as_it_was(made):
    async def run():
        async with opened(made, size=(1280, 600)) as it:
            page = it.page
            await it.goto("/episodes?place=training")
            await page.get_by_text("24 of 29 episodes").wait_for()
            await page.locator("#view").evaluate("view => { view.scrollTop = 400; }")
            await it.until(f"!{ROWS}.some(row => row.ariaRowIndex === '2')")  # the scroll is drawn
            await it.until(f"{ROWS}.every(row => row.querySelector('a').href)")
            link = page.locator("#rows .row[aria-rowindex='18'] a")
            href = await link.get_attribute("href")
            await link.click()
            await page.locator(".turn-view").first.wait_for()
            await page.go_back()
            await page.get_by_text("24 of 29 episodes").wait_for()
            await it.until(FOCUSED, "18")
            assert await page.evaluate("document.activeElement.getAttribute('href')") == href
            assert await page.evaluate("document.getElementById('view').scrollTop") == 400

    asyncio.run(run())


def test_list_of_thousands_has_few_elements_and_right_rows(tmp_path):
    group = world.make_group(0, 0)
    writer = world.writer_of(open_store(tmp_path))
    many = [
        dataclasses.replace(group[n % 4], episode_id=f"{n:032x}", group_id=str(n),
                            task=dataclasses.replace(group[0].task, seed=n))
        for n in range(3000)
    ]  # fmt: skip
    for first in range(0, 3000, 500):
        writer.publish(many[first : first + 500])

    async def run():
        async with opened(tmp_path) as it:
            page = it.page
            await it.goto("/episodes?order=oldest")
            await page.get_by_text("3,000 of 3,000 episodes").wait_for()
            for top in (0, 36 * 1500, 36 * 2999, 36 * 700):
                await page.locator("#view").evaluate(
                    "(view, top) => { view.scrollTop = top; }", top
                )
                # The rows of the new place, and filled: those of the old one go a frame later.
                await it.until(
                    f"{ROWS}.some(row => row.getAttribute('aria-rowindex') === '{top // 36 + 2}')"
                    f" && {ROWS}.every(row => row.children[1]?.textContent)"
                )
                shown = await page.evaluate(
                    f"{ROWS}.map(row => [row.getAttribute('aria-rowindex'), "
                    "row.children[1].textContent])"
                )
                assert len(shown) >= 15 and all(int(n) - 2 == int(seed) for n, seed in shown)
                order = f"{ROWS}.map(row => Number(row.getAttribute('aria-rowindex')))"
                await it.until(f"{order}.every((n, at, all) => at === 0 || all[at - 1] < n)")
                assert await page.evaluate("document.querySelectorAll('.row').length") < 80
            assert await page.evaluate("document.getElementById('rows').clientHeight") == 108_000

    asyncio.run(run())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(made, scheme):
    found = importlib.util.find_spec(AXE)
    if found is None or found.origin is None:
        pytest.skip("needs axe-core: pip install axe-playwright-python (extra `test`)")
    axe = Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8")

    async def run():
        async with opened(made, scheme=scheme) as it:
            page = it.page
            await it.goto("/episodes?place=training&order=most+turns")
            await it.until(
                f"{ROWS}.length >= 20 && {ROWS}.every(row => row.querySelector('a').href)"
            )
            key = (await page.locator("#rows a").first.get_attribute("href")).rpartition("/")[2]
            problems: list[tuple] = []
            other = (await page.locator("#rows a").nth(1).get_attribute("href")).rpartition("/")[2]
            for path in (
                *("/", "/episodes", f"/episode/{key}", f"/compare?a={key}&b={other}"),
                "/episode/0000000000000000",
            ):
                await it.goto(path)
                if path == "/episodes":
                    await it.until(f"{ROWS}.length >= 20")
                await page.evaluate(
                    "document.querySelectorAll('details').forEach(one => { one.open = true; })"
                )
                await page.evaluate(axe)  # by the debugger: the page itself may not load it
                result = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
                problems += [
                    (
                        path,
                        one["id"],
                        one["help"],
                        [node["html"][:150] for node in one["nodes"][:3]],
                    )
                    for one in result["violations"]
                ]
                assert len(result["passes"]) > 10
                it.said[:] = [text for text in it.said if "404" not in text]
            assert problems == [], json.dumps(problems, indent=1)

    asyncio.run(run())


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_the_screen(made, width):
    async def run():
        async with opened(made, size=(width, 800)) as it:
            page = it.page
            await it.goto("/episodes?place=training")
            await page.locator("#rows a[href]").first.wait_for()
            href = await page.locator("#rows a").first.get_attribute("href")
            key = href.rpartition("/")[2]
            for path in ("/", "/episodes", href, f"/compare?a={key}&b={key}"):
                await it.goto(path)
                root = "document.documentElement"
                assert await page.evaluate(f"{root}.scrollWidth - {root}.clientWidth") <= 0, path

    asyncio.run(run())


def test_hostile_texts_and_pictures_do_nothing(tmp_path):
    group = world.make_group(0, 0)
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' onload='document.title=1'/>"
    world.writer_of(open_store(tmp_path)).publish(
        [
            dataclasses.replace(world.hostile(group[0], ATTACK), episode_id="a"),
            dataclasses.replace(world.hostile(group[1], "x" * 300_000, svg), episode_id="b"),
        ]
    )
    world.write_config(tmp_path)

    async def run():
        async with opened(tmp_path) as it:
            page = it.page
            dialogs = []
            page.on("dialog", lambda dialog: dialogs.append(dialog.message))
            await it.goto("/episodes?order=oldest")
            await page.locator("#rows a[href]").nth(1).wait_for()
            assert "<script>alert(1)</script>" in await page.locator("#rows a").first.inner_text()
            hrefs = [await page.locator("#rows a").nth(n).get_attribute("href") for n in (0, 1)]
            keys = [href.rpartition("/")[2] for href in hrefs]
            for path in (*hrefs, f"/compare?a={keys[0]}&b={keys[1]}"):
                await it.goto(path)
                assert await page.locator(".turn-view").first.is_visible()
                root = "document.documentElement"
                assert await page.evaluate(f"{root}.scrollWidth - {root}.clientWidth") <= 0
                assert "uirl_jax viewer" in await page.title()
            assert dialogs == []

    asyncio.run(run())


def test_gone_episode_is_a_page_that_says_so(tmp_path):
    name = world.writer_of(open_store(tmp_path)).publish(world.make_group(0, 0))

    async def run():
        async with opened(tmp_path) as it:
            page = it.page
            await it.goto("/episodes")
            await page.locator("#rows a[href]").first.wait_for()
            (tmp_path / name).unlink()
            await page.locator("#rows a[href]").first.click()
            await page.get_by_text("This cannot be shown").wait_for()
            assert "the learner deletes shards" in await page.locator("main").inner_text()
            it.said[:] = [text for text in it.said if "410" not in text]  # Chromium logs it

    asyncio.run(run())
