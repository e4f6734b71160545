r"""The promises about each message of one subscription. Independent of the engine: sets of
offsets and plain rules, fed with what passes the worker.

    not delivered -> held by one -> acked -> acked durably        must not come again, from then on
                          |           \-> (the worker dies) -> in doubt: may come again, or not
                          v
              nacked, timed out, holder gone: must come again, one delivery more if its application took it

Where the model cannot know (an ack that came just as its deadline went by), it allows both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from danube_fast.clock import MILLISECOND_NS
from danube_fast.testing.attached_model import Attached, Counted, Held, Known, Policy, takes
from danube_fast.testing.publishing_model import Violation
from danube_fast.testing.virtual_clock import VirtualClock

__all__ = ["SubscriptionModel"]

ATTEMPTS_MAX = 255  # more deliveries are not counted
ORDERED = ("exclusive", "failover")
GROUPS = ("shared", "key_shared")
GOODBYE_SURE_NS = 500 * MILLISECOND_NS
"""So long after a consumer was sent away for a move its acks count for certain."""
TIMEOUT_SOON_NS = 2000 * MILLISECOND_NS
DOUBTFUL_MAX = 10_000


@dataclass
class SubscriptionModel:
    """One subscription on one partition."""

    partition_id: int
    name: str
    kind: str
    start: int
    policy: Policy
    clock: VirtualClock
    is_silent: Callable[[int], bool]
    """Whether a session was silent for so long that the worker may have given it up."""
    consumers: list[Attached] = field(default_factory=list)
    """In the order in which they came."""
    settled: set[int] = field(default_factory=set)
    durable: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    """May come again, or not."""
    has_moved: bool = False
    """Or perhaps not, if the move was given up: then the worker still knows what we have forgotten."""
    tap: object = None
    """Of the worker that has it."""
    poisoned: set[int] = field(default_factory=set)
    """Failed too often, or perhaps: no consumer is owed these; dead letters are."""
    held: dict[int, Held] = field(default_factory=dict)
    known: dict[int, Known] = field(default_factory=dict)
    keys: dict[int, bytes | None] = field(default_factory=dict)
    due: dict[int, int] = field(default_factory=dict)
    """When messages are due, wall clock, ns; 0: at once."""
    unseen_ends: int = 0
    """Consumers that left with messages, perhaps, that did not pass the tap."""
    is_lagging: bool = False
    """A queue was full since the worker's start: messages reach the tap later than they were handed
    out, so who held what then is not known."""
    letters: set[int] = field(default_factory=set)
    """Of which a dead letter was seen."""
    sought: tuple[int, int] | None = None
    """Seeks that may not be durable: the place of the last one, and the end of what all of them concern."""
    _filters: set[tuple[str, ...]] = field(default_factory=set)
    _unsent: dict[int, Attached] = field(default_factory=dict)
    """Handed out to a connection that was gone: the worker takes an ack of these from that consumer,
    as it may have commands of it yet to read."""
    _acks: list[list[int]] = field(default_factory=list)
    """What each ACK since the last seek has settled: confirmed later, unless a seek undoes it."""
    _unsettled: dict[bytes, set[int]] = field(default_factory=dict)
    _newest: dict[bytes, int] = field(default_factory=dict)
    """The last that this life of the worker has handed out of each domain."""

    @property
    def label(self) -> str:
        """For a text."""
        return f"partition {self.partition_id}, {self.kind} subscription {self.name!r}"

    def _fault(self, offset: int, text: str) -> Violation:
        return Violation(f"{self.label}: message {offset} {text}")

    # ------------------------------------------------------------ consumers

    def attach(self, consumer: Attached) -> None:
        """SUBSCRIBE was read."""
        self.consumers.append(consumer)
        self._filters.add(consumer.filters)

    def wants(self, key: bytes | None) -> bool:
        """Whether every consumer there ever was takes this key: others may have been skipped."""
        return all(not filters or takes(filters, key) for filters in self._filters)

    def confirm(self, consumer: Attached) -> None:
        """SUBSCRIBE was answered."""
        consumer.is_confirmed = True
        if self.kind != "exclusive":
            return
        for other in self.consumers:
            if other is not consumer and other.is_confirmed and not self.may_be_dead(other):
                raise Violation(f"{self.label}: {other.name} and {consumer.name} at once")

    def detach(self, consumer: Attached, parting: str = "closed") -> None:
        """Free what a consumer held: it is gone. `parting`: closed, lost (its client goes on), died."""
        if consumer.is_gone:
            return
        if parting != "died" and self.may_be_dead(consumer):
            parting += ", perhaps died before"
        consumer.is_gone = True
        for offset, held in self.held.items():
            if held.consumer is consumer:
                self._freed(offset, held, parting)
        self.consumers = [other for other in self.consumers if other is not consumer]
        self.held = {at: held for at, held in self.held.items() if held.consumer is not consumer}
        if self.is_lagging or consumer.has_unsent:
            self.unseen_ends += 1
            for offset in self._unsent:
                self.known.setdefault(offset, Known(deliveries_max=self.unseen_ends - 1))
            for offset, known in self.known.items():
                known.deliveries_max += 1
                if "died" in parting:
                    self._may_have_failed(known, offset)

    def _freed(self, offset: int, held: Held, parting: str) -> None:
        """A message is not held any more as its consumer is gone, or as its time was over before. Only of a
        consumer that reports its death is a failure."""
        counted = self._counted(held.consumer, parting)
        known, reports = self.known[offset], held.consumer.reports
        is_late = held.deadline_ns <= self.clock.now_ns
        known.deliveries_min += offset in counted.surely
        known.deliveries_max += is_late or offset in counted.perhaps
        was_reported = reports and (held.frame, offset) < held.consumer.taken
        known.failures_min += parting == "died" and offset in counted.failed and not is_late
        if is_late or ("died" in parting and (was_reported or self.is_lagging)):
            self._may_have_failed(known, offset)
        known.is_out_of_turn |= is_late

    def _counted(self, consumer: Attached, parting: str) -> Counted:
        mine = {at: held for at, held in self.held.items() if held.consumer is consumer}
        if self.is_lagging and consumer.reports:  # which frame a message came in is not known
            return Counted(set(), set(mine), set())
        return consumer.count_end(mine, parting, self.clock.now_ns)

    # ------------------------------------------------------------ deliveries

    def charge(
        self, consumer: Attached, frame_bytes: int, payloads: Sequence[bytes | None]
    ) -> None:
        """A frame left for a consumer. Raises Violation if it had no credit for that."""
        fault = consumer.charge(frame_bytes, payloads, is_cut=self.kind in GROUPS)
        if fault:
            raise Violation(f"{self.label}: {consumer.name} was sent {fault}")

    def deliver(
        self, consumer: Attached, offset: int, key: bytes | None, attempts: int, *, is_late: bool
    ) -> None:
        """A message left for a consumer, in the last frame that this was sent. `is_late`: it waited in a queue
        that was full."""
        now_ns = self.clock.now_ns
        self.keys[offset] = key
        if consumer.is_gone:
            raise self._fault(offset, "went to a consumer that is gone")
        if consumer.is_outdated and not (is_late or self.is_lagging):
            raise self._fault(
                offset,
                f"went to {consumer.name}, whose acks may be from before the seek of another",
            )
        consumer.has_received = True
        if offset in self.durable:
            raise self._fault(offset, "was acked durably and came again")
        known = self.known.get(offset)
        is_first = known is None and not attempts
        if known is None:
            known = self.known[offset] = Known(deliveries_max=self.unseen_ends)
            known.failures_max = self.unseen_ends
            if self.has_moved:  # the worker may know more of it than we do, and its failures
                known.failures_max = max(known.failures_max, attempts)
                known.is_out_of_turn = bool(attempts)
        if not (is_late or self.is_lagging):
            self._check_holder(consumer, offset, key)
            self._check_state(offset, known, now_ns)
            self._check_attempts(offset, known, attempts)
            self._check_order(consumer, offset, key, is_first=is_first)
            known.deliveries_min = known.deliveries_max = attempts
        else:
            if offset in self.held:  # its time may have been over, or its holder gone
                self._failed(offset, certainly=False)
            known.deliveries_min = min(known.deliveries_min, attempts)
            known.deliveries_max = max(known.deliveries_max, attempts) + 1
        self.doubtful.discard(offset)
        self.settled.discard(offset)
        known.not_before_ns = 0
        timeout_ns = self.policy.ack_timeout_ms * MILLISECOND_NS or (1 << 62)
        self.held[offset] = Held(consumer, now_ns + timeout_ns, consumer.frames - 1)
        consumer.counted = None  # it lived, and holds more now

    def not_sent(self, consumer: Attached, offset: int) -> None:
        """A message was handed out, and the connection was gone."""
        self._unsent[offset] = consumer
        consumer.has_unsent = True

    def _check_state(self, offset: int, known: Known, now_ns: int) -> None:
        if offset in self.settled and offset not in self.doubtful:
            raise self._fault(offset, "was acked and came again")
        early_ns = self.due[offset] - self.clock.wall_ns()
        if early_ns > 0:
            raise self._fault(offset, f"came {early_ns / MILLISECOND_NS:.3f} ms before it was due")
        if now_ns < known.not_before_ns:
            early_ms = (known.not_before_ns - now_ns) / MILLISECOND_NS
            raise self._fault(offset, f"came again {early_ms:.3f} ms before its delay was over")
        if known.failures_min > self.policy.max_redelivery_count:
            raise self._fault(offset, f"failed {known.failures_min} times and came again")

    def _check_holder(self, consumer: Attached, offset: int, key: bytes | None) -> None:
        held = self.held.get(offset)
        if held is not None:
            if not self.may_be_free(held):
                raise self._fault(
                    offset,
                    f"went to consumer {consumer.name} while {held.consumer.name} holds it",
                )
            self._freed(offset, held, "died" if self.may_be_dead(held.consumer) else "closed")
        if consumer.filters and not takes(consumer.filters, key):
            raise self._fault(
                offset, f"has key {key!r}, which consumer {consumer.name} filters out"
            )
        if self.kind in ORDERED:
            for first in self.consumers:
                if first is consumer:
                    break
                if not self.may_be_dead(first):
                    raise self._fault(
                        offset, f"went to {consumer.name} while {first.name} is the active one"
                    )
        if self.kind == "key_shared" and key is not None:
            for other, holding in self.held.items():
                if (
                    self.keys.get(other) == key
                    and holding.consumer is not consumer
                    and not self.may_be_free(holding)
                ):
                    raise self._fault(
                        offset,
                        f"of key {key!r} went to {consumer.name} while {holding.consumer.name} "
                        f"holds {other} of that key",
                    )

    def _check_attempts(self, offset: int, known: Known, attempts: int) -> None:
        least, most = known.deliveries_min, ATTEMPTS_MAX if self.has_moved else known.deliveries_max
        if not min(least, ATTEMPTS_MAX) <= attempts <= most:
            raise self._fault(
                offset, f"has redelivery_count {attempts}, where {least} to {most} were delivered"
            )

    def _check_order(
        self, consumer: Attached, offset: int, key: bytes | None, *, is_first: bool
    ) -> None:
        """Nothing overtakes: what was handed out before it and given back goes before it, unless it
        failed, and what comes for the first time comes in order; all of a partition, or all of a key."""
        domain = self._domain(key)
        if domain is None or self.due[offset]:
            return
        if not self.known[offset].is_out_of_turn:
            for other in self._unsettled.get(domain, ()):
                if other < offset and not self._may_be_passed(other, consumer):
                    raise self._fault(offset, f"overtook {other}")
        newest = self._newest.get(domain, -1)
        if is_first and offset < newest:
            raise self._fault(offset, f"came for the first time behind {newest}")
        self._newest[domain] = max(offset, newest)
        self._unsettled.setdefault(domain, set()).add(offset)

    def _domain(self, key: bytes | None) -> bytes | None:
        """Messages of the same domain keep their order; None: there is no order."""
        if self.kind in ORDERED:
            return b""
        return key if self.kind == "key_shared" else None

    def _may_be_passed(self, offset: int, consumer: Attached) -> bool:
        known = self.known.get(offset)
        if known is None or known.is_out_of_turn or not self.is_owed(offset):
            return True
        if offset in self.poisoned or not self.wants(self.keys.get(offset)):
            return True  # it waits for its dead letter, for good, or for none
        held = self.held.get(offset)
        if held is None:
            return False
        is_last = known.failures_max >= self.policy.max_redelivery_count
        if is_last and self._may_fail_by_death(offset, held):
            return True
        return held.consumer is consumer or held.deadline_ns <= self.clock.now_ns

    def _may_fail_by_death(self, offset: int, held: Held) -> bool:
        consumer = held.consumer
        if not consumer.reports or not self.may_be_dead(consumer):
            return False
        return self.is_lagging or (held.frame, offset) < consumer.taken

    def may_be_free(self, held: Held) -> bool:
        """Whether the worker may have taken it back by now."""
        if held.consumer.is_gone or self.may_be_dead(held.consumer):
            return True
        return held.deadline_ns <= self.clock.now_ns

    def may_be_dead(self, consumer: Attached) -> bool:
        """Whether the worker may have given up its session."""
        return self.is_silent(consumer.session)

    # ------------------------------------------------------------ acks and failures

    def ack(self, consumer: Attached, low: int, high: int) -> list[int]:
        """ACK was read; which messages it settles. Those that others hold are left alone."""
        settled: list[int] = []
        self._acks.append(settled)
        for offset, other in self._unsent.items():
            if other is consumer and low <= offset < high and offset not in self.settled:
                self.doubtful.add(offset)
        for offset in self._held_by(consumer, low, high):
            held = self.held.pop(offset)
            if self.may_be_free(held) or self.is_lagging:
                self.doubtful.add(offset)
                self._failed(offset, certainly=False)
                continue
            self.settled.add(offset)
            settled.append(offset)
            domain = self._domain(self.keys.get(offset))
            if domain is not None:
                self._unsettled.get(domain, set()).discard(offset)
        return settled

    def send_away(self, consumer: Attached) -> None:
        """Its partition is about to move, and all are told: it gets nothing more, and for a while its
        acks count."""
        soon_ns = self.clock.now_ns + TIMEOUT_SOON_NS
        for offset, held in self.held.items():
            held.consumer.left_with[offset] = held
            # while its last acks are waited for the timeout of others may go by, or one may die
            failures = self.known[offset].failures_max + (held.deadline_ns <= soon_ns)
            failures += held.consumer.reports
            if failures > self.policy.max_redelivery_count:
                self.poisoned.add(offset)
        consumer.left_ns = self.clock.now_ns
        self.detach(consumer)
        self.moved()

    def ack_last(self, consumer: Attached, low: int, high: int) -> list[int]:
        """ACK of a consumer that was sent away was read; which messages it settles."""
        settled: list[int] = []
        is_sure = self.clock.now_ns - consumer.left_ns < GOODBYE_SURE_NS and not self.is_lagging
        for offset, held in list(consumer.left_with.items()):
            if not low <= offset < high:
                continue
            if is_sure and held.deadline_ns > self.clock.now_ns:
                self.settled.add(offset)
                self.doubtful.discard(offset)
                settled.append(offset)
            else:
                self.doubtful.add(offset)
        if self.is_lagging:
            self.doubtful.update(range(low, min(high, low + DOUBTFUL_MAX)))
        return settled

    def nack(self, consumer: Attached, low: int, high: int, delay_ms: int) -> None:
        """NACK was read."""
        for offset in self._held_by(consumer, low, high):
            held = self.held.pop(offset)
            known = self.known[offset]
            if self.may_be_free(held) or self.is_lagging:
                self._failed(offset, certainly=False)
                continue
            self._failed(offset, certainly=True)
            wait_ns = delay_ms * MILLISECOND_NS
            if delay_ms < 0:
                wait_ns = self.policy.delay_min_ns(known.failures_min)
            known.not_before_ns = self.clock.now_ns + wait_ns

    def _failed(self, offset: int, *, certainly: bool) -> None:
        """Note a failure: a nack, an ack timeout, or the death of the consumer."""
        known = self.known[offset]
        known.deliveries_max += 1
        known.deliveries_min += certainly
        known.failures_min += certainly
        known.is_out_of_turn = True
        self._may_have_failed(known, offset)

    def _may_have_failed(self, known: Known, offset: int) -> None:
        known.failures_max += 1
        if known.failures_max > self.policy.max_redelivery_count:
            self.poisoned.add(offset)

    def suspect(self, consumer: Attached) -> None:
        """Remember what its death counts, if it may be dead, before a command of it is believed."""
        if self.may_be_dead(consumer):
            self._counted(consumer, "died")

    def _held_by(self, consumer: Attached, low: int, high: int) -> list[int]:
        self.suspect(consumer)
        return [
            offset
            for offset, held in self.held.items()
            if low <= offset < high and held.consumer is consumer
        ]

    def extend(self, consumer: Attached, low: int, high: int, wait_ms: int) -> None:
        """EXTEND was read."""
        wait_ns = (wait_ms or self.policy.ack_timeout_ms) * MILLISECOND_NS
        for offset in self._held_by(consumer, low, high):
            if (held := self.held[offset]).deadline_ns > self.clock.now_ns:
                held.deadline_ns = self.clock.now_ns + wait_ns

    def overdue(self) -> None:
        """Allow what is held for too long, or by a consumer that may be dead, to have failed by now."""
        for offset, held in self.held.items():
            is_over = held.deadline_ns <= self.clock.now_ns or self._may_fail_by_death(offset, held)
            if is_over and self.known[offset].failures_max >= self.policy.max_redelivery_count:
                self.poisoned.add(offset)

    def confirm_acks(self, offsets: list[int], sought: tuple[int, int] | None) -> None:
        """These acks are durable, and so is that seek."""
        self.durable.update(offset for offset in offsets if offset in self.settled)
        if sought is self.sought:
            self.sought = None

    def seek(self, offset: int, seeker: Attached | None) -> None:
        """SEEK was read; `seeker` is None if it was read a while ago."""
        for other in self.consumers:
            other.counted = None
        for other in self.consumers if seeker is not None else ():
            other.is_outdated = other.has_received and other is not seeker
        # A death may undo the seek before this one as well, and bring back acks from before both: what that one
        # made new, and was not handed out since, is in none of these sets any more.
        before = offset if self.sought is None else self.sought[1]
        top = max(*self.known, *self.settled, *self.doubtful, before, offset)
        self.doubtful = set()
        while self._acks:
            self._acks.pop().clear()
        self.settled = set(range(self.start, offset))
        self.durable = set()
        self.start = min(self.start, offset)
        self.held.clear()
        self.known = {}
        self.poisoned.clear()
        self.sought = (offset, top)
        self._unsettled.clear()
        self._newest.clear()

    def may_have_sought(self) -> None:
        """A SEEK was read whose answer waits in a queue."""
        self.doubtful |= self.settled | set(self.known)
        self.durable.clear()

    # ------------------------------------------------------------ the worker's death

    def worker_died(self) -> None:
        """Forget what was only in the worker's memory."""
        self.overdue()
        for consumer in list(self.consumers):
            consumer.is_gone = True
        self.consumers = []
        self.held.clear()
        self.known = {}
        self.doubtful |= self.settled - self.durable
        if self.sought is not None:
            self.doubtful |= set(range(self.start, self.sought[1] + 1))
            self.durable.clear()
            self.sought = None
        self.is_lagging = False
        self.unseen_ends = 0
        self._unsettled.clear()
        self._newest.clear()

    def moved(self) -> None:
        """The partition leaves its worker, or tries to; what was in memory may stay behind."""
        self.worker_died()
        self.has_moved = True

    def is_owed(self, offset: int) -> bool:
        """Whether the subscription must still get a message."""
        return (
            offset >= self.start
            and offset not in self.settled
            and offset not in self.doubtful
            and not self._is_excused(offset)
        )

    def _is_excused(self, offset: int) -> bool:
        """Whether it failed too often, and what the policy says was done with it."""
        if self.policy.poison_policy == "dead_letter":
            return offset in self.letters
        is_unseen = offset not in self.known and self.unseen_ends > self.policy.max_redelivery_count
        return offset in self.poisoned or is_unseen
