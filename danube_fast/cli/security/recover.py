"""`danube-fast security recover`: the way back into a broker whose keys are lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from danube_fast.cli.options import (
    ConfigOption,
    DataDirOption,
    OutputForm,
    OutputOption,
    YesOption,
    command,
)
from danube_fast.cli.output import print_result, refuse_without_yes

__all__ = ["recover"]


@command(
    "danube-fast security recover --data-dir /srv/danube",
    "danube-fast security recover --data-dir /srv/danube --new-server-key --yes",
)
def recover(
    data_dir: DataDirOption = None,
    new_server_key: Annotated[
        bool,
        typer.Option(
            "--new-server-key",
            help="Make a new server key: the one before is lost, damaged, or known to others.",
        ),
    ] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Make a key for an administrator, while the broker is stopped; its next start takes it.

    It is good for one connection, as the key of the first start. All users, keys and rights stay as they are.
    """
    from danube_fast.config import load_settings
    from danube_fast.workers.supervisor.recovery import recover as make

    settings = load_settings({"data_dir": data_dir}, os.environ, config).settings
    if new_server_key:
        refuse_without_yes(
            yes, f"replaces the server key in {settings.data_dir}; no client that pins the one before comes in any more"
        )  # fmt: skip
    made = make(Path(settings.data_dir), new_server_key=new_server_key)
    lines = [
        f"administrator: {made.admin_key}, good for one connection behind the next start",
        f"server key     {' '.join(made.server_keys)}",
    ]
    value = {"admin_key": str(made.admin_key), "server_keys": made.server_keys}
    print_result(output, value, "\n".join(lines))
