"""Words of a worker's turn: what its kernels take, write, show and answer in one call.

    job       one block: addresses of all else, and how far the turn is
    links     a row for each client that was heard: its side of the rings, or its row as a peer of the ROUTER; its session
    taken     a row for each PUBLISH that was taken: who sent it, its result row, how far it is
    outlets   a row for each partition whose next frame needs nothing but what kernels do: who gets it

Written by the worker's loop and its kernels, in turns. Python fills outlets right before a call and takes them away
right behind it, so no rule stands twice: whatever changes in between is seen.
"""

from __future__ import annotations

import enum
import types
from typing import Any, NamedTuple

from danube_fast.net.port_kernels import MESSAGE_BYTES
from danube_fast.ring.duplex_kernel import PAIR_WORDS
from danube_fast.ring.layout import WORD_BYTES

__all__ = [
    "AT_BODY_MESSAGE",
    "AT_COMMAND",
    "AT_COMMAND_MESSAGE",
    "AT_LINKS",
    "AT_OUTLETS",
    "AT_SENDER",
    "AT_TAKEN",
    "COMMAND_ROOM",
    "EVENTS_MAX",
    "JOB",
    "LEFT_PLACE",
    "LINK",
    "LINK_BYTES",
    "LINK_WORDS",
    "NOT_RECEIVED",
    "OUTLETS_MAX",
    "OUTLET_BYTES",
    "OUTLET_WORDS",
    "ROUTED_BYTES",
    "SENDER_ROOM",
    "STAGING_BYTES",
    "TAKEN",
    "TAKEN_BYTES",
    "TAKEN_MAX",
    "TAKEN_WORDS",
    "Flag",
    "JobWord",
    "LinkStatus",
    "LinkWord",
    "OutletKind",
    "OutletWord",
    "Stage",
    "Taken",
    "TakenWord",
]

TAKEN_MAX = 256
"""Messages that one turn takes."""
LEFT_PLACE = TAKEN_MAX
"""Index in the list of bundles, behind those that a turn takes: the one that kernels have received and leave to Python."""
OUTLETS_MAX = 256
"""Partitions that have an outlet in one turn; those of others go the ordinary way."""
EVENTS_MAX = 64
"""Events of epoll that one wait takes; the next one takes the rest."""
STAGING_BYTES = 256 * 1024
"""Frames of one group that kernels write; a larger one is written by Python."""
NOT_RECEIVED = -(1 << 32)
"""In COMMAND_FOUND: the command was not asked for, and is still the ROUTER's. Errors are small."""


