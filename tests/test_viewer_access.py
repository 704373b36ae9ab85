"""Whom the viewer answers, what hostile contents do to it, buckets, and the command itself."""

import asyncio
import dataclasses
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import urllib.parse
import zlib
from pathlib import Path

import pytest
from PIL import Image

from tests import viewer_world as world
from tests.buckets import point_to
from tests.test_report import Page, words
from tests.viewer_world import ATTACK, BIDI, ask, key_of, parsed
from tools import viewer as command
from tools.bucket_emulator import emulator
from uirl_jax.errors import ConfigError
from uirl_jax.store import mirror, open_store
from uirl_jax.types import Trajectory
from uirl_jax.watch import frames, viewer

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Trajectory]]:
    """A run that no test changes, and its training episodes by id."""
    workdir = tmp_path_factory.mktemp("viewer") / "a run & more"
    episodes = world.make_run(workdir)
    world.make_suite(workdir)
    return workdir, episodes


# ---------------------------------------------------------------- hostile contents


def test_hostile_texts_are_shown_and_never_run(tmp_path):
    texts = (ATTACK, "x" * 1_000_000, "</textarea></option>{{ 7*7 }}", "\x00\x1b[31m\u2066\ufeff")
    groups = world.make_group(0, 0)
    attacked = [
        dataclasses.replace(world.hostile(one, text), episode_id=f"{n}{text[:90]}")
        for n, (one, text) in enumerate(zip(groups, texts, strict=True))
    ]
    world.writer_of(open_store(tmp_path)).publish(attacked)
    world.write_config(tmp_path)
    world.write_actor(tmp_path, "a0", age_s=1)
    (tmp_path / "logs" / "actor-a0.jsonl").write_text(
        json.dumps({"unix_s": 9e12, "actor/published": 1, "actor/env_error": 50,
                    "env_error_reasons": {ATTACK: 50}}) + "\n"
    )  # fmt: skip
    (tmp_path / "findings.json").write_text(
        json.dumps({"x": {"since_step": ATTACK, "text": ATTACK}})
    )
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / "a.tfrecord").write_bytes(b"")
    (tmp_path / "quarantine" / "a.tfrecord.reason").write_text(ATTACK)

    async def test(asked):
        rows = (await asked.rows("order=oldest"))["rows"]
        pages = [await asked.page(path) for path in ("/", "/episodes")]
        pages += [await asked.page(f"/episode/{row['key']}") for row in rows]
        pages.append(await asked.page(f"/compare?a={rows[0]['key']}&b={rows[2]['key']}"))
        raw = await asked.page("/api/episodes")
        return rows, pages, raw

    rows, pages, raw = ask(tmp_path, test)
    for text in pages:
        parsed(text)
        assert len(text) < 3_000_000
    assert BIDI not in raw and rows[0]["task"].endswith("\\u202egnp.exe")
    run, _, first, huge, braces, control, _ = pages
    assert words(Page(run).text).count("<script>alert(1)</script>") == 4
    assert words(Page(first).text).count("<script>alert(1)</script>") >= 6
    assert "and 980000 more characters" in words(Page(huge).text)
    assert "{{ 7*7 }}" in Page(braces).text and "49" not in words(Page(braces).text).split()
    assert "\x1b" not in control and "\\u001b[31m" in Page(control).text


