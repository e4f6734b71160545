"""What an executor does for one range of offsets: read its messages, and stage the files that hold them.

    read_piece   history --> batches of columns, typed if a schema is given; rejected rows go to a file of their own
    write_piece  batches --> files of the wanted form, in one folder or in one for each value of some columns
    NNNNN.done   what became of it; the driver reads that, so nothing but a folder in common is needed

Files have another name until they are whole and synced: a task that is run twice, or killed, leaves no half of one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from danube_fast.durable import write_file
from danube_fast.errors import InvalidArgument, PermissionDenied, ResourceExhausted
from danube_fast.spark.export.plan import Done, PlannedRange, StagedFile
from danube_fast.spark.export.target import (
    DERIVED,
    ICEBERG,
    ExportSpec,
    message_schema,
    typed_schema,
)
from danube_fast.spark.export.typed import TypedReader
from danube_fast.spark.export.writers import PARQUET, REJECTED_FORM, make_writer
from danube_fast.spark.plan import Task
from danube_fast.spark.scan import read_task

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "FULL",
    "Piece",
    "Work",
    "batch_schema",
    "disk_errors",
    "export_piece",
    "read_piece",
    "write_piece",
]

FOLDERS_MAX = 256
"""Values of `partition_by` in one range: a file is open for each."""
FOLDER_NAME_MAX = 255
"""Bytes, of every file system at hand."""
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
REJECTED_COLUMNS = ("offset", "partition", "key", "payload")
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk without room."""
_EXTENSIONS = {"json": "json", "csv": "csv"}
_FORMATS = {"date": "%Y-%m-%d", "hour": "%H"}, {"date": "%Y-%m-%d", "hour": "%Y-%m-%d-%H"}
"""Of folders in general, and of tables of Iceberg, whose hours are those of one day."""


class Piece(NamedTuple):
    """One range of a plan, and how to read it."""

    number: int
    of: PlannedRange
    tasks: tuple[Task, ...]


class Work(NamedTuple):
    """What is done with every piece of a plan."""

    spec: ExportSpec
    staging: str
    suffix: str
    """Of file names, before the extension."""
    read_columns: tuple[str, ...]
    fails_on_loss: bool


def export_piece(work: Work, piece: Piece) -> None:
    """Read a piece and stage its files. Raises DataLoss, ResourceExhausted for a full disk, what the store raises."""
    write_piece(work, piece, read_piece(work, piece))


def batch_schema(work: Work) -> pa.Schema:
    """Arrow's schema of the batches between reading and writing."""
    import pyarrow as pa

    return pa.schema([*message_schema(work.read_columns), *typed_schema(work.spec.fields)])


def read_piece(work: Work, piece: Piece) -> Iterator[pa.RecordBatch]:
    """Read the messages of a piece as batches of `batch_schema`. Raises as `export_piece`."""
    schema = message_schema(work.read_columns)
    with contextlib.ExitStack() as at_end:
        typed = at_end.enter_context(_Typed(work, piece)) if work.spec.fields else None
        for task in piece.tasks:
            for batch in read_task(
                task, work.read_columns, schema, fails_on_loss=work.fails_on_loss
            ):
                yield batch if typed is None else typed.columns(batch)


def write_piece(work: Work, piece: Piece, batches: Iterable[pa.RecordBatch]) -> None:
    """Stage the files of a piece, and note what they hold. Raises as `export_piece`."""
    with _Files(work, piece, work.spec.form) as files:
        for batch in batches:
            files.add(batch)


