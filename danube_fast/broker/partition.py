"""One partition on its worker: recent frames, what is visible, its subscriptions. IO-free.

    first_offset ... | frames in the log or gone | tail (in memory) | visible | admitted, not durable
                                                 ^ tail_first       ^

A frame becomes visible when it has met its topic's durability. The tail keeps recent visible frames
for consumers that are nearly up to date; older ones come from the log through `read_log`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from msgspec import structs

from danube_fast.broker.admission.rates import Rate
from danube_fast.broker.records import (
    Acked,
    Compacted,
    Cursor,
    Moving,
    PartitionAssigned,
    PendingGapsSet,
    PolicySet,
    SubscriptionCreated,
    Uploaded,
)
from danube_fast.broker.sizes import Sizes
from danube_fast.broker.subscription.consumer import (
    PENDING,
    Deliver,
    Gap,
    Pending,
    Read,
    Ready,
    Stored,
    SubscriptionKind,
)
from danube_fast.broker.subscription.obstacle import Obstacle
from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.broker.subscription.subscription import OnDelayed, Subscription
from danube_fast.broker.subscription.timers import Timers
from danube_fast.broker.tail import Tail
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument
from danube_fast.types import Dispatch, Durability

__all__ = ["Partition", "ReadLog"]

ReadLog = Callable[["Partition", int], Read]
"""Frames of a partition from an offset on, read from the log; a gap; or that they are still to come."""

RESERVE_BLOCK_MAX = 1 << 32


class Partition(Tail):
    """State of one partition."""

    # Python keeps more than 30 attributes in a dict of each object: a cache miss for every one of them, among thousands
    __slots__ = (
        "_timers", "_turn", "assigned", "breaks", "compacted", "keeps_memory", "last_moved_ns", "last_offset",
        "log_slot", "moving", "moving_epoch", "old_at_ns", "partition_id", "policy", "producer_names",
        "purged_until", "quota", "rate", "readers", "refusals", "reliable", "replayed_end", "reserve_block",
        "reserving_until", "resumes_until_ns", "safe_until", "sizes", "sizes_base", "slot", "strict",
        "strict_end", "subscriptions", "switching", "topic", "unaged_until", "unsure_until", "uploaded",
    )  # fmt: skip

    def __init__(
        self,
        assigned: PartitionAssigned,
        log_slot: int,
        slot: int,
        timers: Timers[Subscription] | None = None,
    ) -> None:
        super().__init__(assigned.first_offset)
        self.assign(assigned)
        self.rate: Rate | None = None
        """How fast it may be published to; None: as fast as it is."""
        self._timers = timers or Timers()
        self.partition_id = assigned.partition_id
        self.topic = assigned.topic
        self.log_slot = log_slot
        self.slot = slot
        self.purged_until = 0
        """No read goes below, whatever the log still has of it."""
        self.subscriptions: dict[str, Subscription] = {}
        self.readers: list[Subscription] = []
        self.producer_names: dict[int, str] = {}
        self.reserve_block = 1 << 20
        self.safe_until = assigned.first_offset
        """Offsets below are reserved durably: they may be shown before they are in the log."""
        self.reserving_until = 0
        """The same of what is recorded, durably or not yet."""
        self.unsure_until = 0
        """It is not known which offsets below were used and lost, and which were never used."""
        self.strict_end = 0
        """End of the newest frame that becomes visible only when it is synced."""
        self.switching = 0
        """Changes of the durability that are under way."""
        self.refusals: dict[int, str] = {}
        """Why publishes are refused just now, by cause; written by `admission.gate`."""
        self.sizes: Sizes | None = None
        """Where its bytes lie, if a policy needs that."""
        self.sizes_base = 0
        """What `sizes` counts before `byte_count` began."""
        self.old_at_ns = 0
        """When its messages' ages are looked at next, monotonic."""
        self.unaged_until = 0
        """Subscriptions do not read below before it is known which messages are too old."""
        self.moving = Moving.NO
        """On its way between two logs, closed until the metadata has decided."""
        self.moving_epoch = 0
        """The owner's epoch once it has moved."""
        self.resumes_until_ns = 0
        """It came from another worker: until then its consumers go on where they were there."""
        self.last_offset = self.last_moved_ns = 0
        """Where the last of the consumers was seen, and since when."""
        self.compacted = Compacted(assigned.partition_id, 0, 0, 0, 0)
        self.breaks: list[int] = []
        """Offsets at which positions in the log fall: what is below was written again."""
        self.uploaded = Uploaded(assigned.partition_id, 0, 0, -1)
        """How far its messages are in the history of the object store."""
        self.replayed_end = 0
        """What the log said at the start of this partition ends here."""
        self._turn = 0

    @property
    def refusal(self) -> str:
        """Why publishes are refused just now, empty when they are not."""
        return self.refusals[min(self.refusals)] if self.refusals else ""

    @property
    def durability(self) -> Durability:
        """The topic's durability; it may change live."""
        return Durability(self.assigned.durability)

    def assign(self, assigned: PartitionAssigned) -> None:
        """Take over the topic's options as they are now."""
        self.assigned = assigned
        self.policy = assigned.policy
        self.quota = assigned.quota
        """Of its namespace."""
        # asked several times for every frame, and names of an enum are slow
        self.reliable = assigned.dispatch == Dispatch.RELIABLE.value
        """Messages are acked, redelivered and never dropped."""
        self.logged = self.reliable and assigned.durability != Durability.MEMORY.value
        """Messages are written to the log."""
        self.strict = self.logged and assigned.durability != Durability.OS.value
        """A message is in the log durably before a consumer sees it."""
        self.keeps_memory = self.reliable and not self.logged
        """Unacked messages live in memory only and must not be evicted."""

    @property
    def is_changing(self) -> bool:
        """Its durability is being changed, or it moves."""
        return bool(self.switching or self.moving)

    def begin_move(self, moving: Moving, owner_epoch: int) -> None:
        """Leave it to the metadata whether this log has the partition."""
        self.moving, self.moving_epoch = moving, owner_epoch

    def end_move(self) -> None:
        """Note that this log has the partition."""
        self.moving = Moving.NO

    def begin_switch(self) -> None:
        """Begin a change of the durability."""
        self.switching += 1

    def end_switch(self) -> None:
        """End one, whatever came of it."""
        self.switching -= 1

    def resume_until(self, at_ns: int) -> None:
        """Let consumers go on until then where they were on the worker that the partition came from."""
        self.resumes_until_ns = at_ns

    def set_rate(self, rate: Rate | None) -> None:
        """Bound how fast it may be published to; None: do not."""
        self.rate = rate

    # ------------------------------------------------------------ offsets

    def skip_to(self, next_offset: int) -> None:
        """Give out no offset below: some of them may have been used, and lost."""
        self.unsure_until = next_offset

    def next_reservation(self, next_offset: int) -> int:
        """Ask for a block of offsets, twice as large as the last one; where it ends."""
        until = next_offset + self.reserve_block
        self.reserving_until = max(self.reserving_until, until)
        self.reserve_block = min(2 * self.reserve_block, RESERVE_BLOCK_MAX)
        return until

    def note_reserved(self, until: int) -> None:
        """Note that the offsets below are reserved durably."""
        self.safe_until = max(self.safe_until, until)

    def restore_reserved(self, until: int) -> None:
        """Set the end of the offsets that are reserved durably, as a record says."""
        self.safe_until = until

    def await_sync(self, end_offset: int) -> None:
        """Show no frame below before it is synced."""
        self.strict_end = end_offset

    # ------------------------------------------------------------ frames

    def frame_at(self, read_log: ReadLog, offset: int) -> Stored | Gap | Pending:
        """The frame that holds a visible offset, for no subscription."""
        found = self.find_in_tail(offset)
        if found is not None:
            return found
        read = read_log(self, offset)
        return _first(read.frames, offset) if isinstance(read, Ready) else read

    def fetch(
        self, read_log: ReadLog, subscription: Subscription, offset: int
    ) -> Stored | Gap | Pending:
        """The frame that holds `offset` for a subscription; see `subscription.Fetch`."""
        if offset < self.purged_until:
            return Gap(self.purged_until, "these messages were purged", lost=True)
        if offset < self.unaged_until and subscription.tracks:
            return PENDING
        if subscription.prefetched and (cut := subscription.prefetched.take(offset)) is not None:
            return cut
        found = self.find_in_tail(offset)
        ahead = subscription.ahead
        if found is not None:
            if ahead:
                subscription.ahead = []
            return found
        while ahead and ahead[0].end_offset <= offset:
            ahead.pop(0)
        if ahead and ahead[0].base_offset <= offset:
            return ahead[0]
        oldest = self.oldest_in_tail()
        if not self.logged:
            end = self.visible
            if oldest is not None and offset < oldest.base_offset:
                end = oldest.base_offset
            if self.reliable:  # the topic may have been written to the log in former times
                read = read_log(self, offset)
                if read is PENDING:
                    return read
                first = _first(read.frames, offset) if isinstance(read, Ready) else read
                if isinstance(read, Ready) and isinstance(first, Stored):
                    subscription.ahead = read.frames
                    return first
                if isinstance(first, Gap):
                    end = min(end, first.end)
            reason = "the messages were kept in memory only and are gone"
            return Gap(end, reason, lost=end > self.unsure_until)
        read = read_log(self, offset)
        if isinstance(read, Ready):
            subscription.ahead = read.frames
            return _first(read.frames, offset)
        return read

    # ------------------------------------------------------------ written again

    def note_replayed(self, until: int) -> None:
        """Note up to where the log was read at the start."""
        self.replayed_end = max(self.replayed_end, until)

    def replay(self, start: int, end: int) -> bool:
        """Note a frame that the log has, at the start. False: it is a copy that was written again."""
        is_new = start >= self.replayed_end
        self.note_replayed(end)
        if not is_new:
            self.written_again(start, end)
        return is_new

    def note_compacted(self, record: Compacted) -> None:
        """Take over what a compaction left; its sizes have to be counted anew."""
        self.compacted = structs.replace(record, breaks=None)
        if record.breaks is not None:
            self.breaks = record.breaks
        self.sizes = None

    def keep_breaks(self, breaks: list[int]) -> None:
        """Forget all other breaks: the log has been trimmed."""
        self.breaks = breaks

    def note_uploaded(self, record: Uploaded) -> None:
        """Note how far its messages are in history, durably."""
        self.uploaded = record

    def is_in_history(self, offset: int) -> bool:
        """Whether a message is to be read from history, if the log does not have it."""
        return self.first_offset <= offset < self.uploaded.until

    def written_again(self, start: int, end: int) -> None:
        """Note that [start, end) stands behind all else of the log now, under its old offsets."""
        self.breaks = [at for at in self.breaks if at < start or at > end]
        insort(self.breaks, end)

    def places_from(self, offset: int) -> list[int]:
        """Offsets from which on positions in the log rise; what stands at the first message at or behind
        one of them stands lowest of all from `offset` on."""
        return [offset, *(at for at in self.breaks if at > offset)]

    # ------------------------------------------------------------ subscriptions

    def position(self, wanted: str | int) -> int:
        """Offset for "earliest", "latest" or an offset. Raises InvalidArgument on anything else."""
        if wanted == "latest":
            return self.visible
        if wanted == "earliest":
            return self.first_offset
        if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
            if wanted > self.visible:
                raise InvalidArgument(
                    f"offset {wanted} lies beyond the end of {self.topic}, which is at "
                    f"{self.visible}; use 'latest' to wait for new messages"
                )
            return max(wanted, self.first_offset)
        raise InvalidArgument(
            f"position {wanted!r} is none of 'earliest', 'latest' or an offset of 0 or above"
        )

    def subscribe(
        self, name: str, kind: SubscriptionKind, wanted: str | int
    ) -> tuple[Subscription, bool]:
        """The subscription of that name, created at a position if it is new (then True).

        Raises FailedPrecondition if it exists with another type.
        """
        existing = self.subscriptions.get(name)
        if existing is not None:
            if existing.kind is not kind:
                raise FailedPrecondition(
                    f"subscription {name!r} on {self.topic} is {existing.kind}; its type was fixed "
                    f"when it was created: use type='{existing.kind}' or another name"
                )
            return existing, False
        created = Subscription(
            self.partition_id, name, kind, self.position(wanted), tracks=self.reliable,
            timers=self._timers,
        )  # fmt: skip
        self.subscriptions[name] = created
        self.check_ages_at(0)  # it may begin at messages that are too old for others
        return created, True

    def forget_subscription(self, name: str) -> Subscription | None:
        """Keep nothing of a subscription that is gone."""
        gone = self.subscriptions.pop(name, None)
        if gone is not None:
            gone.start_over(gone.cursor)
            self._timers.forget(gone)
        return gone

    def forget_clients(self) -> None:
        """Forget its subscriptions, readers and producers: the partition is gone."""
        for name in list(self.subscriptions):
            self.forget_subscription(name)
        self.readers = []
        self.producer_names = {}

    def purge(self, until: int, *, restoring: bool = False) -> None:
        """Drop everything below `until`, for all subscriptions. `restoring`: a record says so."""
        self.purged_until = max(self.purged_until, until)
        self.first_offset = max(self.first_offset, until)
        for sub in self.subscriptions.values():
            if sub.cursor < until:
                if restoring:
                    sub.start_over(until)
                else:
                    sub.seek(until)

    def new_reader(self, wanted: str | int) -> Subscription:
        """A subscription without a name for one reader; it goes when the reader goes."""
        reader = Subscription(
            self.partition_id, "", SubscriptionKind.READER, self.position(wanted), tracks=False
        )
        self.readers.append(reader)
        return reader

    def all_subscriptions(self) -> list[Subscription]:
        """Named ones and readers."""
        return [*self.subscriptions.values(), *self.readers]

    def only_subscription(self) -> Subscription | None:
        """The named one or reader, if there is exactly one."""
        if len(self.subscriptions) + len(self.readers) != 1:
            return None
        return self.readers[0] if self.readers else next(iter(self.subscriptions.values()))

    def dispatch(self, read_log: ReadLog, now_ns: int, effects: list[Deliver]) -> list[Obstacle]:
        """Let every subscription with consumers hand out what it can; each begins in its turn.

        Returns gaps that were met, and errors of `read_log` that keep a subscription from going on.
        """
        met: list[Obstacle] = []

        def fetch(subscription: Subscription, offset: int) -> Stored | Gap | Pending:
            try:
                return self.fetch(read_log, subscription, offset)
            except DanubeError as error:
                met.append(Obstacle(subscription, error, len(effects)))
                return PENDING

        waiting = [sub for sub in self.all_subscriptions() if sub.consumers]
        if len(waiting) > 1:
            self._turn = (self._turn + 1) % len(waiting)
            waiting = waiting[self._turn :] + waiting[: self._turn]
        for subscription in waiting:
            for gap in subscription.dispatch(self.visible, fetch, now_ns, effects):
                met.append(Obstacle(subscription, gap, gap.place))
        return met

    def look_ahead(self, read_log: ReadLog, frames_max: int, on_delayed: OnDelayed) -> bool:
        """Let subscriptions without consumers learn when their delayed messages are due, some frames of
        one of them. False: that was all. Raises DataLoss for a log that cannot be read."""

        def fetch(subscription: Subscription, offset: int) -> Stored | Gap | Pending:
            return self.fetch(read_log, subscription, offset)

        subs = self.subscriptions.values()
        return any(sub.look_ahead(self.visible, fetch, frames_max, on_delayed) for sub in subs)

    def pass_on(self, stored: Stored, now_ns: int, effects: list[Deliver]) -> bool:
        """Hand the newest frame to the only subscription, if that waits for nothing else.

        False: `dispatch` has to look, and nothing was done.
        """
        only = self.only_subscription()
        return only is not None and only.pass_on(stored, now_ns, effects)

    def lag(self) -> tuple[int, int]:
        """How far the last subscription with consumers is behind, about, bytes; its next offset."""
        offset = min(
            (sub.next_offset for sub in self.all_subscriptions() if sub.consumers),
            default=self.visible,
        )
        return (self.visible - offset) * self.byte_count // max(1, self.message_count), offset

    def oldest_needed(self) -> int:
        """First offset that some named subscription still needs; `visible` if there is none."""
        cursors = [sub.cursor for sub in self.subscriptions.values() if sub.tracks]
        return min(cursors, default=self.visible)

    def watch_lag(self, now_ns: int) -> tuple[int, int]:
        """How far the last subscription is behind, as `lag`, and for how long it has not moved, ns."""
        behind, offset = self.lag()
        if offset != self.last_offset:
            self.last_offset, self.last_moved_ns = offset, now_ns
        return behind, now_ns - self.last_moved_ns

    # ------------------------------------------------------------ sizes and ages

    def know_sizes(self, sizes: Sizes, total: int) -> None:
        """Keep where its bytes lie, `total` of them up to now."""
        self.sizes_base = total - self.byte_count
        self.sizes = sizes

    def forget_sizes(self) -> None:
        """Keep them no more."""
        self.sizes = None

    def check_ages_at(self, at_ns: int) -> None:
        """Look at its messages' ages then, and not before."""
        self.old_at_ns = at_ns

    def await_ages(self, until: int) -> None:
        """Let no subscription read below an offset before ages are known; 0: they are."""
        self.unaged_until = until

    # ------------------------------------------------------------ records

    def cursor_records(self) -> list[Cursor | Acked | PendingGapsSet]:
        """Records of what changed in the cursors since the last call."""
        return [record for sub in self.subscriptions.values() for record in sub.cursor_records()]

    def subscription_records(
        self,
    ) -> list[SubscriptionCreated | Cursor | PolicySet | PendingGapsSet]:
        """Everything about the subscriptions, for a snapshot."""
        records: list[SubscriptionCreated | Cursor | PolicySet | PendingGapsSet] = []
        for sub in self.subscriptions.values():
            records.append(
                SubscriptionCreated(self.partition_id, sub.name, sub.kind.value, sub.cursor)
            )
            acked = sub.ledger.settled_pairs()
            records.append(Cursor(self.partition_id, sub.name, sub.cursor, acked))
            if sub.policy != FailurePolicy():
                records.append(
                    PolicySet(self.partition_id, sub.name, sub.policy, sub.policy_setter)
                )
            if sub.pending_gaps:
                records.append(sub.pending_gaps.record(self.partition_id, sub.name))
        return records


def _first(frames: list[Stored], offset: int) -> Stored | Gap:
    """The first of some frames, or the gap before it."""
    first = frames[0]
    return first if first.base_offset <= offset else Gap(first.base_offset, "never used")
