"""Tables of Delta Lake and Iceberg: files are put in place first, and one commit makes them visible.

The commit carries how far each partition is, so a table is right whatever becomes of the checkpoint:

| | where | what |
|---|---|---|
| Delta | application transactions `danube-fast/TOPIC/plan`, `.../partitions`, `.../N/partition-id`, `.../N/next` | number of the plan; partitions; id and next offset of partition N |
| Iceberg | table property `danube-fast.TOPIC`, set in the transaction that adds the files; the same on the snapshot | the same as JSON |
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from danube_fast.clock import MILLISECOND_NS, SystemClock
from danube_fast.errors import DanubeError, FailedPrecondition, Internal, Unavailable
from danube_fast.spark.export.destinations import REJECTED_SUFFIX, Committed, refuse_others
from danube_fast.spark.export.files import FULL
from danube_fast.spark.export.plan import STATE_FOLDER, ExportPlan, Next
from danube_fast.spark.export.target import ExportSpec, Target

__all__ = ["DeltaTarget", "IcebergTarget"]

PREFIX = "danube-fast"
CATALOG = "default"
"""Name of Iceberg's catalogue: a file of SQLite has the tables of one name, and credentials of a REST catalogue come
from the user's configuration of that name."""
COMMIT_TRIES = 5
"""Of Iceberg, when others commit to the table at the same time."""
_METRICS = "write.metadata.metrics.column"
"""Property of tables of Iceberg: the statistics of a column."""
_IDENTITY = "identity"
_DERIVED = {"date": ("publish_time", "day"), "hour": ("publish_time", "hour")}
"""Iceberg's transforms in place of columns."""
_LOCAL = re.compile(r"(?:file:(?://)?)?(/(?!/).*)")
"""A folder of this host, as catalogues write it: `/lake`, `file:/lake` and `file:///lake`."""


