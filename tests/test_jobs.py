"""A request on its way through the engine: where it is cut."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.engine_world import request
from uirl_jax.engine.jobs import Job
from uirl_jax.engine.programs import Decoded
from uirl_jax.engine.slots import Slot, contents


def new_job(loop: asyncio.AbstractEventLoop, stop_strings: tuple[str, ...]) -> Job:
    asked = dataclasses.replace(request(0, 5), stop_strings=stop_strings)
    ids = contents(asked.context_ids, (), 60)
    job = Job(asked, np.zeros((3, 5), np.int32), 5, ids, {}, loop.create_future(), time.time())
    job.slot = Slot(0, contents_c=ids[:-1], computed=4)
    return job


def decoded(token_ids: Sequence[int]) -> Decoded:
    ids_bs = np.array([token_ids], np.int32)
    logprobs_bs = -ids_bs.astype(np.float32)
    return Decoded(ids_bs, logprobs_bs, logprobs_bs, np.array([len(token_ids)]), np.array([False]))


def spelled(token_ids: Sequence[int]) -> str:
    """Like a tokenizer of bytes: three tokens alone are broken, together they are one letter."""
    return "".join("abé"[i] for i in token_ids).replace("ééé", "b").replace("é", "\ufffd")


def cut_slowly(token_ids: Sequence[int], stop_strings: Sequence[str]) -> list[int]:
    """Every prefix is looked at."""
    for count in range(1, len(token_ids) + 1):
        if any(stop in spelled(token_ids[:count]) for stop in stop_strings):
            return list(token_ids[:count])
    return list(token_ids)


@given(
    calls=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6),
    stop_strings=st.lists(st.text("ab\ufffd", min_size=1, max_size=4), max_size=2),
)
def test_stop_string_cuts_where_a_look_at_every_prefix_does(calls, stop_strings):
    loop = asyncio.new_event_loop()
    try:
        job = new_job(loop, tuple(stop_strings))
        lengths: list[int] = []

        def decode_text(token_ids: Sequence[int]) -> str:
            lengths.append(len(token_ids))
            return spelled(token_ids)

        sampled: list[int] = []
        for call in calls:
            seen = len(job.token_ids)
            job.add(decoded(call), 0, 7)
            job.cut_at_stop_string(decode_text, seen)
            sampled += call
            assert job.token_ids == cut_slowly(sampled, stop_strings)
            assert job.stopped == any(stop in spelled(job.token_ids) for stop in stop_strings)
            if job.stopped:
                break
        assert len(job.logprobs) == len(job.versions) == len(job.token_ids)
        # Each prefix was decoded once: sequences of a thousand tokens come in many calls.
        assert lengths == list(range(1, len(job.token_ids) + 1))
    finally:
        loop.close()
