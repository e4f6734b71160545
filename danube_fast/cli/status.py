"""`danube-fast status`: one screen about a running broker."""

from __future__ import annotations

from danube_fast.cli.broker import Ask, asking

__all__ = ["status"]


@asking(None, "danube-fast status --url danube://broker.example:6650")
def status(ask: Ask) -> None:
    """Show a running broker: its processes, logs, disk and counters."""
    ask.show(ask("cluster_status"))
