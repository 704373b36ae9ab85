"""A page of MiniWoB++ that begins anew is as a fresh one: what is drawn, filled in, listened to."""

import asyncio
import io

import numpy as np
import pytest
from PIL import Image

from configs.miniwob_tasks import MAX_TURNS
from tests.chromium import needs_chromium, pool_and_runner, waits_again
from uirl_jax.errors import VerifierError
from uirl_jax.types import Action, TaskSpec

pytestmark = needs_chromium

# All that a script of the page could see of an episode before: the document, what is in its fields,
# where it is scrolled to, jQuery's handlers, every global that is data. Not: scripts, which hold
# the seed that the page was loaded with, and what tells the time.
STATE = r"""(() => {
  const clocks = ["performance", "ept0", "EP_TIMER", "core"];
  const data = object => Object.fromEntries(Object.getOwnPropertyNames(object)
    .filter(name => !clocks.includes(name) && object[name] !== window)
    .map(name => {
      const value = object[name];
      if (typeof value === "function" || value instanceof Node) return [name, typeof value];
      try { return [name, JSON.stringify(value)]; } catch { return [name, "circular"]; }
    }));
  const all = [...document.querySelectorAll("*")];
  return {
    body: document.body.outerHTML.replace(/<script[^]*?<\/script>/g, ""),
    fields: all.map(e => [e.value, e.checked, e.selectedIndex, e.scrollTop, e.scrollLeft].join()),
    active: document.activeElement.outerHTML,
    handlers: window.jQuery
      ? [window, document, ...all].map(e => Object.entries(jQuery._data(e, "events") ?? {})
          .map(([type, list]) => type + list.length).join())
      : [],
    ...data(window), ...data(core),
  };
})()"""
EVERYTHING = "[window, document, ...document.querySelectorAll('*')]"


@pytest.fixture(scope="module")
def world():
    with pool_and_runner(warm=1, max_browsers=1) as (pool, runner):
        yield pool, runner


async def begin(pool, name, seed, variant=""):
    from uirl_jax.verifiers.browser.miniwob import MiniWob

    return await MiniWob.open(pool, TaskSpec(name, seed, variant))


async def end(pool, session):
    session._tab.num_sessions = 0  # else the hundredth would end the browser
    await session.close()
    await waits_again(pool, session._tab)


async def look(session):
    """What a script sees, the listeners of every node, and the screen."""
    tab = session._tab
    state = await tab.evaluate(STATE)
    answer = await tab._page.send("Runtime.evaluate", {"expression": EVERYTHING})
    nodes = await tab._page.send(
        "Runtime.getProperties", {"objectId": answer["result"]["objectId"], "ownProperties": True}
    )
    state["listeners"] = []
    for node in nodes["result"]:
        if node["name"].isdigit():
            found = await tab._page.send(
                "DOMDebugger.getEventListeners", {"objectId": node["value"]["objectId"]}
            )
            state["listeners"].append(sorted(one["type"] for one in found["listeners"]))
    png = await session.screenshot("png")
    return state, np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), int)


def forget(pool):
    """The next episode of any task loads its page."""
    for tab in pool._waiting:
        tab.kept = {(f"forgotten {n}", 1): kept for n, kept in enumerate(tab.kept.values())}


async def fresh(pool, name, seed):
    forget(pool)
    session = await begin(pool, name, seed)
    seen = await look(session)
    await end(pool, session)
    return seen


async def play(session, rng, num_actions):
    """The demonstrator's actions, where there is one, and then any."""
    for _ in range(num_actions):
        done = (await session.progress())["done"]
        action = None if done else await session.scripted_action(rng)
        if action is None:
            break
        await session.act(action)
    for kind in rng.choice(("click", "click", "double_click", "type", "scroll", "drag"), 5):
        x, y, x2, y2 = (int(rng.integers(5, most)) for most in (155, 205, 155, 205))
        fields = {
            **{"type": {"text": "ab"}, "drag": {"x": x, "y": y, "x2": x2, "y2": y2}},
            "scroll": {"x": x, "y": y, "direction": "down", "amount": 60},
        }
        # Past the session, which acts no more after the end.
        await session._tab.act(Action(str(kind), **fields.get(kind, {"x": x, "y": y})))


