"""Fetches for workers: blocks of history from the store into files of this host.

A store that is a folder of this host needs no copy: the worker is told the object's own file, once its bytes were
checked. Fetches of one partition come one after the other, so that two readers at one place share one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from danube_fast.broker import messages as m
from danube_fast.errors import DanubeError
from danube_fast.history.reader import Fetched, HistoryReader
from danube_fast.ring.counters import Counter
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.process.tasks import Do, Join, Running, Task
from danube_fast.workers.uploader.cache import Cache, Piece
from danube_fast.workers.uploader.state import CACHE_NAME, History, UploaderState

__all__ = ["Fetches"]

_log = logging.getLogger(__name__)

FETCH_BYTES = 4 << 20
"""Fetched at a time, about."""
LAST_MAX = 1000
"""Partitions whose last fetch is remembered; beyond, those that are over are forgotten."""


class Fetches:
    """Answer workers that read history."""

    def __init__(self, state: UploaderState) -> None:
        self._state = state
        directory = state.data_dir / CACHE_NAME
        self._cache = Cache(directory, state.settings.history_cache_bytes)
        self._last: dict[int, Running] = {}
        """By partition id: the fetch that was begun last."""
        self._fault = ""
        self._cache.clear()
        state.boot.mailbox.serve(m.FetchHistory, self._fetch)
        state.boot.mailbox.serve(m.FindHistoryTime, self._find_time)

    def _fetch(self, request: Request[m.FetchHistory]) -> None:
        self._start(request, self._fetched(request.message))

    def _find_time(self, request: Request[m.FindHistoryTime]) -> None:
        self._start(request, self._found(request.message))

    def _start(self, request: Request[Any], task: Task) -> None:
        """Answer a request with the result of a task, behind those that were begun before for its partition."""
        partition_id = request.message.partition_id
        before = self._last.get(partition_id)
        running = self._state.tasks.start(self._answer(request, task, before))
        self._last[partition_id] = running

    def _answer(self, request: Request[Any], task: Task, before: Running | None) -> Task:
        if before is not None and not before.is_over:
            yield Join(before)
        try:
            request.reply((yield from task))
            self._note("")
        except DanubeError as error:
            self._note(str(error))
            request.fail(error)
        if len(self._last) > LAST_MAX:
            self._last = {number: last for number, last in self._last.items() if not last.is_over}

    def _fetched(self, asked: m.FetchHistory) -> Task:
        piece: Piece | None = yield from self._piece(asked)
        return m.FetchedHistory(*piece[:2]) if piece else m.FetchedHistory("", [])

    def _found(self, asked: m.FindHistoryTime) -> Task:
        history: History = yield from self._state.history(asked.partition_id, asked.manifest)
        return (yield Do(lambda: history.reader.find_time(asked.time_ns)))

    def _note(self, fault: str) -> None:
        """Log why a reader waits, once; empty: it does not."""
        if fault and fault != self._fault:
            _log.warning("history cannot be read: %s", fault)
        self._fault = fault

    def _piece(self, asked: m.FetchHistory) -> Task:
        counters = self._state.boot.counters
        found = self._cache.find(asked.partition_id, asked.offset)
        if found is not None:
            counters.add(Counter.HISTORY_CACHE_HITS)
            return found
        history: History = yield from self._state.history(asked.partition_id, asked.manifest)
        fetch = self._work(history.reader, asked.offset)
        piece: Piece | None = yield Do(fetch)
        if piece is not None:
            counters.add(Counter.HISTORY_CACHE_MISSES)
            self._cache.add(asked.partition_id, piece)
        return piece

    def _work(self, reader: HistoryReader, offset: int) -> Callable[[], Piece | None]:
        store = self._state.store

        def fetch() -> Piece | None:
            fetched = reader.fetch(offset, FETCH_BYTES)
            if fetched is None:
                return None
            in_place = store.path_of(fetched.key)
            if in_place:
                return Piece(in_place, _blocks(fetched, 0), 0)
            start = int(fetched.rows["position"][0])
            path = self._cache.write(fetched.data)
            return Piece(path, _blocks(fetched, start), len(fetched.data))

        return fetch


def _blocks(fetched: Fetched, start: int) -> list[m.Block]:
    """The blocks, their positions counted from `start`."""
    return [
        m.Block(
            int(row["base_offset"]), int(row["end_offset"]), int(row["position"]) - start,
            int(row["byte_count"]),
        )
        for row in fetched.rows
    ]  # fmt: skip
