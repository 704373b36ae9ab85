"""A chat completion as JSON: what is asked for, and what of an answer is believed.

Field names are vLLM's, which are OpenAI's and more (`return_token_ids`, `top_k`, ...). Pure
functions: `openai` sends and retries. Source: vllm/entrypoints/openai/chat_completion/protocol.py.
"""

import base64
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from uirl_jax.engine.requests import SampleRequest
from uirl_jax.families.chat import Message

# As strong as the API allows: a token is e^-100 of what it was. A completion that has one of them
# all the same is refused.
NEVER = -100.0
# vLLM says this where it has no logprob, because JSON has no minus infinity.
_NO_LOGPROB = -9999.0
# Above 0 by so little is another library's rounding.
_ROUNDING = 1e-3


class Completion(NamedTuple):
    """What was sampled, checked in itself."""

    prompt_ids: np.ndarray  # int32[C], what the server read
    token_ids: np.ndarray  # int32[S], S >= 1
    logprobs: np.ndarray  # float32[S]
    stopped: bool


def request_body(
    request: SampleRequest,
    model: str,
    *,
    end_token_ids: Sequence[int],
    biases: Mapping[int, float],
) -> dict[str, Any]:
    """The JSON of POST /v1/chat/completions.

    Everything that shapes the distribution is said: a server's defaults come from the model's
    generation_config.json, where Qwen2-VL-Instruct has top_k=1.

    Args:
      model: the base's name or an adapter's.
      biases: by token id, added to its logit.
    """
    screenshots = (screen.screenshot for screen in request.screens)
    return {
        "model": model,
        "messages": [_message(message, screenshots) for message in request.messages],
        "add_generation_prompt": True,
        "n": 1,
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed,
        "stop": list(request.stop_strings),
        "include_stop_str_in_output": True,
        "stop_token_ids": list(end_token_ids),
        "logit_bias": {str(token_id): bias for token_id, bias in biases.items()},
        "logprobs": True,
        "top_logprobs": 0,  # that of the sampled token, and no others
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # in logprobs, where text would be ambiguous
        "skip_special_tokens": False,
    }


def read_completion(
    answer: Mapping[str, Any],
    request: SampleRequest,
    *,
    vocab_size: int,
    end_token_ids: Sequence[int],
    forbidden_ids: Collection[int],
) -> Completion:
    """Checks an answer, which is JSON from outside, against what was asked.

    Raises: ValueError with what is wrong and, where a setting of the server is at fault, which.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError("the answer has no `choices` with one entry")
    choice = choices[0]
    unknown = "; a server that knows return_token_ids is needed (vLLM of October 2025 or newer)"
    token_ids = _token_ids(choice.get("token_ids"), "choices[0].token_ids", vocab_size, unknown)
    if not 1 <= len(token_ids) <= request.max_new_tokens:
        raise ValueError(
            f"{len(token_ids)} tokens were sampled, asked for were 1 to {request.max_new_tokens}"
        )
    forbidden = [token_id for token_id in token_ids.tolist() if token_id in forbidden_ids]
    if forbidden:
        raise ValueError(
            f"token {forbidden[0]} was sampled, which may never be; the server has to obey "
            "logit_bias"
        )
    finish, last = choice.get("finish_reason"), int(token_ids[-1])
    if finish not in ("stop", "length"):
        raise ValueError(f"finish_reason is {str(finish)[:40]!r}, expected 'stop' or 'length'")
    ends = np.isin(token_ids, end_token_ids)
    if ends[:-1].any():
        raise ValueError("tokens go on after an end token")
    if finish == "stop" and not ends[-1] and not request.stop_strings:
        raise ValueError(
            f"the completion stopped at token {last}, which is not an end token here "
            f"({', '.join(map(str, end_token_ids))}); the server must return the token that ended "
            "it, and know no other ones (--generation-config vllm)"
        )
    return Completion(
        _token_ids(answer.get("prompt_token_ids"), "prompt_token_ids", vocab_size, unknown),
        token_ids,
        _logprobs(choice.get("logprobs"), token_ids),
        stopped=finish == "stop" or bool(ends[-1]),
    )


def _message(message: Message, screenshots: Any) -> dict[str, Any]:
    if message.role == "assistant":  # as text alone: some templates read nothing else
        return {"role": message.role, "content": "".join(filter(None, message.parts))}
    content = [
        {"type": "text", "text": part}
        if part is not None
        else {"type": "image_url", "image_url": {"url": _data_url(next(screenshots))}}
        for part in message.parts
    ]
    return {"role": message.role, "content": content}


def _data_url(image: bytes) -> str:
    kinds = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
    kind = next((name for magic, name in kinds.items() if image.startswith(magic)), None)
    if kind is None:
        raise ValueError("a screenshot that is neither PNG, JPEG nor WEBP")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


def _token_ids(value: Any, what: str, vocab_size: int, hint: str) -> np.ndarray:
    if not isinstance(value, list) or not value:
        raise ValueError(f"the answer has no {what}{hint}")
    # type, not isinstance: true is not a token
    wrong = [one for one in value if type(one) is not int or not 0 <= one < vocab_size]
    if wrong:
        raise ValueError(f"{what} holds {str(wrong[0])[:40]!r}, not an id below {vocab_size}")
    return np.array(value, np.int32)


def _logprobs(value: Any, token_ids: np.ndarray) -> np.ndarray:
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list) or len(content) != len(token_ids):
        raise ValueError(
            f"logprobs.content is not a list of {len(token_ids)} logprobs, one a token"
        )
    logprobs = []
    for token_id, entry in zip(token_ids.tolist(), content, strict=True):
        entry = entry if isinstance(entry, dict) else {}
        token: Any = entry.get("token")
        logprob: Any = entry.get("logprob")
        # Said twice, once with its logprob: the two must be about the same tokens.
        if isinstance(token, str) and token.startswith("token_id:") and token[9:] != str(token_id):
            raise ValueError(f"token {token_id} was sampled, and {token[:40]!r} has its logprob")
        is_number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
        if not is_number or not math.isfinite(logprob):
            raise ValueError(f"the logprob of token {token_id} is {str(logprob)[:40]!r}, no number")
        if not _NO_LOGPROB < logprob <= _ROUNDING:
            raise ValueError(f"the logprob of token {token_id} is {logprob}, expected 0 or less")
        logprobs.append(min(float(logprob), 0.0))
    return np.array(logprobs, np.float32)
