"""Where an export goes, and what of each message.

parquet:DIR | json:DIR | csv:DIR          a folder of files
delta:DIR                                 a table of Delta Lake
iceberg:DIR#namespace.table               a table of Iceberg, with a catalogue of its own in DIR (SQLite)
iceberg:http://HOST:PORT#namespace.table  one of a REST catalogue
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from danube_fast.checks import check_names
from danube_fast.errors import InvalidArgument
from danube_fast.spark.export.typed import TypedField
from danube_fast.spark.options import COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["DERIVED", "FORMS", "ICEBERG", "TABLE_FORMS", "ExportSpec", "Target", "parse_target"]

ICEBERG = "iceberg"
TABLE_FORMS = ("delta", ICEBERG)
FORMS = ("parquet", "json", "csv", *TABLE_FORMS)
DERIVED = ("date", "hour")
"""Columns that `partition_by` may name beside those that are exported: of publish_time, in UTC."""
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")
_USER_INFO = re.compile(r"https?://.*@|[a-z][a-z0-9+.-]*://[^/]*@", re.IGNORECASE | re.DOTALL)
_TABLE = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")
_EXAMPLE = "parquet:DIR, json:DIR, csv:DIR, delta:DIR or iceberg:DIR#namespace.table"


class Target(msgspec.Struct, frozen=True):
    """What `--to` names."""

    form: str
    place: str
    """An absolute folder, or the URL of a catalogue."""
    table: str = ""
    """Of Iceberg: namespace.table."""

    @property
    def text(self) -> str:
        """The target as it is written."""
        return f"{self.form}:{self.place}" + (f"#{self.table}" if self.table else "")

    @property
    def is_table(self) -> bool:
        """Whether the target has commits of its own."""
        return self.form in TABLE_FORMS


def parse_target(text: str) -> Target:
    """Read `--to`. Raises InvalidArgument for anything but a form and a local folder, or a REST catalogue.

    parse_target("parquet:/data/flights")
    """
    if _USER_INFO.search(text):  # which no error repeats
        raise InvalidArgument(
            "--to is a URL with '@', which looks like credentials; leave them out: those of a REST catalogue belong in "
            ".pyiceberg.yaml, in the catalogue 'default'"
        )
    form, colon, place = text.partition(":")
    if not colon or form not in FORMS or not place:
        raise InvalidArgument(f"--to {text!r} is no target; give {_EXAMPLE}")
    table = ""
    if form == ICEBERG:
        place, _, table = place.rpartition("#")
        if not place or not _TABLE.fullmatch(table):
            raise InvalidArgument(
                f"--to {text!r} names no table; give iceberg:DIR#namespace.table, such as iceberg:/lake#air.flights"
            )
        if place.startswith(("http://", "https://")):
            return Target(form, place, table)
    place = place.removeprefix("file://")
    if _SCHEME.match(place):
        raise InvalidArgument(
            f"--to {text!r} is no folder; export to one of this host, or one that all executors mount, and copy it "
            "from there"
        )
    return Target(form, str(Path(place).absolute()), table)


class ExportSpec(msgspec.Struct, frozen=True):
    """What is exported, and how; the same for the life of a target."""

    topic: str
    form: str
    columns: tuple[str, ...]
    """Of messages."""
    fields: tuple[TypedField, ...] = ()
    """Of payloads."""
    where: str = ""
    """A condition of Spark SQL; empty: all rows."""
    partition_by: tuple[str, ...] = ()

    @classmethod
    def make(
        cls,
        topic: str,
        form: str,
        *,
        columns: str | None = None,
        fields: tuple[TypedField, ...] = (),
        where: str | None = None,
        partition_by: str | None = None,
    ) -> ExportSpec:
        """Check what is given. Raises InvalidArgument."""
        typed = tuple(field.name for field in fields)
        names = _names(columns)
        if doubled := sorted({*typed} & {*COLUMNS}):
            raise InvalidArgument(
                f"--schema has a field {doubled[0]}, which is the name of a column of messages; leave it out, or take "
                "payload as it is"
            )
        if names is None:
            own = (name for name in COLUMNS if not (typed and name == "payload"))
            names = (*own, *typed)
        check_names(names, (*COLUMNS, *typed), "--columns")
        by = _names(partition_by) or ()
        if doubled := sorted({*typed} & {*DERIVED} & {*by}):
            raise InvalidArgument(
                f"--partition-by {doubled[0]} is that of publish_time, and --schema has a field {doubled[0]}; leave one "
                "of them out"
            )
        check_names(by, (*names, *DERIVED), "--partition-by")
        if form == ICEBERG:
            _check_iceberg_partitions(by, names, fields)
        if by and not {*names} - {*by}:
            raise InvalidArgument("--partition-by names every column; leave one for the files")
        for name in by:
            if name in ("attributes", "payload", "publish_time", "event_time"):
                raise InvalidArgument(
                    f"--partition-by {name} makes a folder for each value; take date, hour, partition or key"
                )
        return cls(
            topic,
            form,
            tuple(name for name in names if name not in typed),
            tuple(field for field in fields if field.name in names),
            where or "",
            by,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All columns of a row, those of messages first."""
        return (*self.columns, *(field.name for field in self.fields))

    @property
    def names_in_files(self) -> tuple[str, ...]:
        """Columns that files have: in tables of Iceberg those that choose a folder, too."""
        if self.form == ICEBERG:
            return self.names
        return tuple(name for name in self.names if name not in self.partition_by)

    @property
    def divided_by(self) -> tuple[str, ...]:
        """What chooses the folder of a row: an hour of Iceberg is one of its day, and makes `date` needless."""
        if self.form == ICEBERG and "hour" in self.partition_by:
            return tuple(name for name in self.partition_by if name != "date")
        return self.partition_by

    def schema(self) -> pa.Schema:
        """Arrow's schema of a row, with the columns that choose its folder; Iceberg makes those of publish_time."""
        import pyarrow as pa

        own = () if self.form == ICEBERG else self.partition_by
        derived = [pa.field(name, pa.string()) for name in own if name in DERIVED]
        return pa.schema([*message_schema(self.columns), *typed_schema(self.fields), *derived])

    def needed(self, of_condition: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Columns of messages that have to be read. `of_condition`: those that `where` needs."""
        wanted = {*self.columns, *of_condition}
        if self.fields:
            wanted |= {"offset", "partition", "key", "payload"}  # of rejected rows
        if {*self.partition_by} & {*DERIVED}:
            wanted.add("publish_time")
        return tuple(name for name in COLUMNS if name in wanted)

    def different(self, other: ExportSpec) -> str:
        """Name what differs from another; empty: nothing."""
        mine, its = msgspec.to_builtins(self), msgspec.to_builtins(other)
        return ", ".join(_OPTIONS[name] for name in mine if mine[name] != its[name])


_OPTIONS = {
    "topic": "the topic",
    "form": "the form",
    "columns": "--columns",
    "fields": "--schema",
    "where": "--where",
    "partition_by": "--partition-by",
}


def _check_iceberg_partitions(
    by: tuple[str, ...], names: tuple[str, ...], fields: tuple[TypedField, ...]
) -> None:
    """Refuse what statistics of files do not tell exactly. Raises InvalidArgument."""
    derived = [name for name in by if name in DERIVED]
    if derived and "publish_time" not in names:
        raise InvalidArgument(
            f"--partition-by {derived[0]} of Iceberg is made of the column publish_time; name that in --columns, too"
        )
    for field in fields:
        if field.name in by and field.type.startswith("float"):
            raise InvalidArgument(
                f"--partition-by {field.name} of Iceberg is no {field.type}; take a column of another type"
            )


def message_schema(columns: tuple[str, ...]) -> Any:
    """Arrow's schema of columns of messages."""
    from pyspark.sql.pandas.types import to_arrow_schema

    from danube_fast.spark.source import row_schema

    return to_arrow_schema(row_schema(columns), timezone="UTC")


def typed_schema(fields: tuple[TypedField, ...]) -> list[Any]:
    """Arrow's fields of typed columns."""
    return [field.arrow() for field in fields]


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidArgument("a list of columns is empty; name some with commas between")
    return names
