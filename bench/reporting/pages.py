"""`./run bench`: measures the cases of the floors and writes a table and plots anew.

    docs/measurements.md  <!-- bench:floors --> ... <!-- bench:end -->   every case with its floor and target
    docs/plots/rates.svg, docs/plots/latencies.svg                       the same as bars

What stands between the markers is ours; the rest of a page is left alone.
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from danube_fast.bench import floors
from danube_fast.bench.floors import Case, Verdict
from danube_fast.bench.load import host
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Figures, client_of
from danube_fast.bench.reporting import report
from danube_fast.bench.reporting.plot import Bar, write_bars
from danube_fast.bench.workloads.catalog import find
from danube_fast.errors import DanubeError, NotFound
from danube_fast.version import VERSION

__all__ = ["floors_table", "machine_note", "main", "note_text", "plots", "replaced"]

END = "<!-- bench:end -->"
PAGES = {"docs/measurements.md": "floors"}
PLOTS = Path("docs", "plots")
RAW = "the same, raw ZeroMQ"
OWN_GROUP, RAW_GROUP = "danube-fast", "raw ZeroMQ"
PAGE_WIDTH = 120
RUNS = 3


def replaced(text: str, name: str, table: str) -> str:
    """A page with a table between its markers. Raises NotFound if it has none."""
    start = f"<!-- bench:{name} -->"
    head, found, rest = text.partition(start)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise NotFound(
            f"the page has no {start} with an {END} behind it; put both where the table goes"
        )
    return f"{head}{start}\n{table}\n{END}{tail}"


def machine_note(runs: int) -> str:
    """When, what, where, and how many runs: for the line above a table."""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    times = "one run" if runs == 1 else f"medians of {runs} runs"
    return f"{today}, danube-fast {VERSION}, {host.machine()}; {times}."


def note_text(note: str) -> str:
    """The line above a table, as wide as a page."""
    return textwrap.fill(note, PAGE_WIDTH, break_long_words=False, break_on_hyphens=False)


def _header(*names: str) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def floors_table(found: Sequence[Verdict], durabilities: Sequence[str], runs: int) -> str:
    """Every case with its floor and target."""
    lines = _header("what", "durability", "floor", "target", "measured", "unit", "raw ZeroMQ")
    for verdict, durability in zip(found, durabilities, strict=True):
        floor = verdict.floor
        measured = report.amount(verdict.median) + ("" if verdict.is_met else " (missed)")
        lines.append(
            f"| {verdict.case.what} | {durability} | {report.amount(floor.floor)} | "
            f"{report.amount(floor.target)} | {measured} | {floor.unit} | "
            f"{report.amount(verdict.reference)} |"
        )
    note = (
        "Measured by `./run bench`: broker with two workers, producer and consumer processes on the same "
        f"host, ipc, 100 B incompressible payloads unless said, every byte compared. {machine_note(runs)}"
    )
    pictures = "![messages a second](plots/rates.svg)", "![latencies](plots/latencies.svg)"
    return "\n".join([note_text(note), "", *lines, "", pictures[0], "", pictures[1]])


def plots(
    found: Sequence[Verdict], durabilities: Sequence[str]
) -> dict[str, tuple[str, list[Bar]]]:
    """Title and bars of each plot, by the name of its file."""
    rates: list[Bar] = []
    times: list[Bar] = []
    for verdict, durability in zip(found, durabilities, strict=True):
        name, what = verdict.floor.figure, verdict.case.what
        if verdict.median is None or not (name.endswith("_us") or name == "messages_per_s"):
            continue
        label = what if durability in what else f"{what}, {durability}"
        if not name.endswith("_us"):
            rates.append(Bar(label, verdict.median, client_of(verdict.case.workload)))
            continue
        times.append(Bar(f"{label}, {name.removesuffix('_us')}", verdict.median, OWN_GROUP))
        if verdict.reference is not None:
            times.append(Bar(RAW, verdict.reference, RAW_GROUP))
    return {
        "rates.svg": ("messages a second", rates),
        "latencies.svg": ("latency at 1,000 messages a second, us", times),
    }


def main() -> int:
    """Measure, rewrite; the exit code."""
    parser = argparse.ArgumentParser(description="Measure and write the tables of the pages anew.")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where README.md is")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--messages", type=int, help="for a short trial")
    parser.add_argument("workloads", nargs="*")
    arguments = parser.parse_args()
    try:
        _rewrite(arguments)
    except DanubeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _rewrite(arguments: argparse.Namespace) -> None:
    pages = {name: arguments.root / name for name in PAGES}
    for name, path in pages.items():
        if not path.is_file():
            raise NotFound(f"there is no {path}; run this where README.md is")
        replaced(path.read_text(), PAGES[name], "")  # before an hour of measuring
    cases = floors.select(arguments.workloads)
    changes = {} if arguments.messages is None else {"messages": arguments.messages}
    with Rig() as rig:
        measured = floors.check(rig, cases, arguments.runs, changes, _say)
    found = floors.verdicts(cases, measured)
    durabilities = [_durability(verdict.case) for verdict in found]
    folder = arguments.root / PLOTS
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, rows) in plots(found, durabilities).items():
        write_bars(folder / name, title, rows, machine_note(arguments.runs))
    for name, path in pages.items():
        table = floors_table(found, durabilities, arguments.runs)
        path.write_text(replaced(path.read_text(), PAGES[name], table))
        print(f"{path}: written", file=sys.stderr)


def _durability(case: Case) -> str:
    if not {"durability", "topics"} & find(case.workload).takes:
        return "-"
    return case.plan().durability


def _say(case: Case, figures: Figures) -> None:
    print(report.progress(case.what, figures), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
