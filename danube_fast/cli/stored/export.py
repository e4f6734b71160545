"""`danube-fast export`: a topic as files or a table, by Spark, each message once."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from danube_fast.checks import parse_amount
from danube_fast.cli.interrupts import terminable
from danube_fast.cli.options import OutputForm, OutputOption, TopicArgument, command, seconds_of
from danube_fast.cli.output import Progress, bytes_text, counted, duration_text, note, print_result
from danube_fast.cli.stored.options import MasterOption, StoreOption, UrlOption, place_options
from danube_fast.errors import DanubeError, InvalidArgument
from danube_fast.types import parse_topic

if TYPE_CHECKING:
    from danube_fast.spark.export.job import ExportJob
    from danube_fast.spark.export.report import Progress as ExportProgress
    from danube_fast.spark.export.report import Report
    from danube_fast.spark.export.runners import Runner

__all__ = ["Mode", "export"]

BAR = 20
"""Characters of the bar of progress."""


class Mode(enum.StrEnum):
    """Ways to treat rows that the target has."""

    APPEND = "append"
    OVERWRITE = "overwrite"


ToOption = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORM:DIR",
        help="parquet, json, csv or delta:DIR; iceberg:DIR#namespace.table.",
    ),
]
StartOption = Annotated[
    str, typer.Option(metavar="WHERE", help="Where the first run begins: an offset, a time, -10m.")
]
EndOption = Annotated[str, typer.Option(metavar="WHERE", help="Up to here: an offset, a time.")]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where it is noted how far it is.  [default: DIR/_danube]"),
]
FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Go on with what comes, until it is interrupted.")
]
FollowBytesOption = Annotated[
    str, typer.Option(metavar="BYTES", help="With --follow: write when so much is new.")
]
FollowSecondsOption = Annotated[
    str, typer.Option(metavar="TIME", help="With --follow: or when something has waited so long.")
]
ColumnsOption = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="What is exported of each message.")
]
WhereOption = Annotated[
    str | None, typer.Option(metavar="SQL", help="Only rows with this condition of Spark SQL.")
]
PartitionByOption = Annotated[
    str | None,
    typer.Option(metavar="NAME,...", help="A folder for each value: of columns, date, hour."),
]
ModeOption = Annotated[
    Mode, typer.Option(help="Add to what the target has, or put all of it anew.")
]
SchemaOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help='Payloads are JSON: {"delay": "int32", ...} are columns.'),
]
SkipLostOption = Annotated[
    bool, typer.Option("--skip-lost", help="Go on behind messages that are lost or damaged.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be exported.")]


@command(
    "danube-fast export /default/flights --to parquet:flights",
    "danube-fast export /default/flights --to delta:lake/flights --follow",
    "danube-fast export /default/flights --to iceberg:lake#air.flights --columns offset,key,payload",
)
def export(
    topic: TopicArgument,
    to: ToOption,
    url: UrlOption = None,
    store: StoreOption = None,
    start: StartOption = "earliest",
    end: EndOption = "latest",
    checkpoint: CheckpointOption = None,
    follow: FollowOption = False,
    follow_bytes: FollowBytesOption = "64MiB",
    follow_seconds: FollowSecondsOption = "60s",
    master: MasterOption = None,
    columns: ColumnsOption = None,
    where: WhereOption = None,
    partition_by: PartitionByOption = None,
    mode: ModeOption = Mode.APPEND,
    schema: SchemaOption = None,
    skip_lost: SkipLostOption = False,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Write a topic to files or a table, each message once; a later run adds what is new.

    Needs pip install 'danube-fast[spark]', for Delta and Iceberg 'danube-fast[spark,lakehouse]'; no Java, as that
    brings one.

    The topic is read through an object store: the broker runs with one (danube-fast serve --store URL), and Spark
    reads it, too, with credentials of its own and the extra of that store ('danube-fast[spark,s3]', azure, gcs).
    Topics of durability memory and non_reliable ones cannot be read so. With retention_policy until_acked, the
    default, what is acked and removed before a run is not exported: set forever or until_expired.
    """
    from danube_fast.spark.export.job import ExportJob
    from danube_fast.spark.export.target import ExportSpec, parse_target
    from danube_fast.spark.export.typed import read_schema
    from danube_fast.spark.options import ReadOptions

    target = parse_target(to)
    name = str(parse_topic(topic))
    fields = read_schema(schema) if schema is not None else ()
    spec = ExportSpec.make(
        name, target.form, columns=columns, fields=fields, where=where, partition_by=partition_by
    )
    loss = "false" if skip_lost else "true"
    read = ReadOptions.parse(
        {**place_options(url, store), "start": start, "end": end, "topic": name, "failOnDataLoss": loss}
    )  # fmt: skip
    _check(read.start, read.end, follow=follow, dry_run=dry_run)
    enough = parse_amount("follow_bytes", follow_bytes)
    if enough is None or enough < 1:
        raise InvalidArgument(f"--follow-bytes {follow_bytes!r} is no size; give such as 64MiB")
    job = ExportJob(
        target, spec, read, checkpoint and checkpoint.absolute(), mode.value, dry_run, follow,
        enough, seconds_of("--follow-seconds", follow_seconds) or 0.0,
    )  # fmt: skip
    _run(job, master, output)


