"""`danube-fast wal`: looks into logs on disk; no broker is needed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from danube_fast.cli.options import OutputForm, OutputOption, YesOption, example, group
from danube_fast.cli.output import Progress, bytes_text, note, print_result, refuse_without_yes
from danube_fast.clock import SystemClock
from danube_fast.errors import DataLoss, NotFound

__all__ = ["app"]

app = group("wal", "Look into logs.", "danube-fast wal inspect danube-data")

LOGS_FOLDER = "logs"

DirectoryArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A data directory, or the folder of one log.")
]


@app.command(epilog=example("danube-fast wal inspect danube-data"))
def inspect(directory: DirectoryArgument, output: OutputOption = OutputForm.TEXT) -> None:
    """Show segments, snapshots and sizes; reads headers only, a running broker does not mind."""
    from danube_fast.wal.inspect import inspect_log

    reports = [inspect_log(path) for path in _logs(directory)]
    text = "\n\n".join(_inspected(report) for report in reports)
    print_result(output, msgspec.to_builtins(reports), text)


@app.command(
    epilog=example(
        "danube-fast wal verify danube-data",
        "danube-fast wal verify danube-data/logs/0000 --accept-loss --yes",
    )
)
def verify(
    directory: DirectoryArgument,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Cut out what is damaged, and record the loss.")
    ] = False,
    yes: YesOption = False,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Check every byte of a log that no broker has open; exit code 1 if something is damaged."""
    from danube_fast.wal.inspect import verify_log

    paths = _logs(directory)
    if accept_loss:
        refuse_without_yes(yes, f"gives up every damaged message in {directory}, for ever")
    wall_ns = SystemClock().wall_ns()
    reports = []
    with Progress() as progress:
        for path in paths:
            reports.append(
                verify_log(
                    path,
                    accept_loss=accept_loss,
                    wall_ns=wall_ns,
                    on_progress=functools.partial(_show, progress, path),
                )
            )
    text = "\n".join(_verified(report) for report in reports)
    print_result(output, msgspec.to_builtins(reports), text)
    damaged = [report.directory for report in reports if report.faults and not report.repaired]
    if damaged:
        raise DataLoss(
            f"{', '.join(damaged)} is damaged; restore it from a backup, or give up what is lost "
            "with: danube-fast wal verify --accept-loss --yes"
        )
    if any(report.repaired for report in reports):
        note("the damage was cut out; readers are told which offsets are gone")


def _show(progress: Progress, path: Path, done: int, total: int) -> None:
    progress.show(f"{path}: {bytes_text(done)} of {bytes_text(total)} checked")


def _logs(directory: Path) -> list[Path]:
    """The logs below a data directory, or the one that was named."""
    folder = directory / LOGS_FOLDER
    if not folder.is_dir():
        return [directory]
    logs = sorted(path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal())
    if not logs:
        raise NotFound(f"there are no logs in {folder}; name another directory")
    return logs


def _inspected(report: Any) -> str:
    size = bytes_text(report.bytes_on_disk)
    spares = report.spare_segments
    lines = [f"{report.directory}: log {report.log_id}, {size} on disk, {spares} spare segments"]
    for segment in report.segments:
        health = segment.fault or "sound header"
        lines.append(
            f"  {Path(segment.path).name}  positions {segment.first_position} to "
            f"{segment.end_position}, epoch {segment.epoch}, {health}"
        )
    for snapshot in report.snapshots:
        health = snapshot.fault or ("orderly stop" if snapshot.clean else "sound")
        lines.append(
            f"  {Path(snapshot.path).name}  at {snapshot.position}, "
            f"{bytes_text(snapshot.state_bytes)} of state, {health}"
        )
    lines += [f"  lost: {msgspec.to_builtins(loss)}" for loss in report.losses]
    return "\n".join(lines)


def _verified(report: Any) -> str:
    extent = f"positions {report.first_position} to {report.cut}"
    lines = [
        f"{report.directory}: {report.frames:,} frames, {report.messages:,} messages in {extent}",
        f"  synced to {report.synced_position}, epoch {report.epoch}",
    ]
    if report.torn is not None:
        lines.append(
            f"  behind its end, never known to be durable, cut off by the next start: {report.torn}"
        )
    lines += [
        f"  DAMAGE in positions {fault.position} to {fault.until}: {fault.reason} ({fault.path})"
        for fault in report.faults
    ]
    if not report.faults:
        lines.append("  sound")
    return "\n".join(lines)