def png_of(width: int, height: int) -> bytes:
    """A PNG that declares a size, with too few bytes for it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "image",
    [
        *(b"<svg onload=alert(1)>", b"<html><script>alert(1)</script>", b"GIF89a", b"\0"),
        *(png_of(60_000, 60_000), png_of(200_000, 2), png_of(0, 0)),
    ],
    ids=["svg", "html", "gif", "zero", "bomb", "wide", "empty"],
)
def test_bytes_that_are_no_screenshot_are_not_served(tmp_path, image):
    one = world.hostile(world.make_group(0, 0)[0], "x", image)
    world.writer_of(open_store(tmp_path)).publish([one])

    async def test(asked):
        key = await key_of(asked, "")
        return await asked.page(f"/episode/{key}"), await asked.get(f"/episode/{key}/screen/1")

    page, (status, text, headers) = ask(tmp_path, test)
    assert status == 404 and headers["Content-Type"].startswith("text/html")
    assert image not in text.encode()
    assert "no screenshot is shown" in words(parsed(page).text)
    assert "<img" not in page


def test_screenshots_of_usual_sizes_are_pictures():
    for kind, size in (("PNG", (4000, 3000)), ("JPEG", (1920, 1080)), ("WEBP", (16, 16))):
        file = io.BytesIO()
        Image.new("RGB", size).save(file, kind)
        found = frames.picture_of(file.getvalue())
        assert found == (f"image/{kind.lower()}", *size)


# ---------------------------------------------------------------- who may ask


def test_only_known_hosts_are_answered_and_only_get(made):
    async def test(asked):
        statuses = {}
        for host in ("evil.example", "127.0.0.1.evil.example:80", "", "[::2]", "localhost@evil"):
            statuses[host] = (await asked.get("/", headers={"Host": host}))[0]
        good = [(await asked.get("/", headers={"Host": h}))[0] for h in ("localhost:1", "[::1]:9")]
        methods = []
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            async with asked.session.request(method, asked.address + "/") as response:
                methods.append(response.status)
        return statuses, good, methods, (await asked.get("/"))[2]

    statuses, good, methods, headers = ask(made[0], test)
    assert set(statuses.values()) <= {400, 403}
    assert good == [200, 200] and methods == [405] * 4
    policy = headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy and "*" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in policy


def test_token_is_asked_for_everywhere_and_leaves_the_address(made):
    token = "t" * 15 + "ö"

    async def test(asked):
        paths = ("/", "/episodes", "/api/state", "/api/episodes", "/static/viewer.js", "/compare")
        refused = [(await asked.get(path))[0] for path in paths]
        wrong = (await asked.get("/", params={"token": token[:-1]}))[0]
        bad = (await asked.get("/", headers={"Authorization": "Bearer x"}))[0]
        good = (await asked.get("/", headers={"Authorization": f"Bearer {token}"}))[0]
        first = await asked.get(
            "/episodes", params={"token": token, "task": "a&b"}, allow_redirects=False
        )
        away = await asked.get("//evil.example/", params={"token": token}, allow_redirects=False)
        return refused, wrong, bad, good, first, away

    refused, wrong, bad, good, first, away = ask(made[0], test, token=token)
    assert refused == [401] * 6 and wrong == bad == 401 and good == 200
    assert first[0] == 303 and first[2]["Location"] == "/episodes?task=a%26b"
    cookie = first[2]["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert away[2]["Location"] == "/evil.example/"


def test_cookie_of_the_first_visit_opens_the_other_pages(made):
    token = "0123456789abcdef"

    async def test(asked):
        async with asked.session.get(
            asked.address, params={"token": token}, allow_redirects=False
        ) as response:
            value = response.cookies[viewer.COOKIE].value
        headers = {"Cookie": f"{viewer.COOKIE}={value}"}
        return (await asked.get("/episodes", headers=headers))[0]

    assert ask(made[0], test, token=token) == 200


@pytest.mark.parametrize(
    ("options", "why"),
    [({"host": "0.0.0.0"}, "needs a token"), ({"token": "short"}, "at least 16")],
)
def test_viewer_without_a_fit_token_does_not_start(made, options, why):
    async def test(asked):
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match=why):
        ask(made[0], test, **options)


def test_no_address_becomes_a_path(made):
    (made[0] / "secret.txt").write_text("hunter3")

    async def test(asked):
        paths = (
            *("/static/../secret.txt", "/static/..%2f..%2fsecret.txt", "/static/%2e%2e/secret.txt"),
            *("/episode/..%2fsecret.txt", "/episode/" + "0" * 16, "/episode/" + "0" * 17),
            *("/secret.txt", "/static/", "/episode/%00", "/static/report.html.j2"),
        )
        return [await asked.get(path) for path in paths]

    for status, text, _ in ask(made[0], test):
        assert status == 404 and "hunter3" not in text
        parsed(text)


# ---------------------------------------------------------------- buckets and the command


@pytest.mark.parametrize("kind", ["gs", "s3", "linked"])
def test_run_in_a_bucket_is_shown(monkeypatch, tmp_path, kind):
    address = f"{'s3' if kind == 's3' else 'gs'}://runs/far"
    workdir = address
    if kind == "linked":
        workdir = str(tmp_path / "linked")
        mirror.link(Path(workdir), address)
    with emulator() as service:
        point_to(service, monkeypatch)
        store = open_store(address)
        made = tmp_path / "made"
        world.make_run(made, groups=2)
        for path in made.rglob("*"):
            if path.is_file():
                store.put(path.relative_to(made).as_posix(), path.read_bytes())

        async def test(asked):
            key = await key_of(asked, "place=training")
            first = await asked.page("/")
            store.put("findings.json", b'{"x": {"since_step": 7, "text": "something new"}}')
            await asyncio.to_thread(asked.follower.look)
            return first, await asked.page("/"), await asked.page(f"/episode/{key}")

        first, second, episode = ask(workdir, test)
    shown = words(parsed(first).text)
    assert ("linked" if kind == "linked" else address) in shown
    assert "in progress, 20 steps done" in shown
    assert "playing 8 episodes" in shown and "all rewards are <equal>" in shown
    assert "Since step 7: something new" in words(parsed(second).text)
    assert "Turn 1" in words(parsed(episode).text)


def test_command_prints_its_address_and_ends_with_ctrl_c(made):
    arguments = (sys.executable, "-m", "tools.viewer", f"--workdir={made[0]}")
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_address_that_is_printed_holds_any_token(made, tmp_path):
    token = "a+b&c=d%20e#f/g-and-more"
    (tmp_path / "token").write_text(token, encoding="utf-8")
    arguments = (sys.executable, "-m", "tools.viewer", f"--workdir={made[0]}")
    arguments += (f"--token_file={tmp_path}/token",)
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = urllib.parse.urlsplit(process.stdout.readline().strip())
            assert urllib.parse.parse_qsl(address.query) == [("token", token)]
            assert not address.fragment
        finally:
            process.kill()


def test_token_comes_from_a_file_the_environment_or_is_drawn(tmp_path, monkeypatch):
    monkeypatch.delenv(command.TOKEN_VARIABLE, raising=False)
    assert command.read_token("", "127.0.0.1") is None
    drawn = {command.read_token("", "0.0.0.0") for _ in range(3)}
    assert len(drawn) == 3 and all(len(token or "") >= 24 for token in drawn)
    monkeypatch.setenv(command.TOKEN_VARIABLE, "of-the-environment")
    assert command.read_token("", "127.0.0.1") == "of-the-environment"
    (tmp_path / "token").write_text("of-the-file\n")
    assert command.read_token(str(tmp_path / "token"), "127.0.0.1") == "of-the-file"
    with pytest.raises(ConfigError, match="cannot be read"):
        command.read_token(str(tmp_path / "nowhere"), "127.0.0.1")


def test_command_with_wrong_arguments_is_one_line(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        parts = (sys.executable, "-m", "tools.viewer", *arguments)
        return subprocess.run(parts, cwd=ROOT, capture_output=True, text=True, timeout=60)

    missing = run(f"--workdir={tmp_path}/nowhere")
    assert missing.returncode != 0 and missing.stderr.count("\n") == 1
    assert "no such directory" in missing.stderr
    shown = run("--help")
    assert shown.returncode == 0 and "python -m tools.viewer --workdir=runs/quickstart" in (
        shown.stdout
    )


def test_viewer_starts_without_jax_and_torch():
    """0.6 s in place of 3.9 s: the first page is what a person waits for."""
    code = "import sys, tools.viewer; print(*({'jax', 'torch', 'flax'} & sys.modules.keys()))"
    run = subprocess.run(
        (sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert run.stdout.split() == [] and run.returncode == 0, run.stderr
