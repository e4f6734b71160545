"""What a person reads: a row for each system and workload, and the table of a page, a row for each system."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from danube_fast.bench.plan import NON_RELIABLE, ONE_BY_ONE, Figures
from danube_fast.bench.reporting.pages import note_text
from danube_fast.bench.reporting.report import amount, extra_text

__all__ = ["OWN_DURABILITY", "Row", "fastest", "joined", "label", "markdown", "print_rows"]

OWN = "danube-fast"
OWN_DURABILITY = {
    NON_RELIABLE: "none: non_reliable, may drop what a consumer does not take in time",
    "memory": "memory: acked from the worker's memory",
    "os": "os: acked from the page cache",
    "fsync": "fsync: fdatasync before each ack, shared by a group",
}
"""Our own durabilities in the words of the table."""
SYNCED = re.compile(r"f(data)?sync\b.* before ")
"""The durabilities whose ack waits for the disk."""
LABEL_LETTERS_MAX = 60
LANES = {"shm": "shared memory", "zmq": "ipc"}


class Row(NamedTuple):
    """A row of the page: rate of one workload, latency of another."""

    system: str
    durability: str
    client: str
    rate: float | None
    rate_min: float | None
    rate_max: float | None
    p50_us: float | None = None
    p99_us: float | None = None


def joined(found: Sequence[Figures]) -> list[Row]:
    """Rates with the latencies of the same system; ours stand where messages go one by one."""
    rows: dict[tuple[str, str | None, str | None, str], Row] = {}
    for f in found:
        is_ours = f.system == OWN
        place = (f.system, f.transport, f.durability)
        if f.workload == "latency":
            last = next((key for key in reversed(rows) if key[:3] == place), (*place, ""))
            row = rows.get(last, Row(_named(f), _durability(f), ONE_BY_ONE, None, None, None))
            rows[last] = row._replace(p50_us=f.p50_us, p99_us=f.p99_us)
            continue
        client = f.client if is_ours else ""
        low, high = (f.extra.get(f"messages_per_s_{end}") for end in ("min", "max"))
        rows[(*place, client)] = Row(
            _named(f), _durability(f), f.client, f.messages_per_s, low, high
        )
    return list(rows.values())


def _named(f: Figures) -> str:
    if f.system != OWN:
        return f.system
    return f"{OWN}, {LANES.get(f.transport or '', f.transport)}"


def _durability(f: Figures) -> str:
    durability = f.durability or "-"
    return OWN_DURABILITY.get(durability, durability) if f.system == OWN else durability


def label(row: Row) -> str:
    """System and durability, shortened for a picture."""
    if row.system.startswith(OWN):
        level = next(key for key, words in OWN_DURABILITY.items() if words == row.durability)
        return f"{row.system}, {level}"
    words = f"{row.system}, {', '.join(row.durability.split(' (')[0].split(', ')[:2])}"
    return textwrap.shorten(words, LABEL_LETTERS_MAX, placeholder=" ...")


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Of each system its fastest row, among those that sync before an ack, and among the others; the fastest
    first. Latencies are those of the same durability."""
    chosen: list[Row] = []
    for is_synced in (True, False):
        best: dict[str, Row] = {}
        for row in rows:
            if row.rate is None or bool(SYNCED.search(row.durability)) != is_synced:
                continue
            name = re.split(r"[ ,]", row.system)[0]
            if name not in best or row.rate > (best[name].rate or 0):
                best[name] = row
        chosen += sorted(best.values(), key=lambda row: -(row.rate or 0))
    return [_with_latencies(row, rows) for row in chosen]


def _with_latencies(row: Row, rows: Sequence[Row]) -> Row:
    for other in rows:
        if other[:2] == row[:2] and row.p50_us is None:
            row = row._replace(p50_us=other.p50_us, p99_us=other.p99_us)
    return row


def markdown(rows: Sequence[Row], note: str, found: Sequence[Figures]) -> str:
    """The table of a page."""
    names = ("system", "durability", "client", "msgs/s", "smallest to largest", "p50 us", "p99 us")
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in rows:
        spread = "-"
        if row.rate_min is not None and row.rate_max is not None:
            spread = f"{amount(row.rate_min)} to {amount(row.rate_max)}"
        cells = (
            row.system, row.durability, row.client, amount(row.rate), spread, amount(row.p50_us),
            amount(row.p99_us),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    versions = dict.fromkeys(f"{f.system.split()[0]} {f.version}" for f in found)
    sizes = sorted({f.message_bytes for f in found if f.message_bytes})
    text = (
        f"{note} Messages of {', '.join(f'{size:,}' for size in sizes)} B, one producer and one consumer "
        f"process. {'; '.join(versions)}."
    )
    return "\n".join([note_text(text), "", *lines, "", note_text(_faults_text(found))])


def _faults_text(found: Sequence[Figures]) -> str:
    """What did not arrive as it was sent, of all rows."""
    faults = [
        f"{_named(f)} ({_durability(f)}), {f.workload}: {f.lost or 0:,} lost, "
        f"{f.duplicated or 0:,} doubled, {f.corrupted or 0:,} changed of {f.messages or 0:,}"
        for f in found
        if f.lost or f.duplicated or f.corrupted
    ]
    return "; ".join(faults) + "." if faults else "Nothing was lost, doubled or changed."


def print_rows(console: Console, found: Sequence[Figures], absent: Mapping[str, str]) -> None:
    """A row for each system and workload, then who was absent and why."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("system", "version", "workload", "transport", "durability"):
        table.add_column(name, no_wrap=name in ("system", "workload"))
    for name in ("msgs/s", "from", "to", "MB/s", "p50 us", "p99 us", "lost", "dup", "bad"):
        table.add_column(name, justify="right", no_wrap=True)
    for f in found:
        faults = ["-" if x is None else str(x) for x in (f.lost, f.duplicated, f.corrupted)]
        ends = [amount(f.extra.get(f"messages_per_s_{end}")) for end in ("min", "max")]
        table.add_row(
            f.system, f.version, f.workload, f.transport or "-", _durability(f),
            amount(f.messages_per_s), *ends, amount(f.mb_per_s), amount(f.p50_us),
            amount(f.p99_us), *faults,
        )  # fmt: skip
    console.print(table)
    for f in found:
        if extra := extra_text(f):
            console.print(f"{_named(f)} ({_durability(f)}), {f.workload}: {extra}", soft_wrap=True)
    for name, reason in absent.items():
        console.print(f"absent: {name}: {reason}", soft_wrap=True, markup=False)
    sizes = sorted({f.message_bytes for f in found if f.message_bytes})
    console.print(
        f"Messages of {', '.join(f'{size:,}' for size in sizes)} B; rates from the first send to the "
        "last receive, latencies from the actual send; of requests the rate is that of those back to back, "
        "latencies are those at a pace until the reply; every byte compared. What is not alike between these "
        "systems: docs/peers.md",
        style="dim", soft_wrap=True,
    )  # fmt: skip
