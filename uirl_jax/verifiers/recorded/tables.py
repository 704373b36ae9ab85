"""Parquet files as untrusted bytes, and written whole: what `parquet`, `verl` and the tools share.

pyarrow is the optional extra `data`; it is imported here, when a file is first touched.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from uirl_jax.errors import ConfigError, RecordError, UirlError, one_line
from uirl_jax.store.files import replacing
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded.pages import PageError, check_pages, chunk_places

GROUP_BYTES = 2**20  # a row group is closed behind the row that reaches it: half a ms to read
GROUP_ROWS = 1000
MAX_ROWS = 20_000_000
MAX_FOOTER_BYTES = 256 * 2**20
MAX_GROUP_BYTES = 256 * 2**20  # a group holds at least one row, whose pictures may be 128 MiB
MAX_VALUES = 20_000_000  # of a group's columns together, nulls too: they take memory, no bytes
CODECS = ("UNCOMPRESSED", "SNAPPY")
# Under any other a page becomes more than its bytes: of a dictionary (RLE_DICTIONARY) and of
# DELTA_BYTE_ARRAY a value of a megabyte may be repeated a million times.
ENCODINGS = frozenset({"PLAIN", "RLE", "BIT_PACKED"})


def require_pyarrow() -> Any:
    """pyarrow with its parquet module. Raises ConfigError where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"parquet files need pyarrow ({error}): pip install -e '.[data]'"
        ) from None
    return pyarrow


def write_records(path: Path, file_schema: Any, records: Iterable[dict[str, Any]]) -> None:
    """Writes records of any schema in row groups of bounded size. Raises as `write_rows`."""
    pa = require_pyarrow()
    try:
        with (
            replacing(path) as (file,),
            pa.parquet.ParquetWriter(
                file,
                file_schema,
                compression="snappy",
                use_dictionary=False,
                write_statistics=False,  # they would hold whole pictures, the first and the last
            ) as out,
        ):
            for group in _groups(records):
                out.write_table(pa.Table.from_pylist(group, schema=file_schema))
    except OSError as error:
        raise UirlError(f"{path}: cannot be written ({error.strerror or error})") from error


def _groups(records: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    size_bytes = 0
    for record in records:
        group.append(record)
        size_bytes += _size_bytes(record)
        if size_bytes >= GROUP_BYTES or len(group) == GROUP_ROWS:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group


def _size_bytes(value: Any) -> int:
    """About the memory that a nested value takes in a column."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_size_bytes(below) for below in value.values())
    return sum(_size_bytes(below) for below in value) if isinstance(value, list | tuple) else 8


def open_parquet(path: Path, *, buffer_bytes: int = 0) -> Any:
    """pyarrow.parquet.ParquetFile of an untrusted file: its footer is read, within limits.

    Args: buffer_bytes: 0: a column of a row group is read at once; else through such a buffer.
    Raises: RecordError: no parquet file. ConfigError: pyarrow is missing.
    """
    pa = require_pyarrow()
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size_bytes - 8))
            tail = file.read(8)
        if len(tail) < 8 or tail[4:] != b"PAR1":
            raise RecordError(f"{path}: {size_bytes} bytes, no parquet file or one that was cut")
        footer_bytes = int.from_bytes(tail[:4], "little")
        if footer_bytes > min(size_bytes, MAX_FOOTER_BYTES):
            raise RecordError(f"{path}: a footer of {footer_bytes} bytes in {size_bytes}")
        return pa.parquet.ParquetFile(
            path,
            thrift_string_size_limit=MAX_FOOTER_BYTES,
            thrift_container_size_limit=10_000_000,
            arrow_extensions_enabled=False,
            buffer_size=buffer_bytes,
            pre_buffer=False,
        )
    except (OSError, pa.ArrowException, ValueError) as error:
        raise RecordError(f"{path}: {_one_line(error)}") from None


def check_groups(path: Path, metadata: Any) -> None:
    """Raises RecordError where the footer announces more than may be read into memory."""
    if metadata.num_rows > MAX_ROWS:
        raise RecordError(f"{path}: {metadata.num_rows} rows, at most {MAX_ROWS} are read")
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(index) for index in range(group.num_columns)]
        where = f"{path}: row group {number}"
        size_bytes = sum(column.total_uncompressed_size for column in columns)
        if size_bytes > MAX_GROUP_BYTES:
            raise RecordError(
                f"{where} holds {size_bytes} bytes, at most {MAX_GROUP_BYTES} are read at once; "
                "write the file with smaller row groups"
            )
        if (values := sum(column.num_values for column in columns)) > MAX_VALUES:
            raise RecordError(
                f"{where} holds {values} values, at most {MAX_VALUES} are read at once; write the "
                "file with smaller row groups"
            )
        for column in columns:
            if column.num_values < 0:
                raise RecordError(
                    f"{where}: {column.path_in_schema} has {column.num_values} values"
                )
            if column.compression not in CODECS:
                raise RecordError(
                    f"{where}: {column.path_in_schema} is compressed with {column.compression}, "
                    f"expected {' or '.join(CODECS)}"
                )
            if others := sorted(set(column.encodings) - ENCODINGS):
                raise RecordError(
                    f"{where}: {column.path_in_schema} is encoded as {others[0]}, expected PLAIN; "
                    "write the file with pyarrow's use_dictionary=False and no column_encoding"
                )


def read_group(path: Path, file: Any, group: int, columns: Sequence[str]) -> Any:
    """A row group as a pyarrow.Table.

    Raises RecordError for bytes that cannot be read, or pages that may repeat values: the footer's
    list of encodings, which `check_groups` reads, is only what the file says of them.
    """
    pa = require_pyarrow()
    try:
        with path.open("rb") as content:
            told = file.metadata.row_group(group)
            for first, size_bytes in chunk_places(told, columns, MAX_GROUP_BYTES):
                content.seek(first)
                check_pages(content.read(size_bytes))
        return file.read_row_group(group, columns=list(columns), use_threads=False)
    except PageError as error:
        raise RecordError(
            f"{path}: row group {group}: {error}; write the file with pyarrow's "
            "use_dictionary=False and no column_encoding"
        ) from None
    except (OSError, pa.ArrowException, ValueError) as error:
        raise RecordError(f"{path}: row group {group}: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return printable(one_line(getattr(error, "strerror", None) or error), 200)
