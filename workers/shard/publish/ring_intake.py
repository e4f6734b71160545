r"""Plain publishes over rings: one kernel call takes, decodes and admits those of all clients that are awake.

    rings -- [PUBLISH, request], bundle --> bytes object --admit--> result rows, a taken row: link, request, frames
          \- anything else, damage, no room --> stays first in its ring: the ordinary way handles it

A link is served one message in a round, as all others are. Where a frame is not simply accepted, or a rate is charged
for it, the kernel stops behind its bundle, so that Python has dealt with it before the next one is admitted.
"""

from __future__ import annotations

import numpy as np

from danube_fast.broker.admission.admission import admit
from danube_fast.broker.admission.layout import (
    PARTITION_WORDS,
    RESULT_WORDS,
    PartitionWord,
    ResultWord,
    StateWord,
)
from danube_fast.errors import Internal, Status
from danube_fast.frame.cpython import AT_BYTES_DATA, COUNTED_NONE, OBJECTS_READABLE
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, HEADER_BYTES
from danube_fast.frame.memory import load_i64, load_u8, load_word, store_u64
from danube_fast.frame.unpack_kernels import keep_bytes
from danube_fast.net.msgpack_kernel import FIXED_ARRAY, read_unsigned
from danube_fast.net.protocol import Publish, op_code
from danube_fast.net.session import Session, Sessions
from danube_fast.ring.duplex_kernel import (
    PAIR_BODY,
    PAIR_BODY_BYTES,
    PAIR_HEAD,
    PAIR_HEAD_BYTES,
    PAIR_WORDS,
    WAITS,
    _arm,
    peek_pair,
    release_pair,
    word_of,
)
from danube_fast.ring.handover import RingServer
from danube_fast.ring.layout import WORD_BYTES
from danube_fast.ring.spsc_kernel import EMPTY
from danube_fast.workers.shard.publish.group import Publication
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.state import ShardState

__all__ = ["RingIntake"]

TAKEN_MAX = 256
"""Messages that one call takes."""
STATE, RESULT, NOW_NS, TAKEN, TAKEN_LIMIT, ROOM, HOLDERS, NONE, LINKS, NUMBER, AT_PAIR = range(
    0, 11 * WORD_BYTES, WORD_BYTES
)
AT_TAKEN = AT_PAIR + PAIR_WORDS * WORD_BYTES
_TAKEN_WORDS = 3
_TAKEN_BYTES = _TAKEN_WORDS * WORD_BYTES
AT_LINKS = AT_TAKEN + TAKEN_MAX * _TAKEN_BYTES
_LINK_WORDS = 3
_LINK_BYTES = _LINK_WORDS * WORD_BYTES
_AT_SESSION, _AT_STATUS = WORD_BYTES, 2 * WORD_BYTES
MORE, ARMED, ORDINARY, STOP = range(4)
"""What is known of a link: there may be more; its client signals what comes; the ordinary way has to look at it; or
of a bundle: it was taken, and Python has to look at it now."""
_FRAME_BYTES_MIN = HEADER_BYTES + BUNDLE_ENTRY_BYTES
_PUBLISH = op_code(Publish)
_OK = int(Status.OK)
_RESULT_BYTES, _PARTITION_BYTES = RESULT_WORDS * WORD_BYTES, PARTITION_WORDS * WORD_BYTES
ROOM_MIN = 64 * 1024
"""With less room in a log all goes the ordinary way, which makes some."""


@kernel("int64(int64)")
def _read_request(job: int) -> int:
    """Request of the PUBLISH whose parts are in the job; 0 if it is no such command."""
    head = job + AT_PAIR + PAIR_HEAD
    end = head + load_i64(job + AT_PAIR + PAIR_HEAD_BYTES)
    if end < head + 3 or load_u8(head) != FIXED_ARRAY + 2 or load_u8(head + 1) != _PUBLISH:
        return 0
    return load_i64(job + NUMBER) if read_unsigned(head + 2, end, job + NUMBER) == end else 0


