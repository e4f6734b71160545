"""Connected clients, for `danube-fast clients list`: a page of sessions with what is open on each."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from danube_fast.broker.admission.layout import ProducerWord
from danube_fast.broker.answers import ClientConnection, ClientPage, OpenConsumer, OpenProducer
from danube_fast.clock import MILLISECOND_NS
from danube_fast.net.session import Session

if TYPE_CHECKING:  # the coordinator, which every start waits for, imports this module and no shard
    from danube_fast.workers.shard.state import ShardState

__all__ = ["client_page"]

ITEMS_MAX = 100
"""Producers and consumers that are named, of each connection; the counts are of all."""
PAGE_ITEMS_MAX = 2000
"""Connections, producers and consumers on one page at most, whatever was asked for."""
_ROUTED = 0  # see transports.py


def client_page(
    sessions: Iterable[Session], after: int, limit: int, now_ns: int, state: ShardState | None
) -> ClientPage:
    """List the connections behind session number `after`."""
    behind = [session for session in sessions if session.number > after]
    chosen = heapq.nsmallest(limit, behind, key=lambda session: session.number)
    producers = _producers(state, chosen) if state is not None else {}
    rows: list[ClientConnection] = []
    room = PAGE_ITEMS_MAX
    for session in chosen:
        row = _row(session, producers.get(session.number, []), now_ns, state)
        room -= 1 + len(row.producers) + len(row.consumers)
        if room < 0 and rows:
            break
        rows.append(row)
    return ClientPage(clients=rows, more=len(rows) < len(behind))


def _row(
    session: Session, producers: list[OpenProducer], now_ns: int, state: ShardState | None
) -> ClientConnection:
    consumers = list(session.consumers.values())
    return ClientConnection(
        session=session.number, client=session.client_name, principal=str(session.principal),
        transport="zmq" if session.identity[0] == _ROUTED else "shm",
        silent_ms=max(0, now_ns - session.last_seen_ns) // MILLISECOND_NS,
        producer_count=len(producers), consumer_count=len(consumers),
        producers=producers[:ITEMS_MAX],
        consumers=[_consumer(each, state) for each in consumers[:ITEMS_MAX]],
    )  # fmt: skip


def _consumer(consumer: Any, state: ShardState | None) -> OpenConsumer:
    sub = consumer.subscription
    partition = state.partition(sub.partition_id) if state is not None else None
    return OpenConsumer(
        topic=partition.topic if partition is not None else "",
        partition=partition.assigned.index if partition is not None else 0,
        subscription=sub.name, type=sub.kind.value, name=consumer.name, unacked=consumer.unacked,
    )  # fmt: skip


def _producers(state: ShardState, sessions: list[Session]) -> dict[int, list[OpenProducer]]:
    """Find the open producers by session."""
    tables, by_id = state.tables, state.catalog.by_id
    rows = tables.producers[: tables.producer_count]
    numbers = [session.number for session in sessions]
    mine = np.isin(rows[:, ProducerWord.SESSION], numbers)
    mine &= rows[:, ProducerWord.PARTITION_ID] != 0
    found: dict[int, list[OpenProducer]] = {}
    for row in rows[mine]:
        partition = by_id.get(int(row[ProducerWord.PARTITION_ID]))
        if partition is None:
            continue
        name = partition.producer_names.get(int(row[ProducerWord.PRODUCER_ID]), "")
        item = OpenProducer(topic=partition.topic, partition=partition.assigned.index, name=name)
        found.setdefault(int(row[ProducerWord.SESSION]), []).append(item)
    return found