async def compare(pool, name):
    """Three episodes one after the other in one page, each beside a fresh page's of its seed."""
    rng = np.random.default_rng(0)
    expected = {seed: await fresh(pool, name, seed) for seed in (2, 3)}
    forget(pool)
    session = await begin(pool, name, 1)
    try:
        await session._tab.evaluate("document.sameDocument = true")
        for seed, num_actions in ((2, 20), (3, 1)):
            await play(session, rng, num_actions)
            await end(pool, session)
            session = await begin(pool, name, seed)
            assert await session._tab.evaluate("document.sameDocument") is True
            (state, screen), (state_there, screen_there) = await look(session), expected[seed]
            assert {key: state[key] for key in state if state[key] != state_there.get(key)} == {}
            # A line between pixels is drawn in shades that differ by one or two, with fresh pages
            # too.
            assert np.abs(screen - screen_there).max() <= 3
    finally:
        await end(pool, session)


@pytest.mark.parametrize("task", sorted(MAX_TURNS))
def test_page_that_begins_anew_is_as_a_fresh_one(world, task):
    pool, runner = world
    runner.run(compare(pool, f"miniwob/{task}"))


@pytest.mark.slow
def test_every_page_that_may_begin_anew_is_as_a_fresh_one(world):
    from uirl_jax.verifiers.browser import miniwob

    pool, runner = world
    different = {}
    for name in sorted(set(miniwob.task_names()) - miniwob._ALWAYS_FRESH):
        try:
            runner.run(compare(pool, name))
        except AssertionError as error:
            different[name] = str(error)[:300]
    assert not different, "\n".join(f"{name}: {why}" for name, why in different.items())


def test_page_begins_anew_for_its_own_task_and_scale_alone(world):
    pool, runner = world

    async def same_document(first, then):
        session = await begin(pool, *first)
        await session._tab.evaluate("document.sameDocument = true")
        await end(pool, session)
        session = await begin(pool, *then)
        same = await session._tab.evaluate("document.sameDocument === true")
        await end(pool, session)
        return same

    test, pie = ("miniwob/click-test", 1), ("miniwob/click-pie", 1)
    assert runner.run(same_document(test, ("miniwob/click-test", 2)))
    assert not runner.run(same_document(test, ("miniwob/click-test-2", 2)))
    assert not runner.run(same_document(test, ("miniwob/click-test", 1, "scale=2")))
    assert not runner.run(same_document(pie, pie))  # it moves by a clock


def test_of_the_pages_that_wait_each_task_takes_its_own():
    names = ("miniwob/click-test", "miniwob/click-test-2")

    async def run(pool):
        sessions = [await begin(pool, name, 1) for name in names]
        for session in sessions:
            await session._tab.evaluate("document.sameDocument = true")
            await end(pool, session)
        sessions = [await begin(pool, name, 2) for name in names]
        same = [await s._tab.evaluate("document.sameDocument === true") for s in sessions]
        for session in sessions:
            await end(pool, session)
        return same

    with pool_and_runner(warm=2, max_browsers=2) as (pool, runner):
        assert runner.run(run(pool)) == [True, True]


@pytest.mark.parametrize("spoil", ["location.hash = 'x'", "core.getUtterance = null"])
def test_page_that_went_elsewhere_or_fails_is_not_begun_anew(world, spoil):
    pool, runner = world

    async def run():
        session = await begin(pool, "miniwob/click-test", 1)
        await session._tab.evaluate(spoil)
        await end(pool, session)
        try:
            session = await begin(pool, "miniwob/click-test", 2)
        except VerifierError:  # the one after it shall not suffer
            async with asyncio.timeout(60):
                while not pool._waiting:
                    await asyncio.sleep(0.01)
            session = await begin(pool, "miniwob/click-test", 2)
        where = await session._tab.evaluate("location.hash + typeof core.getUtterance")
        await end(pool, session)
        return where

    assert runner.run(run()) == "function"


def test_nothing_that_was_typed_comes_back_by_undoing_or_pasting(world):
    pool, runner = world

    async def run():
        for seed in range(3):
            session = await begin(pool, "miniwob/enter-text", seed)
            if seed:
                await session.act(await session.scripted_action(np.random.default_rng(0)))
                for keys in ("ctrl+z", "ctrl+v"):
                    await session.act(Action("keys", keys=keys))
            assert await session._tab.evaluate("document.querySelector('#tt').value") == ""
            await session.act(await session.scripted_action(np.random.default_rng(0)))
            for action in (Action("type", text="x"), Action("keys", keys="ctrl+a")):
                await session.act(action)
            await session.act(Action("keys", keys="ctrl+c"))
            await session._tab.evaluate("localStorage.x = sessionStorage.x = window.name = 1")
            await end(pool, session)
        session = await begin(pool, "miniwob/enter-text", 9)
        left = await session._tab.evaluate("[window.name, localStorage.length]")
        await end(pool, session)
        return left

    assert runner.run(run()) == ["", 0]
