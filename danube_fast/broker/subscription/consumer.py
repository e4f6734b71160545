"""The values that subscriptions and their worker exchange: frames, gaps, consumers and their credit. IO-free."""

from __future__ import annotations

import enum
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from danube_fast.broker.ledger.ledger import EVERYTHING, Ledger, Rows, Taken

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from danube_fast.frame.split import Cut

__all__ = [
    "PENDING",
    "UNREPORTED_MESSAGES",
    "Consumer",
    "Deliver",
    "Flow",
    "Gap",
    "Parting",
    "Pending",
    "Poisoned",
    "Read",
    "Ready",
    "Stored",
    "SubscriptionKind",
]

COUNT_MAX = 1 << 62
_NUMBERS = itertools.count(1)
CREDIT_MAX = 1 << 30
"""Bytes, and messages, that one flow can be granted ahead."""


UNREPORTED_MESSAGES = 64
"""So many messages behind the last report of a consumer count as delivered when it dies, as it may have taken
more since. Only what was reported has failed: of messages that come again clients report at once."""


class Parting(enum.Enum):
    """How a consumer leaves its subscription."""

    CLOSED = 1
    """In order: what it last said that it has taken is all."""
    LOST = 2
    """Its connection ended and the client goes on with another: it may have taken a little more."""
    DIED = 3
    """Its client was not heard any more: the same, and what it had reported has failed."""


class SubscriptionKind(enum.StrEnum):
    """How a subscription divides its messages among consumers."""

    EXCLUSIVE = "exclusive"
    """There is only one."""
    SHARED = "shared"
    """Messages go round."""
    FAILOVER = "failover"
    """The first gets everything, the others stand by."""
    KEY_SHARED = "key_shared"
    """Messages of a key go to one of them."""
    READER = "reader"
    """No subscription at all: one consumer that acks nothing."""


class Stored(msgspec.Struct, gc=False, eq=False):
    """A frame that can be delivered: its offsets, and where its bytes lie. A worker holds many, and none is part of a
    cycle, so the garbage collector does not know them."""

    partition_id: int
    base_offset: int
    end_offset: int
    message_count: int
    frame_bytes: int
    producer_id: int
    holder: object
    """Owns the bytes."""
    start: int
    """Where in the holder the frame begins."""
    index: int = 0
    """Its number among the frames of the holder, if that is a whole bundle."""
    bundle_frames: int = 0
    """How many there are in it."""
    is_delayed: bool = False
    """Some of its messages have a time before which they are not to be delivered."""
    is_sparse: bool = False
    """It has not all of its offsets: see sparse.py."""

    @property
    def message_bytes(self) -> int:
        """Bytes of one of its messages, in the mean."""
        return self.frame_bytes // max(1, self.message_count)

    @property
    def memory(self) -> memoryview:
        """The frame's bytes, not copied."""
        holder: Any = self.holder
        buffer = memoryview(getattr(holder, "buffer", holder))
        return buffer[self.start : self.start + self.frame_bytes]


class Gap(NamedTuple):
    """Offsets up to `end` do not exist or are gone; `lost`: there were messages."""

    end: int
    reason: str
    lost: bool = False
    start: int = 0
    """From here on, for the reader that met it."""
    is_silent: bool = False
    """Newer messages have taken their place: no consumer needs to be told."""
    place: int = 0
    """How many effects of the turn that has met it stand before it."""


class Pending(enum.Enum):
    """Nothing is there yet: the partition's turn comes again when there is."""

    PENDING = "pending"


PENDING = Pending.PENDING


class Ready(NamedTuple):
    """Frames that a read has found, oldest first; the first holds the offset or stands behind it."""

    frames: list[Stored]


Read = Ready | Gap | Pending
"""What a read of a partition's log answers, at once."""


