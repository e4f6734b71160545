"""`danube-fast serve`: puts the settings together and hands over to the supervisor."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from danube_fast.cli.options import (
    ConfigOption,
    DataDirOption,
    OutputForm,
    OutputOption,
    command,
)
from danube_fast.cli.output import note
from danube_fast.interpreter import check_interpreter

__all__ = ["serve"]


AuthOption = Annotated[
    str | None,
    typer.Option(
        metavar="none|required", help="Whether clients must prove who they are (default: none)."
    ),
]
SignOnOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where clients sign on by HTTPS with API keys and tokens (default: nowhere).",
    ),
]
InsecureOption = Annotated[
    bool | None,
    typer.Option(
        "--insecure",
        help="Listen beyond loopback, or open a secured data directory, although no client is asked who it is.",
    ),
]
RollbackOption = Annotated[
    bool,
    typer.Option(
        "--accept-rollback",
        help="Start although logs or metadata were put back from an older copy; what it lacks is "
        "lost.",
    ),
]


@command(
    "danube-fast serve --workers 4 --data-dir /srv/danube --listen 0.0.0.0:6650 --auth required"
)
def serve(
    workers: Annotated[
        int | None, typer.Option(help="Worker processes; about one per core to spare.")
    ] = None,
    data_dir: DataDirOption = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where clients connect; port 0: any free one."),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="Host name that clients are told.")
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Admin port (default: port of --listen + 1 on loopback)."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Object store of history: file:///DIR, s3://BUCKET/PREFIX (default: none, all stays in the log).",
        ),
    ] = None,
    pin: Annotated[
        bool | None, typer.Option("--pin", help="Keep each worker on a core of its own.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(metavar="text|json", help="Form of the log on stderr.")
    ] = None,
    accept_rollback: RollbackOption = False,
    auth: AuthOption = None,
    sign_on: SignOnOption = None,
    insecure: InsecureOption = None,
    config: ConfigOption = None,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C. Every setting has a default that works.

    When all processes are ready it says where it listens, with --output json in one line.
    """
    check_interpreter()
    from danube_fast.config import load_settings

    flags = {
        "workers": workers,
        "data_dir": data_dir,
        "listen": listen,
        "advertise": advertise,
        "admin": admin,
        "store": store,
        "pin": pin,
        "log_format": log_format,
        "auth": auth,
        "sign_on": sign_on,
        "insecure": insecure,
    }
    loaded = load_settings(flags, os.environ, config)
    for variable in loaded.ignored_variables:
        note(f"danube-fast: {variable} is no setting and is ignored")
    from danube_fast.workers.supervisor import supervisor

    code = supervisor.serve(loaded.settings, output=output.value, accept_rollback=accept_rollback)
    if code:
        raise typer.Exit(code)
