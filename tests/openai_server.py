"""An OpenAI-compatible server as vLLM answers, whose tokens and logprobs are real.

It renders messages with the model directory's own jinja template and tokenises with transformers
(nothing of uirl_jax.chat), cuts the images of the data URLs, and samples with this project's engine
from the model that ships with the package. Faults on request.
"""

import asyncio
import base64
import contextlib
import dataclasses
import functools
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from PIL import Image
from transformers import AutoTokenizer

from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest
from uirl_jax.families import loading
from uirl_jax.families.border import Inputs, Screen
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen.inputs import QwenInputs
from uirl_jax.families.screens import image_size, plan_screen, read_planned
from uirl_jax.models import weights
from uirl_jax.models.lora import LoraConfig

MODEL_DIR = Path(__file__).parents[1] / "uirl_jax" / "assets" / "tiny-ui-base"
BASE = "tiny-ui"
CONTEXT, NEW = 208, 8
ENGINE_CFG = EngineConfig(
    batch_sizes=(1,),
    context_lengths=(CONTEXT,),
    prefill_rows=(1,),
    prefill_lengths=(CONTEXT,),
    image_rows=(1,),
    image_row_patches=192,
    max_new_tokens=NEW,
    decode_steps=NEW,
)
# What every request must say: a server's own defaults are another distribution.
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "n": 1}
Answer = dict[str, Any]


@functools.cache
def model() -> loading.PolicyModel:
    lora = LoraConfig(rank=2, alpha=4.0, targets=("attention",))
    return loading.load(MODEL_DIR, lora=lora, seed=0)


@functools.cache
def image_cfg() -> ImageConfig:
    return ImageConfig.load(MODEL_DIR)


@functools.cache
def chat() -> Chat:
    return Chat(
        MODEL_DIR,
        ChatConfig(system_prompt="", prompt_template="{instruction}"),
        model().family.chat,
    )


@functools.cache
def engine() -> Engine:
    """What the server samples with; compiled once."""
    return Engine(model(), chat().vocabulary(model().cfg.vocab_size), ENGINE_CFG)


def changed_lora(seed: int) -> Any:
    """Adapters that change what the model says (fresh ones do not)."""
    rng = np.random.default_rng(seed)
    arrays = weights.adapters_to_numpy(model().trainable)
    drawn = {name: rng.normal(0, 0.3, a.shape).astype(a.dtype) for name, a in arrays.items()}
    return weights.adapters_from_numpy(drawn, model().trainable)


