"""`danube-fast backup` and `restore`: a data directory as one file, and back, while the broker is stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from danube_fast.cli.interrupts import terminable
from danube_fast.cli.options import (
    ConfigOption,
    DataDirOption,
    OutputForm,
    OutputOption,
    command,
)
from danube_fast.cli.output import Progress, bytes_text, counted, print_result, safe_text
from danube_fast.clock import SystemClock

if TYPE_CHECKING:
    from danube_fast.workers.supervisor.archive import Manifest

__all__ = ["backup", "restore"]

NOT_IN_IT = (
    "history in an object store, and what settings name outside of the data directory: tls_key, certificates, "
    "issuers.toml and its secret files"
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The backup: one file.")]


@command(
    "danube-fast backup --data-dir /srv/danube /mnt/backups/danube.tar.zst",
    "danube-fast backup --data-dir /srv/danube /mnt/backups/danube.tar.zst --without-secrets --yes",
)
def backup(
    file: FileArgument,
    data_dir: DataDirOption = None,
    without_secrets: Annotated[
        bool,
        typer.Option(
            "--without-secrets", help="Leave the keys out: a broker does not start on such a copy."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Replace the file if it is there.")] = False,
    config: ConfigOption = None,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Write all that a stopped broker has on its disk to one file; --yes replaces a file that is there.

    It says which secrets the file holds. The file is of this user alone, and has its name only when all of it is durable.
    """
    from danube_fast.workers.supervisor.backup import back_up

    folder = _data_dir(data_dir, config)
    with terminable(), Progress() as progress:
        made = back_up(
            folder, file, SystemClock(), with_secrets=not without_secrets, replace=yes,
            on_progress=lambda done, total: progress.show(
                f"{bytes_text(done // 2)} of {bytes_text(total // 2)}"
            ),
        )  # fmt: skip
    unknown = [safe_text(name) for name in made.unknown]
    lines = [
        f"{made.path}: {bytes_text(made.archive_bytes)}",
        *_lines(made.manifest, str(folder)),
        f"not in it  {NOT_IN_IT}",
    ]
    if unknown:
        lines.append(f"left out   {', '.join(unknown)}: not the broker's")
    value = {
        "file": str(made.path), "archive_bytes": made.archive_bytes, **_value(made.manifest),
        "left_out": unknown,
    }  # fmt: skip
    print_result(output, value, "\n".join(lines))


@command(
    "danube-fast restore /mnt/backups/danube.tar.zst --data-dir /srv/danube",
    "danube-fast restore /mnt/backups/danube.tar.zst --list",
)
def restore(
    file: FileArgument,
    data_dir: DataDirOption = None,
    list_files: Annotated[
        bool,
        typer.Option("--list", help="Restore nothing: check the file, and list what it holds."),
    ] = False,
    config: ConfigOption = None,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Make a data directory out of a backup, where there is none or an empty one.

    Every byte is checked before the directory appears under its name. The broker is the same one as it was at the time of
    the backup: end the other one before you start it.
    """
    from danube_fast.workers.supervisor.restore import check_backup
    from danube_fast.workers.supervisor.restore import restore as restore_to

    folder = _data_dir(data_dir, config)
    with terminable(), Progress() as progress:

        def show(done: int, total: int) -> None:
            progress.show(f"{bytes_text(done)} of {bytes_text(total)}")

        manifest = check_backup(file, show) if list_files else restore_to(file, folder, show)
    value = _value(manifest)
    if list_files:
        files = [f"{each.mode}  {each.bytes:>12,}  {each.path}" for each in manifest.files]
        lines = [*_lines(manifest, data_dir or "DIR"), *files]
        value = {**value, "file": str(file), "files": msgspec.to_builtins(manifest.files)}
    else:
        lines = [f"restored {folder}", *_lines(manifest, str(folder))]
        value = {**value, "data_dir": str(folder)}
    print_result(output, value, "\n".join(lines))


def _data_dir(data_dir: str | None, config: Path | None) -> Path:
    from danube_fast.config import load_settings

    return Path(load_settings({"data_dir": data_dir}, os.environ, config).settings.data_dir)


def _value(manifest: Manifest) -> dict[str, Any]:
    return {
        "broker": manifest.broker, "time": manifest.time, "danube_fast": manifest.danube_fast,
        "file_count": len(manifest.files), "data_bytes": manifest.data_bytes, "secrets": manifest.secrets,
        "secrets_left_out": manifest.secrets_left_out,
    }  # fmt: skip


def _lines(manifest: Manifest, folder: str) -> list[str]:
    """Say what a backup holds, and above all which secrets."""
    lines = [
        f"broker     {manifest.broker or 'none yet'} at {manifest.time}",
        f"files      {counted(len(manifest.files), 'file')}, {bytes_text(manifest.data_bytes)}",
        f"secrets    {_secrets(manifest)}",
    ]
    if "server.key" in manifest.secrets_left_out:
        lines.append(
            "           a secured broker does not start without server.key: put it back (mode 0600), or run: danube-fast "
            f"security recover --data-dir {folder} --new-server-key --yes"
        )
    return lines


def _secrets(manifest: Manifest) -> str:
    if manifest.secrets:
        return f"{', '.join(manifest.secrets)}: who reads the file has them"
    left_out = ", ".join(manifest.secrets_left_out)
    return f"none; left out: {left_out}" if left_out else "none"
