"""The engine that asks a server: one that errs, reads otherwise, is busy or must not be asked."""

import asyncio
import contextlib
import dataclasses
import json

import pytest
from aiohttp import web

from tests import openai_server
from tests.openai_server import CONTEXT, NEW, Server, chat, error, image_cfg
from tests.openai_world import (
    assert_same,
    new_engine,
    request,
    sample_one,
    sampled_here,
    with_server,
)
from uirl_jax.errors import ConfigError, EngineError

OFFICIAL_TEMPLATE_START = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}"
)


# ---------------------------------------------------------------- servers that err


def changed(**fields):
    """Replaces fields of the only choice, or of the answer."""

    def after(answer):
        inner = answer["choices"][0]
        for name, value in fields.items():
            (inner if name in inner else answer)[name] = value
        return answer

    return after


def without(name):
    def after(answer):
        answer.pop(name, None)
        answer["choices"][0].pop(name, None)
        return answer

    return after


def logprob(value):
    def after(answer):
        answer["choices"][0]["logprobs"]["content"][0]["logprob"] = value
        return answer

    return after


def first_token(value):
    def after(answer):
        answer["choices"][0]["token_ids"][0] = value
        return answer

    return after


async def hang(number):
    await asyncio.sleep(30)


END = chat().end_token_ids[0]
ERRING = {
    "500": (dict(before=lambda n: error(500, "out of memory")), r"HTTP 500 \(out of memory\)"),
    "400": (dict(before=lambda n: error(400, "too long")), r"HTTP 400 \(too long\)"),
    "401": (dict(before=lambda n: error(401, "Unauthorized")), "api_key_env"),
    "hang": (dict(before=hang), "no complete answer within 1.5 s"),
    "garbage": (dict(after=lambda a: b"<html>"), "is not JSON"),
    "not_an_object": (dict(after=lambda a: b"[1]"), "expected an object"),
    "huge": (dict(after=lambda a: b'{"x":"' + b"x" * 90_000 + b'"}'), "a body of 90008 bytes"),
    "redirect": (
        dict(before=lambda n: web.Response(status=307, headers={"Location": "/elsewhere"})),
        "redirects are not followed",
    ),
    "compressed": (
        dict(before=lambda n: web.Response(body=b"x", headers={"Content-Encoding": "gzip"})),
        "which was not asked for",
    ),
    "no_choices": (dict(after=changed(choices=[])), "`choices` with one entry"),
    "no_token_ids": (dict(after=without("token_ids")), "knows return_token_ids"),
    "no_prompt_ids": (dict(after=without("prompt_token_ids")), "no prompt_token_ids"),
    "no_logprobs": (dict(after=without("logprobs")), "logprobs.content"),
    "text_for_ids": (dict(after=changed(token_ids=["a"])), "holds 'a', not an id below 512"),
    "id_too_large": (dict(after=changed(token_ids=[512])), "holds '512', not an id below 512"),
    "too_many": (dict(after=changed(token_ids=[5] * 9)), "9 tokens were sampled"),
    "forbidden": (dict(after=changed(token_ids=[chat().image_token_id])), "may never be"),
    "padding_id": (dict(after=changed(token_ids=[511])), "token 511 was sampled"),
    "goes_on": (dict(after=changed(token_ids=[END, 5])), "after an end token"),
    "aborted": (dict(after=changed(finish_reason="abort")), "finish_reason is 'abort'"),
    "end_kept_back": (
        dict(after=changed(token_ids=[5], finish_reason="stop")),
        "must return the token that ended it",
    ),
    "others_logprobs": (dict(after=first_token(5)), "has its logprob"),
    "nan": (dict(after=lambda a: json.dumps(logprob(float("nan"))(a)).encode()), "holds NaN"),
    "no_logprob": (dict(after=logprob(None)), "is 'None', no number"),
    "above_0": (dict(after=logprob(0.5)), "is 0.5, expected 0 or less"),
    "minus_infinity": (dict(after=logprob(-9999.0)), "is -9999.0"),
}


@pytest.mark.parametrize("case", ERRING)
def test_openai_engine_server_that_errs_is_one_clear_error(tmp_path, case):
    faults, message = ERRING[case]
    server = Server(**faults)
    patience = {"request_timeout_s": 1.5} if case == "hang" else {}
    with pytest.raises(EngineError, match=message) as caught:
        sample_one(server, tmp_path, request(6), max_answer_bytes=60_000, **patience)
    assert "\n" not in str(caught.value) and "/v1/chat/completions" in str(caught.value)
    assert len(server.bodies) == 1, "sampled once, not again"
    assert "elsewhere" not in server.events


OTHER_READINGS = {
    "template": (
        dict(template=None),
        "chat_template must be the family's own and chat.system_prompt",
    ),
    "image_sizes": (
        dict(other_image_cfg=dataclasses.replace(image_cfg(), max_pixels=28 * 28 * 12)),
        "max_pixels must be those",
    ),
    "prompt_ids": (dict(after=lambda a: changed(prompt_token_ids=[1, 2])(a)), "number 0 is 1"),
}


