"""The chat: a user's text, then the screen; the reply begins with a marker of its own."""

import json
from collections.abc import Sequence

from uirl_jax.families.border import ChatLayout, Marker, Piece, ScreenSlot


def _user(parts: Sequence[str | ScreenSlot]) -> list[Piece]:
    return [Marker("<user>"), *parts]


def _template(system_prompt: str) -> str:
    return (
        f"{{{{ {json.dumps(system_prompt + chr(10))} }}}}{{% for message in messages %}}"
        "{{ {'user': '<user>', 'assistant': '<agent>'}[message['role']] }}"
        "{% for part in message['content'] %}{{ part.get('text', '<image>') }}{% endfor %}"
        "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}<agent>"
    )


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
