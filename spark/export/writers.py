"""Files of one form: rows in, bytes out.

| form | keys and payloads | times |
|---|---|---|
| parquet | binary | timestamp, UTC |
| json | text; what is no UTF-8 is `payload_base64` in place of `payload`, as `consume -o json` prints it | RFC 3339 |
| csv | text; what is no UTF-8 is base64 with `base64:` before it, and so is text that begins like that | RFC 3339 |
"""

from __future__ import annotations

import base64
import contextlib
import io
from pathlib import Path
from typing import Any, Protocol

import msgspec

__all__ = ["PARQUET", "REJECTED_FORM", "Writer", "make_writer", "text_of"]

PARQUET = REJECTED_FORM = "parquet"
GROUP_BYTES = 32 * 1024 * 1024
"""Of a row group, uncompressed."""
GROUP_ROWS = 1024 * 1024
ZSTD_LEVEL = 1
_NAMES = frozenset({"topic", "partition", "producer_name", "key"})
"""Columns whose values come again and again."""
_COUNTERS = ("offset", "sequence")
"""Columns that go up by about the same from row to row."""
_BINARY = ("key", "payload")
_BASE64 = "base64:"
"""Before bytes in CSV that are not written as text."""


class Writer(Protocol):
    """A file that is being written."""

    def write(self, rows: Any) -> None:
        """Append a record batch. Raises OSError."""
        ...

    def close(self) -> int:
        """End the file; how many rows it has. Raises OSError."""
        ...


def make_writer(form: str, path: Path, schema: Any) -> Writer:
    """Begin a file for rows of a schema. Raises OSError."""
    if form == "json":
        return _JsonFile(path)
    if form == "csv":
        return _CsvFile(path, schema)
    return _ParquetFile(path, schema)


class _ParquetFile:
    """Row groups of about GROUP_BYTES, zstd."""

    def __init__(self, path: Path, schema: Any) -> None:
        import pyarrow.parquet as pq

        names = schema.names
        self._schema, self._rows = schema, 0
        self._waiting: list[Any] = []
        self._bytes = self._waiting_rows = 0
        self._writer = pq.ParquetWriter(
            path,
            schema,
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            use_dictionary=[name for name in names if name in _NAMES],
            column_encoding={name: "DELTA_BINARY_PACKED" for name in _COUNTERS if name in names},
            write_statistics=[name for name in names if name not in ("payload", "attributes")],
        )

    def write(self, rows: Any) -> None:
        """Append rows; a row group is written when there is enough of it."""
        self._waiting.append(rows)
        self._bytes += rows.nbytes
        self._waiting_rows += rows.num_rows
        if self._bytes >= GROUP_BYTES or self._waiting_rows >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._waiting:
            table = pa.Table.from_batches(self._waiting, schema=self._schema)
            self._waiting, self._bytes, self._waiting_rows = [], 0, 0
            self._writer.write_table(table, row_group_size=table.num_rows)
            self._rows += table.num_rows

    def close(self) -> int:
        """End the file."""
        try:
            self._flush()
        finally:
            self._writer.close()
        return self._rows


class _JsonFile:
    """An object in a line for each row."""

    def __init__(self, path: Path) -> None:
        self._file = io.BufferedWriter(io.FileIO(path, "w"))
        self._rows = 0
        self._encode = msgspec.json.Encoder().encode

    def write(self, rows: Any) -> None:
        """Append rows."""
        names = rows.schema.names
        dicts = rows.to_pylist()
        if "attributes" in names:
            for each in dicts:
                each["attributes"] = dict(each["attributes"] or ())
        for name in _BINARY:
            if name in names:
                for each in dicts:
                    _decode(each, name)
        self._file.write(b"\n".join(map(self._encode, dicts)) + b"\n")
        self._rows += len(dicts)

    def close(self) -> int:
        """End the file."""
        self._file.close()
        return self._rows


class _CsvFile:
    """A line of names, then a line for each row; a null is empty, a text has quotes."""

    def __init__(self, path: Path, schema: Any) -> None:
        import pyarrow as pa
        import pyarrow.csv as csv

        text = [pa.field(field.name, pa.string()) if _is_text(field) else field for field in schema]
        self._schema, self._rows = pa.schema(text), 0
        self._writer = csv.CSVWriter(path, self._schema)

    def write(self, rows: Any) -> None:
        """Append rows."""
        import pyarrow as pa

        columns = [
            _as_text(field, column) if _is_text(field) else column
            for field, column in zip(rows.schema, rows.columns, strict=True)
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._rows += rows.num_rows

    def close(self) -> int:
        """End the file."""
        self._writer.close()
        return self._rows


def _is_text(field: Any) -> bool:
    import pyarrow as pa

    kind = field.type
    return bool(pa.types.is_binary(kind) or pa.types.is_map(kind) or pa.types.is_timestamp(kind))


def _as_text(field: Any, column: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_timestamp(field.type):
        return pc.strftime(column, format="%Y-%m-%dT%H:%M:%SZ")
    if pa.types.is_map(field.type):
        values = [msgspec.json.encode(dict(each or ())).decode() for each in column.to_pylist()]
        return pa.array(values, type=pa.string())
    try:
        text = column.cast(pa.string())
    except pa.ArrowInvalid:
        text = None
    if text is None or pc.any(pc.starts_with(text, pattern=_BASE64)).as_py():
        texts: list[str | None] = [
            None if value is None else text_of(value) for value in column.to_pylist()
        ]
        return pa.array(texts, type=pa.string())
    return text


def text_of(value: bytes) -> str:
    """Write bytes as text; as base64 behind `base64:` if they are no UTF-8, or begin like that."""
    with contextlib.suppress(UnicodeDecodeError):
        text = value.decode()
        if not text.startswith(_BASE64):
            return text
    return _BASE64 + base64.b64encode(value).decode()


def _decode(row: dict[str, Any], name: str) -> None:
    value = row[name]
    if value is not None:
        try:
            row[name] = value.decode()
        except UnicodeDecodeError:
            del row[name]
            row[f"{name}_base64"] = base64.b64encode(value).decode()
