"""The judgement: what consumers wrote down against the data set. Pure functions, numpy only.

A message's identity is (partition, offset); a flight's identity is its row. Right means: every flight
stands at exactly one offset, every subscription received every offset at least once, under the
carrier's key, and the flights of one producer lie in its order in every partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from danube_fast.clock import SECOND_NS
from danube_fast.demo.dataset import Flights
from danube_fast.demo.records import RECORD, Records, fingerprint

__all__ = ["Catalogue", "Kill", "Latency", "Subscription", "judge", "problems_of"]

NS_PER_MS = 1e6


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """The kill of one worker."""

    worker: int
    pid: int
    kill_ns: int
    """Wall clock."""
    partitions: list[int]
    """Those it served."""


class Latency(msgspec.Struct, frozen=True):
    """Publish to consume, milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that one subscription got."""

    name: str
    type: str
    received: int
    received_by_consumer: list[int]
    distinct: int
    """Different (partition, offset)."""
    redelivered: int
    """Received again, because the ack had not been durable when the worker died."""
    lost: int
    """Flights that never came."""
    duplicated: int
    """Flights that stand at more than one offset."""
    foreign: int
    """Messages that are no flight, have another's key, or changed between deliveries."""
    out_of_order: int
    """Flights that lie before an earlier flight of the same producer."""
    messages_per_s: float
    """Distinct messages, from the first publish to the last receive."""
    latency: Latency
    latency_undisturbed: Latency
    """Without what the killed worker's partitions held up."""
    published_before_kill: int
    """Messages packed before the kill."""
    received_before_kill: int
    silence_seconds: float | None
    """From the kill to the next new message out of the killed worker's partitions."""
    carriers: dict[str, int]
    unacked: int = 0
    """As the broker counts, after everything was acked."""


class Catalogue:
    """The data set, made ready for comparing."""

    def __init__(self, flights: Flights) -> None:
        self.count = len(flights.rows)
        prints = fingerprint(flights.rows)
        self._order = np.argsort(prints)
        self._sorted = prints[self._order]
        self.keys = np.array(flights.carriers, dtype=RECORD["key"])
        names, counts = np.unique(self.keys, return_counts=True)
        self.carriers = {
            name.decode(): int(count) for name, count in zip(names, counts, strict=True)
        }

    def rows_of(self, prints: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Row number of each fingerprint, -1 for what is no flight; int64."""
        if not self.count:
            return np.full(len(prints), -1)
        places = np.minimum(np.searchsorted(self._sorted, prints), self.count - 1)
        return np.where(self._sorted[places] == prints, self._order[places], -1)


def judge(
    catalogue: Catalogue,
    parts: Sequence[Records],
    *,
    name: str,
    type_name: str,
    producers: int,
    kill: Kill | None,
) -> Subscription:
    """Compare what the consumers of one subscription wrote down (`parts`, one each) with the data
    set, of which producer i of `producers` published every row r with r % producers == i."""
    records = np.concatenate([np.empty(0, RECORD), *parts])
    order = np.lexsort((records["receive_ns"], records["offset"], records["partition"]))
    records = records[order]
    same = (np.diff(records["partition"]) == 0) & (np.diff(records["offset"]) == 0)
    is_first = np.concatenate((np.ones(min(1, len(records)), bool), ~same))
    changed = int(np.count_nonzero(same & (records["row"][1:] != records["row"][:-1])))
    first = records[is_first]
    rows = catalogue.rows_of(first["row"])
    right = rows >= 0
    right[right] = catalogue.keys[rows[right]] == first["key"][right]
    times_seen = np.bincount(rows[right], minlength=catalogue.count)
    names, counts = np.unique(first["key"], return_counts=True)
    seconds = float("inf")
    if len(first):
        seconds = max(int(first["receive_ns"].max() - first["publish_ns"].min()), 1) / SECOND_NS
    silence, held_up = _silence(first, kill)
    kill_ns = kill.kill_ns if kill is not None else 0
    return Subscription(
        name=name,
        type=type_name,
        received=len(records),
        received_by_consumer=[len(part) for part in parts],
        distinct=len(first),
        redelivered=len(records) - len(first),
        lost=int(np.count_nonzero(times_seen == 0)),
        duplicated=int(np.count_nonzero(times_seen > 1)),
        foreign=int(np.count_nonzero(~right)) + changed,
        out_of_order=_out_of_order(first["partition"][right], rows[right], producers),
        messages_per_s=len(first) / seconds,
        latency=_latency(first),
        latency_undisturbed=_latency(first[~held_up]),
        published_before_kill=int(np.count_nonzero(first["publish_ns"] < kill_ns)),
        received_before_kill=int(np.count_nonzero(first["receive_ns"] < kill_ns)),
        silence_seconds=silence,
        carriers={
            key.decode(errors="replace"): int(n) for key, n in zip(names, counts, strict=True)
        },
    )


def _out_of_order(partitions: npt.NDArray[Any], rows: npt.NDArray[np.int64], producers: int) -> int:
    """Rows, in the order of (partition, offset), that come after a later row of their producer."""
    lanes = partitions.astype(np.int64) * producers + rows % producers
    by_lane = np.argsort(lanes, kind="stable")
    falls = np.diff(rows[by_lane]) <= 0
    return int(np.count_nonzero(falls & (np.diff(lanes[by_lane]) == 0)))


def _latency(records: Records) -> Latency:
    if not len(records):
        return Latency(0.0, 0.0, 0.0)
    times_ms = (records["receive_ns"] - records["publish_ns"]) / NS_PER_MS
    p50, p99 = np.percentile(times_ms, (50, 99))
    return Latency(float(p50), float(p99), float(times_ms.max()))


def _silence(first: Records, kill: Kill | None) -> tuple[float | None, npt.NDArray[np.bool_]]:
    """Seconds from the kill to the next new message out of the dead worker's partitions, and which
    messages were held up by it.

    A consumer may still hold messages that left the worker before its death, so the end of the
    longest silence that ends after the kill counts, not the first message received after it.
    """
    unaffected = np.zeros(len(first), bool)
    if kill is None:
        return None, unaffected
    concerned = np.isin(first["partition"], kill.partitions)
    times_ns = np.sort(first["receive_ns"][concerned])
    times_ns = np.concatenate(
        (times_ns[times_ns <= kill.kill_ns][-1:], times_ns[times_ns > kill.kill_ns])
    )
    if not len(times_ns) or times_ns[-1] <= kill.kill_ns:
        return None, unaffected
    gaps_ns = np.diff(times_ns, prepend=min(times_ns[0], kill.kill_ns))
    back_ns = int(times_ns[np.argmax(gaps_ns)])
    held_up = concerned & (first["receive_ns"] > kill.kill_ns) & (first["publish_ns"] < back_ns)
    return (back_ns - kill.kill_ns) / SECOND_NS, held_up


def problems_of(catalogue: Catalogue, subscription: Subscription) -> list[str]:
    """Everything about a subscription that is not as it must be, in sentences."""
    found = {
        "never came": subscription.lost,
        "stand twice in the log": subscription.duplicated,
        "are not what was published": subscription.foreign,
        "are out of order": subscription.out_of_order,
        "are not acked": subscription.unacked,
    }
    problems = [f"{subscription.name}: {n:,} messages {what}" for what, n in found.items() if n]
    for carrier in sorted({*catalogue.carriers, *subscription.carriers}):
        wanted = catalogue.carriers.get(carrier, 0)
        got = subscription.carriers.get(carrier, 0)
        if wanted != got:
            problems.append(
                f"{subscription.name}: {got:,} flights of {carrier} instead of {wanted:,}"
            )
    return problems
