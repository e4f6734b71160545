"""`danube-fast status`: one screen about a running broker."""

from __future__ import annotations

from danube_fast.cli.broker import operation
from danube_fast.cli.options import DEFAULT_URL, OutputForm, OutputOption, UrlOption, command
from danube_fast.cli.output import print_result

__all__ = ["status"]


@command("danube-fast status --url danube://broker.example:6650")
def status(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputForm.TEXT) -> None:
    """Show a running broker: its processes, logs, disk and counters."""
    print_result(output, operation(url, "cluster_status"))
