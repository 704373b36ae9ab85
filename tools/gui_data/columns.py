"""Parquet files of others: some columns, a few rows at a time.

They may be compressed and encoded as they like, and be one row group of gigabytes: pages are read
through a small buffer, so memory holds a page of each column and a batch of rows. A column that
would grow a hundredfold is refused: pictures are compressed already.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from uirl_jax.errors import RecordError
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded.tables import MAX_ROWS, open_parquet, require_pyarrow

BATCH_ROWS = 8
_BUFFER_BYTES = 2**20
_MOST_GROWTH, _SMALL_BYTES = 100, 64 * 2**20


def rows(path: Path, wanted: Sequence[str], optional: Sequence[str] = ()) -> Iterator[dict]:
    """The rows as plain objects, with the wanted columns and the optional ones that are there.

    Raises: RecordError: no parquet file, a wanted column is missing, or pages that are broken.
    """
    pa = require_pyarrow()
    file = open_parquet(path, buffer_bytes=_BUFFER_BYTES)
    names = file.schema_arrow.names
    if missing := [name for name in wanted if name not in names]:
        raise RecordError(
            f"column {', '.join(missing)} is missing; the file has "
            f"{printable(', '.join(names), 150)}"
        )
    _check_growth(file.metadata)
    columns = [*wanted, *(name for name in optional if name in names)]
    try:
        for batch in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
            for place in range(batch.num_rows):
                yield batch.slice(place, 1).to_pylist()[0]
    except (OSError, pa.ArrowException, ValueError) as error:
        raise RecordError(printable(" ".join(str(error).split()), 200)) from None


def _check_growth(metadata: Any) -> None:
    if metadata.num_rows > MAX_ROWS:
        raise RecordError(f"{metadata.num_rows} rows, at most {MAX_ROWS} are read")
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
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
