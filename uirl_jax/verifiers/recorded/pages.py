"""How the pages of a parquet file are encoded, as their own headers say: pyarrow decodes by these.

The footer has a list of encodings too, which may say anything. Read without decoding a value;
headers are structs in Thrift's compact protocol.
"""

from collections.abc import Iterable
from typing import Any

_DATA, _DATA_V2 = 0, 3  # kinds of pages; others are an index, and the dictionary of those behind
_HEADER = {_DATA: (5, 2), _DATA_V2: (8, 4)}  # fields: of the kind's own struct; of the encoding
_PLAIN, _RLE = 0, 3  # RLE: of booleans
_MAX_DEPTH = 8


class PageError(Exception):
    """A page may repeat values, or its header cannot be read."""


def check_pages(chunk: bytes) -> None:
    """Checks that what a column chunk becomes is about its pages' bytes.

    Raises: PageError: a page with a dictionary, or with another encoding than PLAIN and RLE.
    """
    place = 0
    while place < len(chunk):
        header = _Thrift(chunk, place)
        fields = header.struct()
        kind, size_bytes = fields.get(1), fields.get(3)
        if kind not in _HEADER:
            raise PageError("a page is no data, as that of a dictionary")
        own, encoding = _HEADER[kind]
        of_kind = fields.get(own)
        found = of_kind.get(encoding) if isinstance(of_kind, dict) else None
        if found not in (_PLAIN, _RLE):
            raise PageError(f"a page has the encoding {found}, expected {_PLAIN} (PLAIN)")
        if not isinstance(size_bytes, int) or size_bytes < 0:
            raise PageError("a page's header cannot be read")
        place = header.place + size_bytes


class _Thrift:
    """A reader of the compact protocol; `place` is behind what was read."""

    def __init__(self, content: bytes, place: int) -> None:
        self._content, self.place = content, place

    def _byte(self) -> int:
        if self.place >= len(self._content):
            raise PageError("a page's header is cut")
        self.place += 1
        return self._content[self.place - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise PageError("a page's header cannot be read")

    def _signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """The fields by number."""
        if depth > _MAX_DEPTH:
            raise PageError("a page's header is too deep")
        fields: dict[int, Any] = {}
        last = 0
        while head := self._byte():
            last = last + (head >> 4) if head >> 4 else self._signed()
            if last in fields:
                raise PageError("a page's header has a field twice")
            fields[last] = self._value(head & 0xF, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind in (7, 8):  # a double; bytes
            size_bytes = 8 if kind == 7 else self._varint()
            self.place += size_bytes
            return None
        if kind == 12:
            return self.struct(depth + 1)
        raise PageError("a page's header cannot be read")  # lists and maps: it has none


def chunk_places(group: Any, columns: Iterable[str], most_bytes: int) -> list[tuple[int, int]]:
    """Where pyarrow reads the chunks of a row group: first byte and size, of these columns.

    Raises: PageError: a place that is none, or more than `most_bytes`.
    """
    names, places = set(columns), []
    for index in range(group.num_columns):
        chunk = group.column(index)
        if chunk.path_in_schema.partition(".")[0] in names:
            first = chunk.data_page_offset
            if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < first:
                first = chunk.dictionary_page_offset
            if first < 0 or not 0 <= chunk.total_compressed_size <= most_bytes:
                raise PageError(
                    f"{chunk.path_in_schema} has {chunk.total_compressed_size} bytes at {first}"
                )
            places.append((first, chunk.total_compressed_size))
    return places
