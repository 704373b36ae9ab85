"""A run to look at, for the tests of the viewer: whole groups of real episodes with real tokens.

`PYTHONPATH=. python tests/viewer_world.py DIR` makes one.
"""

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tokenizers import Tokenizer

from tests.test_report import KINDS, Page, evaluate_stage, play, write_metrics
from uirl_jax import assets
from uirl_jax.policy_sync import MANIFEST
from uirl_jax.shards.record import TokenLayout
from uirl_jax.shards.writer import ShardWriter, put_shard
from uirl_jax.store import Store, open_store
from uirl_jax.types import StopReason, Trajectory
from uirl_jax.watch import viewer
from uirl_jax.watch.follow import Follower

MODEL = "asset:tiny-ui-base"
TOKENIZER = Tokenizer.from_file(str(assets.find(MODEL) / "tokenizer.json"))
IMAGE_TOKEN = TOKENIZER.token_to_id("<|image_pad|>")
END_TOKEN = TOKENIZER.token_to_id("<|im_end|>")
LAYOUT = TokenLayout(TOKENIZER.get_vocab_size(with_added_tokens=True), IMAGE_TOKEN)
ALGORITHM = {
    "objective": "policy",
    "advantage": {
        "estimator": "group",
        "normalise": "group_std",
        "credit": "episode",
        "virtual_return": None,
        "turn_discount": 1.0,
        "gae_lambda": 0.95,
        "function": "",
        "epsilon": 1e-6,
    },
    "reward": {
        "outcome": 1.0,
        "turns": 0.0,
        "overlong_max_tokens": 0,
        "overlong_buffer_tokens": 0,
        "functions": [],
    },
    "loss": {"kl_in": "loss", "kl_coefficient": 0.01},
    "replay": False,
}
GROUP_SIZE = 4
BIDI = "\u202e"
ATTACK = f"<script>alert(1)</script>\"' onload=alert(2) <img src=x onerror=alert(3)>{BIDI}gnp.exe"


def with_tokens(trajectory: Trajectory, version: int) -> Trajectory:
    """The trajectory with its texts as the tokens of a real tokenizer, and probable logprobs."""
    rng = np.random.default_rng([version, *trajectory.episode_id.encode()])
    turns = []
    for turn in trajectory.turns:
        ids = [*TOKENIZER.encode(turn.text, add_special_tokens=False).ids, END_TOKEN]
        logprobs = -rng.exponential(0.4, len(ids)).astype(np.float32)
        context = np.where(turn.context_ids == 7, IMAGE_TOKEN, 1).astype(np.int32)
        turns.append(
            dataclasses.replace(
                turn,
                context_ids=context,
                token_ids=np.array(ids, np.int32),
                logprobs=logprobs,
                full_logprobs=logprobs,
                policy_versions=np.full(len(ids), version, np.int32),
            )
        )
    return dataclasses.replace(trajectory, turns=tuple(turns), actor_id="", run_id="")


def make_group(number: int, version: int, qualities: Sequence[float] = (0, 0.4, 0.7, 1)) -> list:
    """Episodes of one instance, some of them right."""
    task = dataclasses.replace(KINDS[number % 3], seed=1000 + number)
    members = []
    for member, quality in enumerate(qualities):
        played = play(task, quality, 10 * version + member)
        members.append(
            with_tokens(
                dataclasses.replace(
                    played,
                    episode_id=f"{number:04d}{version:04d}{member:024x}",
                    group_id=f"{number:08d}",
                    started_unix_s=1.7e9 + number,
                    duration_s=2.5,
                ),
                version,
            )
        )
    return members


def writer_of(store: Store, actor_id: str = "a0") -> ShardWriter:
    return ShardWriter(store, actor_id, "test-run", "f" * 64, layout=LAYOUT)


def write_config(workdir: Path, **changes: Any) -> None:
    algorithm = {**ALGORITHM, **changes}
    config = {
        "model": {"path": MODEL},
        "algorithm": algorithm,
        "actor": {"group_size": GROUP_SIZE},
        "learner": {"max_staleness": 1, "steps": 60},
        "verifier": {"token": "hunter2-secret"},
    }
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps({"run_id": "test-run", "config": config}))


def write_actor(workdir: Path, name: str, *, age_s: float = 1.0, **numbers: float) -> None:
    log = workdir / "logs" / f"actor-{name}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    line = {"unix_s": time.time() - age_s, "actor/published": 40, "actor/env_error": 0}
    line |= {"actor/running": 8, "actor/lost": 0, "actor/success": 0.5}
    line |= {"actor/episodes_per_s": 1.5, "actor/tokens_per_s": 210.0, "env_error_reasons": {}}
    with log.open("a") as file:
        file.write(json.dumps(line | {f"actor/{key}": value for key, value in numbers.items()}))
        file.write("\n")


