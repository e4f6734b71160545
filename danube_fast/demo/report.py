"""The end of the demo as a person reads it: what was sent, what came, what the kill did, a verdict."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from danube_fast.demo.analysis import Analysis
from danube_fast.demo.check import Kill
from danube_fast.demo.history import History
from danube_fast.demo.scenario import Outcome

__all__ = ["print_outcome"]

BYTES_PER_MB = 1e6
WIDE = 110
"""Columns of a terminal that has room for the names of airlines."""
DELAY_COLUMNS = 30
"""Of the longest bar."""
OK = "bold green"
BAD = "bold red"


def print_outcome(console: Console, outcome: Outcome, airlines: dict[str, str]) -> None:
    """Everything, in tables. `airlines`: names by carrier code."""
    console.print()
    _line(
        console,
        f"{outcome.messages:,} flights ({outcome.payload_bytes / BYTES_PER_MB:.1f} MB), "
        f"{outcome.producers} producers, {outcome.workers} workers, {outcome.partitions} partitions, "
        f"reliable, {outcome.durability} before every ack",
    )
    _line(console, f"published at {_pace(outcome)}")
    console.print(_subscriptions(outcome))
    _line(console, _kill_text(outcome.kill, outcome))
    if outcome.history is not None:
        _line(console, _history_text(outcome.history))
    if outcome.analysis is not None:
        _line(console, _analysis_text(outcome.analysis))
        console.print(_delays(outcome.analysis))
    console.print(_carriers(outcome, airlines, is_wide=console.width >= WIDE))
    for problem in outcome.problems:
        _line(console, f"  {problem}", BAD)
    _line(console, _verdict(outcome), OK if outcome.ok else BAD)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


def _pace(outcome: Outcome) -> str:
    rate = f"{outcome.published_messages_per_s:,.0f} messages/s"
    if not outcome.pace_messages_per_s:
        return f"{rate}, as fast as the producers could"
    return (
        f"{rate}: paced to {outcome.pace_messages_per_s:,.0f}/s so that the kill falls into the "
        "middle (--rate 0: no pace)"
    )


def _subscriptions(outcome: Outcome) -> Table:
    """A column for each subscription."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("subscription")
    for each in outcome.subscriptions:
        count = len(each.received_by_consumer)
        who = "1 consumer" if count == 1 else f"{count} consumers"
        table.add_column(f"{each.name}\n{each.type}, {who}", justify="right")

    def row(name: str, cells: list[str], bad: list[bool] | None = None) -> None:
        flags = bad or [False] * len(cells)
        table.add_row(
            name, *(Text(c, style=BAD if b else "") for c, b in zip(cells, flags, strict=True))
        )

    def counts(name: str, field: str, *, must_be_0: bool = False) -> None:
        values = [int(getattr(each, field)) for each in outcome.subscriptions]
        row(name, [f"{n:,}" for n in values], [must_be_0 and n > 0 for n in values])

    counts("messages received", "received")
    shares = [each.received_by_consumer for each in outcome.subscriptions]
    row("  by each consumer", [" + ".join(f"{n:,}" for n in each) for each in shares])
    counts("duplicates (redelivered)", "redelivered")
    counts("different messages", "distinct")
    counts("lost", "lost", must_be_0=True)
    counts("twice in the log", "duplicated", must_be_0=True)
    counts("altered or unknown", "foreign", must_be_0=True)
    counts("out of order", "out_of_order", must_be_0=True)
    counts("left unacked", "unacked", must_be_0=True)
    row("messages/s", [f"{each.messages_per_s:,.0f}" for each in outcome.subscriptions])
    row("latency p50", [f"{x.latency.p50_ms:,.1f} ms" for x in outcome.subscriptions])
    row("latency p99", [f"{x.latency.p99_ms:,.1f} ms" for x in outcome.subscriptions])
    if outcome.kill is not None:
        calm = [each.latency_undisturbed for each in outcome.subscriptions]
        row("  p50 but for the kill", [f"{x.p50_ms:,.1f} ms" for x in calm])
        row("  p99 but for the kill", [f"{x.p99_ms:,.1f} ms" for x in calm])
    return table


