"""The chat: a user's screens and text behind a marker; the reply behind another."""

from collections.abc import Sequence

from uirl_jax.families.border import ChatLayout, Marker, Piece, ScreenSlot
from uirl_jax.families.chat_template import with_system_prompt

# The same chat for transformers; tests/test_own_model.py compares both.
_TEMPLATE = (
    "{% for message in messages %}@SYSTEM_BLOCK@"
    "{{ {'system': '', 'user': '<user>', 'assistant': '<agent>'}[message['role']] }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ {'system': '\n', 'user': '', 'assistant': '<eos>'}[message['role']] }}"
    "{% endfor %}{% if add_generation_prompt %}<agent>{% endif %}"
)
_SYSTEM_BLOCK = (
    "{% if loop.first and message['role'] != 'system' %}{{ @SYSTEM_PROMPT@ + '\n' }}{% endif %}"
)


def _user(parts: Sequence[str | ScreenSlot]) -> list[Piece]:
    return [Marker("<user>"), *parts]


def _template(system_prompt: str) -> str:
    return with_system_prompt(_TEMPLATE, _SYSTEM_BLOCK, system_prompt)


LAYOUT = ChatLayout(
    end_tokens=("<eos>",),
    image_token="<image>",
    forbidden=("<user>", "<agent>", "<image>"),
    system=lambda text: [f"{text}\n"],
    user=_user,
    reply=(Marker("<agent>"),),
    after_reply=(),
    template=_template,
)