def _require(package: str, form: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise FailedPrecondition(
            f"an export to {form} needs the package {package}; run pip install 'danube-fast[lakehouse]'"
        )


class DeltaTarget:
    """A table of Delta Lake."""

    names_are_hidden = True

    def __init__(self, target: Target, spec: ExportSpec) -> None:
        """Raises FailedPrecondition if a package is missing."""
        _require("deltalake", "Delta")
        self.folder = self.data = Path(target.place)
        self._spec = spec
        self._app = f"{PREFIX}{spec.topic}"
        self._is_made = False

    @property
    def rejected(self) -> Path:
        """Folder of rejected rows."""
        return self.folder.with_name(self.folder.name + REJECTED_SUFFIX)

    def _open(self) -> Any:
        """Open the table; None: there is none."""
        from deltalake import DeltaTable

        if not (self.folder / "_delta_log").exists():
            return None
        with _told("Delta", str(self.folder)):
            return DeltaTable(str(self.folder))

    def check_new(self, *, is_dry: bool) -> None:
        """Make the table, unless it is there and its columns fit. Raises FailedPrecondition."""
        from deltalake import DeltaTable, Schema

        schema = self._spec.schema()
        table = self._open()
        if table is None:
            refuse_others(self.folder)
            if not is_dry:
                with _told("Delta", str(self.folder)):
                    DeltaTable.create(
                        str(self.folder), Schema.from_arrow(schema),
                        partition_by=list(self._spec.partition_by) or None,
                    )  # fmt: skip
                self._is_made = True
            return
        partition_by = tuple(table.metadata().partition_columns)
        if partition_by != self._spec.partition_by:
            raise FailedPrecondition(
                f"{self.folder} is partitioned by {', '.join(partition_by) or 'nothing'}; say so with --partition-by, "
                "or export to another folder"
            )
        there = {field.name: field.type for field in table.schema().fields}
        wanted = {field.name: field.type for field in Schema.from_arrow(schema).fields}
        _check_columns(str(self.folder), there, wanted)

    def drop_new(self) -> None:
        """Remove an empty table that this run has made."""
        table = self._open() if self._is_made else None
        if table is not None and table.version() == 0:
            shutil.rmtree(self.folder / "_delta_log")
            self._is_made = False

    def committed(self) -> Committed | None:
        """What the transactions of this topic say."""
        table = self._open()
        number = table and table.transaction_version(f"{self._app}/plan")
        if number is None:
            return None
        found: dict[str, Next] = {}
        for index in range(table.transaction_version(f"{self._app}/partitions") or 0):
            offset = table.transaction_version(f"{self._app}/{index}/next")
            partition_id = table.transaction_version(f"{self._app}/{index}/partition-id")
            found[str(index)] = Next(partition_id, offset)
        return Committed(number, found)

    def removed_by(self, plan: ExportPlan) -> list[str]:
        """None: a commit forgets them, and VACUUM removes them."""
        return []

    def commit(self, plan: ExportPlan) -> None:
        """Add the files of a plan, once. Raises Unavailable."""
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction

        now_ms = SystemClock().wall_ns() // MILLISECOND_NS
        versions = {f"{self._app}/plan": plan.number, f"{self._app}/partitions": len(plan.next)}
        for index, each in plan.next.items():
            versions[f"{self._app}/{index}/next"] = each.offset
            versions[f"{self._app}/{index}/partition-id"] = each.partition_id
        actions = [
            AddAction(
                path=file.name, size=file.byte_count, partition_values=file.values, modification_time=now_ms,
                data_change=True, stats=msgspec.json.encode({"numRecords": file.rows}).decode(),
            )
            for file in plan.files if not file.is_rejected
        ]  # fmt: skip
        properties = CommitProperties(
            custom_metadata={PREFIX: _summary(self._spec, plan)},
            app_transactions=[Transaction(name, version) for name, version in versions.items()],
        )
        with _told("Delta", str(self.folder)):
            table = self._open()
            table.create_write_transaction(
                actions, plan.mode, table.schema(), partition_by=list(self._spec.partition_by) or None,
                commit_properties=properties,
            )  # fmt: skip


class IcebergTarget:
    """A table of Iceberg, in a catalogue of SQLite in its folder, or in a REST catalogue."""

    names_are_hidden = True

    def __init__(self, target: Target, spec: ExportSpec, *, is_dry: bool = False) -> None:
        """Open the catalogue, and make the table unless `is_dry`. Raises FailedPrecondition for a missing package or a
        table that is not on this host, Unavailable for a catalogue that does not answer."""
        _require("pyiceberg", "Iceberg")
        # it warns of columns without statistics, on standard error
        logging.getLogger("pyiceberg").setLevel(logging.ERROR)
        self._target, self._spec = target, spec
        self._property = f"{PREFIX}.{spec.topic}"
        self._is_rest = target.place.startswith("http")
        self._table: Any = None
        with _told("the catalogue", target.place):
            # only a REST catalogue knows where the table will be
            self._table = self._opened(is_dry or not self._is_rest)
        if self._table is None:
            self.folder = Path(target.place, *target.table.split("."))
        else:
            location = self._table.location()
            local = _LOCAL.fullmatch(location)
            if local is None:
                raise FailedPrecondition(
                    f"the table {target.table} is at {location}, not in a folder of this host; export to such a table, "
                    "or to Parquet"
                )
            self.folder = Path(local[1])
        self.data = self.folder / "data"

    def _opened(self, is_dry: bool) -> Any:
        from pyiceberg.catalog import Catalog, load_catalog
        from pyiceberg.catalog.sql import SqlCatalog
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        place, name = self._target.place, self._target.table
        namespace, _, _ = name.rpartition(".")
        catalog: Catalog
        if self._is_rest:
            catalog = load_catalog(CATALOG, type="rest", uri=place)
            location = {}
        else:
            folder = Path(place)
            if not (folder / "catalog.db").exists():
                if is_dry:
                    return None
                if not (self.folder / STATE_FOLDER).exists():
                    refuse_others(folder)
            folder.mkdir(parents=True, exist_ok=True)
            catalog = SqlCatalog(
                CATALOG, uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}"
            )
            location = {"location": f"file://{folder.joinpath(*name.split('.'))}"}
        try:
            return catalog.load_table(name)
        except (NoSuchTableError, NoSuchNamespaceError):
            if is_dry:
                return None
        catalog.create_namespace_if_not_exists(namespace)
        schema, partitions = self._schema()
        return catalog.create_table_if_not_exists(
            name, schema, partition_spec=partitions, **location
        )

    def _schema(self) -> tuple[Any, Any]:
        """Iceberg's schema and partitions of a new table."""
        from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
        from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
        from pyiceberg.schema import assign_fresh_schema_ids
        from pyiceberg.transforms import parse_transform

        schema = assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(self._spec.schema()))
        fields = [
            PartitionField(
                source_id=schema.find_field(name).field_id,
                field_id=number,
                transform=parse_transform(transform),
                name=name if transform == _IDENTITY else f"{name}_{transform}",
            )
            for number, (name, transform) in enumerate(self._partitions, PARTITION_FIELD_ID_START)
        ]
        return schema, PartitionSpec(*fields)

    @property
    def _partitions(self) -> list[tuple[str, str]]:
        """Columns that choose a partition, and how."""
        return [_DERIVED.get(name, (name, _IDENTITY)) for name in self._spec.divided_by]

    @property
    def rejected(self) -> Path:
        """Folder of rejected rows."""
        return self.folder.with_name(self.folder.name + REJECTED_SUFFIX)

    def check_new(self, *, is_dry: bool) -> None:
        """Make the table, or compare its columns. Raises FailedPrecondition."""
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        if self._table is None and not is_dry:
            with _told("the catalogue", self._target.place):
                self._table = self._opened(is_dry=False)
        if self._table is None:
            return
        schema = self._table.schema()
        partitions = [
            (schema.find_column_name(field.source_id), str(field.transform))
            for field in self._table.spec().fields
        ]
        if partitions != self._partitions:
            text = ", ".join(f"{transform} of {name}" for name, transform in partitions)
            raise FailedPrecondition(
                f"{self._target.table} is partitioned by {text or 'nothing'}; say so with --partition-by, or export to "
                "another table"
            )
        there = schema_to_pyarrow(schema, include_field_ids=False)
        _check_columns(self._target.table, {*there.names}, {*self._spec.schema().names})

    def drop_new(self) -> None:
        """Keep the table: a catalogue may have told others of it."""

    def committed(self) -> Committed | None:
        """What the property of this topic says."""
        if self._table is None:
            return None
        with _told("the catalogue", self._target.place):
            self._table.refresh()
        return self._said()

    def _said(self) -> Committed | None:
        text = self._table.properties.get(self._property)
        if text is None:
            return None
        said = msgspec.json.decode(text, type=_Said)
        return Committed(said.plan, said.next, said.token)

    def removed_by(self, plan: ExportPlan) -> list[str]:
        """None: a snapshot forgets them, and expiring snapshots removes them."""
        return []

    def commit(self, plan: ExportPlan) -> None:
        """Add the files of a plan, once. Raises Unavailable."""
        from pyiceberg.exceptions import CommitFailedException, ValidationException

        for left in reversed(range(COMMIT_TRIES)):
            self.committed()
            if self._has(plan):
                return
            with _told("the catalogue", self._target.place), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of columns and transforms that are not ours
                try:
                    with contextlib.suppress(_IsThereError):
                        self._commit(plan)
                    return
                except (CommitFailedException, ValidationException):
                    if not left:
                        raise
            time.sleep(0.1)

    def _has(self, plan: ExportPlan) -> bool:
        """Whether the table, as it was read last, has a plan: a commit that got no answer may be there, or come late."""
        said = self._said()
        return said is not None and said.has(plan)

    def _commit(self, plan: ExportPlan) -> None:
        said = msgspec.json.encode(_Said(plan.number, plan.next, plan.token)).decode()
        files = [str(self.data / file.name) for file in plan.files if not file.is_rejected]
        summary = {self._property: said, f"{PREFIX}.ranges": _summary(self._spec, plan)}
        with _once(self._table, lambda: self._has(plan)) as transaction:
            # pyiceberg takes partitions from statistics, and a column without them as null
            full = {f"{_METRICS}.{name}": "full" for name, _ in self._partitions}
            transaction.set_properties({self._property: said, **full})
            if plan.mode == "overwrite" and self._table.current_snapshot() is not None:
                transaction.delete("true", snapshot_properties=summary)
            # without files, too: only a snapshot is refused on a table that has moved on
            uris = [f"file://{path}" for path in files]
            transaction.add_files(uris, snapshot_properties=summary, check_duplicate_files=False)