class JobWord(enum.IntEnum):
    """Words of the job."""

    STATE = 0
    """Address of the state block of the admission tables."""
    RESULT = 1
    """Number of the next result row."""
    NOW_NS = 2
    """By the wall clock; 0: kernels ask it themselves."""
    TAKEN = 3
    TAKEN_LIMIT = 4
    ROOM = 5
    """Bytes that may be taken yet: all that is taken fits the segment, with the PAD frames that were written before."""
    HOLDERS = 6
    """Address of the list whose items are the bundles."""
    NONE = 7
    LINKS = 8
    LINKS_MAX = 9
    NUMBER = 10
    """Scratch for a request."""
    LOOKED = 11
    """Taken rows that were looked at."""
    IS_CLOSING = 12
    """1: nothing more is taken; what is under way is ended."""
    IS_STOPPED = 13
    """1: a row behind LOOKED is for Python, and all behind it."""
    LOG_SLOT = 14
    """The log that kernels may write to, -1: none."""
    LOG_FD = 15
    LOG_DELTA = 16
    """From a position to its place in the file."""
    LOG_END = 17
    """Position behind the segment."""
    GROUP_START = 18
    """Position of the group that is open, or comes next."""
    GROUP_BYTES = 19
    PENDING = 20
    """Frames of it."""
    HAS_WRITTEN = 21
    """1: a frame of it is visible once written."""
    AWAITED = 22
    """Frames that wait for a sync."""
    SIBLINGS = 23
    """Frames of the last group."""
    SINCE_NS = 24
    """Since when the group waits for more frames, or its sync is queued, monotonic."""
    IS_TORN = 25
    """1: a write failed, and may have left something behind."""
    SYNCS = 26
    """Address of the queue of syncs."""
    SYNC_BELL = 27
    STAGING = 28
    BELL = 29
    """The worker's doorbell, which the sync thread rings too."""
    BELL_RANG = 30
    """1: signals of the bell were taken."""
    EPOLL = 31
    """Of the rings' bells, and of the sockets that tell of ends."""
    SIDES = 32
    """Address of the table of sides by bell, and how many it has."""
    SIDES_COUNT = 33
    EVENTS = 34
    """Room for `EVENTS_MAX` events of epoll."""
    SCRATCH = 35
    """Two words: a clock, or a vector of one buffer."""
    POLLED = 37
    """Three descriptors for poll: bell, rings, the ROUTER."""
    TIMEOUT = 40
    """Two words: how long to wait."""
    BEGAN_NS = 42
    """When this turn waited first, monotonic; 0: it has not."""
    GROUPS = 43
    """Groups that it has written."""
    QUEUED_END = 44
    """Up to where it has queued a sync; 0: it has not."""
    CODE = 45
    """The `LinkStatus` with which taking ended the last time."""
    ROUTER = 46
    """Address of the ROUTER; 0: kernels take nothing from it."""
    FUNCTIONS = 47
    """Address of the table of libzmq's functions."""
    PEERS = 48
    """Address of the rows of its peers."""
    MESSAGE = 49
    """Room for the parts of one of its messages."""
    ROUTED = 50
    """The `LinkStatus` of it."""
    IN_HAND = 51
    """Parts of a message that were received, and are for Python."""
    SENDER_FOUND = 52
    """Size of each part, and above `MORE_SHIFT` whether another one follows."""
    COMMAND_FOUND = 53
    BODY_FOUND = 54
    DURABLE_BYTES = 55
    """Size up to which a group may be written by the sync thread, with a call that makes it durable; 0: none."""
    DURABLE_FD = 56
    DURABLE_FLAGS = 57
    """The descriptor, and the flags of pwritev2, with which it is."""
    DURABLE_START = 58
    DURABLE_END = 59
    """Position of the last group that was written so, and behind it; 0: none in this turn."""
    PROVES = 60
    """1: the command of a peer of the ROUTER that has no row is received by Python, which reads what the peer has proved."""
    YIELD_PAUSE = 61
    """Messages to serve alone before the worker yields its core again."""
    YIELD_BACKOFF = 62
    """The pause behind the next yield that takes long."""
    SYNC_NS = 63
    """How long syncs take, in the mean."""
    NOT_ASKED = 64
    """1: some clients do not signal what comes."""
    HEARTBEATS = 65
    """Heartbeats that this turn has answered."""
    STEP_NS = 66
    """When its last step began, monotonic."""
    PAIR = 67


class LinkStatus(enum.IntEnum):
    """State of a link, or of a bundle that was taken."""

    MORE = 0
    """There may be more."""
    ARMED = 1
    """Its client signals what comes."""
    ORDINARY = 2
    """The ordinary way has to look at it."""
    STOP = 3
    """A bundle was taken, and Python has to look at it before the next one is admitted."""
    EMPTY = 4
    """Nothing is there, and its client does not signal what comes."""


class LinkWord(enum.IntEnum):
    """Columns of a link."""

    SIDE = 0
    """Its words: `Duplex.row`, or those of `RoutedPeers`."""
    SESSION = 1
    STATUS = 2
    WAITS_FOR_SYNC = 3
    """1: its last publish waits for a sync, or did."""
    HEARTBEAT = 4
    """When this turn has answered the last heartbeat of it, monotonic; 0: it has not."""