def _check(start: object, end: object, *, follow: bool, dry_run: bool) -> None:
    if isinstance(start, int) and isinstance(end, int) and start >= end:
        raise InvalidArgument(
            f"--start {start} is not below --end {end}; offsets from --start to below --end are exported"
        )
    if follow and end != "latest":
        raise InvalidArgument("--follow has no end; leave out --end, or --follow")
    if follow and dry_run:
        raise InvalidArgument("--follow and --dry-run were both given; leave one of them out")


def _run(job: ExportJob, master: str | None, output: OutputForm) -> None:
    from danube_fast.spark.export.job import Hooks, run_export
    from danube_fast.spark.export.report import Report
    from danube_fast.spark.export.runners import SparkRunner
    from danube_fast.spark.session import spark_session

    @contextlib.contextmanager
    def open_runner() -> Iterator[Runner]:
        with spark_session(master, name=f"danube-fast export {job.spec.topic}") as spark:
            yield SparkRunner(spark)

    report = Report(job.spec.topic, job.target.text)
    try:
        with terminable(), Progress() as progress:
            hooks = Hooks(
                on_progress=lambda at: progress.show(_bar(at, report)),
                on_trouble=lambda error: note(f"{error}; trying again for up to an hour"),
            )
            run_export(job, open_runner, hooks, report)
    except KeyboardInterrupt:
        if report.plans:
            note(f"interrupted: {_summary(report)}; run it again to go on")
        raise
    except DanubeError as error:
        if not report.plans:
            raise
        raise type(error)(f"{error}; before that: {_summary(report)}") from error
    print_result(
        output, msgspec.to_builtins(report), None if report.partitions else _summary(report)
    )


def _summary(report: Report) -> str:
    if not report.messages and not report.partitions and not report.replaced:
        return f"nothing new in {report.topic} for {report.target}"
    before = f", in place of {counted(report.replaced, 'message')}" if report.replaced else ""
    done = "would be exported" if report.dry_run else "exported"
    return f"{counted(report.messages, 'message')} in {counted(report.files, 'file')} {done} to {report.target}{before}"


def _bar(at: ExportProgress, report: Report) -> str:
    """Say how far an export is."""
    if not at.total_bytes:
        return (
            f"{counted(at.messages, 'message')} exported, {counted(at.pending, 'message')} waiting"
        )
    share = at.done_bytes / at.total_bytes
    full = round(BAR * share)
    left = ""
    if at.seconds and at.done_bytes:
        rate = at.done_bytes / at.seconds
        seconds = duration_text((at.total_bytes - at.done_bytes) / rate)
        left = f", {bytes_text(rate)}/s, {seconds} left"
    return (
        f"[{'#' * full}{'-' * (BAR - full)}] {share:4.0%} of {bytes_text(at.total_bytes)}{left}, "
        f"{counted(report.messages, 'message')} before"
    )