def screenshot(seed: int) -> bytes:
    """A PNG of 224x168, the desktop's size: 192 patches, 48 visual tokens."""
    pixels = np.random.default_rng(seed).integers(0, 255, (12, 16, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((224, 168)).save(buffer, "PNG")
    return buffer.getvalue()


def read_screen(inputs: Inputs, data: bytes) -> Screen:
    return read_planned(inputs, plan_screen(inputs, data, image_size(data)))


class Server:
    """The four calls.

    Args:
      before: of the request's number, from 0: a response instead of work, or None.
      after: changes the answer, into another one or into a body.
      template, other_image_cfg: not the model directory's.
      expand: prompt_token_ids with image placeholders expanded, as vLLM has them.
      raw_logprobs: of another distribution than the one sampled from, as vLLM by default.
    """

    def __init__(
        self,
        *,
        before: Callable[[int], Any] = lambda number: None,
        after: Callable[[Answer], Answer | bytes] = lambda answer: answer,
        template: str | None = None,
        other_image_cfg: ImageConfig | None = None,
        expand: bool = True,
        raw_logprobs: bool = False,
        max_model_len: int = 4096,
    ) -> None:
        self._before, self._after, self._template = before, after, template
        images = other_image_cfg or image_cfg()
        self._inputs = QwenInputs(images, chat().image_token_id)
        self._expand, self._raw_logprobs = expand, raw_logprobs
        self._max_model_len = max_model_len
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
        self._one = asyncio.Lock()  # the engine has one policy at a time
        self.adapters: dict[str, Any] = {}
        self.events: list[str] = []
        self.bodies: list[Answer] = []
        self.keys: list[str | None] = []
        self.under_way = self.most_under_way = self.hung_up = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_post("/v1/load_lora_adapter", self.load)
        app.router.add_post("/v1/unload_lora_adapter", self.unload)
        app.router.add_get("/elsewhere", self.elsewhere)
        app.router.add_post("/elsewhere", self.elsewhere)
        return app

    async def elsewhere(self, request: web.Request) -> web.Response:
        self.events.append("elsewhere")
        return web.json_response({})

    async def models(self, request: web.Request) -> web.Response:
        names = [BASE, *self.adapters]
        cards = [{"id": name, "max_model_len": self._max_model_len} for name in names]
        return web.json_response({"object": "list", "data": cards})

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["lora_name"]
        if name in self.adapters:
            return error(400, f"The lora adapter '{name}' has already been loaded.")
        adapter = loading.load_adapter(body["lora_path"], model().family, model().cfg)
        lora = weights.adapters_from_numpy(adapter.arrays, model().trainable)
        self.adapters[name] = lora
        self.events.append(f"load {name}")
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return error(404, f"The lora adapter '{name}' cannot be found.")
        self.events.append(f"unload {name}")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.keys.append(request.headers.get("Authorization"))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if 100.0 in body["logit_bias"].values():
                return web.json_response(self._certain(body))
            self.bodies.append(body)
            response = self._before(len(self.bodies) - 1)
            response = await response if asyncio.iscoroutine(response) else response
            if response is not None:
                return response
            if body["model"] not in (BASE, *self.adapters):
                return error(404, f"The model `{body['model']}` does not exist.")
            answer = self._after(await self._sample(body))
            if isinstance(answer, bytes):
                return web.Response(body=answer, content_type="application/json")
            return web.json_response(answer)
        except asyncio.CancelledError:
            self.hung_up += 1
            raise
        finally:
            self.under_way -= 1

    def _certain(self, body: Answer) -> Answer:
        """One token whose bias of 100 leaves nothing to the others; raw logprobs know no bias."""
        (token_id,) = (int(token_id) for token_id, bias in body["logit_bias"].items() if bias > 0)
        logprob = -7.3 if self._raw_logprobs else 0.0
        return self._answer([1], [token_id], [logprob], "length", body)

    async def _sample(self, body: Answer) -> Answer:
        forbidden = chat().vocabulary(model().cfg.vocab_size).forbidden_ids
        never = {str(token_id): -100.0 for token_id in forbidden}
        assert body["logit_bias"] == never
        assert {name: body[name] for name in NEUTRAL} == NEUTRAL
        assert set(body["stop_token_ids"]) == set(chat().end_token_ids)
        assert body["logprobs"] is True and body["return_token_ids"] is True
        images, messages = [], []
        for message in body["messages"]:
            content = message["content"]
            if not isinstance(content, str):
                images += [part["image_url"]["url"] for part in content if "image_url" in part]
                content = [{"type": "image"} if "image_url" in part else part for part in content]
            messages.append({"role": message["role"], "content": content})
        text = self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=body["add_generation_prompt"],
            chat_template=self._template,
        )
        encoded = [base64.b64decode(url.partition(";base64,")[2]) for url in images]
        assert all(url.startswith("data:image/png;") for url in images)
        screens = [read_screen(self._inputs, data) for data in encoded]
        ids = self._tokenizer(text)["input_ids"]
        counts = iter([screen.tokens for screen in screens])
        image = chat().image_token_id
        expanded = [j for i in ids for j in [i] * (next(counts) if i == image else 1)]
        request = SampleRequest(
            context_ids=np.array(expanded, np.int32),
            screens=tuple(
                dataclasses.replace(screen, key=f"{screen.key} {screen.layout}")
                for screen in screens
            ),
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=body["top_k"],
            seed=body["seed"],
        )
        async with self._one:
            engine().set_policy(self.adapters.get(body["model"], model().trainable), 0)
            result = await engine().sample(request)
        return self._answer(
            expanded if self._expand else ids,
            result.token_ids.tolist(),
            result.logprobs.tolist(),
            "stop" if result.stopped else "length",
            body,
        )

    def _answer(self, prompt_ids, token_ids, logprobs, finish_reason, body) -> Answer:
        content = [
            {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": [], "top_logprobs": []}
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": chat().decode(np.array(token_ids))},
            "logprobs": {"content": content},
            "finish_reason": finish_reason,
            "stop_reason": None,
            "token_ids": token_ids,
        }
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": body["model"],
            "choices": [choice],
            "prompt_token_ids": prompt_ids,
            "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": len(token_ids)},
        }


def error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    kind = {"message": message, "type": "Error", "param": None, "code": status}
    return web.json_response({"error": kind}, status=status, headers=headers)


@contextlib.asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    """The server's url, with its /v1."""
    runner = web.AppRunner(
        server.app(), access_log=None, shutdown_timeout=0.2, handler_cancellation=True
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
