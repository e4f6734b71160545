r"""Plain publishes: a turn of kernels takes them from all clients that are awake, and serves what it can.

    rings, ROUTER --take, admit--> plain: written, shown, delivered and answered by kernels; entered here afterwards
                               \-> anything else: the ordinary way, from the result rows on

A message that kernels have begun to receive from the ROUTER, and may not take, is given to `Server`, which hands it out
next.

Rows and words stand in `turn_layout.py`, the steps in `turn_kernel.py`, `take_kernel.py` and `serve_kernel.py`.
"""

from __future__ import annotations

import functools
import operator
import os
import select
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from danube_fast.broker.admission.layout import INT64_MAX, ResultWord
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import Internal
from danube_fast.frame.cpython import COUNTED_NONE, OBJECTS_READABLE
from danube_fast.frame.kernel import address_of
from danube_fast.frame.layout import HEADER_BYTES
from danube_fast.frame.system import EPOLL_EVENT_BYTES
from danube_fast.net.port_kernels import FUNCTIONS
from danube_fast.net.server import Server
from danube_fast.net.session import Session
from danube_fast.ring.duplex_kernel import SESSION
from danube_fast.ring.handover import RingServer
from danube_fast.ring.layout import WORD_BYTES
from danube_fast.wal.appender import Held
from danube_fast.wal.layout import GROUP_ALIGNMENT
from danube_fast.wal.log import Log
from danube_fast.workers.shard.publish.group import Group, Publication, Written
from danube_fast.workers.shard.publish.in_hand import take_in_hand
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.publish.journal import Journal
from danube_fast.workers.shard.publish.outlets import Outlets
from danube_fast.workers.shard.publish.turn_kernel import pause, step, wait, wait_and_step
from danube_fast.workers.shard.publish.turn_layout import (
    AT_LINKS,
    AT_TAKEN,
    EVENTS_MAX,
    JOB,
    LEFT_PLACE,
    LINK,
    LINK_WORDS,
    ROUTED_BYTES,
    STAGING_BYTES,
    TAKEN,
    TAKEN_MAX,
    TAKEN_WORDS,
    Flag,
    LinkStatus,
    Stage,
    Taken,
)
from danube_fast.workers.shard.routed_peers import RoutedPeers
from danube_fast.workers.shard.state import ShardState

__all__ = ["RingIntake"]

ROOM_MIN = 64 * 1024
"""With less room in a log all goes the ordinary way, which makes some."""
LINKS_MIN = 64
"""Room for so many links from the start."""
_HOLD_NS_MAX = 20 * MILLISECOND_NS
"""Publishes are left in their rings for so long at most."""
_BELL_NS_MAX = 2 * MILLISECOND_NS
"""So long one turn waits for the end of a sync that publishes are held for."""
_UNHELD_TURNS, _UNHELD_TURNS_MAX = 64, 64 * 1024
"""So many turns nothing is held where that was in vain; twice as many each time, as ZeroMQ receives on meanwhile."""
_SERVING_NS, _SERVING_NS_MAX = 10 * MILLISECOND_NS, 12 * MILLISECOND_NS
"""After so long the ordinary turn does what the clock asks: right behind a message, or at the latest."""
_POLLED = struct.Struct("=ihh")
_IS_BUSY = operator.attrgetter("busy")
_TAKEN_AT = AT_TAKEN // WORD_BYTES
_LINKS_AT = AT_LINKS // WORD_BYTES
_HEAD_WORDS = int(ResultWord.BASE_OFFSET) + 1
_TAKEN, _AS_TAKEN = struct.Struct(f"={TAKEN_WORDS}q"), functools.partial(tuple.__new__, Taken)
_ADMITTED, _WRITTEN, _DONE, _SHOWN = map(int, list(Stage)[:4])
_ARMED, _ORDINARY, _MORE = int(LinkStatus.ARMED), int(LinkStatus.ORDINARY), int(LinkStatus.MORE)
_UNDERWAY, _STOPPED, _FULL, _OTHER, _LATE, _MISSING = map(int, Flag)
_CLEARED = (
    JOB.LOOKED, JOB.IS_CLOSING, JOB.IS_STOPPED, JOB.GROUP_BYTES, JOB.PENDING, JOB.HAS_WRITTEN, JOB.AWAITED,
    JOB.IS_TORN, JOB.BELL_RANG, JOB.CODE, JOB.BEGAN_NS, JOB.GROUPS, JOB.QUEUED_END, JOB.IN_HAND,
    JOB.DURABLE_START, JOB.DURABLE_END, JOB.HEARTBEATS,
)  # fmt: skip
"""Words that are 0 at the beginning of a turn."""


