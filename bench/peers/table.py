"""What a person reads: one row for each system and workload, then who was absent and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from danube_fast.bench.plan import NON_RELIABLE, Figures
from danube_fast.bench.report import amount

__all__ = ["OWN_DURABILITY", "print_rows"]

OWN_DURABILITY = {
    NON_RELIABLE: "none: non_reliable, may drop what a consumer does not take in time",
    "memory": "memory: acked from the worker's memory",
    "os": "os: acked from the page cache",
    "fsync": "fsync: fdatasync before each ack, shared by a group",
}
"""Our own durabilities in the words of the table."""


def print_rows(console: Console, found: Sequence[Figures], absent: Mapping[str, str]) -> None:
    """The table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("system", "version", "workload", "transport", "durability"):
        table.add_column(name, no_wrap=name in ("system", "workload"))
    for name in ("msgs/s", "MB/s", "p50 us", "p99 us", "lost", "dup", "bad"):
        table.add_column(name, justify="right", no_wrap=True)
    for f in found:
        durability = f.durability or "-"
        if f.system == "danube-fast":
            durability = OWN_DURABILITY.get(durability, durability)
        faults = ["-" if x is None else str(x) for x in (f.lost, f.duplicated, f.corrupted)]
        table.add_row(
            f.system, f.version, f.workload, f.transport or "-", durability,
            amount(f.messages_per_s), amount(f.mb_per_s), amount(f.p50_us), amount(f.p99_us), *faults,
        )  # fmt: skip
    console.print(table)
    for name, reason in absent.items():
        console.print(f"absent: {name}: {reason}", soft_wrap=True, markup=False)
    sizes = sorted({f.message_bytes for f in found if f.message_bytes})
    console.print(
        f"Messages of {', '.join(f'{size:,}' for size in sizes)} B; rates from the first send to the "
        "last receive, latencies from the actual send; every byte compared. What is not alike "
        "between these systems: docs/peers.md",
        style="dim", soft_wrap=True,
    )  # fmt: skip
