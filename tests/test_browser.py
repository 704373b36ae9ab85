"""Tabs of real browsers: isolation, settling, crashes."""

import asyncio
import contextlib
import io
import os
import signal
import time

import aiohttp
import numpy as np
import pytest
from PIL import Image

from tests.chromium import needs_chromium, open_page, pool_and_runner, waits_again
from tests.linux_processes import command_of, descendants
from tests.served import ask, create, served
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.browser import BrowserError
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.server.server import serve
from uirl_jax.verifiers.server.sessions import ServerLimits

pytestmark = needs_chromium

TWO_FIELDS = """<!DOCTYPE html><style>body{margin:0}
input{position:absolute;left:0;width:150px;height:30px}</style>
<input id=a style="top:0"><input id=b style="top:50px">"""
CLICK_A, CLICK_B = Action("click", x=20, y=15), Action("click", x=20, y=65)


@pytest.fixture(scope="module")
def world():
    with pool_and_runner(warm=1, max_browsers=8) as (pool, runner):
        yield pool, runner


def press(keys):
    return Action("keys", keys=keys)


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_clipboards_of_eight_sessions_at_once_are_their_own(world):
    pool, runner = world
    wrong = []

    async def copy_and_paste(tab, number, barrier):
        for turn in range(3):
            text = f"session {number} turn {turn}"
            for action in (CLICK_A, press("ctrl+a"), Action("type", text=text), press("ctrl+a")):
                await tab.act(action)
            await barrier.wait()
            await tab.act(press("ctrl+c"))
            await (
                barrier.wait()
            )  # all have copied before any pastes: a shared clipboard has one text
            for action in (CLICK_B, press("ctrl+a"), press("ctrl+v")):
                await tab.act(action)
            pasted = await tab.evaluate("b.value")
            if pasted != text:
                wrong.append((pasted, text))

    async def run():
        tabs = [await open_page(pool, TWO_FIELDS) for _ in range(8)]
        barrier = asyncio.Barrier(8)
        await asyncio.gather(*(copy_and_paste(t, i, barrier) for i, t in enumerate(tabs)))
        for tab in tabs:
            await pool.release(tab)

    runner.run(run())
    assert wrong == []


@pytest.mark.parametrize("trusted", [False, True])
def test_next_session_of_a_process_finds_nothing_of_the_last(world, trusted):
    pool, runner = world
    leave = """(async () => {
      localStorage.x = 1; sessionStorage.x = 1; window.name = "x"; document.cookie = "y=1";
      history.pushState(0, "", "#z");
      await new Promise(done => indexedDB.open("x").onsuccess = done);
      await caches.open("x");
      setInterval(() => { localStorage.x = 1 }, 1);  // for as long as the page is there
    })()"""
    look = """(async () => [a.value, b.value, localStorage.x, sessionStorage.x, window.name,
      document.cookie, location.hash, history.length, (await indexedDB.databases()).length,
      (await caches.keys()).length])()"""

    async def run():
        tab = await open_page(pool, TWO_FIELDS, trusted=trusted)
        for action in (CLICK_A, Action("type", text="secret"), press("ctrl+a"), press("ctrl+c")):
            await tab.act(action)
        await tab.evaluate(leave)
        before = await tab.evaluate(look)
        assert before == ["secret", "", "1", "1", "x", "y=1", "#z", 2, 1, 1]
        await pool.release(tab)
        await waits_again(pool, tab)
        again = await open_page(pool, TWO_FIELDS)
        assert again is tab  # the same process, whose clipboard it was
        await again.act(CLICK_B)
        await again.act(press("ctrl+v"))
        await again.act(Action("navigate_back"))
        left = await again.evaluate(look)
        await pool.release(again)
        return left

    assert runner.run(run()) == ["", "", None, None, "", "", "", 1, 0, 0]