@pytest.mark.parametrize("case", OTHER_READINGS)
def test_openai_engine_context_read_otherwise_names_the_first_difference(tmp_path, case):
    faults, message = OTHER_READINGS[case]
    if case == "template":
        own = (openai_server.MODEL_DIR / "chat_template.jinja").read_text()
        faults = dict(template=OFFICIAL_TEMPLATE_START + own)
    with pytest.raises(ConfigError, match=r"did not read the context.*tokens number \d+ is") as got:
        # A screen of another size has room in the server's engine where it is smaller alone.
        sample_one(Server(**faults), tmp_path, request(instruction="Go"))
    assert message in str(got.value)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (dict(raw_logprobs=True), "--logprobs-mode processed_logprobs"),
        (dict(max_model_len=CONTEXT), f"--max-model-len {CONTEXT + NEW}"),
    ],
)
def test_openai_engine_entering_refuses_a_server_that_will_not_do(tmp_path, faults, message):
    with pytest.raises(ConfigError, match=message):
        sample_one(Server(**faults), tmp_path)


def test_openai_engine_entering_without_a_server_says_where(tmp_path):
    async def run():
        async with new_engine("http://127.0.0.1:9/v1", tmp_path, attempts=2):
            pass

    with pytest.raises(EngineError, match=r"127.0.0.1:9/v1/models: cannot connect \(2 attempts\)"):
        asyncio.run(run())


# ---------------------------------------------------------------- again, at once, and ended


@pytest.mark.parametrize("status", [429, 503])
def test_openai_engine_busy_server_is_asked_again(tmp_path, status):
    def before(number):
        return error(status, "busy", {"Retry-After": "0"}) if number < 2 else None

    server = Server(before=before)

    async def work(engine):
        return await engine.sample(request()), engine.metrics()

    result, metrics = with_server(server, tmp_path, work)
    assert_same(result, sampled_here(request()))
    assert len(server.bodies) == 3 and metrics["engine/retries"] == 2


def test_openai_engine_busy_server_is_not_asked_for_ever(tmp_path):
    server = Server(before=lambda number: error(503, "busy"))
    with pytest.raises(EngineError, match=r"HTTP 503 \(4 attempts\)"):
        sample_one(server, tmp_path, attempts=4)
    assert len(server.bodies) == 4


def test_openai_engine_lost_connection_is_asked_again(tmp_path):
    lost = []

    class Losing(Server):
        async def complete(self, request):
            response = await super().complete(request)
            if self.bodies and not lost:
                lost.append(request.transport)
                request.transport.abort()
            return response

    server = Losing()
    assert_same(sample_one(server, tmp_path), sampled_here(request()))
    assert lost and len(server.bodies) == 2


def test_openai_engine_keeps_to_its_concurrency_and_counts_the_wait(tmp_path):
    async def slowly(number):
        await asyncio.sleep(0.02)

    server = Server(before=slowly)

    async def work(engine):
        results = await asyncio.gather(*[engine.sample(request(n)) for n in range(6)])
        return results, engine.metrics()

    results, metrics = with_server(server, tmp_path, work, concurrency=2)
    assert server.most_under_way == 2
    assert metrics["engine/requests"] == 6
    assert metrics["engine/tokens_sampled"] == sum(len(one.token_ids) for one in results)
    assert metrics["engine/queue_s"] > 0.01
    assert metrics["engine/busy_s"] > 0.06


def test_openai_engine_cancelled_request_closes_its_connection_and_frees_its_place(tmp_path):
    server = Server(before=lambda number: hang(number) if number == 0 else None)

    async def work(engine):
        task = asyncio.create_task(engine.sample(request()))
        while not server.bodies:
            await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        while not server.hung_up:
            await asyncio.sleep(0.005)
        return await engine.sample(request())

    assert_same(with_server(server, tmp_path, work, concurrency=1), sampled_here(request()))


def test_openai_engine_key_comes_from_the_environment_and_stays_out_of_errors(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("UIRL_TEST_KEY", "secret-7")
    server = Server(before=lambda number: error(500, "no"))
    with pytest.raises(EngineError) as caught:
        sample_one(server, tmp_path, api_key_env="UIRL_TEST_KEY")
    assert server.keys == ["Bearer secret-7"] * 2
    assert "secret" not in str(caught.value)
    monkeypatch.delenv("UIRL_TEST_KEY")
    with pytest.raises(ConfigError, match="api_key_env='UIRL_TEST_KEY'"):
        new_engine("http://127.0.0.1:9/v1", tmp_path, api_key_env="UIRL_TEST_KEY")


def test_openai_engine_requests_beyond_its_limits_are_refused_here(tmp_path):
    server = Server()

    async def work(engine):
        for wrong in (
            dict(max_new_tokens=NEW + 1),
            dict(temperature=-1.0),
            dict(top_p=0.0),
            dict(sampled=[chat().completion_ids("click(100, 60)")] * 9),
        ):
            with pytest.raises(ConfigError):
                await engine.sample(request(**wrong))
        with pytest.raises(ValueError, match="without messages"):
            await engine.sample(dataclasses.replace(request(), messages=()))

    with_server(server, tmp_path, work)
    assert not server.bodies
