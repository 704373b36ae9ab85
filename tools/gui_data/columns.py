"""Parquet files of others: some columns, a row at a time.

They may be compressed and encoded as they like, and be one row group of gigabytes: pages are read
through a small buffer, so memory holds a page of each column and one row. A column that would grow
a hundredfold is refused: pictures are compressed already.

A dictionary, or the prefixes of DELTA_BYTE_ARRAY, may repeat a text of megabytes a million times.
So a row has one text or picture in a column, never a list of them, and no two rows are decoded
together: no value is longer than the pages that it was decoded from.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from uirl_jax.errors import RecordError, one_line
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded.tables import MAX_ROWS, open_parquet, require_pyarrow

_BUFFER_BYTES = 2**20
_MOST_GROWTH, _SMALL_BYTES = 100, 64 * 2**20
_MAX_VALUES = 2_000_000  # of a column in a row group: 500,000 rows of a box's four sides
_MAX_LIST = 100  # the length that a type may fix: also a null takes that much memory


def rows(
    path: Path, wanted: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[Callable[[], dict]]:
    """The rows, with the wanted columns and the optional ones that are there. Each is a function
    that makes its plain objects, or raises RecordError, as for a text that is not UTF-8.

    Raises: RecordError: no parquet file, a column is missing or of a type that may expand, or pages
      that are broken.
    """
    pa = require_pyarrow()
    file = open_parquet(path, buffer_bytes=_BUFFER_BYTES)
    names = file.schema_arrow.names
    if missing := [name for name in wanted if name not in names]:
        raise RecordError(
            f"column {', '.join(missing)} is missing; the file has "
            f"{printable(', '.join(names), 150)}"
        )
    columns = [*wanted, *(name for name in optional if name in names)]
    for name in columns:
        kind = file.schema_arrow.field(name).type
        if not _is_bounded(kind):
            raise RecordError(
                f"column {name} is of type {printable(str(kind), 80)}, expected numbers, one text, "
                "one picture, or a list of numbers"
            )
    _check_growth(file.metadata)
    try:
        for batch in file.iter_batches(1, columns=columns, use_threads=False):
            yield lambda batch=batch: _plain(batch)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise RecordError(printable(one_line(error), 200)) from None


def _plain(batch: Any) -> dict:
    try:
        return batch.to_pylist()[0]
    except (ValueError, OverflowError) as error:  # no UTF-8; a time that Python has none for
        raise RecordError(printable(one_line(error), 200)) from None


def _is_bounded(kind: Any, *, in_list: bool = False, levels: int = 4) -> bool:
    """Whether a value is at most numbers, and outside of lists a text or some bytes."""
    types = require_pyarrow().types
    if levels == 0:
        return False
    if types.is_struct(kind):
        # Of lists of structs a null takes an object for each field.
        return not in_list and all(
            _is_bounded(field.type, in_list=in_list, levels=levels - 1) for field in kind
        )
    if types.is_fixed_size_list(kind) and kind.list_size > _MAX_LIST:
        return False
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_bounded(kind.value_type, in_list=True, levels=levels - 1)
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if any(is_text(kind) for is_text in texts):
        return not in_list
    return types.is_primitive(kind) or types.is_null(kind)


def _check_growth(metadata: Any) -> None:
    if metadata.num_rows > MAX_ROWS:
        raise RecordError(f"{metadata.num_rows} rows, at most {MAX_ROWS} are read")
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            if not 0 <= column.num_values <= _MAX_VALUES:
                raise RecordError(
                    f"row group {number}: {column.path_in_schema} has {column.num_values} values, "
                    f"at most {_MAX_VALUES} are read"
                )
            size_bytes = column.total_uncompressed_size
            most = max(_SMALL_BYTES, _MOST_GROWTH * column.total_compressed_size)
            if not 0 <= size_bytes <= most:
                raise RecordError(
                    f"row group {number}: {column.path_in_schema} would become {size_bytes} bytes "
                    f"of {column.total_compressed_size}"
                )


def picture_bytes(value: Any) -> Any:
    """The bytes of a picture in a column: {bytes, path}, or the bytes themselves."""
    return value.get("bytes") if isinstance(value, dict) else value