def test_sessions_that_take_turns_keep_their_processes():
    """As many at once as there may be: the next one waits for a tab, it starts no process."""
    used = []

    async def play(pool):
        for _ in range(5):
            tab = await open_page(pool, TWO_FIELDS)
            used.append(tab.browser)
            await pool.release(tab)

    async def run(pool):
        async with asyncio.timeout(60):
            await asyncio.gather(*(play(pool) for _ in range(3)))

    with pool_and_runner(warm=1, max_browsers=3) as (pool, runner):
        runner.run(run(pool))
    assert (len(used), len(set(used))) == (15, 3)


@pytest.mark.parametrize("trusted", [False, True])
def test_next_session_of_a_process_is_drawn_as_the_first(world, trusted):
    """The mouse rests, focus and a selection are, scrolled it is where the last session left it."""
    pool, runner = world
    page = """<!DOCTYPE html><style>body{margin:0;height:2000px} button:hover{background:red}
      button:active{background:blue}</style><button style="position:fixed;left:0;top:0;width:200px;
      height:100px">Press</button><input style="position:absolute;top:110px"><p>Some words."""

    async def run():
        screens = []
        for _ in range(3):
            tab = await open_page(pool, page, trusted=trusted)
            await asyncio.sleep(0.3)  # time for a hover that comes late
            screens.append(await tab.screenshot("png"))
            await tab.act(Action("click", x=50, y=120))
            await tab.act(press("ctrl+a"))
            await tab.act(Action("scroll", x=50, y=120, direction="down", amount=300))
            await tab.act(Action("click", x=50, y=50))
            screens.append(await tab.screenshot("png"))
            await pool.release(tab)
            await waits_again(pool, tab)
        return screens

    first, used, *others = runner.run(run())
    assert pixels(first)[50, 150].tolist() != pixels(used)[50, 150].tolist() == [255, 0, 0]
    assert others == [first, used] * 2


def test_every_mouse_action_reaches_the_page(world):
    pool, runner = world
    page = """<!DOCTYPE html><body style="margin:0;height:2000px"><script>
      const seen = [];
      for (const kind of ["click", "dblclick", "auxclick", "contextmenu", "mousedown", "mouseup",
                          "wheel"])
        addEventListener(kind, e => seen.push([kind, e.clientX, e.clientY, e.detail]));
      const take = () => seen.splice(0);</script>"""

    async def run():
        tab = await open_page(pool, page, screen_px=(640, 400), scale=2)

        async def after(action):
            await tab.act(action)
            return await tab.evaluate("take()")

        at = {"x": 100, "y": 60}  # of the screen; half of it in the page's own pixels
        assert await after(Action("click", **at)) == [
            ["mousedown", 50, 30, 1], ["mouseup", 50, 30, 1], ["click", 50, 30, 1]
        ]  # fmt: skip
        kinds = [event[0] for event in await after(Action("triple_click", **at))]
        assert kinds.count("click") == 3 and kinds.count("dblclick") == 1
        assert "contextmenu" in [event[0] for event in await after(Action("right_click", **at))]
        middle = await after(Action("middle_click", **at))
        assert ["auxclick", 50, 30, 1] in middle
        drag = await after(Action("drag", **at, x2=300, y2=200))
        assert drag[0][:3] == ["mousedown", 50, 30] and drag[1][:3] == ["mouseup", 150, 100]
        started = time.monotonic()
        held = await after(Action("long_press", **at, seconds=0.3))
        assert held[0][0] == "mousedown" and time.monotonic() - started > 0.3
        wheel = await after(Action("scroll", direction="down", amount=200, **at))
        assert wheel[0][:3] == ["wheel", 50, 30]
        assert await tab.evaluate("scrollY") == 100
        await pool.release(tab)

    runner.run(run())


