"""Files of strangers, in bounded memory: JSON lists of any length, lines, values of a kind.

A list is cut into its items before anything of it is parsed: a broken item costs itself alone, and
a file of gigabytes takes the memory of its longest item.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import RecordError
from uirl_jax.untrusted import json as untrusted_json

MAX_ITEM_BYTES = 8 * 2**20  # of a list or a line
MAX_DOCUMENT_BYTES = 64 * 2**20  # of a file that is one object: an episode, a table of splits
_CHUNK_BYTES = 2**20
# A whole string, an unfinished one (no closing quote), or what gives a list its structure.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[{}\[\],]', re.DOTALL)
_SPACE = b" \t\r\n"
_SPLITS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}


def list_items(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of the items of a file that is one JSON list; what is in them is not parsed.

    Raises: RecordError: no list, one that ends early, or an item that is too long; the items before
      it were given.
    """
    with path.open("rb") as file:
        buffer = file.read(_CHUNK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip(_SPACE)
        if not buffer.startswith(b"["):
            raise RecordError(f"expected a JSON list, the file begins with {buffer[:20]!r}")
        number, depth, start, place = 0, 0, 1, 0
        while True:
            match = _TOKEN.search(buffer, place)
            if match is None or (match[0][:1] == b'"' and not match[1]):
                if len(buffer) - start > MAX_ITEM_BYTES:
                    raise RecordError(f"row {number} is longer than {MAX_ITEM_BYTES} bytes")
                place = match.start() if match else len(buffer)
                chunk = file.read(_CHUNK_BYTES)
                if not chunk:
                    raise RecordError(f"the file ends within row {number}")
                buffer, place, start = buffer[start:] + chunk, place - start, 0
                continue
            token, place = match[0], match.end()
            ends = depth == 1 and token in (b",", b"]")
            if ends:
                item = buffer[start : match.start()].strip(_SPACE)
                if item or token == b"," or number:
                    yield number, item
                number, start = number + 1, place
            if token in (b"{", b"["):
                depth += 1
            elif token in (b"}", b"]"):
                depth -= 1
            if depth == 0:
                if token != b"]":
                    raise RecordError(f"row {number}: {token.decode()!r} stands where a list ends")
                rest = (buffer[place:] + file.read(_CHUNK_BYTES)).strip(_SPACE)
                if rest:
                    raise RecordError(f"after the list comes {rest[:20]!r}")
                return


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of the lines that are not empty. Raises RecordError for one too long."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_ITEM_BYTES + 1):
            number += 1
            if len(line) > MAX_ITEM_BYTES:
                raise RecordError(f"line {number} is longer than {MAX_ITEM_BYTES} bytes")
            if line.strip():
                yield number, line


def parse(item: bytes) -> dict[str, Any]:
    """An object from JSON. Raises RecordError: it is none, or has what no row may have."""
    try:
        return untrusted_json.parse(item)
    except ValueError as error:
        raise RecordError(f"it {error}") from None


def document(path: Path) -> dict[str, Any]:
    """A file that is one object. Raises RecordError."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_DOCUMENT_BYTES:
            raise RecordError(f"{path}: {size_bytes} bytes, at most {MAX_DOCUMENT_BYTES} are read")
        return untrusted_json.parse(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise RecordError(f"{path}: it {error}") from None


def splits_of(path: Path) -> dict[str, str]:
    """Which split each id of a table {"train": [ids], "test": [ids]} is in.

    Raises: RecordError: no such table, or an id that is in two splits.
    """
    found: dict[str, str] = {}
    for name, ids in document(path).items():
        if name not in _SPLITS or not isinstance(ids, list):
            raise RecordError(
                f"{path}: {untrusted_json.printable(name)!r}, expected lists of ids named "
                f"{', '.join(_SPLITS)}"
            )
        for one in ids:
            if not isinstance(one, str | int) or isinstance(one, bool):
                raise RecordError(f"{path}: {name} has a {type(one).__name__}, expected ids")
            if found.setdefault(str(one), _SPLITS[name]) != _SPLITS[name]:
                raise RecordError(f"{path}: {one!r} is in two splits")
    return found


def value_of(row: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A field of one of these types. Raises RecordError."""
    value = row.get(name)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        got = "missing" if value is None else f"a {type(value).__name__}"
        raise RecordError(f"{name} is {got}, expected {wanted}")
    return value


def labels_of(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Those of the fields that are there, as text of one line."""
    found: dict[str, str] = {}
    for name in names:
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            found[name] = untrusted_json.printable(str(value), 100)
    return found
