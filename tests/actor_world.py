"""The world of the actor's tests: the real verifier, a tiny random policy that only clicks, faults.

The tokenizer has whole actions as single tokens, and the engine may sample nothing else, so that a
random model gives episodes with turns in them; everything between is the real thing.
"""

import asyncio
import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web
from tokenizers import AddedToken

from tests.policies import random_policy
from tools.base_models import qwen_tokenizer
from uirl_jax.actor.rollout import RolloutConfig
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest, SampleResult
from uirl_jax.families import qwen2_vl
from uirl_jax.families.border import Inputs
from uirl_jax.families.chat import Chat, Vocabulary
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.loading import PolicyModel
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig
from uirl_jax.families.screens import decode_planned
from uirl_jax.models.lora import LoraConfig
from uirl_jax.shards.record import TokenLayout
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.client.client import ClientLimits, VerifierClient
from uirl_jax.verifiers.server.server import serve

CLICKS = ("click(60,40)", "click(160,40)", "click(60,120)", "click(160,120)")
IMAGE_CFG = ImageConfig(min_pixels=56 * 56, max_pixels=28 * 28 * 12)  # 224x168 is 12 visual tokens
TASK = TaskSpec("desktop/click_button", seed=5, variant="misses=9", max_turns=2)
CONTEXT_TOKENS = 256
ROLLOUT = RolloutConfig(max_new_tokens=1, max_context_tokens=CONTEXT_TOKENS)


@functools.cache
def chat() -> Chat:
    directory = Path(_temporary_directory().name)
    texts = ["Click the red button.", "click(100, 200)", "You are a helpful assistant."] * 10
    tokenizer = qwen_tokenizer.train_tokenizer(texts, 300)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CLICKS])
    qwen_tokenizer.save(tokenizer, directory)
    cfg = ChatConfig(system_prompt="", prompt_template="{instruction}")
    return Chat(directory, cfg, qwen2_vl.FAMILY.chat)


@functools.cache
def talking(action_format: str, system_prompt: str = "") -> Chat:
    """The same tokenizer, another way to speak."""
    chat()  # which writes the directory
    cfg = ChatConfig(
        action_format=action_format,
        system_prompt=system_prompt,
        prompt_template="{instruction}",
    )
    return Chat(Path(_temporary_directory().name), cfg, qwen2_vl.FAMILY.chat)


@functools.cache
def _temporary_directory():
    return tempfile.TemporaryDirectory()


@functools.cache
def model_cfg() -> Qwen2VLConfig:
    cfg = Qwen2VLConfig.from_dict(
        {
            "model_type": "qwen2_vl",
            "vocab_size": chat().vocab_size,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            "tie_word_embeddings": True,
            "image_token_id": chat().image_token_id,
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2},
        }
    )
    return dataclasses.replace(cfg, images=IMAGE_CFG)


@functools.cache
def policy() -> PolicyModel:
    return random_policy(model_cfg(), LoraConfig(rank=2, alpha=4.0))


def inputs() -> Inputs:
    return policy().inputs


def layout() -> TokenLayout:
    return TokenLayout(model_cfg().vocab_size, chat().image_token_id)


@functools.cache
def engine() -> Engine:
    """Samples one of CLICKS. Shared by all tests of a module: its one shape compiles once."""
    allowed = {int(i) for text in CLICKS for i in chat_token_ids(text)}
    forbidden_ids = tuple(i for i in range(model_cfg().vocab_size) if i not in allowed)
    return Engine(
        policy(),
        Vocabulary(chat().end_token_ids, forbidden_ids),
        EngineConfig(
            batch_sizes=(8,),
            context_lengths=(CONTEXT_TOKENS,),
            image_rows=(16,),
            image_row_patches=48,
            max_new_tokens=1,
            prefill_rows=(8,),
            prefill_lengths=(CONTEXT_TOKENS,),
        ),
    )


def chat_token_ids(text: str) -> list[int]:
    """The one id of an action in CLICKS."""
    first = chat().vocab_size - len(CLICKS)
    ids = [i for i in range(first, chat().vocab_size) if chat().decode(np.array([i])) == text]
    assert len(ids) == 1, (text, ids)
    return ids


class ScriptedEngine:
    """Says what it is told to, one text a turn: for ends that a random policy does not reach."""

    def __init__(
        self, say: Callable[[int], str], *, stopped: bool = True, version: int = 3
    ) -> None:
        self._say, self._stopped, self._version = say, stopped, version
        self.requests: list[SampleRequest] = []
        self.released: list[str] = []  # episodes that are over

    async def sample(self, request: SampleRequest) -> SampleResult:
        text = self._say(len(self.requests))
        self.requests.append(request)
        decode_planned(
            request.screens[-1]
        )  # as every engine: ImageError where it cannot be decoded
        ids = chat().completion_ids(text) if self._stopped else chat().encode(text)
        logprobs = np.full(len(ids), -0.5, np.float32)
        versions = np.full(len(ids), self._version, np.int32)
        return SampleResult(ids, logprobs, self._version, self._stopped, logprobs, versions)

    def set_policy(self, lora: object, version: int) -> None:
        self._version = version

    def release(self, episode: str) -> None:
        self.released.append(episode)

    def metrics(self) -> dict[str, float]:
        return {"engine/requests": float(len(self.requests))}


def client(url: str) -> VerifierClient:
    """One attempt each: the tests want to see the first fault."""
    return VerifierClient(url, limits=ClientLimits(attempts=1, attempt_timeout_s=10.0))


async def open_sessions(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/status") as response:
        return sum(info["stop_time"] is None for info in (await response.json()).values())


def our_tasks() -> set[asyncio.Task]:
    """The tasks that run code of the actor or of the client itself."""
    files = ((task, task.get_coro().cr_code.co_filename) for task in asyncio.all_tasks())
    return {task for task, file in files if "uirl_jax/actor" in file or "client.py" in file}


Fault = Callable[[str, int], str | float | bytes | None]


class Proxy:
    """The way to a real verifier, with faults on it.

    `fault(call, n)` is asked for every call ("session", "screenshot", "act", "progress", "delete";
    n counts the calls of that kind from 0): None lets it through, "error" answers 500, "unknown"
    422, "lost" lets it through and drops the answer, a number delays the answer by so many seconds,
    bytes are its body instead.
    """

    def __init__(self, target: str, fault: Fault) -> None:
        self.target, self.fault = target, fault
        self.seen: dict[str, int] = {}
        self.open_at_most = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        call = "delete" if request.method == "DELETE" else request.path.rsplit("/", 1)[-1]
        number = self.seen.get(call, 0)
        self.seen[call] = number + 1
        fault = self.fault(call, number)
        if fault == "error":
            return web.Response(status=500)
        if fault == "unknown":
            return web.json_response({"detail": "unknown task"}, status=422)
        async with (
            aiohttp.ClientSession() as http,
            http.request(
                request.method,
                f"{self.target}{request.path_qs}",
                data=await request.read(),
                headers={"Content-Type": request.content_type},
            ) as response,
        ):
            body = await response.read()
        if fault == "lost":
            request.transport.close()
        elif isinstance(fault, bytes):
            body = fault
        elif fault is not None:
            await asyncio.sleep(fault)
        return web.Response(status=response.status, body=body, content_type=response.content_type)


@contextlib.asynccontextmanager
async def faulty(target: str, fault: Fault) -> AsyncIterator[tuple[str, Proxy]]:
    proxy = Proxy(target, fault)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", proxy
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def verifier() -> AsyncIterator[str]:
    async with serve() as port:
        yield f"http://127.0.0.1:{port}"