@pytest.mark.parametrize("event", ["mousedown", "mousemove", "dragstart"])
def test_drag_on_a_page_that_is_loaded_anew_in_its_middle_ends_the_drag_alone(world, event):
    pool, runner = world
    page = f"""<!DOCTYPE html><body style="margin:0"><p draggable=true>text</p><script>
      const count = Number(sessionStorage.loads || 0);
      sessionStorage.loads = count + 1;
      const pressed = [];
      addEventListener("mousedown", () => pressed.push("down"));
      addEventListener("mouseup", () => pressed.push("up"));
      if (count === 0) addEventListener("{event}", () => location.reload());</script>"""

    async def run():
        tab = await open_page(pool, page)
        await tab.act(Action("drag", x=10, y=25, x2=200, y2=150))
        assert await tab.evaluate("sessionStorage.loads") == "2"
        await tab.evaluate("pressed.length = 0")
        await tab.act(Action("click", x=300, y=300))
        assert await tab.evaluate("pressed") == ["down", "up"]
        await tab.act(Action("drag", x=10, y=25, x2=200, y2=150))
        await tab.evaluate("1")
        await pool.release(tab)

    runner.run(run())


@pytest.mark.parametrize(
    "script",
    [
        "window.requestAnimationFrame = () => 0",  # calls back never
        "setTimeout(() => { const end = Date.now() + 11000; while (Date.now() < end) {} }, 300)",
    ],
)
def test_page_that_draws_no_frame_is_shown_as_it_is(world, script):
    pool, runner = world
    page = f"<body style='background:#00f'><script>{script}</script></body>"

    async def look():
        tab = await open_page(pool, page)
        try:
            await asyncio.sleep(0.5)
            return await asyncio.wait_for(tab.screenshot("png"), 5)
        finally:
            tab.broken = tab.broken or "its page stays busy"
            await pool.release(tab)

    with Image.open(io.BytesIO(runner.run(look()))) as image:
        assert image.convert("RGB").getpixel((100, 100)) == (0, 0, 255)


def test_screenshot_that_was_cancelled_leaves_the_next_one_as_it_is(world):
    pool, runner = world

    async def run():
        tab = await open_page(pool, TWO_FIELDS)
        before = await tab.screenshot("png")
        for _ in range(3):
            shot = asyncio.create_task(tab.screenshot("png"))
            await asyncio.sleep(0)
            shot.cancel()
            assert await tab.screenshot("png") == before
        await pool.release(tab)

    runner.run(run())


def test_typed_text_arrives_key_by_key_and_long_text_whole(world):
    pool, runner = world
    long_text = "ab \u00e9\u4f60 " * 100

    async def run():
        tab = await open_page(pool, TWO_FIELDS)
        await tab.evaluate("a.keys = 0; a.onkeydown = () => a.keys++; 0")
        await tab.act(CLICK_A)
        await tab.act(Action("type", text="Hi!\t" + long_text))
        got = await tab.evaluate("[a.value, a.keys, b.value]")
        await pool.release(tab)
        return got

    assert runner.run(run()) == ["Hi!", 4, long_text]


def test_text_of_many_keys_has_the_time_for_them(world, monkeypatch):
    """Parts between tabs are typed key by key, however many there are."""
    monkeypatch.setattr("uirl_jax.verifiers.browser.tab.ANSWER_S", 0.3)  # less than they take
    monkeypatch.setattr("uirl_jax.verifiers.browser.tab.KEY_S", 1.0)
    pool, runner = world

    async def run():
        with monkeypatch.context() as patient:
            patient.setattr("uirl_jax.verifiers.browser.tab.ANSWER_S", 30.0)
            tab = await open_page(pool, TWO_FIELDS)
            await tab.evaluate("a.keys = 0; onkeydown = () => a.keys++; 0")
        await tab.act(Action("type", text=f"{'x' * 199}\t" * 10))
        with monkeypatch.context() as patient:
            patient.setattr("uirl_jax.verifiers.browser.tab.ANSWER_S", 30.0)
            keys = await tab.evaluate("a.keys")
            await pool.release(tab)
        return keys

    assert runner.run(run()) == 2000


