"""Whatever is done in a browser session, the server answers without a 500, the session goes on, and
nothing happens outside of it: no other session changes, no file is written, no socket is opened."""

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chromium import needs_chromium
from tests.running_server import running_server
from uirl_jax import actions
from uirl_jax.verifiers import wire
from uirl_jax.verifiers.server.open_session import ServerLimits
from uirl_jax.verifiers.server.server import serve

pytestmark = needs_chromium

TASKS = {
    "simple_data_entry": "size=small",
    "miniwob/enter-text": "",
    "miniwob/email-inbox": "",
}
KEYS = sorted(actions.NAMED_KEYS | actions.CHARACTER_KEYS)
TEXTS = st.text(max_size=40) | st.sampled_from(
    [
        *("</script><script>fetch('http://127.0.0.1/')</script>", "javascript:alert(1)", "\\u0000"),
        *("https://example.com\n", "file:///etc/passwd\n", "'\"`${1}", "\u202e\u2028\ufeff"),
        *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "e\u0301" * 100, "\t" * 20, "\n" * 20),
        *("x" * 4096, "\U0001f600" * 300, "a\tb\nc"),
    ]
)


def acts(width_px, height_px):
    """Fields of acts that are let through, for a screen of this size."""
    x, y = st.integers(0, width_px - 1), st.integers(0, height_px - 1)
    at = {"x": x, "y": y}
    chord = st.tuples(
        st.lists(st.sampled_from(sorted(actions.MODIFIERS)), unique=True, max_size=3),
        st.sampled_from(KEYS),
    ).map(lambda pair: "+".join([*(key for key in pair[0] if key != pair[1]), pair[1]]))
    given_fields = {
        **{name: at for name in wire.ACTION_TYPES if "click" in name or name == "mouse_move"},
        "drag": at | {"x2": x, "y2": y},
        "long_press": at | {"seconds": st.sampled_from([0, 0.02])},
        "type": {"text": TEXTS},
        "keys": {"keys": chord},
        "scroll": {
            "direction": st.sampled_from(actions.DIRECTIONS),
            "amount": st.integers(1, actions.MAX_SCROLL_PX),
        },
        "wait": {"seconds": st.sampled_from([0, 0.01])},
        "navigate_back": {},
        "system_button": {"text": st.sampled_from(["home", "menu"])},
    }
    assert set(given_fields) == set(wire.ACTION_TYPES) - {"screenshot", *wire.SAID}
    return st.one_of(
        *(
            st.fixed_dictionaries({"action_type": st.just(name), **fields})
            for name, fields in given_fields.items()
        )
    )


def sockets_beyond_loopback(pid):
    """Remote ends, as the kernel writes them, of TCP connections that this process or one below it
    has with another machine."""
    inodes = {
        link.readlink().name.strip("socket:[]")
        for process in processes_below(pid)
        for link in Path(f"/proc/{process}/fd").iterdir()
        if str(link.readlink()).startswith("socket:")
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address = words[2].split(":")[0]
            if words[9] in inodes and not address.endswith(("0100007F", "00000000")):
                found.add(address)
    return found


def processes_below(pid):
    """The process and all that it started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    below = [int(child) for path in children for child in path.read_text().split()]
    return [pid, *(found for child in below for found in processes_below(child))]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.mark.parametrize("name", TASKS)
def test_session_goes_on_whatever_is_done_in_it(server, name):
    bystander = server.create(name, variant=TASKS[name], seed=2)
    before = server.seen_of(bystander)
    session = server.create(name, variant=TASKS[name])
    shot = server.call("GET", f"/session/{session}/screenshot").content
    width_px, height_px = int.from_bytes(shot[16:20], "big"), int.from_bytes(shot[20:24], "big")

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=int(os.environ.get("UIRL_FUZZ_EXAMPLES", "6")),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(acts(width_px, height_px), min_size=4, max_size=8))
    def run(sequence):
        for fields in sequence:
            answer = server.call("POST", f"/session/{session}/act", json={**fields, "delay": 0})
            assert answer.status_code in (200, 422), (fields, answer.text)
            if answer.status_code == 200:
                assert answer.content[16:24] == shot[16:24], fields
            else:
                assert "which no key types" in answer.json()["detail"], (fields, answer.text)
        progress = server.call("GET", f"/session/{session}/progress")
        assert progress.status_code == 200 and isinstance(progress.json()["done"], bool)

    run()
    assert len(processes_below(server.pid)) > 1  # a browser is among them
    assert sockets_beyond_loopback(server.pid) == set()
    assert server.seen_of(bystander) == before
    server.delete_all_but("")
    server.check_whole()


def test_deletion_in_the_middle_of_an_act_leaves_the_next_session_alone():
    """The page of a deleted session goes to the next one: no act of the old one may reach it."""

    async def run():
        limits = ServerLimits(max_browsers=1, warm_browsers=0)
        async with (
            serve(limits=limits) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):

            async def create():
                query = {"type": "miniwob/click-test-2", "seed": 3}
                async with http.post("/session", params=query) as response:
                    return (await response.json())["session_ids"][0]

            async def call(method, path, **options):
                async with http.request(method, path, **options) as response:
                    return response.status, await response.read()

            old = await create()
            acting = [
                asyncio.create_task(
                    call(
                        "POST",
                        f"/session/{old}/act",
                        json={"action_type": "left_click", "x": 80, "y": 25, "delay": 2},
                    )
                )
                for _ in range(3)  # one waits for its delay, the others for it
            ]
            await asyncio.sleep(0.5)
            assert (await call("DELETE", f"/session/{old}"))[0] == 200
            new = await create()
            first = await call("GET", f"/session/{new}/screenshot")
            assert [status for status, _ in await asyncio.gather(*acting)] == [404] * 3
            assert await call("GET", f"/session/{new}/screenshot") == first

    asyncio.run(run())
