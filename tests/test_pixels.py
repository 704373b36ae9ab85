"""Screenshots that come to an engine compressed: read once, in threads, and refused alone."""

import asyncio
import dataclasses
import io
import threading
import weakref

import numpy as np
import pytest
from PIL import Image

from tests.engine_world import make_policy, new_engine, request, sample_all
from uirl_jax.engine import pixels
from uirl_jax.engine.engine import SampleRequest
from uirl_jax.engine.pixels import PixelReader
from uirl_jax.errors import ImageError
from uirl_jax.families.border import Screen
from uirl_jax.families.screens import plan_screen, read_planned

INPUTS = make_policy().inputs
SIZE_PX = (16, 16)  # the grid of engine_world's screenshot a


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    pixels_hwc = np.random.default_rng(seed).integers(0, 256, (*SIZE_PX, 3), np.uint8)
    Image.fromarray(pixels_hwc).save(buffer, "PNG")
    return buffer.getvalue()


def planned(seed: int = 0, *, whole: bool = True, key: str = "key") -> Screen:
    data = png(seed)
    broken = data[:60] + bytes(30) + data[90:]
    screen = plan_screen(INPUTS, data if whole else broken, SIZE_PX)
    return dataclasses.replace(screen, key=key)


def whole(seed: int = 0, key: str = "key") -> Screen:
    return read_planned(INPUTS, planned(seed, key=key))


def patches(screen: Screen) -> np.ndarray:
    return screen.arrays["patches_pc"]


def read_with(work) -> PixelReader:
    """A reader that `await work(reader)` was done with."""
    reader = PixelReader(INPUTS)

    async def run() -> None:
        reader.open()
        async with asyncio.timeout(60):
            await work(reader)
        reader.close()

    asyncio.run(run())
    return reader


def test_reader_reads_a_screenshot_once_for_all_who_hold_it():
    async def work(reader: PixelReader) -> None:
        first, second = await asyncio.gather(*[reader.read(planned()) for _ in range(2)])
        assert first is second is await reader.read(planned())
        np.testing.assert_array_equal(patches(first), patches(whole()))
        assert reader.screens == 1
        held = weakref.ref(first)
        del first, second
        while held() is not None:  # by the event loop and the thread that read them, for a moment
            await asyncio.sleep(0.001)
        await reader.read(planned())
        assert reader.screens == 2, "nobody held it: nothing is kept"

    assert read_with(work).cpu_s > 0


@pytest.mark.parametrize("how", ["read", "check"])
def test_reader_tells_everybody_who_waits_that_it_is_no_picture(how):
    async def work(reader: PixelReader) -> None:
        asked = [getattr(reader, how)(planned(whole=False)) for _ in range(2)]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in errors] == [ImageError, ImageError]

    assert read_with(work).screens == 1


def test_reader_goes_on_for_others_where_one_who_waits_is_cancelled():
    async def work(reader: PixelReader) -> None:
        first, second = (asyncio.create_task(reader.read(planned())) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        np.testing.assert_array_equal(patches(await second), patches(whole()))
        assert first.cancelled()

    assert read_with(work).screens == 1


def test_reader_that_closes_tells_who_waits_and_cancels_nobody(monkeypatch):
    monkeypatch.setattr(pixels, "MAX_THREADS", 1)
    begun, go_on = threading.Event(), threading.Event()

    def slow(screen: Screen) -> None:
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(pixels, "decode_planned", slow)

    async def run() -> list:
        reader = PixelReader(INPUTS)
        reader.open()
        waiting = [
            asyncio.create_task(reader.check(planned(key=key))) for key in ("first", "second")
        ]
        await asyncio.to_thread(begun.wait, 60)
        threading.Timer(0.1, go_on.set).start()
        reader.close()
        return await asyncio.gather(*waiting, return_exceptions=True)

    first, second = asyncio.run(run())
    assert first is None
    assert isinstance(second, RuntimeError) and "engine closed" in str(second)


@pytest.fixture(scope="module")
def engine():
    return new_engine(make_policy())


def with_newest(asked: SampleRequest, newest: Screen) -> SampleRequest:
    return dataclasses.replace(asked, screens=(*asked.screens[:-1], newest))


def test_engine_decodes_a_screenshot_once_and_a_broken_one_fails_alone(engine):
    asked = request(0, 5, "ba")

    async def run() -> list:
        async with engine, asyncio.timeout(600):
            first = await asyncio.gather(
                engine.sample(with_newest(asked, whole(key="array"))),
                *[engine.sample(with_newest(asked, planned(key="png"))) for _ in range(3)],
                engine.sample(with_newest(asked, planned(whole=False, key="broken"))),
                return_exceptions=True,
            )
            read = engine.metrics()["engine/images_read"]
            await engine.sample(request(3, 4))  # else the engine still has its last job, and array
            again = await engine.sample(with_newest(asked, planned(key="png")))
            assert engine.metrics()["engine/images_read"] == read, "its tokens are in the table"
            return [read, again, *first]

    read, again, expected, *same, error = asyncio.run(run())
    assert read == 2, "png once for three that wait for it, and broken"
    assert isinstance(error, ImageError)
    for result in (again, *same):
        np.testing.assert_array_equal(result.token_ids, expected.token_ids)
        np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=1e-4)
    assert engine.metrics()["engine/failed_rounds"] == 0


def test_engine_decodes_older_screenshots_whose_tokens_it_lacks(engine):
    asked = request(1, 5, "ab")

    def with_older(first: Screen) -> SampleRequest:
        return dataclasses.replace(asked, screens=(first, asked.screens[1]))

    (expected,) = sample_all(engine, [with_older(whole(1, "array 1"))])
    before = engine.metrics()["engine/images_read"]
    (result,) = sample_all(engine, [with_older(planned(1, key="png 1"))])
    assert engine.metrics()["engine/images_read"] == before + 1
    np.testing.assert_array_equal(result.token_ids, expected.token_ids)
