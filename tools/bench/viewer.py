"""What a person waits for in the viewer: the first page, the whole list, a filter, scrolling.

    python -m tools.bench viewer --episodes=50000 --json=viewer.json

Makes a workdir of groups of 8 real episodes of the desktop (one turn, a screenshot of 224x168), a
shard each, with the actor's writer; starts `python -m tools.viewer` on it as a process, and opens
it in Chromium. The files are in the page cache: they were just written. `list_s` is from the
request to rows with text, while the index is still read and when it is complete; a frame is the
time between two animation frames while the list scrolls by 400 pixels a frame.
"""

import argparse
import asyncio
import dataclasses
import hashlib
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from uirl_jax import actions
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import ShardWriter
from uirl_jax.store import open_store
from uirl_jax.types import StopReason, TaskSpec, Trajectory, Turn
from uirl_jax.verifiers.tasks import desktop

GROUP = 8
_IMAGE, _VISUAL_TOKENS = 7, 48
_SCROLL = """async () => {
  const view = document.getElementById("view"), frames = [];
  let last = performance.now();
  for (let n = 0; n < 300; n++) {
    view.scrollTop += 400;
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last);
    last = now;
  }
  return frames;
}"""
_ROWS = "#rows .row a[href]"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5, help="openings of the whole list")


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-viewer-") as directory:
        workdir = Path(directory) / "run"
        make_workdir(workdir, args.episodes)
        return asyncio.run(_measure(workdir, args.episodes // GROUP * GROUP, args.rounds))


def format_table(result: dict[str, Any]) -> str:
    return "\n".join(f"{name:28}{value:12.3f}" for name, value in result.items())


def make_workdir(workdir: Path, episodes: int) -> None:
    """Groups of 8 episodes, a shard each, of policy versions that grow."""
    layout = TokenLayout(vocab_size=100, image_token_id=_IMAGE)
    writer = ShardWriter(open_store(workdir), "a0", "bench", "f" * 64, layout=layout)
    played = [play(seed, seed % 2 / 2 + 0.5) for seed in range(16)]
    for group in range(episodes // GROUP):
        members = [played[(group + n) % len(played)] for n in range(GROUP)]
        task = dataclasses.replace(members[0].task, seed=group)
        version = np.full(3, group // 200, np.int32)
        writer.publish(
            [
                dataclasses.replace(
                    member,
                    episode_id=f"{group:016x}{n:016x}",
                    group_id=f"{group:08d}",
                    task=task,
                    turns=tuple(
                        dataclasses.replace(turn, policy_versions=version) for turn in member.turns
                    ),
                )
                for n, member in enumerate(members)
            ]
        )


def play(seed: int, quality: float) -> Trajectory:
    """The scripted demonstrator's one action on the real desktop."""
    session = desktop.open_session(TaskSpec("desktop/click_button", seed))
    encoded = io.BytesIO()
    session.screenshot().save(encoded, "PNG")
    key = hashlib.sha256(encoded.getvalue()).hexdigest()
    action = desktop.scripted_action(session, np.random.default_rng(seed), quality)
    session.act(action)
    reward = float(session.progress()["reward"] or 0.0)
    scores = np.array([-0.1, -0.2, -0.3], np.float32)
    turn = Turn(
        context_ids=np.array([1, *[_IMAGE] * _VISUAL_TOKENS, 2], np.int32),
        token_ids=np.array([3, 4, 5], np.int32),
        logprobs=scores,
        full_logprobs=scores,
        policy_versions=np.zeros(3, np.int32),
        image_keys=(key,),
        text=actions.format_action(action, (session.width_px, session.height_px)),
        action=action,
        progress=session.progress(),
    )
    return Trajectory(
        episode_id="x",
        group_id="x",
        task=TaskSpec("desktop/click_button", seed),
        instruction=session.instruction,
        turns=(turn,),
        images={key: encoded.getvalue()},
        image_tokens={key: _VISUAL_TOKENS},
        stop_reason=StopReason.COMPLETED if reward == 1.0 else StopReason.FAILED,
        reward=reward,
        success=reward == 1.0,
    )


async def _measure(workdir: Path, episodes: int, rounds: int) -> dict[str, float]:
    from playwright.async_api import async_playwright

    from uirl_jax.verifiers.browser.pool import find_chromium

    start_s = time.perf_counter()
    process = subprocess.Popen(
        (sys.executable, "-m", "tools.viewer", f"--workdir={workdir}"),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        found = {"command_to_address_s": time.perf_counter() - start_s}
        async with async_playwright() as driver:
            browser = await driver.chromium.launch(
                executable_path=find_chromium(), args=["--no-sandbox"]
            )
            page = await browser.new_page(viewport={"width": 1280, "height": 900})
            found["list_s_while_indexing"] = await _open(page, address)
            whole = page.locator("#found", has_text=f"{episodes:,} of {episodes:,}")
            await whole.wait_for(timeout=120_000)
            found["command_to_whole_list_s"] = time.perf_counter() - start_s
            opened_s = [await _open(page, address) for _ in range(rounds)]
            found["list_s_median"], found["list_s_most"] = float(np.median(opened_s)), max(opened_s)
            found |= await _filter(page)
            await _open(page, address)
            frames_ms = await page.evaluate(_SCROLL)
            found["frame_ms_median"] = float(np.median(frames_ms))
            found["frame_ms_p99"] = float(np.quantile(frames_ms, 0.99))
            found["frame_ms_most"] = max(frames_ms)
            await browser.close()
        return found
    finally:
        process.terminate()
        process.wait()


async def _open(page: Any, address: str) -> float:
    """Seconds from the request to rows with text."""
    start_s = time.perf_counter()
    await page.goto(f"{address}episodes")
    await page.locator(_ROWS).first.wait_for()
    return time.perf_counter() - start_s


async def _filter(page: Any) -> dict[str, float]:
    before = await page.locator("#found").text_content()
    start_s = time.perf_counter()
    await page.locator("[name=outcome]").select_option("success")
    while await page.locator("#found").text_content() == before:
        await asyncio.sleep(0.001)
    return {"filter_s": time.perf_counter() - start_s}