def test_act_returns_when_the_page_has_settled_and_in_bounded_time_if_never(world):
    pool, runner = world
    page = """<!DOCTYPE html><body style="background:white"><script>
      onclick = () => { let left = 20; const frame = () => {
        document.body.style.background = left-- ? `rgb(0,0,${left * 10})` : "rgb(1,2,3)";
        if (left >= 0 || endless) requestAnimationFrame(frame); }; frame(); };
      let endless = false;</script>"""

    async def run():
        tab = await open_page(pool, page)
        await tab.act(Action("click", x=5, y=5))
        settled = pixels(await tab.screenshot("png"))[100, 100].tolist()
        await tab.evaluate("endless = true")
        started = time.monotonic()
        await tab.act(Action("click", x=5, y=5))
        bounded_s = time.monotonic() - started
        await pool.release(tab)
        return settled, bounded_s

    settled, bounded_s = runner.run(run())
    assert settled == [1, 2, 3]
    assert bounded_s < 3.0


@pytest.mark.parametrize(
    "attempt",
    [
        "fetch(`http://${host}/`, {mode: 'no-cors'}).then(() => 1, () => 0)",
        "new Promise(r => { const w = new WebSocket(`ws://${host}/`); w.onopen = () => r(1);"
        " w.onerror = () => r(0); })",
        "new Promise(async r => { const p = new RTCPeerConnection({iceServers: "
        "[{urls: `stun:${host}`}, {urls: `turn:${host}?transport=tcp`, username: 'a',"
        " credential: 'b'}]}); p.createDataChannel('x'); await p.setLocalDescription("
        "await p.createOffer()); p.onicegatheringstatechange = () => "
        "p.iceGatheringState === 'complete' && r(0); })",
    ],
)
def test_pages_reach_no_network(world, attempt):
    pool, runner = world
    callers = []

    class Datagrams(asyncio.DatagramProtocol):
        def datagram_received(self, data, address):
            callers.append("udp")

    def connected(reader, writer):
        callers.append("tcp")
        writer.close()

    async def run():
        listener = await asyncio.start_server(connected, "127.0.0.1", 0)
        address = listener.sockets[0].getsockname()
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            Datagrams, local_addr=address
        )
        tab = await open_page(pool, "<!DOCTYPE html>")
        got = await tab.evaluate(f"(host => {attempt})('127.0.0.1:{address[1]}')")
        await pool.release(tab)
        transport.close()
        listener.close()
        return got

    assert runner.run(run()) == 0
    assert callers == []


def test_links_elsewhere_and_new_windows_leave_the_page_as_it_is(world):
    pool, runner = world
    page = """<!DOCTYPE html><style>a{position:absolute;left:0}</style>
      <a href="https://example.com/" style="top:0">away</a>
      <a href="https://test.invalid/" target="_blank" style="top:50px">window</a>
      <script>const opened = document.title = "here"</script>"""

    async def run():
        tab = await open_page(pool, page)
        before = await tab.screenshot("png")
        for y in (8, 58):
            await tab.act(Action("click", x=10, y=y))
        await tab.act(Action("move", x=300, y=190))
        title = await tab.evaluate("document.title")
        after = await tab.screenshot("png")
        await pool.release(tab)
        return title, before == after or not np.any(pixels(after)[100:] != 255)

    assert runner.run(run()) == ("here", True)


async def _crash_page(tab, pids):
    with contextlib.suppress(BrowserError):
        async with tab._answering():
            await tab._page.send("Page.crash")