@contextlib.contextmanager
def disk_errors(folder: str) -> Iterator[None]:
    """Raise ResourceExhausted for a full disk, PermissionDenied for what may not be written."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL or "No space left" in str(error) or "File too large" in str(error):
            raise ResourceExhausted(
                f"{folder} has no room left: make some there and run the export again, which goes on where it was"
            ) from None
        if isinstance(error, PermissionError):
            raise PermissionDenied(f"{folder} cannot be written; correct its rights") from None
        raise


class _Files:
    """Files of one piece that are being written."""

    def __init__(
        self, work: Work, piece: Piece, form: str, columns: tuple[str, ...] = (), *, rejected: bool = False
    ) -> None:  # fmt: skip
        self._work, self._piece, self._form, self._is_rejected = work, piece, form, rejected
        spec = work.spec
        self._by = () if rejected else spec.divided_by
        self._names = columns or spec.names_in_files
        self._marker = secrets.token_hex(4)
        self._writers: dict[tuple[str | None, ...], tuple[Path, Any]] = {}
        self._messages = self._payload_bytes = self._checksum = 0

    def __enter__(self) -> _Files:
        return self

    def add(self, batch: Any) -> None:
        """Write rows. Raises ResourceExhausted, InvalidArgument for too many folders."""
        if not batch.num_rows:
            return
        self._messages += batch.num_rows
        if "payload" in batch.schema.names and not self._is_rejected:
            self._count(batch.column("payload"))
        with disk_errors(self._work.staging):
            for values, rows in self._divided(batch):
                self._writer(values, rows).write(rows)

    def _count(self, payloads: Any) -> None:
        crc32 = zlib.crc32
        values = payloads.to_pylist()
        if payloads.null_count:
            values = [value for value in values if value is not None]
        self._payload_bytes += sum(map(len, values))
        self._checksum += sum(map(crc32, values))

    def _divided(self, batch: Any) -> Iterator[tuple[tuple[str | None, ...], Any]]:
        """Divide rows by the folder where they belong."""
        rows = batch.select(list(self._names))
        if not self._by:
            yield (), rows
            return
        import pyarrow as pa
        import pyarrow.compute as pc

        keys = pa.table({name: _folder_values(batch, name, self._form) for name in self._by})
        found = keys.group_by(list(self._by)).aggregate([]).to_pylist()
        for each in found:
            values = tuple(each[name] for name in self._by)
            if len(found) == 1:
                yield values, rows
                continue
            chosen = None
            for name, value in each.items():
                column = keys[name]
                same = pc.is_null(column) if value is None else pc.equal(column, value)
                chosen = same if chosen is None else pc.and_kleene(chosen, same)
            table = pa.Table.from_batches([rows]).filter(chosen)
            yield from ((values, some) for some in table.to_batches())

    def _writer(self, values: tuple[str | None, ...], rows: Any) -> Any:
        found = self._writers.get(values)
        if found is None:
            if len(self._writers) >= FOLDERS_MAX:
                raise InvalidArgument(
                    f"--partition-by {','.join(self._by)} makes more than {FOLDERS_MAX} folders of one range of "
                    "offsets; choose columns with fewer values, and export to another folder"
                )
            for name, value in zip(self._by, values, strict=True):
                if len(name) + 1 + len(_quoted(value)) > FOLDER_NAME_MAX:
                    raise InvalidArgument(
                        f"--partition-by {name}: {value!r:.60} is too long for the name of a folder; leave that column "
                        "out of it, and export to another folder"
                    )
            kind = "r" if self._is_rejected else "d"
            path = Path(
                self._work.staging, f"{self._piece.number:05d}-{kind}{len(self._writers)}.{self._marker}.tmp"
            )  # fmt: skip
            found = path, make_writer(self._form, path, rows.schema)
            self._writers[values] = found
        return found[1]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for path, writer in self._writers.values():
                with contextlib.suppress(Exception):  # of a disk that is full
                    writer.close()
                path.unlink(missing_ok=True)
            return
        with disk_errors(self._work.staging):
            files = [self._finished(values) for values in self._writers]
            done = Done(
                self._piece.number, self._messages, self._payload_bytes, self._checksum, files
            )
            if self._is_rejected:
                done = Done(self._piece.number, 0, 0, 0, files, rejected=self._messages)
            name = f"{self._piece.number:05d}{'-rejected' if self._is_rejected else ''}.done"
            partial = Path(self._work.staging, f"{name}.{self._marker}.tmp")
            write_file(partial, msgspec.json.encode(done))
            partial.replace(partial.with_name(name))

    def _finished(self, values: tuple[str | None, ...]) -> StagedFile:
        path, writer = self._writers[values]
        rows = writer.close()
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        of, work = self._piece.of, self._work
        folders = [f"{name}={_quoted(value)}" for name, value in zip(self._by, values, strict=True)]
        name = (
            f"part-{of.partition:05d}-offsets-{of.low:012d}-{of.high:012d}{work.suffix}."
            f"{_EXTENSIONS.get(self._form, PARQUET)}"
        )
        return StagedFile(
            path.name, "/".join([*folders, name]), self._is_rejected, self._piece.number, rows,
            path.stat().st_size, dict(zip(self._by, values, strict=True)),
        )  # fmt: skip


class _Typed:
    """Typed columns of a piece; rows that do not match are written beside."""

    def __init__(self, work: Work, piece: Piece) -> None:
        self._reader = TypedReader(work.spec.fields)
        self._schema = batch_schema(work)
        self._rejects = _Files(
            work, piece, REJECTED_FORM, (*REJECTED_COLUMNS, "reason"), rejected=True
        )

    def __enter__(self) -> _Typed:
        return self

    def columns(self, batch: Any) -> Any:
        """Rows that match, with their typed columns. Raises ResourceExhausted."""
        import numpy as np
        import pyarrow as pa

        arrays, rejected, reasons = self._reader.read(batch.column("payload").to_pylist())
        if rejected:
            some = batch.take(pa.array(rejected)).select(list(REJECTED_COLUMNS))
            columns = [*some.columns, pa.array(reasons, type=pa.string())]
            self._rejects.add(
                pa.RecordBatch.from_arrays(columns, names=[*REJECTED_COLUMNS, "reason"])
            )
            matches = np.ones(batch.num_rows, dtype=bool)
            matches[rejected] = False
            batch = batch.filter(pa.array(matches))
        return pa.RecordBatch.from_arrays([*batch.columns, *arrays], schema=self._schema)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._rejects.__exit__(kind, *rest)


def _folder_values(batch: Any, name: str, form: str) -> Any:
    """The values of a column as text, as names of folders have it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if name in DERIVED:
        return pc.strftime(batch.column("publish_time"), format=_FORMATS[form == ICEBERG][name])
    try:
        text = batch.column(name).cast(pa.string())
    except pa.ArrowInvalid:
        raise InvalidArgument(
            f"--partition-by {name}: a value is no text; leave that column out of it, and export to another folder"
        ) from None
    if form == ICEBERG:  # which does not look at names
        return text
    # no name of a folder tells these from null
    is_nameless = pc.is_in(text, value_set=pa.array(["", HIVE_NULL]))
    return pc.if_else(is_nameless, pa.scalar(None, pa.string()), text)


def _quoted(value: str | None) -> str:
    """A value as a part of a path, as Hive's readers expect it."""
    if value is None:
        return HIVE_NULL
    # a text that is as null is written: only of Iceberg
    return urllib.parse.quote(value, safe=" ").replace(HIVE_NULL, f"%5F{HIVE_NULL[1:]}")