def _once(table: Any, is_there: Callable[[], bool]) -> Any:
    """Begin a transaction which raises _IsThereError once the table has what it adds. pyiceberg tries a refused one again
    on the table as that is then, and knows an earlier try only by the id of its own snapshot."""
    from pyiceberg.table import Transaction

    class Once(Transaction):
        def _rebuild_snapshot_updates(self) -> None:
            if is_there():
                raise _IsThereError
            super()._rebuild_snapshot_updates()

    return Once(table)


class _IsThereError(Exception):
    """An earlier try of a commit is there. No error of pyiceberg, which would remove manifests: some may be in use."""


class _Said(msgspec.Struct):
    plan: int
    next: dict[str, Next]
    token: str = ""


def _summary(spec: ExportSpec, plan: ExportPlan) -> str:
    """The ranges of a plan, for people who look at a commit."""
    ranges = [[each.partition, each.low, each.high] for each in plan.ranges]
    return msgspec.json.encode(
        {"topic": spec.topic, "plan": plan.number, "ranges": ranges}
    ).decode()


def _check_columns(what: str, there: Any, wanted: Any) -> None:
    """Raise FailedPrecondition unless a table that was there has the wanted columns."""
    if there != wanted:
        raise FailedPrecondition(
            f"{what} is there with other columns ({', '.join(sorted(there))}) than would be exported "
            f"({', '.join(sorted(wanted))}); choose them with --columns, or export to another table"
        )


@contextlib.contextmanager
def _told(what: str, place: str) -> Iterator[None]:
    """Raise errors of the libraries as ours."""
    try:
        yield
    except (DanubeError, OSError) as error:
        if isinstance(error, DanubeError) or error.filename is not None or error.errno in FULL:
            raise
        raise Unavailable(f"{what} at {place} does not answer: {_line(error)}; try again") from None
    except Exception as error:
        kind = type(error)
        # pydantic: of an answer that was cut short, or is not one of a catalogue
        if kind.__module__.startswith(("requests", "sqlalchemy", "urllib3", "pydantic")):
            raise Unavailable(
                f"{what} at {place} does not answer: {_line(error)}; try again"
            ) from None
        if kind.__module__.partition(".")[0] in ("deltalake", "pyiceberg", "_internal"):
            raise Unavailable(
                f"{what} at {place} failed: {kind.__name__}: {_line(error)}; run the export again, which goes on where "
                "it was"
            ) from None
        if kind in (ValueError, TypeError, NotImplementedError):
            raise Internal(f"{what} at {place}: {_line(error)}") from error
        raise


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
