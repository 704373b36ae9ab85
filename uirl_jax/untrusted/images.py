"""What a picture of others may cost before it is decoded."""

MAX_PIXELS = 16_000_000  # of a screenshot: 48 MB decoded
MAX_JPEG_SCANS = 100  # encoders write about ten


def has_too_many_scans(jpeg: bytes) -> bool:
    """Whether a JPEG file has more than MAX_JPEG_SCANS.

    Each goes over the whole picture again, and 31 bytes are enough for one: a file of 16 MB could
    take hours. The marker stands nowhere within what is compressed.
    """
    return jpeg.count(b"\xff\xda") > MAX_JPEG_SCANS
