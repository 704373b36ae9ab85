"""Screenshots of OpenEnv's BrowserGym, which are nested lists in JSON: bytes to a picture."""

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from uirl_jax.errors import ImageError
from uirl_jax.verifiers.client import openenv_answers


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([3, 4]), st.booleans(), st.integers(0))
def test_rows_of_pixels_are_the_picture_that_was_sent(height, width, channels, spaced, seed):
    rng = np.random.default_rng(seed)
    pixels_hwc = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    separators = (", ", ": ") if spaced else (",", ":")
    rows = json.dumps(pixels_hwc.tolist(), separators=separators).encode()
    image = Image.open(io.BytesIO(openenv_answers.encode_pixels(rows, 81)))
    assert np.array_equal(np.asarray(image), pixels_hwc[:, :, :3])


@pytest.mark.parametrize(
    "rows",
    [
        *(b"[[[]]]", b"[]]]", b"[[[1,2]]]", b"[[[1,2,3,4,5]]]", b"[[[[1,2,3]]]]", b"[[[1,2,3],]]]"),
        *(b"[[[1,2,3],[1,2]]]", b"[[[1,2,3]],[[1,2,3],[1,2,3]]]", b"[[[1,2,3]],[]]]"),
        *(
            b"[[[1,2,256]]]",
            b"[[[1,2,300]]]",
            b"[[[999,2,3]]]",
            b"[[[1,2,]]]",
            b"[[[,,]]]",
            b"[[[1,-2,3]]]",
            b"[[[1,2.0,3]]]",
        ),
        *(b"[[[1,2,9999999999999999999999]]]", b'[[["a",2,3]]]', b"[[[1 1,2,3]]]"),
        *(b"[[[true,2,3]]]", b"[[[\xff,1,2]]]", b"[[[1,2,3]" + b",[1,2,3]" * 99 + b"]]"),
    ],
)
def test_rows_that_are_no_picture_are_refused(rows):
    with pytest.raises(ImageError):
        openenv_answers.encode_pixels(rows, 81)