class Flow:
    """Credit that one or more consumers of a session draw on."""

    __slots__ = ("byte_credit", "kept_bytes", "message_credit", "paused", "ran_out", "users")

    def __init__(self) -> None:
        self.byte_credit = 0
        self.message_credit = 0
        self.kept_bytes = 0
        """More byte credit, kept for the turns of other partitions: no frame is begun on it."""
        self.paused = False
        """The session does not take what was sent already."""
        self.ran_out = False
        """Credit was used up since the last grant: a subscription may wait for more."""
        self.users: dict[Consumer, None] = {}
        """Who was served longest ago comes first."""

    @property
    def willing(self) -> bool:
        """One more frame may be sent."""
        return self.byte_credit > 0 and self.message_credit > 0 and not self.paused

    @property
    def bytes_left(self) -> int:
        """How much of a frame that is begun may be sent."""
        return self.byte_credit + self.kept_bytes

    def covers(self, stored: Stored) -> bool:
        """Credit is good for a whole frame."""
        return self.message_credit >= stored.message_count and self.bytes_left >= stored.frame_bytes

    def grant(self, byte_count: int, message_count: int) -> None:
        """Add credit, up to a bound that no honest consumer needs."""
        self.byte_credit = min(self.byte_credit + max(0, byte_count), CREDIT_MAX)
        self.message_credit = min(self.message_credit + max(0, message_count), CREDIT_MAX)

    def take(self, byte_count: int, message_count: int) -> None:
        """Charge the credit."""
        self.message_credit -= message_count
        self.byte_credit -= byte_count
        if self.byte_credit <= 0 or self.message_credit <= 0:
            self.ran_out = True


class Consumer:
    """A consumer attached to one subscription of one partition."""

    __slots__ = (
        "announced", "consumer_id", "filters", "flow", "frames_sent", "name", "number", "session",
        "slot", "subscription", "taken",
    )  # fmt: skip

    def __init__(
        self,
        subscription: Any,
        session: int,
        consumer_id: int,
        flow: Flow,
        name: str,
        filters: tuple[str, ...] = (),
        *,
        reports: bool = False,
    ) -> None:
        """`filters`: globs of the keys that it takes (key_shared); none: it takes all. `reports`: its client
        says how far its application is."""
        self.subscription = subscription
        """The `Subscription` that it is attached to. That one knows consumers, so this file does not know it."""
        self.session = session
        self.number = next(_NUMBERS)
        """No other consumer of this process has it."""
        self.consumer_id = consumer_id
        self.flow = flow
        self.name = name
        self.filters = filters
        self.slot = -1
        """What the subscription's ledger calls it while it is attached."""
        self.announced: set[int] = set()
        self.frames_sent = 0
        self.taken = Taken(0, 0) if reports else EVERYTHING
        """What its application has taken, as last heard."""

    @property
    def reports(self) -> bool:
        """Whether its client says how far its application is."""
        return self.taken is not EVERYTHING

    def report(self, frames: int, offset: int) -> None:
        """Note how far its application is; of a consumer that announced no reports nothing is believed."""
        if self.reports:
            self.taken = Taken(min(max(0, frames), COUNT_MAX), min(max(0, offset), COUNT_MAX))

    def next_frame(self) -> int:
        """Number of the frame that it is sent now."""
        self.frames_sent += 1
        return self.frames_sent - 1

    @property
    def unacked(self) -> int:
        """Messages that it has and has not acked."""
        ledger: Ledger = self.subscription.ledger
        return ledger.unacked_of(self.slot) if self.slot >= 0 else 0


class Deliver(NamedTuple):
    """Effect: send `stored` to `consumer`; only the messages at `rows` when they are given, with the
    redelivery counts of `attempts` (one for each row) when those are given."""

    consumer: Consumer
    stored: Stored
    rows: Rows | None
    attempts: NDArray[np.uint32] | None
    cut: Cut | None = None
    """Those messages as a frame of their own; None with `rows`: the frame cannot be taken apart."""


class Poisoned(NamedTuple):
    """Messages [start, end) that failed `failures` times, which is too often, and why the last time."""

    start: int
    end: int
    failures: int
    reason: str