@kernel("int64(int64,int64,int64,int64)")
def _admit_taken(job: int, link: int, bundle: int, byte_count: int) -> int:
    """Admit a bundle and enter it into the taken rows; MORE, or STOP if Python is needed before the next one."""
    taken, first = load_i64(job + TAKEN), load_i64(job + RESULT)
    session = load_i64(link + _AT_SESSION)
    state = load_i64(job + STATE)
    count = admit(state, bundle, byte_count, session, first, 0, load_i64(job + NOW_NS))
    row = job + AT_TAKEN + taken * _TAKEN_BYTES
    store_u64(row, (link - job - AT_LINKS) // _LINK_BYTES)
    store_u64(row + WORD_BYTES, load_i64(job + NUMBER))
    store_u64(row + 2 * WORD_BYTES, count)
    store_u64(job + TAKEN, taken + 1)
    store_u64(job + ROOM, load_i64(job + ROOM) - byte_count)
    if count < 0:
        return STOP
    store_u64(job + RESULT, first + count)
    results, partitions = (
        load_word(state, StateWord.RESULTS),
        load_word(state, StateWord.PARTITIONS),
    )
    for index in range(first, first + count):
        result = results + index * _RESULT_BYTES
        if load_word(result, ResultWord.STATUS) != _OK:
            return STOP
        slot = load_word(result, ResultWord.PARTITION_SLOT)
        if load_word(partitions + slot * _PARTITION_BYTES, PartitionWord.IS_PACED) != 0:
            return STOP
    return MORE


@kernel("int64(int64,int64)")
def _take_one(job: int, link: int) -> int:
    """Take the oldest message of a link: MORE or STOP if it was taken, else ARMED or ORDINARY."""
    side, pair = load_i64(link), job + AT_PAIR
    found = peek_pair(side, pair)
    if found == EMPTY and word_of(side, WAITS) == 0:
        return ARMED if _arm(side) != 0 else MORE
    if found < 0 or _read_request(job) == 0:
        return ORDINARY
    size = load_i64(pair + PAIR_BODY_BYTES)
    frames = size // _FRAME_BYTES_MIN + 1  # no bundle of that size has more
    results_max = load_word(load_i64(job + STATE), StateWord.RESULTS_MAX)
    if size > load_i64(job + ROOM) or load_i64(job + RESULT) + frames > results_max:
        return ORDINARY
    place = load_i64(job + TAKEN)
    holder = keep_bytes(
        load_i64(job + HOLDERS), place, load_i64(pair + PAIR_BODY), size, load_i64(job + NONE)
    )
    if holder == 0:
        return ORDINARY  # which meets it again, and raises MemoryError
    release_pair(side, found)
    return _admit_taken(job, link, holder + AT_BYTES_DATA, size)


@kernel("int64(int64)")
def _take_rounds(job: int) -> int:
    """Take messages of all links in turn, until nothing is left but what the ordinary way has to look at."""
    is_busy = True
    while is_busy:
        is_busy = False
        for index in range(load_i64(job + LINKS)):
            link = job + AT_LINKS + index * _LINK_BYTES
            if load_i64(link + _AT_STATUS) != MORE:
                continue
            if load_i64(job + TAKEN) >= load_i64(job + TAKEN_LIMIT):
                return load_i64(job + TAKEN)
            code = _take_one(job, link)
            if code == STOP:
                return load_i64(job + TAKEN)
            store_u64(link + _AT_STATUS, code)
            is_busy = is_busy or code == MORE
    return load_i64(job + TAKEN)


_take = direct(_take_rounds)


class RingIntake:
    """Take plain publishes of ring clients for one worker. Used by its loop only."""

    def __init__(
        self, state: ShardState, rings: RingServer, intake: Intake, sessions: Sessions
    ) -> None:
        self._state, self._rings, self._intake, self._sessions = state, rings, intake, sessions
        self._holders: list[bytes | None] = [None] * TAKEN_MAX
        self._capacity = 0
        self._grow(16)

    def _grow(self, links: int) -> None:
        """Make room for that many links in the job."""
        self._capacity = links
        first = AT_LINKS // WORD_BYTES
        self._memory = np.zeros(first + links * _LINK_WORDS, np.int64)
        self._words = self._memory.data
        self._address: int = self._memory.ctypes.data
        self._words[HOLDERS // WORD_BYTES] = id(self._holders)
        self._words[NONE // WORD_BYTES] = COUNTED_NONE

    def take(self, limit: int) -> int:
        """Take and admit up to `limit` messages of the clients that are awake; how many."""
        state, intake = self._state, self._intake
        if not OBJECTS_READABLE:
            return 0
        room = min([journal.spare_bytes for journal in state.journals.values()], default=0)
        if room < ROOM_MIN:
            return 0
        sessions = self._list_links()
        words, first = self._words, intake.result_index
        words[STATE // WORD_BYTES] = intake.tables.address
        words[RESULT // WORD_BYTES], words[NOW_NS // WORD_BYTES] = first, state.now_wall_ns
        words[TAKEN // WORD_BYTES] = 0
        words[TAKEN_LIMIT // WORD_BYTES] = min(limit, TAKEN_MAX)
        words[ROOM // WORD_BYTES] = min(
            room, state.settings.group_bytes_max, intake.bundle_bytes_max
        )
        taken: int = _take(self._address)
        self._arm_links(sessions)
        if taken:
            self._hand_on(taken, [each for _, each in sessions])
        return taken

    def _list_links(self) -> list[tuple[bytes, Session | None]]:
        """Enter the links that are awake into the job; their identities and sessions."""
        rings = self._rings
        found = []
        awake = rings.awake_links()
        if len(awake) > self._capacity:
            self._grow(2 * len(awake))
        words, place = self._words, AT_LINKS // WORD_BYTES
        for identity, link in awake:
            session = self._sessions.by_identity(identity)
            found.append((identity, session))
            words[place] = link.row
            if session is None or link.has_slices:
                words[place + 2] = ORDINARY
            else:
                words[place + 1], words[place + 2] = session.number, MORE
            place += _LINK_WORDS
        words[LINKS // WORD_BYTES] = len(found)
        return found

    def _arm_links(self, links: list[tuple[bytes, Session | None]]) -> None:
        """Let those links rest that the kernel has armed."""
        place = AT_LINKS // WORD_BYTES + 2
        for identity, _ in links:
            if self._words[place] == ARMED:
                self._rings.armed(identity)
            place += _LINK_WORDS

    def _hand_on(self, taken: int, sessions: list[Session | None]) -> None:
        """Give the bundles that were taken to the intake, in their order."""
        intake, state, holders = self._intake, self._state, self._holders
        place = AT_TAKEN // WORD_BYTES
        taken_rows = self._words[place : place + taken * _TAKEN_WORDS].tolist()
        first = intake.result_index
        rows = intake.tables.results[first : self._words[RESULT // WORD_BYTES]].tolist()
        at = 0
        for number in range(taken):
            link, request, count = taken_rows[number * _TAKEN_WORDS : (number + 1) * _TAKEN_WORDS]
            session, holder = sessions[link], holders[number]
            holders[number] = None
            if session is None or holder is None:
                raise Internal("a bundle was taken from a link without a session")
            session.last_seen_ns = state.now_ns
            self._rings.took(session.identity)
            publication = Publication(session.number, request)
            if count < 0:
                intake.publish(publication, holder, state.now_wall_ns)
            else:
                intake.admitted(publication, holder, rows[at : at + count], state.now_wall_ns)
                at += count
