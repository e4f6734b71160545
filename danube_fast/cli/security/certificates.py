"""`danube-fast security new-certificate`: a certificate for the HTTPS ports of a host that has no CA."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from danube_fast.cli.options import OutputForm, OutputOption, command
from danube_fast.cli.output import print_result

__all__ = ["new_certificate"]

DAYS = 3650


@command("danube-fast security new-certificate /srv/tls --name broker.example --name 10.0.0.7")
def new_certificate(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where tls.pem and tls.key are written.")
    ],
    name: Annotated[
        list[str], typer.Option(metavar="HOST", help="Host name or address; may be repeated.")
    ],
    days: Annotated[int, typer.Option(help="It ends after so many days.")] = DAYS,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Make a self-signed certificate and its key, and print the fingerprint, which clients pin."""
    from danube_fast.security.certificates import new_certificate as make

    made = make(folder, name, days)
    value = {
        "certificate": str(made.certificate),
        "key": str(made.key),
        "fingerprint": made.fingerprint,
    }
    print_result(output, value, made.fingerprint)
