"""The chat layout of PaliGemma: no turns, an image and a text that a newline ends.

    <image> ... <image> <bos> text newline | sampled <eos>

There are no roles, so an instruction cannot open a turn. A system prompt, which no published model
was trained with, stands before the image; without one the context is the processor's.

Source: transformers, models/paligemma/processing_paligemma.py.
"""

from collections.abc import Sequence

from uirl_jax.families.border import ChatLayout, Marker, Piece, ScreenSlot
from uirl_jax.families.chat_template import with_system_prompt

# The processor puts <bos> behind the image, and the newline at the end.
_TEMPLATE = (
    "{% for message in messages %}@SYSTEM_BLOCK@"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] if content['type'] == 'image' %}<image>{% endfor %}"
    "{% for content in message['content'] if content['type'] == 'text' %}"
    "{{ content['text'] }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'system' %}{{ '\n' }}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
)
_SYSTEM_BLOCK = (
    "{% if loop.first and message['role'] != 'system' %}{{ @SYSTEM_PROMPT@ + '\n' }}{% endif %}"
)


def _user(parts: Sequence[str | ScreenSlot]) -> list[Piece]:
    """Images stand before the text, wherever they were given."""
    slots = [part for part in parts if not isinstance(part, str)]
    return [*slots, Marker("<bos>"), *(part for part in parts if isinstance(part, str))]


def _template(system_prompt: str) -> str:
    return with_system_prompt(_TEMPLATE, _SYSTEM_BLOCK, system_prompt)


LAYOUT = ChatLayout(
    end_tokens=("<eos>",),
    image_token="<image>",
    forbidden=("<bos>", "<image>"),
    system=lambda text: [f"{text}\n"],
    user=_user,
    reply=("\n",),
    after_reply=(),
    template=_template,
)
