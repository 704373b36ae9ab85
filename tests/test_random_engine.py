"""What chance says: actions that the rollout takes, in every coordinate space."""

import asyncio
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests import actor_world as world
from uirl_jax import actions
from uirl_jax.actor.random_engine import RandomEngine
from uirl_jax.engine.requests import SampleRequest
from uirl_jax.errors import ImageError
from uirl_jax.families.chat import Chat, Message
from uirl_jax.families.screens import plan_screen
from uirl_jax.types import Action

SCREEN = (448, 336)  # the model sees it at less than half of that: IMAGE_CFG.max_pixels


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", SCREEN).save(buffer, "PNG")
    return buffer.getvalue()


def said(chat: Chat, instruction: str, screenshot: bytes | None = None) -> list[Action]:
    """What 200 seeds make it do, as the rollout reads it."""
    screenshot = screenshot or png()
    screen = plan_screen(world.inputs(), screenshot, SCREEN)
    engine = RandomEngine(chat)

    def ask(seed: int) -> SampleRequest:
        return SampleRequest(
            context_ids=np.zeros(1, np.int32),
            screens=(screen,),
            max_new_tokens=1,
            temperature=1.0,
            seed=seed,
            messages=(Message("user", (None, instruction)),),
        )

    async def run() -> list:
        return [await engine.sample(ask(seed)) for seed in range(200)]

    return [
        actions.parse(
            chat.decode(result.token_ids),
            SCREEN,
            chat.action_format,
            image_size=screen.seen_px,
        )
        for result in asyncio.run(run())
    ]


@pytest.mark.parametrize("action_format", ["text", "computer_use", "mobile_use", "ui_tars"])
def test_chance_clicks_everywhere_and_types_what_was_said(action_format):
    done = said(world.talking(action_format), 'Type "Ada".')
    typed = [action.text for action in done if action.kind == "type"]
    clicks = np.array([(action.x, action.y) for action in done if action.kind == "click"])
    assert len(typed) + len(clicks) == 200 and 30 < len(typed) < 70
    assert set(typed) == {"Type", "Ada"}
    # Thirds of the screen, each with its share of the clicks.
    for axis, side in enumerate(SCREEN):
        counts, _ = np.histogram(clicks[:, axis], bins=3, range=(0, side))
        assert counts.min() > len(clicks) / 5


@pytest.mark.parametrize("instruction", ["", "\x7f\x01", "x" * 5000])
def test_chance_clicks_where_nothing_that_was_said_can_be_typed(instruction):
    assert {action.kind for action in said(world.chat(), instruction)} == {"click"}


def test_chance_does_not_play_on_a_screen_that_nobody_could_see():
    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", *SCREEN, 8, 2, 0, 0, 0)
    broken = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    broken += chunk(b"IDAT", b"not compressed") + chunk(b"IEND", b"")
    with pytest.raises(ImageError):
        said(world.chat(), "Click.", broken)
