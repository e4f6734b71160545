"""Fetches for workers: blocks of history from the store into files of this host.

    | piece that was asked for | on its way | on its way | on its way |     while a partition is read in order
    0                         4 MiB

A store that is a folder of this host needs no copy: the worker is told the object's own file, once the kernel has its
pages. Workers check each block; one that is damaged they ask for again, and are told what is lost. Readers at one place
share a fetch.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from danube_fast.broker import messages as m
from danube_fast.errors import DanubeError, DataLoss, NotFound
from danube_fast.history.layout import Blocks
from danube_fast.history.reader import HistoryReader, Span
from danube_fast.ring.counters import Counter
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.process.tasks import Do, Join, Running, Task
from danube_fast.workers.uploader.cache import Cache, Piece
from danube_fast.workers.uploader.state import CACHE_NAME, History, UploaderState

__all__ = ["Fetches"]

_log = logging.getLogger(__name__)

FETCH_BYTES = 4 << 20
"""Fetched at a time, about."""
IN_PLACE_BYTES = 16 << 20
"""The same for a reader in order, if nothing is copied: on a busy host each answer waits for its turn."""
IN_PLACE_AHEAD = 2
"""Such pieces that are brought in ahead of it; before it is known to read in order, one of the usual size is."""
AHEAD_MAX = 3
"""Pieces that are fetched before a reader in order asks for them."""
CACHE_PART = 4
"""They fill a quarter of the cache at most."""
EXTENTS_MAX = 1024
"""Extents in one answer: of more sections, some are told together."""
FETCHES_MAX = 16
"""Pieces that are read from the store at the same time, for all partitions."""


class _OnWay(NamedTuple):
    """A piece that is being fetched."""

    span: Span
    running: Running


class Fetches:
    """Answer workers that read history."""

    def __init__(self, state: UploaderState) -> None:
        self._state = state
        directory = state.data_dir / CACHE_NAME
        self._cache = Cache(directory, state.settings.history_cache_bytes)
        self._on_way: dict[int, list[_OnWay]] = {}
        """By partition id."""
        self._reading: list[Running] = []
        """All of them, those that were begun first at the front."""
        self._fault = ""
        self._cache.clear()
        state.boot.mailbox.serve(m.FetchHistory, self._fetch)
        state.boot.mailbox.serve(m.FindHistoryTime, self._find_time)
        state.boot.mailbox.serve(m.ListExtents, self._list_extents)

    def _fetch(self, request: Request[m.FetchHistory]) -> None:
        self._state.tasks.start(self._answer(request, self._fetched(request.message)))

    def _find_time(self, request: Request[m.FindHistoryTime]) -> None:
        self._state.tasks.start(self._answer(request, self._found(request.message)))

    def _list_extents(self, request: Request[m.ListExtents]) -> None:
        self._state.tasks.start(self._answer(request, self._extents(request.message)))

    def _answer(self, request: Request[Any], task: Task) -> Task:
        try:
            request.reply((yield from task))
            self._note("")
        except DanubeError as error:
            self._note(str(error))
            request.fail(error)

    def _fetched(self, asked: m.FetchHistory) -> Task:
        piece: Piece | None = yield from self._piece(asked)
        if piece is None:
            history: History = yield from self._state.history(asked.partition_id, asked.manifest)
            manifest = history.manifest
            return m.FetchedHistory("", [], manifest.gone_until, manifest.end_offset)
        look = self._look_ahead(asked.partition_id, asked.offset, piece.end_offset)
        self._state.tasks.start(look)
        return m.FetchedHistory(piece.path, piece.blocks)

    def _found(self, asked: m.FindHistoryTime) -> Task:
        history: History = yield from self._state.history(asked.partition_id, asked.manifest)
        return (yield Do(lambda: history.reader.find_time(asked.time_ns)))

    def _extents(self, asked: m.ListExtents) -> Task:
        history: History = yield from self._state.history(asked.partition_id, asked.manifest)
        sections = history.manifest.sections
        count = 1 + len(sections) // EXTENTS_MAX
        together = [sections[at : at + count] for at in range(0, len(sections), count)]
        return [
            m.Extent(
                some[0].base_offset, some[-1].end_offset, sum(each.byte_count for each in some)
            )
            for some in together
        ]

    def _note(self, fault: str) -> None:
        """Log why a reader waits, once; empty: it does not."""
        if fault and fault != self._fault:
            _log.warning("history cannot be read: %s", fault)
        self._fault = fault

    def _piece(self, asked: m.FetchHistory) -> Task:
        """The piece with an offset, None behind the end and where all was given up. Raises DanubeError."""
        partition_id, offset = asked.partition_id, asked.offset
        counters = self._state.boot.counters
        if asked.is_damaged:
            return (yield from self._checked_piece(asked))
        while True:
            found = self._cache.find(partition_id, offset)
            if found is not None:
                counters.add(Counter.HISTORY_CACHE_HITS)
                return found
            on_way = self._find_on_way(partition_id, offset)
            if on_way is not None:
                with contextlib.suppress(DanubeError):  # its beginning may be damaged, and not this
                    yield Join(on_way.running)
                continue
            history: History = yield from self._state.history(partition_id, asked.manifest)
            byte_count = self._bytes_at(partition_id, offset)
            spans: list[Span] = yield from self._spans(history, offset, byte_count)
            if not spans:
                return None
            if self._find_on_way(partition_id, offset) is None:
                counters.add(Counter.HISTORY_CACHE_MISSES)
                return (yield Join(self._begin(partition_id, history.reader, spans[0])))

    @staticmethod
    def _spans(history: History, offset: int, byte_count: int, count: int = 1) -> Task:
        """Find spans as `HistoryReader.spans`, but none below what was given up: it would pass for never used."""
        if offset < history.manifest.gone_until:
            return []
        spans: list[Span] = yield Do(partial(history.reader.spans, offset, byte_count, count))
        gone_until = history.manifest.gone_until  # sections may have gone meanwhile
        return [span for span in spans if span.start >= gone_until]

    def _checked_piece(self, asked: m.FetchHistory) -> Task:
        """Read what is damaged: the sound blocks before that, if there are any. Raises DataLoss."""
        history: History = yield from self._state.history(asked.partition_id, asked.manifest)
        spans: list[Span] = yield from self._spans(history, asked.offset, FETCH_BYTES)
        if not spans:
            return None
        piece: Piece = yield Do(partial(self._read_piece, history.reader, spans[0]))
        self._cache.add(asked.partition_id, piece)
        return piece

    def _look_ahead(self, partition_id: int, asked: int, offset: int) -> Task:
        """Fetch the next pieces of a partition that is read in order; `asked`: of the last request, whose piece ends at
        `offset`."""
        byte_count = self._bytes_at(partition_id, asked)
        wanted = self._ahead_max(partition_id, asked)
        while wanted > 0:
            end = self._end_of(partition_id, offset)
            if end is None:
                break
            offset = end
            wanted -= 1
        history = self._state.known(partition_id)
        if history is None or wanted <= 0:
            return
        with contextlib.suppress(DanubeError):  # the reader hears of it when it comes there
            spans: list[Span] = yield from self._spans(history, offset, byte_count, wanted)
            for span in spans:
                if self._end_of(partition_id, span.start) is None:
                    self._begin(partition_id, history.reader, span)

    def _bytes_at(self, partition_id: int, offset: int) -> int:
        is_in_order = self._cache.has_end(partition_id, offset)
        return IN_PLACE_BYTES if is_in_order and self._state.store.is_local else FETCH_BYTES

    def _ahead_max(self, partition_id: int, offset: int) -> int:
        """Count pieces to be fetched ahead of a reader that is at an offset."""
        is_in_order = self._cache.has_end(partition_id, offset)  # the piece before was read, too
        if self._state.store.is_local:
            return IN_PLACE_AHEAD if is_in_order else 1
        if not is_in_order:
            return 0
        room = self._state.settings.history_cache_bytes // CACHE_PART
        return min(AHEAD_MAX, room // FETCH_BYTES)

    def _end_of(self, partition_id: int, offset: int) -> int | None:
        """Where the piece with an offset ends that is here or on its way; None if there is none."""
        piece = self._cache.find(partition_id, offset)
        if piece is not None:
            return piece.end_offset
        on_way = self._find_on_way(partition_id, offset)
        return None if on_way is None else on_way.span.end_offset

    def _find_on_way(self, partition_id: int, offset: int) -> _OnWay | None:
        for each in self._on_way.get(partition_id, ()):
            if each.span.start <= offset < each.span.end_offset:
                return each
        return None

    def _begin(self, partition_id: int, reader: HistoryReader, span: Span) -> Running:
        """Fetch a piece; its `Running`."""
        before = self._reading[-FETCHES_MAX] if len(self._reading) >= FETCHES_MAX else None
        running = self._state.tasks.start(self._read(partition_id, reader, span, before))
        self._reading.append(running)
        self._on_way.setdefault(partition_id, []).append(_OnWay(span, running))
        return running

    def _read(
        self, partition_id: int, reader: HistoryReader, span: Span, before: Running | None
    ) -> Task:
        """Fetch a piece once another one is over. Raises DanubeError."""
        try:
            if before is not None:
                with contextlib.suppress(DanubeError):
                    yield Join(before)
            piece: Piece = yield Do(partial(self._bring_piece, reader, span))
            self._cache.add(partition_id, piece)
        finally:
            on_way = [each for each in self._on_way.pop(partition_id) if each.span is not span]
            if on_way:
                self._on_way[partition_id] = on_way
            self._reading = [each for each in self._reading if not each.is_over]
        return piece

    def _bring_piece(self, reader: HistoryReader, span: Span) -> Piece:
        """Let a worker find a piece in a file of this host. Runs in a thread."""
        store, section, rows = self._state.store, span.section, span.rows
        if store.is_local:
            size = int(rows["byte_count"].sum(dtype=np.int64))
            with contextlib.suppress(NotFound, DataLoss):  # what is lost is found below
                store.bring_in(section.key, int(rows["position"][0]), size)
                return Piece(span.start, store.path_of(section.key), _blocks(rows, 0), 0)
        return self._read_piece(reader, span)

    def _read_piece(self, reader: HistoryReader, span: Span) -> Piece:
        """Read a piece, and check it. Runs in a thread."""
        fetched, store = reader.read(span), self._state.store
        if store.is_local:
            return Piece(span.start, store.path_of(fetched.key), _blocks(fetched.rows, 0), 0)
        start = int(fetched.rows["position"][0])
        path = self._cache.write(fetched.data)
        return Piece(span.start, path, _blocks(fetched.rows, start), len(fetched.data))


def _blocks(rows: Blocks, start: int) -> list[m.Block]:
    """The blocks, their positions counted from `start`."""
    return [
        m.Block(
            int(row["base_offset"]), int(row["end_offset"]), int(row["position"]) - start,
            int(row["byte_count"]), int(row["crc"]),
        )
        for row in rows
    ]  # fmt: skip
