"""This project's client of a server, a turn to ask for, and both engines asked for it."""

import asyncio
import dataclasses

import numpy as np

from tests import openai_server
from tests.openai_server import (
    BASE,
    CONTEXT,
    ENGINE_CFG,
    NEW,
    Server,
    chat,
    model,
    read_screen,
    serving,
)
from uirl_jax.engine.openai import OpenAIEngine
from uirl_jax.engine.requests import OpenAIConfig, SampleRequest


def new_engine(
    url, directory, *, max_context=CONTEXT, max_patches=10_000, cfg=ENGINE_CFG, **settings
) -> OpenAIEngine:
    section = OpenAIConfig(
        url=url,
        model=BASE,
        adapters_dir=str(directory),
        # Patient: its first request compiles the server's engine, on a machine that may be busy.
        **{"backoff_s": 0.001, "request_timeout_s": 600.0, **settings},
    )
    openai_cfg = dataclasses.replace(cfg, kind="openai", openai=section)
    return OpenAIEngine(
        model(), chat(), openai_cfg, max_context=max_context, max_patches=max_patches
    )


def request(seed=0, instruction="Click the red button.", sampled=(), **settings) -> SampleRequest:
    """The turn after those that were sampled."""
    images = [openai_server.screenshot(100 * seed + turn) for turn in range(len(sampled) + 1)]
    screens = [
        dataclasses.replace(read_screen(model().inputs, image), key=f"{seed}/{turn}")
        for turn, image in enumerate(images)
    ]
    context = chat().context(instruction, screens, sampled)
    return SampleRequest(
        context_ids=context.ids,
        screens=tuple(screens),
        max_new_tokens=settings.pop("max_new_tokens", NEW),
        temperature=settings.pop("temperature", 1.0),
        seed=seed,
        messages=context.messages,
        **settings,
    )


def with_server(server: Server, directory, work, **settings):
    """The result of `await work(engine)`, everything entered."""

    async def run():
        async with (
            asyncio.timeout(600),
            openai_server.engine(),
            serving(server) as url,
            new_engine(url, directory, **settings) as engine,
        ):
            return await work(engine)

    return asyncio.run(run())


def sample_one(server: Server, directory, asked=None, **settings):
    return with_server(
        server, directory, lambda engine: engine.sample(asked or request()), **settings
    )


def sampled_here(asked: SampleRequest, lora=None):
    """The same by this project's engine alone."""

    async def run():
        async with openai_server.engine() as engine:
            engine.set_policy(model().trainable if lora is None else lora, 0)
            return await engine.sample(asked)

    return asyncio.run(run())


def assert_same(got, expected) -> None:
    np.testing.assert_array_equal(got.token_ids, expected.token_ids)
    np.testing.assert_array_equal(got.logprobs, expected.logprobs)
    assert got.stopped == expected.stopped
