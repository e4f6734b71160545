"""Consumers as what passes their worker shows them: their credit, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from danube_fast.clock import MILLISECOND_NS

__all__ = ["Attached", "Counted", "Credit", "Held", "Known", "Policy", "takes"]

FRAME_OVERHEAD = 600
"""Bytes of a frame that are no message's: headers, directories, padding; and those of each message beside its
payload and key, of the largest frame that the simulation publishes."""
UNREPORTED_MESSAGES = 64
"""A death counts so many messages behind the last report."""


@dataclass(frozen=True)
class Policy:
    """The failure policy that the subscription was created with; times in milliseconds."""

    max_redelivery_count: int = 5
    ack_timeout_ms: int = 30_000
    base_redelivery_delay_ms: int = 1_000
    max_redelivery_delay_ms: int = 60_000
    backoff_strategy: str = "exponential"
    poison_policy: str = "block"
    dead_letter_topic: str = ""

    def delay_min_ns(self, failures: int) -> int:
        """A message that failed so often comes again no earlier than this."""
        delay_ms = self.base_redelivery_delay_ms
        if self.backoff_strategy == "exponential":
            delay_ms <<= max(0, failures - 1)
        return min(delay_ms, self.max_redelivery_delay_ms) * MILLISECOND_NS


@dataclass
class Credit:
    """The grants of a flow, less what was sent on it. The worker may have known less when it handed
    something out, never more."""

    byte_count: int = 0
    messages: int = 0

    def grant(self, byte_count: int, messages: int) -> None:
        """FLOW was read."""
        self.byte_count += byte_count
        self.messages += messages


class Counted(NamedTuple):
    """The messages that count as delivered at the end of the consumer which holds them."""

    surely: set[int]
    """Delivered once more."""
    perhaps: set[int]
    """The same, or not."""
    failed: set[int]
    """Surely failed, if it died and their time was not over."""


@dataclass
class Attached:
    """A consumer as the model knows it."""

    session: int
    consumer_id: int
    filters: tuple[str, ...]
    is_confirmed: bool = False
    is_gone: bool = False
    has_received: bool = False
    is_outdated: bool = False
    """Another one has sought since: what it acks may be from before."""
    name: str = ""
    owner: str = ""
    """The name that its client gave it."""
    credit: Credit = field(default_factory=Credit)
    """Of the flow that it draws on."""
    reports: bool = False
    """Its client says how far its application is."""
    taken: tuple[int, int] = (0, 0)
    """Frames that it took whole, and the offset in the next one below which it took all, as last read."""
    frames: int = 0
    """It was sent so many."""
    has_unsent: bool = False
    """Some were handed out to it when its connection was gone."""
    counted: Counted | None = None
    """What its death counts, as of when it may have been dead first."""
    left_with: dict[int, Held] = field(default_factory=dict)
    """What it held when it was sent away."""
    left_ns: int = 0

    def charge(self, frame_bytes: int, payloads: Sequence[bytes | None], *, is_cut: bool) -> str:
        """A frame left for it; what was wrong with that. What a group's consumer has no credit for is another
        one's, so its frames are cut; an only consumer gets whole frames while it has any."""
        credit, count = self.credit, len(payloads)
        if credit.messages <= 0 or credit.byte_count <= 0:
            return "a frame without any credit"
        if is_cut:
            excess = frame_bytes - len(payloads[-1] or b"") - FRAME_OVERHEAD - credit.byte_count
            if count > credit.messages:
                return f"{count} messages and had credit for {credit.messages}"
            if excess > 0:
                return f"{excess} bytes too many"
        credit.grant(-frame_bytes, -count)
        self.frames += 1
        return ""

    def count_end(self, mine: dict[int, Held], parting: str, now_ns: int) -> Counted:
        """Tell what counts as delivered of the messages that it holds when it goes: what its application had taken,
        and at its death some more. One whose time was over may not have been held any more, which makes room
        for another. A death is remembered, as it is seen bit by bit: what is said after it comes too late."""
        if not self.reports:
            return Counted(set(mine), set(mine), set())
        places = sorted((held.frame, offset) for offset, held in mine.items())
        taken = {offset for frame, offset in places if (frame, offset) < self.taken}
        if parting == "closed":
            return Counted(taken, taken, set())
        if self.counted is None:
            more = [offset for _, offset in places if offset not in taken]
            timely = [offset for offset in more if mine[offset].deadline_ns > now_ns]
            perhaps = taken | set(timely[:UNREPORTED_MESSAGES]) | (set(more) - set(timely))
            self.counted = Counted(taken | set(more[:UNREPORTED_MESSAGES]), perhaps, taken)
        if parting.startswith("closed,"):
            return Counted(self.counted.surely & taken, self.counted.perhaps | taken, set())
        return self.counted


@dataclass
class Held:
    """A message that a consumer holds."""

    consumer: Attached
    deadline_ns: int
    """When the ack timeout goes by."""
    frame: int = 0
    """In which of the frames that the consumer was sent it came."""


@dataclass
class Known:
    """The history of one message in this subscription, in this life of its worker."""

    deliveries_min: int = 0
    deliveries_max: int = 0
    failures_min: int = 0
    failures_max: int = 0
    is_out_of_turn: bool = False
    """It was nacked, or its time may have gone by: it comes when its delay is over."""
    not_before_ns: int = 0


def takes(filters: tuple[str, ...], key: bytes | None) -> bool:
    """Tell whether a key passes: the simulation's filters are a beginning and an asterisk."""
    text = (key or b"").decode()
    return any(text.startswith(each.removesuffix("*")) for each in filters)
