"""The chat layout of Florence-2: what the encoder reads, then what the decoder begins with.

    <image> ... <image> <s> text </s> | </s> <s> | sampled </s>

The published decoders were trained to say <s> first, and transformers' generate forces it; here it
is given, so that log-probabilities are those of what was sampled. There are no roles that an
instruction could forge. Task words such as <OD> are not read: an instruction says their sentence.
A system prompt, which no published model was trained with, stands before the image; the processor
cannot write it.

Source: transformers, models/florence2/processing_florence2.py.
"""

from collections.abc import Sequence

from uirl_jax.families.border import ChatLayout, Marker, Piece, ScreenSlot

# The processor puts the image and <s> before the text and </s> behind it.
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'user' or not loop.first %}"
    "{{ raise_exception('Florence-2 reads one question and its image') }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] if content['type'] == 'text' %}"
    "{{ content['text'] }}{% endfor %}{% endif %}"
    "{% endfor %}"
)
_REFUSING_TEMPLATE = (
    "{{ raise_exception('trained with a system prompt before the image, where Florence2Processor "
    "puts no text') }}"
)


def _user(parts: Sequence[str | ScreenSlot]) -> list[Piece]:
    """Images stand before the text, wherever they were given."""
    slots = [part for part in parts if not isinstance(part, str)]
    return [*slots, Marker("<s>"), *(part for part in parts if isinstance(part, str))]


def _template(system_prompt: str) -> str:
    return _REFUSING_TEMPLATE if system_prompt else _TEMPLATE


LAYOUT = ChatLayout(
    end_tokens=("</s>",),
    image_token="<image>",
    forbidden=("<s>", "<image>"),
    system=lambda text: [f"{text}\n"],
    user=_user,
    reply=(Marker("</s>"), Marker("</s>"), Marker("<s>")),  # inputs.OPENING of them the decoder's
    after_reply=(),
    template=_template,
)
