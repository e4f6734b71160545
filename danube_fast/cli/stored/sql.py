"""`danube-fast sql`: one statement over topics, by Spark."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

import msgspec
import typer

from danube_fast.cli.options import OutputForm, OutputOption, command
from danube_fast.cli.output import note, print_table, write
from danube_fast.cli.stored.options import (
    EndOption,
    MasterOption,
    StartOption,
    StoreOption,
    UrlOption,
    place_options,
)
from danube_fast.spark.export.writers import text_of

__all__ = ["sql"]

ROWS_SHOWN_MAX = 1000


@command(
    "danube-fast sql \"select cast(key as string) carrier, count(*) flights from '/default/flights' group by 1\"",
    "danube-fast sql \"select max(offset) from '/default/flights'\" --store file:///var/history -o json",
)
def sql(
    statement: Annotated[
        str,
        typer.Argument(
            metavar="STATEMENT",
            help="A query of Spark SQL; topics stand in quotes behind from and join.",
        ),
    ],
    url: UrlOption = None,
    store: StoreOption = None,
    start: StartOption = None,
    end: EndOption = None,
    master: MasterOption = None,
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Show so many rows at most.")
    ] = ROWS_SHOWN_MAX,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Run a statement over topics and print its rows; needs pip install 'danube-fast[spark]'.

    Topics have the columns topic, offset, partition, key, payload, attributes, publish_time, event_time,
    producer_name and sequence; key and payload are binary: cast(key as string).

    No Java is needed, as the extra brings one. Topics are read through an object store: the broker runs with one
    (danube-fast serve --store URL), and Spark reads it, too, with credentials of its own and the extra of that store
    ('danube-fast[spark,s3]', azure, gcs). Topics of durability memory and non_reliable ones cannot be read so.
    """
    from danube_fast.spark.session import spark_session
    from danube_fast.spark.statement import statement as statement_over

    given = {**place_options(url, store), "start": start, "end": end}
    options = {name: value for name, value in given.items() if value is not None}
    with (
        spark_session(master) as spark,
        statement_over(spark, statement, options, once=True) as frame,
    ):
        names = _distinct(frame.columns)
        rows = frame.take(limit + 1)
    shown = [
        {name: _plain(value) for name, value in zip(names, row, strict=True)}
        for row in rows[:limit]
    ]
    if output is OutputForm.JSON:
        for row in shown:
            write(msgspec.json.encode(row) + b"\n")
    else:
        print_table(output, shown, "no rows")
    if len(rows) > limit:
        note(f"there are more rows: these are the first {limit}; --limit N shows more")


def _distinct(names: list[str]) -> list[str]:
    """The names of columns; what is there before gets a number."""
    found: list[str] = []
    for name in names:
        number, distinct = 1, name
        while distinct in found:
            number += 1
            distinct = f"{name}_{number}"
        found.append(distinct)
    return found


def _plain(value: Any) -> Any:
    """A value as JSON has it: text where bytes are UTF-8, else base64 behind `base64:`; times in RFC 3339."""
    if hasattr(value, "asDict"):
        value = value.asDict()
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bytes | bytearray):
        return text_of(bytes(value))
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, bool | int | float | str | None):
        return value
    return str(value)
