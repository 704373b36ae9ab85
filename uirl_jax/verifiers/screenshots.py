"""Screenshots as bytes, in one way wherever a session of ours makes them."""

import io

from PIL import Image


def encode_image(image: Image.Image, image_format: str) -> bytes:
    """A screenshot as bytes, one of wire.IMAGE_FORMATS.

    Quick rather than small. PNG takes 1 ms for 224x168 and 3 ms for 448x336, short enough to stay
    on the event loop: a hop to a thread and back is no shorter.
    """
    buffer = io.BytesIO()
    if image_format == "png":
        image.save(buffer, "PNG", compress_level=1)
    elif image_format == "jpeg":
        image.save(buffer, "JPEG", quality=90)
    else:
        image.save(buffer, "WEBP", quality=90, method=0)
    return buffer.getvalue()


def encode_again(image: bytes, image_format: str, size: tuple[int, int] | None = None) -> bytes:
    """The picture of a file as another one, without transparency, scaled to `size` if it is given.

    Raises: OSError, ValueError, SyntaxError, Image.DecompressionBombError: it cannot be decoded.
    """
    with Image.open(io.BytesIO(image)) as opened:
        decoded = opened.convert("RGB")
    if size is not None:
        decoded = decoded.resize(size, Image.Resampling.BICUBIC)
    return encode_image(decoded, image_format)
