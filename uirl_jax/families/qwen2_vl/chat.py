"""The chat layout of Qwen2-VL: ChatML, with images between vision markers.

Source: chat_template of the published models. Tokens equal those of transformers'
apply_chat_template.
"""

from collections.abc import Sequence

from uirl_jax.families.border import ChatLayout, Marker, Piece, ScreenSlot

_START, _END = Marker("<|im_start|>"), Marker("<|im_end|>")
_VISION_START, _VISION_END = Marker("<|vision_start|>"), Marker("<|vision_end|>")


def _system(text: str) -> list[Piece]:
    return [_START, f"system\n{text}", _END, "\n"]


def _user(parts: Sequence[str | ScreenSlot]) -> list[Piece]:
    pieces: list[Piece] = [_START, "user\n"]
    for part in parts:
        pieces += [part] if isinstance(part, str) else [_VISION_START, part, _VISION_END]
    return [*pieces, _END, "\n"]


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
)