def _kill_text(kill: Kill | None, outcome: Outcome) -> str:
    if kill is None:
        return "no worker was killed"
    silences = [
        f"{each.name} after {each.silence_seconds:.2f} s"
        if each.silence_seconds is not None
        else f"{each.name} never"
        for each in outcome.subscriptions
    ]
    first = outcome.subscriptions[0]
    numbers = " and ".join(map(str, kill.partitions))
    return (
        f"worker {kill.worker} (pid {kill.pid}) was killed with SIGKILL after "
        f"{first.published_before_kill:,} messages; {first.name} had "
        f"{first.received_before_kill:,} of them, "
        f"{outcome.messages - first.published_before_kill:,} were still to be published.\n"
        f"Next message out of its partitions ({numbers}): {', '.join(silences)}. "
        f"Restarts: {outcome.worker_restarts}."
    )


def _history_text(history: History) -> str:
    objects = "1 object" if history.objects == 1 else f"{history.objects} objects"
    return (
        f"Then all flights went into an object store: {objects}, {history.object_bytes / BYTES_PER_MB:.1f} MB; "
        f"{history.trimmed_logs} logs gave {history.trimmed_bytes / BYTES_PER_MB:.1f} MB back.\n"
        f"A reader from the first offset on got {history.read:,} flights in {history.seconds:.2f} s."
    )


def _analysis_text(analysis: Analysis) -> str:
    files = "1 file" if analysis.files == 1 else f"{analysis.files} files"
    return (
        f"Spark counted them by SQL and exported them to Parquet in {analysis.seconds:.1f} s: {files}, "
        f"{analysis.file_bytes / BYTES_PER_MB:.1f} MB; the table has {analysis.distinct:,} different flights.\n"
        "Mean delay at departure by hour of the day, by SQL:"
    )


def _delays(analysis: Analysis) -> Table:
    """A bar for each hour."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    longest = max([1.0, *analysis.delays.values()])
    for hour, minutes in sorted(analysis.delays.items()):
        bar = "█" * round(DELAY_COLUMNS * max(0.0, minutes) / longest)
        table.add_row(f"{hour:02}:00", bar, f"{minutes:.0f} min")
    return table


def _carriers(outcome: Outcome, airlines: dict[str, str], *, is_wide: bool) -> Table:
    """Flights by carrier: the data set against what came. `is_wide`: airlines have a column of their own."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("carrier", no_wrap=True)
    if is_wide:
        table.add_column("airline", no_wrap=True, overflow="ellipsis")
    columns = {each.name: each.carriers for each in outcome.subscriptions}
    if outcome.history is not None:
        columns["history"] = outcome.history.carriers
    if outcome.analysis is not None:
        columns["spark"] = outcome.analysis.carriers
    for title in ("data set", *columns):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    seen = {carrier for carriers in columns.values() for carrier in carriers}
    wanted = outcome.carriers
    for carrier in sorted({*wanted, *seen}, key=lambda code: (-wanted.get(code, 0), code)):
        count = wanted.get(carrier, 0)
        got = [carriers.get(carrier, 0) for carriers in columns.values()]
        is_equal = all(n == count for n in got)
        mark = Text("equal", style=OK) if is_equal else Text("DIFFERS", style=BAD)
        cells = [f"{n:,}" for n in (count, *got)]
        name = [airlines.get(carrier, "")] if is_wide else []
        table.add_row(carrier, *name, *cells, mark)
    return table


def _verdict(outcome: Outcome) -> str:
    if not outcome.ok:
        return f"FAILED after {outcome.seconds:.1f} s: see the lines above"
    end = "and all came back from history"
    if outcome.analysis is not None:
        end = "all came back from history, and each is in the table once"
    return (
        f"COMPLETE AND CORRECT in {outcome.seconds:.1f} s: every flight reached every subscription, none "
        f"was lost, none is twice in the log, {end}"
    )