async def _kill_browsers(tab, pids):
    for pid in pids:
        if b"headless-shell" in command_of(pid) or b"chromium" in command_of(pid).split(b"\0")[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("disaster", [_crash_page, _kill_browsers])
def test_crash_ends_its_session_and_the_next_one_has_another_browser(disaster):
    before = set(descendants(os.getpid()))
    with pool_and_runner(warm=1) as (pool, runner):

        async def run():
            tab = await open_page(pool, TWO_FIELDS)
            await disaster(tab, set(descendants(os.getpid())) - before)
            with pytest.raises(BrowserError, match="lost"):
                await tab.act(CLICK_A)
                await tab.act(CLICK_A)
            await pool.release(tab)
            again = await open_page(pool, TWO_FIELDS)
            await again.act(CLICK_A)
            await again.act(Action("type", text="alive"))
            assert await again.evaluate("a.value") == "alive"
            await pool.release(again)

        runner.run(run())


def test_page_that_hangs_is_lost_after_a_bound(world, monkeypatch):
    from uirl_jax.verifiers.browser import tab as tab_module

    pool, runner = world

    async def run():
        tab = await open_page(pool, "<!DOCTYPE html><script>onclick = () => { for (;;); }</script>")
        monkeypatch.setattr(tab_module, "ANSWER_S", 0.5)
        with pytest.raises(BrowserError, match=r"no answer within 0\.5 s"):
            await tab.act(Action("click", x=5, y=5))
        monkeypatch.undo()
        await pool.release(tab)

    runner.run(run())


def test_server_ends_a_session_whose_browser_is_lost_and_tells_why():
    before = set(descendants(os.getpid()))

    async def run():
        limits = ServerLimits(warm_browsers=1, max_browsers=1)
        async with (
            serve(limits=limits) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):
            query = {"type": "simple_data_entry", "seed": 1}
            async with http.post("/session", params=query) as response:
                path = f"/session/{(await response.json())['session_ids'][0]}"
            async with http.post("/session", params=query) as response:
                assert response.status == 429
            await _kill_browsers(None, set(descendants(os.getpid())) - before)
            async with http.post(
                f"{path}/act", json={"action_type": "left_click", "x": 1, "y": 1}
            ) as r:
                assert r.status == 500 and "lost" in (await r.json())["detail"]
            async with http.get(f"{path}/screenshot") as response:
                assert response.status == 404
            async with http.post("/session", params=query) as response:
                assert response.status == 200

    asyncio.run(run())


def test_session_in_a_browser_names_its_renderer_and_a_drawn_one_does_not(capfd):
    async def run():
        async with (
            serve(limits=ServerLimits(warm_browsers=1, max_browsers=1)) as port,
            VerifierClient(f"http://127.0.0.1:{port}") as client,
        ):
            drawn = await client.create(TaskSpec("desktop/click_button", 1))
            page = await client.create(TaskSpec("simple_data_entry", 1))
            assert drawn.renderer == "" and len(page.renderer) == 16
            assert f"event=renderer fingerprint={page.renderer} " in capfd.readouterr().out

    asyncio.run(run())


def test_fingerprint_that_fails_costs_its_call_alone(monkeypatch):
    from uirl_jax.verifiers.browser import rendering

    fingerprint = rendering.fingerprint

    async def fail_once(tab):
        monkeypatch.setattr(rendering, "fingerprint", fingerprint)
        raise BrowserError("its page crashed")

    monkeypatch.setattr(rendering, "fingerprint", fail_once)

    async def run():
        async with served(limits=ServerLimits(warm_browsers=0, max_browsers=1)) as http:
            query = {"type": "simple_data_entry", "seed": 1}
            refused = await ask(http, "POST", "/session", params=query)
            assert refused[:2] == (503, {"detail": "its page crashed"})
            session = await create(http, "simple_data_entry", seed=1)  # the only browser is free
            assert len(session["renderer"]) == 16

    asyncio.run(run())


def test_fonts_of_the_machine_do_not_change_what_is_drawn(tmp_path, monkeypatch):
    """A user's font settings draw Arial with serifs; the pool's browsers do not look there."""
    settings = tmp_path / "fontconfig" / "fonts.conf"
    settings.parent.mkdir()
    settings.write_text(
        "<fontconfig><match><edit name='family' mode='prepend_first' binding='strong'>"
        "<string>DejaVu Serif</string></edit></match></fontconfig>"
    )

    from uirl_jax.verifiers.browser import rendering

    def drawn(environment=None) -> str:
        if environment is not None:
            monkeypatch.setattr(rendering, "environment", environment)
        with pool_and_runner(warm=1) as (pool, runner):

            async def run():
                tab = await pool.acquire()
                try:
                    return await rendering.fingerprint(tab)
                finally:
                    await pool.release(tab)

            return runner.run(run())

    before = drawn()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert drawn() == before
    assert drawn(lambda: dict(os.environ)) != before