def write_manifest(workdir: Path, version: int, trained: list[list[int]] | None = None) -> None:
    path = workdir / MANIFEST
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": version, "extra": {"groups_trained": trained or []}}))


def make_run(workdir: Path, groups: int = 6, *, steps: int = 20) -> dict[str, Trajectory]:
    """A run in progress: its training episodes by id."""
    write_metrics(workdir, steps)
    write_config(workdir)
    write_manifest(workdir, 2, [[0, 2]])
    write_actor(workdir, "a0")
    write_actor(workdir, "a1", age_s=600)
    evaluate_stage(workdir, "before", 0.35, n=3)
    writers = [writer_of(open_store(workdir), name) for name in ("a0", "a1")]
    made: dict[str, Trajectory] = {}
    for number in range(groups):
        group = make_group(number, version=number // 3)
        writers[number % 2].publish(group)
        made |= {one.episode_id: one for one in group}
    (workdir / "findings.json").write_text(
        json.dumps({"no_signal": {"since_step": 5, "text": "all rewards are <equal>"}})
    )
    return made


def make_suite(workdir: Path) -> None:
    """What --role=eval with a tasks.json leaves."""
    store = open_store(workdir)
    group = make_group(1, 3)[:2]
    put_shard(
        store, "eval/suites/held/adapter/000000.tfrecord", group, base_hash="f", layout=LAYOUT
    )


def hostile(trajectory: Trajectory, text: str, image: bytes | None = None) -> Trajectory:
    """The trajectory with a text, or an image, wherever a model or a verifier can put one."""
    import hashlib

    turns, images, tokens = [], trajectory.images, trajectory.image_tokens
    key = "" if image is None else hashlib.sha256(image).hexdigest()
    if image is not None:
        images, tokens = {key: image}, {key: next(iter(trajectory.image_tokens.values()))}
    for turn in trajectory.turns[:1]:
        turns.append(
            dataclasses.replace(
                turn,
                text=text,
                error=text,
                action=dataclasses.replace(turn.action, text=text) if turn.action else None,
                progress={text[:200]: text},
                image_keys=(key,) if key else turn.image_keys,
            )
        )
    return dataclasses.replace(
        trajectory,
        task=dataclasses.replace(trajectory.task, name=text[:300], variant=text[:300]),
        instruction=text,
        group_id=text[:100],
        episode_id=text[:100],
        turns=tuple(turns),
        images=images,
        image_tokens=tokens,
        stop_reason=StopReason.FAILED,
        renderer=text[:100],
    )


class Asked:
    """A session with a running viewer."""

    def __init__(self, session: aiohttp.ClientSession, address: str, follower: Follower) -> None:
        self.session, self.address, self.follower = session, address.rstrip("/"), follower

    async def get(self, path: str, **options: Any) -> tuple[int, str, Any]:
        """(status, text, headers)."""
        async with self.session.get(self.address + path, **options) as response:
            return response.status, await response.text(errors="replace"), response.headers

    async def page(self, path: str) -> str:
        status, text, _ = await self.get(path)
        assert status == 200, text
        return text

    async def rows(self, query: str = "") -> dict[str, Any]:
        return json.loads(await self.page(f"/api/episodes?{query}"))


@contextlib.asynccontextmanager
async def looking_at(workdir: str | Path, **options: Any) -> AsyncIterator[Asked]:
    """A viewer that has looked once; `follower.look()` is the next look."""
    follower = Follower(str(workdir))
    try:
        await asyncio.to_thread(follower.look)
        async with (
            viewer.serving(follower, **options) as address,
            aiohttp.ClientSession() as session,
        ):
            yield Asked(session, address, follower)
    finally:
        follower.close()


def ask(workdir: str | Path, test, **options):
    """The result of a coroutine function that is given a running viewer."""

    async def run():
        async with looking_at(workdir, **options) as asked:
            return await test(asked)

    return asyncio.run(run())


async def key_of(asked: Asked, query: str) -> str:
    return (await asked.rows(query))["rows"][0]["key"]


def parsed(text: str) -> Page:
    """A page of the viewer, checked: its own script alone, and no handler or style in a tag."""
    page = Page(text)
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert scripts in ([], [{"src": "/static/viewer.js", "defer": None}])
    assert not [tag for tag, _ in page.tags if tag in ("iframe", "object", "base", "embed")]
    for _, attrs in page.tags:
        assert "style" not in attrs and not [name for name in attrs if name.startswith("on")]
        for name in ("src", "href", "action"):
            assert (attrs.get(name) or "/").startswith(("/", "?", "#")), attrs
    assert BIDI not in text
    return page


if __name__ == "__main__":
    make_run(Path(sys.argv[1]), groups=12, steps=60)