class Stage(enum.IntEnum):
    """How far a taken row is."""

    ADMITTED = 0
    """Python does all else."""
    WRITTEN = 1
    """It waits for a sync."""
    DONE = 2
    """Shown, delivered and answered."""
    SHOWN = 3
    """Visible: Python delivers and answers it."""
    DELIVERED = 4
    """Python answers it."""


class TakenWord(enum.IntEnum):
    """Columns of a taken row."""

    LINK = 0
    REQUEST = 1
    COUNT = 2
    """Frames, or the fault of the bundle."""
    FIRST = 3
    """Its first result row."""
    BUNDLE = 4
    BUNDLE_BYTES = 5
    STAGE = 6
    END = 7
    """Position behind its group."""


def _plain(words: type[enum.IntEnum]) -> Any:
    """The members of an enum as plain integers, by name: Python 3.11 takes five times as long to find a member."""
    return types.SimpleNamespace(**{name: int(word) for name, word in words.__members__.items()})


JOB: type[JobWord] = _plain(JobWord)
LINK: type[LinkWord] = _plain(LinkWord)
TAKEN: type[TakenWord] = _plain(TakenWord)
"""The same words for Python; kernels know the enums alone."""


class Taken(NamedTuple):
    """A taken row, as Python reads it: its words in their order."""

    link: int
    request: int
    frames: int
    """Or the fault of the bundle."""
    first: int
    bundle: int
    bundle_bytes: int
    stage: int
    end: int


class OutletKind(enum.IntEnum):
    """When a frame becomes visible."""

    MEMORY = 1
    OS = 2
    FSYNC = 3


class OutletWord(enum.IntEnum):
    """Columns of an outlet."""

    KIND = 0
    SAFE_UNTIL = 1
    """Offsets below may be shown before they are synced."""
    SIDE = 2
    """Words of the consumer's client, as of a link; 0: there is no consumer."""
    CONSUMER_ID = 3
    BYTES = 4
    MESSAGES = 5
    """Credit."""
    COVERS = 6
    """1: credit has to be good for the whole frame."""
    CONSUMER = 7
    """The consumer's number in this process: its producers must have been announced to it."""


class Flag(enum.IntEnum):
    """Outcome of a step, or a wait."""

    UNDERWAY = 1
    """Frames are under way to the disk."""
    STOPPED = 2
    FULL = 4
    """No more can be taken in this turn."""
    OTHER = 8
    """Something else wants the worker."""
    LATE = 16
    """The disk takes its time: Python goes on."""
    MISSING = 32
    """The outlet of a row's partition is not made yet."""


TAKEN_WORDS = len(TakenWord)
LINK_WORDS = len(LinkWord)
OUTLET_WORDS = len(OutletWord)
TAKEN_BYTES, LINK_BYTES = TAKEN_WORDS * WORD_BYTES, LINK_WORDS * WORD_BYTES
OUTLET_BYTES = OUTLET_WORDS * WORD_BYTES
SENDER_ROOM, COMMAND_ROOM = 256, 16 * 1024
AT_SENDER = MESSAGE_BYTES
AT_COMMAND_MESSAGE = AT_SENDER + SENDER_ROOM
AT_COMMAND = AT_COMMAND_MESSAGE + MESSAGE_BYTES
AT_BODY_MESSAGE = AT_COMMAND + COMMAND_ROOM
ROUTED_BYTES = AT_BODY_MESSAGE + MESSAGE_BYTES
"""Of the room for a message of the ROUTER: for each part but the body a zmq_msg_t, and what was in it."""
AT_TAKEN = (JobWord.PAIR + PAIR_WORDS) * WORD_BYTES
AT_OUTLETS = AT_TAKEN + TAKEN_MAX * TAKEN_BYTES
AT_LINKS = AT_OUTLETS + OUTLETS_MAX * OUTLET_BYTES
