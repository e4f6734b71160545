"""Rounds of `--peers`: everybody once in each, medians with their range, the table and the picture of a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from danube_fast.bench.peers import beside, catalog
from danube_fast.bench.peers.beside import _Entrant, _Rounds
from danube_fast.bench.peers.table import fastest, joined, label, markdown
from danube_fast.bench.plan import LISTS, ONE_BY_ONE, Figures, Plan
from danube_fast.errors import InvalidArgument, NotFound, Unavailable

RATES = {"a": [50.0, 10.0, 30.0], "b": [1000.0, 3000.0, 2000.0]}
PLAN = Plan(workload="throughput")


def entrant(name: str, heard: list[str], rates: list[float], fails_in: int = 0) -> _Entrant:
    """One whose runs have these rates, but for a round in which it fails."""
    left = list(rates)

    def run(plan: Plan) -> Figures:
        if plan.messages in (1000, 1, 400):
            heard.append(f"{'sized' if plan.messages == 1000 else 'warm'} {name}")
            return Figures(workload=plan.workload, messages_per_s=100.0)
        heard.append(f"{name} {plan.messages}")
        return Figures(system=name, workload=plan.workload, messages_per_s=left.pop(0), lost=0)

    @contextmanager
    def opened() -> Iterator[Callable[[Plan], Figures]]:
        heard.append(f"open {name}")
        if fails_in and heard.count(f"open {name}") == fails_in:
            raise Unavailable("no more")
        yield run
        heard.append(f"close {name}")

    return _Entrant(name, [PLAN], opened)


def test_everybody_runs_once_in_each_round_with_as_many_messages() -> None:
    heard: list[str] = []
    entrants = [entrant(name, heard, rates) for name, rates in RATES.items()]
    found = _Rounds(entrants, beside.Choices([], {"seconds": 20.0}), lambda _: None).measure(3)
    first = []
    for name in RATES:
        first += [f"open {name}", f"sized {name}", f"warm {name}", f"{name} 2000", f"close {name}"]
    rest = [words for words in first if not words.startswith("sized")]
    assert heard == first + rest * 2
    assert [(f.system, f.messages_per_s) for f in found] == [("a", 30.0), ("b", 2000.0)]
    assert found[0].extra == {"messages_per_s_min": 10.0, "messages_per_s_max": 50.0}


def test_who_fails_in_a_round_keeps_the_rows_of_the_rounds_before() -> None:
    heard: list[str] = []
    entrants = [entrant("a", heard, RATES["a"], fails_in=2), entrant("b", heard, RATES["b"])]
    rounds = _Rounds(entrants, beside.Choices([], {"messages": 7}), lambda _: None)
    found = rounds.measure(3)
    assert [f.messages_per_s for f in found] == [50.0, 2000.0]
    assert rounds.failed == {0: "a: no more"}
    assert heard.count("open a") == 2


def figures(workload: str, **more: object) -> Figures:
    given = {"transport": "shm", "durability": "fsync", "message_bytes": 100, **more}
    return Figures(workload=workload, **given)  # type: ignore[arg-type]


FOUND = [
    figures("throughput", messages_per_s=5e6, extra={"messages_per_s_min": 4e6, "messages_per_s_max": 6e6}),
    figures("messages", messages_per_s=7e5, client=ONE_BY_ONE),
    figures("latency", messages_per_s=1e3, rate=1000.0, p50_us=300.0, p99_us=900.0),
    figures(
        "throughput", system="kafka acks=all", version="4, client 2", transport="tcp",
        durability="acked (by one), flush", messages_per_s=2e5,
    ),
    figures(
        "latency", system="kafka acks=all", version="4, client 2", transport="tcp",
        durability="acked (by one), flush", p50_us=2000.0, p99_us=9000.0,
    ),
]  # fmt: skip


def test_a_row_of_the_page_has_rate_and_latency_of_one_system() -> None:
    rows = joined(FOUND)
    assert [(row.client, row.rate, row.p50_us) for row in rows] == [
        (LISTS, 5e6, None), (ONE_BY_ONE, 7e5, 300.0), (LISTS, 2e5, 2000.0),
    ]  # fmt: skip
    assert [label(row) for row in rows[1:]] == [
        "danube-fast, shared memory, fsync", "kafka acks=all, acked",
    ]  # fmt: skip
    table = markdown(rows, "Today.", FOUND).splitlines()
    assert "| 5.00 M | 4.00 M to 6.00 M | - | - |" in table[-5]
    assert table[-1] == "Nothing was lost, doubled or changed."
    assert table[-3] == (
        "| kafka acks=all | acked (by one), flush | lists | 200 k | - | 2,000 | 9,000 |"
    )
    assert "kafka 4, client 2" in table[0] + table[1]


def test_what_was_lost_stands_below_the_table() -> None:
    lossy = figures("throughput", messages_per_s=5e6, messages=1000, lost=7)
    text = markdown(joined([lossy]), "Today.", [lossy]).replace("\n", " ")
    assert "throughput: 7 lost, 0 doubled, 0 changed of 1,000." in text


def test_table_and_picture_of_a_page_have_the_same_rows(tmp_path: Path) -> None:
    page, plot = tmp_path / "docs" / "peers.md", tmp_path / "docs" / "plots" / "peers.svg"
    plot.parent.mkdir(parents=True)
    page.write_text("# T\n<!-- bench:peers -->\n<!-- bench:end -->\nend\n")
    beside._publish(beside.Choices([], {}, pages=[page], plot=plot), FOUND, 5)
    text = page.read_text()
    assert text.endswith("![messages a second](plots/peers.svg)\n<!-- bench:end -->\nend\n")
    assert "medians of 5 runs" in text
    drawn = plot.read_text()
    assert text.count("\n| ") - 1 == drawn.count("<rect") - 1 == 3
    assert drawn.count(LISTS) == drawn.count(ONE_BY_ONE) == 1


def test_a_short_table_has_the_fastest_rows_of_each_system(tmp_path: Path) -> None:
    more = [
        figures("throughput", transport="zmq", messages_per_s=6e6),
        figures("throughput", durability="non_reliable", messages_per_s=9e6),
        figures("throughput", durability="os", messages_per_s=8e6),
        figures(
            "throughput", system="kafka synced", version="4", durability="fsync of each before its ack",
            messages_per_s=3e5,
        ),
        figures(
            "throughput", system="nats file", version="2", durability="file, fsync every 2 min",
            messages_per_s=4e4,
        ),
    ]  # fmt: skip
    rows = fastest(joined([*FOUND, *more]))
    assert [(row.system, row.rate, row.p50_us) for row in rows] == [
        ("danube-fast, ipc", 6e6, None), ("kafka synced", 3e5, None),
        ("danube-fast, shared memory", 9e6, None), ("kafka acks=all", 2e5, 2000.0),
        ("nats file", 4e4, None),
    ]  # fmt: skip
    assert fastest(joined(FOUND))[0].p50_us == 300.0, "that of single messages"
    readme, plot = tmp_path / "README.md", tmp_path / "peers.svg"
    readme.write_text("<!-- bench:fastest -->\n<!-- bench:end -->\n")
    beside._publish(beside.Choices([], {}, pages=[readme], plot=plot), FOUND, 5)
    assert readme.read_text().count("\n| ") - 1 == 2
    assert "![messages a second](peers-fastest.svg)" in readme.read_text()
    drawn = (tmp_path / "peers-fastest.svg").read_text()
    assert drawn.count("<rect") - 1 == 2 < plot.read_text().count("<rect") - 1


def test_a_page_without_a_place_for_the_table_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# nothing\n")
    with pytest.raises(NotFound, match="bench:peers"):
        beside.beside(beside.Choices([], {}, peers="zeromq", pages=[page]), print, print)


def test_a_page_without_peers_is_refused() -> None:
    from danube_fast.cli.main import main

    assert main(["bench", "reference", "--page", "x.md"]) == 2


def test_every_system_has_a_row_in_the_page_of_peers() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "peers.md").read_text()
    assert [name for name in catalog.ADAPTERS if f"| `{name}` |" not in text] == []
    assert issubclass(InvalidArgument, Exception)
