"""The chat layout of LLaVA-1.5: turns are opened by plain text, replies are ended by a token.

Source: chat_template of llava-hf/llava-1.5-7b-hf, and for the end token after a reply, which that
template leaves out, the conversation "v1" that the models were trained with (LLaVA,
llava/conversation.py). Nothing here can keep an instruction from spelling "USER:".
"""

from collections.abc import Sequence

from uirl_jax.families.border import ChatLayout, Marker, Piece, ScreenSlot
from uirl_jax.families.chat_template import with_system_prompt

_TEMPLATE = (
    "{% for message in messages %}@SYSTEM_BLOCK@"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% set end = '</s>' if message['role'] == 'assistant' else ' ' %}"
    "{% if message['content'] is string %}{{ message['content'] + end }}{% else %}"
    "{% for content in message['content'] if content['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for content in message['content'] if content['type'] == 'text' %}"
    "{{ content['text'] + end }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_SYSTEM_BLOCK = (
    "{% if loop.first and message['role'] != 'system' %}{{ @SYSTEM_PROMPT@ + ' ' }}{% endif %}"
)


def _user(parts: Sequence[str | ScreenSlot]) -> list[Piece]:
    """Images stand before the text, wherever they were given."""
    pieces: list[Piece] = ["USER: "]
    for slot in parts:
        pieces += [] if isinstance(slot, str) else [slot, "\n"]
    return [*pieces, *(f"{text} " for text in parts if isinstance(text, str))]


def _template(system_prompt: str) -> str:
    return with_system_prompt(_TEMPLATE, _SYSTEM_BLOCK, system_prompt)


LAYOUT = ChatLayout(
    end_tokens=("</s>",),
    image_token="<image>",
    forbidden=("<s>", "<image>"),
    system=lambda text: [f"{text} "],
    user=_user,
    reply=("ASSISTANT:",),
    after_reply=(),
    template=_template,
    opening=(Marker("<s>"),),
)
