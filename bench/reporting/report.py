"""What a person reads: tables for the terminal, and the same in Markdown for the pages."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from danube_fast.bench.floors import Verdict
from danube_fast.bench.plan import Figures

__all__ = ["amount", "extra_text", "json_line", "print_figures", "print_verdicts", "progress"]

MILLION = 1_000_000
THOUSAND = 1000
BIG = 100
SIGNIFICANT_BELOW = 10
EXTRAS_HIDDEN = ("reference_messages_per_s", "acked_per_s")
ENDS_HIDDEN = ("_scheduled_us", "_us_min", "_us_max", "_per_s_min", "_per_s_max")


def amount(value: float | None) -> str:
    """A number as people say it."""
    if value is None:
        return "-"
    if abs(value) >= MILLION:
        return f"{value / MILLION:.2f} M"
    if abs(value) >= BIG * THOUSAND:
        return f"{value / THOUSAND:.0f} k"
    if abs(value) >= BIG:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < SIGNIFICANT_BELOW else f"{value:.1f}"


def json_line(figures: Figures) -> dict[str, object]:
    """The line of INTERFACES: every field, rounded, with what only this workload has behind it."""
    line: dict[str, object] = {}
    for name in Figures.__struct_fields__:
        if name != "extra":
            line[name] = _rounded(getattr(figures, name))
    return line | {name: _rounded(value) for name, value in figures.extra.items()}


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


def extra_text(figures: Figures) -> str:
    """What only this workload measures."""
    return ", ".join(
        f"{name} {amount(value)}"
        for name, value in figures.extra.items()
        if name not in EXTRAS_HIDDEN and not name.endswith(ENDS_HIDDEN)
    )


def print_figures(console: Console, all_figures: Sequence[Figures]) -> None:
    """One row for each workload."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("workload", no_wrap=True)
    table.add_column("durability")
    names = ("bytes", "messages", "msgs/s", "MB/s", "p50 us", "p99 us", "p99.9 us")
    for name in (*names, "B/sync", "lost", "dup", "bad", "broker s", "client s", "RSS MB", "ref"):
        table.add_column(name, justify="right")
    for f in all_figures:
        faults = ["-" if x is None else str(x) for x in (f.lost, f.duplicated, f.corrupted)]
        table.add_row(
            f.workload, f.durability or "-", str(f.message_bytes or "-"), amount(f.messages),
            amount(f.messages_per_s), amount(f.mb_per_s), amount(f.p50_us), amount(f.p99_us),
            amount(f.p999_us), amount(f.bytes_per_sync), *faults, amount(f.broker_cpu_s),
            amount(f.client_cpu_s), amount(f.broker_rss_mb), amount(f.vs_reference),
        )  # fmt: skip
    console.print(table)
    for f in all_figures:
        notes = [extra_text(f)] if extra_text(f) else []
        if f.window:
            notes.append(f"closed loop, window {f.window:,} B")
        elif f.rate:
            notes.append(f"open loop, {f.rate:,.0f}/s")
        if notes:
            console.print(f"{f.workload}: {'; '.join(notes)}", soft_wrap=True)
    console.print(
        "ref: msgs/s divided by those of raw ZeroMQ, measured in the same run", style="dim"
    )


def print_verdicts(console: Console, found: Sequence[Verdict]) -> None:
    """Floor, target, measured, pass or miss."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what", no_wrap=True)
    for name in ("floor", "target", "median", "unit", "raw ZeroMQ", ""):
        table.add_column(name, justify="left" if name == "unit" else "right", no_wrap=True)
    for verdict in found:
        sign = "<= " if verdict.floor.is_ceiling else ">= "
        table.add_row(
            verdict.case.what, sign + amount(verdict.floor.floor), amount(verdict.floor.target),
            amount(verdict.median), verdict.floor.unit, amount(verdict.reference),
            "[green]pass[/]" if verdict.is_met else "[red]MISS[/]",
        )  # fmt: skip
    console.print(table)


def progress(what: str, figures: Figures) -> str:
    """One line about a run that has just ended."""
    words = [what]
    if figures.messages_per_s is not None:
        words.append(f"{amount(figures.messages_per_s)} msgs/s")
    if figures.p99_us is not None:
        words.append(f"p50 {figures.p50_us:.0f} us, p99 {figures.p99_us:.0f} us")
    if figures.vs_reference is not None:
        words.append(f"{figures.vs_reference:.2f} of raw ZeroMQ")
    extra = extra_text(figures)
    if extra:
        words.append(extra)
    if not figures.is_faultless:
        words.append(
            f"NOT AS SENT: {figures.lost} lost, {figures.duplicated} doubled, "
            f"{figures.corrupted} changed"
        )
    return "; ".join(words)
