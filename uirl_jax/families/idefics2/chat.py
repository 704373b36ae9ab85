"""The chat layout of Idefics2: turns are opened by plain text and ended by a token.

An image is <image> once per visual token between two <fake_token_around_image>; two images that
touch share the one between them. transformers 5 puts a space between an image and a word that
touches it; the processor with which the models were trained did not, and neither does this.

Source: chat_template of HuggingFaceM4/idefics2-8b; transformers,
models/idefics2/processing_idefics2.py.
"""

from collections.abc import Sequence

from uirl_jax.families.border import ChatLayout, Marker, Piece, ScreenSlot
from uirl_jax.families.chat_template import with_system_prompt

_AROUND, _END = Marker("<fake_token_around_image>"), Marker("<end_of_utterance>")
_TEMPLATE = (
    "{% for message in messages %}@SYSTEM_BLOCK@"
    "{{ message['role'].capitalize() }}"
    "{% if message['content'] is string %}{{ ': ' + message['content'] }}{% else %}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<image>"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_SYSTEM_BLOCK = (
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ 'System: ' + @SYSTEM_PROMPT@ }}<end_of_utterance>\n{% endif %}"
)


def _user(parts: Sequence[str | ScreenSlot]) -> list[Piece]:
    image_first = bool(parts) and isinstance(parts[0], ScreenSlot)
    pieces: list[Piece] = ["User:" if image_first else "User: "]
    for part in parts:
        if isinstance(part, str):
            pieces.append(part)
        else:
            pieces += [part, _AROUND] if pieces[-1] == _AROUND else [_AROUND, part, _AROUND]
    return [*pieces, _END, "\n"]


def _template(system_prompt: str) -> str:
    return with_system_prompt(_TEMPLATE, _SYSTEM_BLOCK, system_prompt)


LAYOUT = ChatLayout(
    end_tokens=("<end_of_utterance>", "</s>"),
    image_token="<image>",
    forbidden=("<s>", "<fake_token_around_image>", "<image>"),
    system=lambda text: [f"System: {text}", _END, "\n"],
    user=_user,
    reply=("Assistant:",),
    after_reply=("\n",),
    template=_template,
    opening=(Marker("<s>"),),
)
