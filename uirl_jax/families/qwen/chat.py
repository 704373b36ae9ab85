"""The chat layout of the Qwen-VL families: ChatML, with images between vision markers.

Source: chat_template of the published models. Tokens equal those of transformers'
apply_chat_template.
"""

from collections.abc import Sequence

from uirl_jax.families.border import ChatLayout, Marker, Piece, ScreenSlot
from uirl_jax.families.chat_template import with_system_prompt

_START, _END = Marker("<|im_start|>"), Marker("<|im_end|>")
_VISION_START, _VISION_END = Marker("<|vision_start|>"), Marker("<|vision_end|>")
# The published template without videos and numbered pictures. The system block stands in for a chat
# that brings no system message of its own.
_SYSTEM_BLOCK = (
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\n{{ @SYSTEM_PROMPT@ }}<|im_end|>\n{% endif %}"
)
_TEMPLATE = (
    "{% for message in messages %}@SYSTEM_BLOCK@"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _system(text: str) -> list[Piece]:
    return [_START, f"system\n{text}", _END, "\n"]


def _user(parts: Sequence[str | ScreenSlot]) -> list[Piece]:
    pieces: list[Piece] = [_START, "user\n"]
    for part in parts:
        pieces += [part] if isinstance(part, str) else [_VISION_START, part, _VISION_END]
    return [*pieces, _END, "\n"]


def _template(system_prompt: str) -> str:
    return with_system_prompt(_TEMPLATE, _SYSTEM_BLOCK, system_prompt)


LAYOUT = ChatLayout(
    end_tokens=("<|im_end|>", "<|endoftext|>"),
    image_token="<|image_pad|>",
    forbidden=(
        "<|im_start|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    system=_system,
    user=_user,
    reply=(_START, "assistant\n"),
    after_reply=("\n",),
    template=_template,
)
