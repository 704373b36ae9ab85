"""The toy's chat: a user's text, then the screen; the reply begins with a marker of its own."""

from collections.abc import Sequence

from uirl_jax.families.border import ChatLayout, Marker, Piece, ScreenSlot


def _user(parts: Sequence[str | ScreenSlot]) -> list[Piece]:
    return [Marker("<user>"), *parts]


LAYOUT = ChatLayout(
    end_tokens=("<eos>",),
    image_token="<image>",
    forbidden=("<user>", "<agent>", "<image>"),
    system=lambda text: [f"{text}\n"],
    user=_user,
    reply=(Marker("<agent>"),),
    after_reply=(),
)