class RingIntake:
    """Take plain publishes of clients for one worker. Used by its loop only."""

    def __init__(
        self, state: ShardState, rings: RingServer, server: Server, peers: RoutedPeers,
        intake: Intake, outlets: Outlets, bell: int,
    ) -> None:  # fmt: skip
        """`bell`: descriptor of the worker's doorbell."""
        self._state, self._intake, self._sessions = state, intake, state.sessions
        self._rings, self._server, self._peers = rings, server, peers
        self._outlets, self._bell = outlets, bell
        self._strangers: dict[bytes, None] = {}
        """Peers of the ROUTER that kernels did not know: perhaps they have a session by now."""
        self._received = bytearray(ROUTED_BYTES)
        self._holders: list[bytes | None] = [None] * (LEFT_PLACE + 1)
        staging = bytearray(STAGING_BYTES + 2 * GROUP_ALIGNMENT + HEADER_BYTES)
        # a write around the page cache takes whole blocks of memory only
        self._staging = memoryview(staging)[-address_of(staging) % GROUP_ALIGNMENT :]
        self._writing: Log | None = None
        """The log whose sync thread may read the staging memory yet."""
        self._events = bytearray(EVENTS_MAX * EPOLL_EVENT_BYTES)
        self._capacity = 0
        self._memory = np.zeros(_LINKS_AT, np.int64)
        self._log_slot = -1
        self._held: list[tuple[Journal, Group]] = []
        self._held_since_ns = self._unheld_turns = 0
        self._unheld_next = _UNHELD_TURNS
        self._grow(LINKS_MIN)

    def _grow(self, links: int) -> None:
        """Make room for that many links in the job."""
        self._capacity = links
        memory = np.zeros(_LINKS_AT + links * LINK_WORDS, np.int64)
        memory[:_LINKS_AT] = self._memory[:_LINKS_AT]
        self._memory = memory
        self._words = words = memory.data
        self._address: int = memory.ctypes.data
        words[JOB.HOLDERS], words[JOB.NONE] = id(self._holders), COUNTED_NONE
        words[JOB.LINKS_MAX] = links
        words[JOB.STAGING] = address_of(self._staging)
        words[JOB.EVENTS] = address_of(self._events)
        words[JOB.FUNCTIONS], words[JOB.PEERS] = FUNCTIONS, self._peers.address
        words[JOB.MESSAGE] = address_of(self._received)
        words[JOB.PROVES] = self._server.looks_at_senders
        words[JOB.BELL], words[JOB.EPOLL] = self._bell, self._rings.fileno()
        polled = (self._bell, self._rings.fileno(), self._server.fileno())
        for place, fd in enumerate(polled, JOB.POLLED):
            words[place] = int.from_bytes(_POLLED.pack(fd, select.POLLIN, 0), "little")

    # ------------------------------------------------------------ turns

    def take(self, limit: int) -> int | None:
        """Take and admit up to `limit` messages of the clients that are awake; how many. None: they are to be left
        where they are for the moment."""
        if not self._has_clients:
            return 0
        if not self._rings.awake and self._server.holds:
            return 0
        if not (self._rings.awake or self._server.readable()):
            self._server.rest(drained=True)
            return 0
        if self._holds():
            return None
        if not self._begin(limit):
            return 0
        words = self._words
        self._list_awake()
        words[JOB.NOW_NS] = self._state.now_wall_ns
        words[JOB.ROUTED] = _MORE if words[JOB.ROUTER] else _ARMED
        self._run(step(self._address))
        taken = self._end()
        if words[JOB.ROUTER] and words[JOB.ROUTED] != _ORDINARY:
            self._server.rest(drained=words[JOB.ROUTED] == _ARMED)
        if words[JOB.BELL_RANG]:  # perhaps for another log, or from another process
            os.eventfd_write(self._bell, 1)
        return taken

    def sleep(
        self, timeout_ms: int, poll: Callable[[int], list[tuple[int, int]]]
    ) -> list[tuple[int, int]]:
        """Sleep as `poll` does until an ordinary turn is wanted, and serve plain publishes and heartbeats meanwhile; the
        events that ended it."""
        state, bell = self._state, self._bell
        end_ns = wake_ns = 0
        if not self._has_clients:
            return poll(timeout_ms)
        while True:
            state.begin_turn()
            self._intake.begin_turn(state.now_ns)
            wake_ns = wake_ns or state.now_ns + timeout_ms * MILLISECOND_NS
            left_ns = (end_ns or wake_ns) - state.now_ns
            if self._holds():
                return poll(0)
            if left_ns <= 0 or not self._begin(TAKEN_MAX):
                return poll(0 if end_ns else max(0, left_ns // MILLISECOND_NS))
            words = self._words
            words[JOB.LINKS] = words[JOB.NOW_NS] = 0
            words[JOB.ROUTED] = _ARMED
            flags = wait_and_step(self._address, left_ns)
            state.begin_turn()
            self._intake.note_time(state.now_ns)
            if words[JOB.LINKS] or words[JOB.ROUTED] != _ARMED:
                flags = self._run(flags)
            taken = self._end()
            if words[JOB.BELL_RANG] and not state.boot.mailbox.prepare_sleep():
                return [(bell, select.POLLIN)]
            if self._server.holds:
                return [(self._server.fileno(), select.POLLIN)]
            if flags & _OTHER or not (taken or words[JOB.HEARTBEATS]) or not self._is_quiet():
                return poll(0)
            if not (taken or end_ns):
                continue  # heartbeats alone
            state.drained_ns = state.now_ns
            end_ns = end_ns or state.now_ns + _SERVING_NS_MAX
            if end_ns - state.now_ns <= _SERVING_NS_MAX - _SERVING_NS:
                return poll(0)

    @property
    def _has_clients(self) -> bool:
        """Whether there are clients whose messages kernels may take."""
        return len(self._rings) > 0 or len(self._sessions) > 0

    def _is_quiet(self) -> bool:
        """Whether all that was taken is dealt with."""
        state = self._state
        busy = state.ready or self._rings.awake or self._intake.is_busy or self._outlets.is_busy
        return not busy and not any(map(_IS_BUSY, state.journals.values()))

    def _holds(self) -> bool:
        """Whether publishes are left in their rings for the moment: the ordinary way has a group under way that they
        would wait for, and behind it kernels may write. Waits for its sync if there is one."""
        journals = self._state.journals.values()
        busy = [journal for journal in journals if journal.has_frames_under_way]
        if not busy or not self._outlets.are_strict:
            self._held, self._held_since_ns, self._unheld_next = [], 0, _UNHELD_TURNS
            return False
        if self._unheld_turns:
            self._unheld_turns -= 1
            return False
        now_ns = self._state.now_ns
        self._held_since_ns = self._held_since_ns or now_ns
        if not self._held:
            self._held = [(journal, group) for journal in busy if (group := journal.last_group())]
        elif not any(journal.has(group) for journal, group in self._held):
            now_ns = INT64_MAX  # others keep the log busy
        if now_ns - self._held_since_ns > _HOLD_NS_MAX:
            self._held, self._held_since_ns, self._unheld_turns = [], 0, self._unheld_next
            self._unheld_next = min(2 * self._unheld_next, _UNHELD_TURNS_MAX)
            return False
        for journal in busy:
            journal.siblings.forget()
        if any(journal.syncing for journal in busy):
            self._words[JOB.IS_CLOSING], self._words[JOB.AWAITED] = 1, 0
            wait(self._address, _BELL_NS_MAX)
        return True

    def _begin(self, limit: int) -> bool:
        """Prepare the job. False: all goes the ordinary way now."""
        state, intake, words = self._state, self._intake, self._words
        room = min([journal.spare_bytes for journal in state.journals.values()], default=0)
        if room < ROOM_MIN or not OBJECTS_READABLE:
            return False
        self._know_strangers()
        clients = len(self._rings) + len(self._peers)
        if clients > self._capacity:
            self._grow(2 * clients)
            words = self._words
        words[JOB.ROUTER] = 0 if self._server.holds else self._peers.router
        words[JOB.STATE], words[JOB.RESULT] = intake.tables.address, intake.result_index
        words[JOB.TAKEN], words[JOB.TAKEN_LIMIT] = 0, min(limit, TAKEN_MAX)
        words[JOB.ROOM] = min(room, state.settings.group_bytes_max, intake.bundle_bytes_max)
        words[JOB.SIDES], words[JOB.SIDES_COUNT] = self._rings.sides
        for word in _CLEARED:
            words[word] = 0
        self._borrow_log()
        self._outlets.begin(words, self._address, self._log_slot)
        return True

    def _know_strangers(self) -> None:
        """Let kernels know the peers of the ROUTER that have got a session."""
        if self._strangers:
            for identity in self._strangers:
                session = self._sessions.by_identity(identity)
                if session is not None:
                    self._peers.add(identity, session.number)
            self._strangers.clear()

    def _borrow_log(self) -> None:
        """Borrow a log for the kernels, if one may be lent: the first of those that the worker has."""
        words, self._log_slot = self._words, -1
        words[JOB.LOG_SLOT] = -1
        if self._writing is not None and self._writing.syncs.backlog:
            return
        self._writing = None
        for slot, journal in self._state.journals.items():
            lent = journal.lend()
            if lent is not None:
                self._log_slot = slot
                start = journal.log.written_position
                words[JOB.LOG_FD], words[JOB.LOG_DELTA] = lent.fd, lent.delta
                words[JOB.LOG_END], words[JOB.GROUP_START] = lent.end_position, start
                words[JOB.SYNCS], words[JOB.SYNC_BELL] = lent.syncs, lent.sync_bell
                words[JOB.DURABLE_BYTES] = lent.durable_bytes
                words[JOB.DURABLE_FD], words[JOB.DURABLE_FLAGS] = (
                    lent.durable_fd,
                    lent.durable_flags,
                )
                break
        words[JOB.LOG_SLOT] = self._log_slot

    def _list_awake(self) -> None:
        """Enter the links that are awake into the job."""
        words, place = self._words, _LINKS_AT
        awake = self._rings.awake_links()
        for identity, link in awake:
            session = self._sessions.by_identity(identity)
            words[place + LINK.SIDE] = link.row
            is_open = session is not None and not link.slices
            link.words[SESSION] = words[place + LINK.SESSION] = session.number if session else 0
            words[place + LINK.STATUS] = _MORE if is_open else _ORDINARY
            words[place + LINK.WAITS_FOR_SYNC] = words[place + LINK.HEARTBEAT] = 0
            place += LINK_WORDS
        words[JOB.LINKS] = len(awake)

    def _run(self, flags: int) -> int:
        """Let kernels go on behind a step that has left these flags, with what there is and what comes while a group is
        under way; flags of the end."""
        address, words = self._address, self._words
        other = 0
        while True:
            other |= flags & _OTHER
            if flags & _MISSING:
                self._make_outlets()
            elif not flags & _UNDERWAY or flags & _STOPPED:
                return other
            else:
                if flags & (_FULL | _OTHER):
                    words[JOB.IS_CLOSING] = 1
                flags = pause(address)
                other |= flags & _OTHER
                if flags & _LATE:
                    return other | _OTHER
                if flags & _OTHER:
                    words[JOB.IS_CLOSING] = 1
            flags = step(address)

    def _make_outlets(self) -> None:
        """Make the outlets that are missing, those of all frames that were not looked at yet."""
        words, intake, outlets = self._words, self._intake, self._outlets
        looked, taken = words[JOB.LOOKED], words[JOB.TAKEN]
        first = words[_TAKEN_AT + looked * TAKEN_WORDS + TAKEN.FIRST]
        results = intake.tables.results[first : words[JOB.RESULT], :_HEAD_WORDS].tolist()
        counts = words[
            _TAKEN_AT + looked * TAKEN_WORDS + TAKEN.COUNT : _TAKEN_AT + taken * TAKEN_WORDS :
            TAKEN_WORDS
        ].tolist()  # fmt: skip
        for count, (status, slot, offset) in zip(counts, results, strict=False):
            if count != 1 or status != 0:
                break
            if slot not in outlets.known:
                outlets.make(words, self._address, intake.partitions_by_slot[slot], offset)

    def _end(self) -> int:
        """Enter what kernels did, and hand on what they left; how many messages were taken."""
        words, rings = self._words, self._rings
        taken: int = words[JOB.TAKEN]
        stop = _LINKS_AT + words[JOB.LINKS] * LINK_WORDS
        sides = words[_LINKS_AT + LINK.SIDE : stop : LINK_WORDS].tolist()
        statuses = words[_LINKS_AT + LINK.STATUS : stop : LINK_WORDS].tolist()
        # behind a bundle that is Python's, what follows is, too; and behind a full turn it is to have its share
        is_full = taken >= words[JOB.TAKEN_LIMIT]
        is_kept = not (is_full or words[JOB.IS_STOPPED] or words[JOB.AWAITED] or words[JOB.PENDING])
        states = [(each == _ARMED, is_kept and each != _ORDINARY) for each in statuses]
        clients = rings.left(zip(sides, states, strict=True))
        identity_of = self._peers.identity_of
        links = [each or identity_of(side) for each, side in zip(clients, sides, strict=True)]
        if words[JOB.HEARTBEATS]:
            beats_ns = words[_LINKS_AT + LINK.HEARTBEAT : stop : LINK_WORDS].tolist()
            self._note_heard({link: ns for link, ns in zip(links, beats_ns, strict=True) if ns})
        if taken:
            taken_rows = words[_TAKEN_AT : _TAKEN_AT + taken * TAKEN_WORDS].cast("B")
            rows = [*map(_AS_TAKEN, _TAKEN.iter_unpack(taken_rows))]
            self._take_back_log(rows)
            self._hand_on(rows, self._senders(rows, links))
        self._outlets.close()
        if words[JOB.IN_HAND]:
            self._hold()
        return taken

    def _hold(self) -> None:
        """Give the message in hand to the server."""
        identity, command, parts, more = take_in_hand(self._words, self._received, self._holders)
        if not self._peers.row_of(identity):
            self._strangers[identity] = None
        self._server.hold(identity, command, parts, more=more)

    def _senders(self, rows: list[Taken], links: list[bytes]) -> dict[int, Session]:
        """The sessions whose messages were taken, by link."""
        numbers = [*dict.fromkeys([row.link for row in rows])]
        now_ns = self._state.now_ns
        sessions = self._note_heard({links[number]: now_ns for number in numbers})
        return dict(zip(numbers, sessions, strict=True))

    def _note_heard(self, heard: dict[bytes, int]) -> list[Session]:
        """Note when these clients have sent something; their sessions."""
        sessions = []
        for identity, heard_ns in heard.items():
            session = self._sessions.by_identity(identity)
            if session is None:
                raise Internal("a message was taken from a link without a session")
            session.last_seen_ns = heard_ns
            sessions.append(session)
        self._rings.took(heard)
        return sessions

    def _take_back_log(self, rows: list[Taken]) -> None:
        """Take the log back, if kernels have written to it."""
        words = self._words
        written = [row for row in rows if row.end]
        if self._log_slot >= 0 and (written or words[JOB.IS_TORN]):
            first, stop = (written[0].first, written[-1].first + 1) if written else (0, 0)
            end, queued = words[JOB.GROUP_START], words[JOB.QUEUED_END]
            is_torn = bool(words[JOB.IS_TORN])
            journal = self._state.journals[self._log_slot]
            written_here = Written(
                first, stop, len(written), words[JOB.GROUPS], end, queued,
                self._held_group(journal.log), is_torn,
            )  # fmt: skip
            journal.take_back(written_here)

    def _held_group(self, log: Log) -> Held:
        """The group that the sync thread writes, if it has not made it durable yet."""
        start, end = self._words[JOB.DURABLE_START], self._words[JOB.DURABLE_END]
        if end <= log.syncs.synced_position:
            return None
        self._writing = log
        return start, self._staging[: end - start]

    def _hand_on(self, rows: list[Taken], senders: dict[int, Session]) -> None:
        """Enter the bundles that were taken, in their order: first those that kernels have written or served."""
        intake, holders = self._intake, self._holders
        first = intake.result_index
        results = intake.tables.results[first : self._words[JOB.RESULT]].tolist()
        late: list[tuple[Taken, Any]] = []
        is_awaiting = False
        for row, holder in zip(rows, holders, strict=False):
            stage = row.stage
            if stage == _ADMITTED:
                late.append((row, holder))
            elif stage == _WRITTEN:
                is_awaiting = True
                self._admitted(row, senders[row.link], holder, results[row.first - first :])
            else:
                _, slot, offset, messages, start, size, _, _, _, _, _, producer = results[
                    row.first - first
                ]
                partition = intake.partitions_by_slot[slot]
                stored = Stored(
                    partition.partition_id, offset, offset + messages, messages, size, producer,
                    holder, start, 0, 1,
                )  # fmt: skip
                self._outlets.show(slot, partition, stored, is_delivered=stage != _SHOWN)
                if stage != _DONE:
                    intake.answer_served(senders[row.link].number, row.request, offset)
        holders[: len(rows)] = [None] * len(rows)
        self._count([row for row in rows if row.stage >= _DONE])
        if is_awaiting:
            self._state.journals[self._log_slot].adopt(self._words[JOB.QUEUED_END])
        for row, holder in late:
            self._admitted(row, senders[row.link], holder, results[row.first - first :])
        intake.result_index = max(intake.result_index, self._words[JOB.RESULT])

    def _count(self, served: list[Taken]) -> None:
        """Count the bundles that kernels have shown."""
        if served:
            logged = byte_count = answered = 0
            for row in served:
                logged += row.end != 0
                byte_count += row.bundle_bytes
                answered += row.stage == _DONE
            took_ns = self._state.clock.monotonic_ns() - self._state.now_ns
            self._intake.count_served(len(served), byte_count, answered, logged, took_ns)

    def _admitted(
        self, row: Taken, session: Session, holder: Any, results: list[list[int]]
    ) -> None:
        """Hand a bundle on to the intake."""
        intake, publication = self._intake, Publication(session.number, row.request)
        intake.result_index = row.first
        if row.frames < 0:
            intake.publish(publication, holder, self._state.now_wall_ns)
            return
        results = results[: row.frames]
        for result in results:
            if result[0] == 0:
                self._outlets.announce_again(
                    intake.partitions_by_slot[result[1]], result[7], result[11]
                )
        intake.admitted(publication, holder, results, self._state.now_wall_ns)
