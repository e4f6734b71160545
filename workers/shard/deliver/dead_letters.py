"""Dead letters: messages that failed too often go to another topic, then count as acked.

    poisoned -> queue -> target of its topic: find the topic, open producers -> publish -> acked

The topic may live on another worker: then frames pass through the mailbox, as those of clients do
(`forward.py`). A dead letter is acked in its subscription only when it is durable; a failed step is
tried again, so a dead letter may appear twice after a crash or a move, and is never lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from danube_fast.broker import messages as m
from danube_fast.broker.ledger.layout import State
from danube_fast.broker.sparse import place_of
from danube_fast.broker.subscription.consumer import Gap, Stored
from danube_fast.broker.subscription.policy import FailurePolicy, Poison
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.countdown import Countdown, Done
from danube_fast.errors import (
    DanubeError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    PermissionDenied,
)
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.view import FrameView
from danube_fast.net.protocol import Status
from danube_fast.roles import COORDINATOR
from danube_fast.types import Permission
from danube_fast.undecided import when_decided
from danube_fast.workers.process.access import may_not_publish
from danube_fast.workers.process.mailbox import Reply
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.job import Job
from danube_fast.workers.shard.publish.group import Publication
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.publish.producers import Producers
from danube_fast.workers.shard.read.log_reader import LogReader
from danube_fast.workers.shard.state import ShardState

__all__ = ["DeadLetters", "refuse_own_topic"]

_log = logging.getLogger(__name__)

PRODUCER_NAME = "dead-letters"
IN_FLIGHT_MAX = 256
"""Dead letters of one target that are published and not durable yet."""
RETRY_NS = 1_000_000_000
REASON_CHARACTERS_MAX = 1000
_REFUSALS = (FailedPrecondition, InvalidArgument, PermissionDenied)
_DONE = (Status.OK, Status.DUPLICATE)


def refuse_own_topic(policy: FailurePolicy, topic: str) -> None:
    """Raise InvalidArgument for a policy that publishes the dead letters of a topic to itself: they would
    fail there again, for ever."""
    if policy.dead_letter_topic == topic:
        raise InvalidArgument(
            f"dead_letter_topic {topic} is the topic of the subscription itself, where its dead letters "
            "would fail again and again; name another one"
        )


class _DeadLetter(NamedTuple):
    """One message that failed too often."""

    sub: Subscription
    offset: int
    failures: int
    reason: str
    policy: FailurePolicy
    """The policy under which it failed: a new policy gives it another chance."""


class _Place:
    """A partition of a dead-letter topic, and our producer there."""

    def __init__(self, partition_id: int, process: int) -> None:
        self.partition_id, self.process = partition_id, process
        self.producer_id = self.epoch = self.next_sequence = 0


class _Target:
    """Dead letters for one topic."""

    def __init__(self) -> None:
        self.waiting: deque[_DeadLetter] = deque()
        self.places: list[_Place] = []
        self.is_opening = False
        self.in_flight: set[tuple[Subscription, int]] = set()
        """Published and not durable yet."""
        self.retry_ns = self.turn = 0
        self.fault = ""
        """Why dead letters have to wait; empty: they do not."""


class DeadLetters(Job):
    """Publish the dead letters of one worker. Used by its loop only."""

    def __init__(
        self, state: ShardState, consumers: Consumers, producers: Producers, intake: Intake,
        reader: LogReader,
    ) -> None:  # fmt: skip
        self._access = producers.access
        self._version = None if self._access is None else self._access.version
        self._state, self._consumers, self._producers = state, consumers, producers
        self._intake, self._reader = intake, reader
        consumers.take_poisoned = self.take
        self._targets: dict[tuple[str, str], _Target] = {}
        """By topic, and the principal whose right it needs."""

    @property
    def is_guarded(self) -> bool:
        """Whether who sets a failure policy needs a right to its dead-letter topic, then and as long as it is used."""
        return self._access is not None

    @staticmethod
    def _key(sub: Subscription) -> tuple[str, str]:
        return sub.policy.dead_letter_topic, sub.policy_setter

    def take(self, sub: Subscription) -> None:
        """Queue the poisoned messages of a subscription."""
        target = self._targets.setdefault(self._key(sub), _Target())
        for start, end, failures, reason in sub.take_poisoned():
            target.waiting += [
                _DeadLetter(sub, offset, failures, reason, sub.policy)
                for offset in range(start, end)
            ]

    def fault_of(self, sub: Subscription) -> str:
        """Tell why the dead letters of a subscription have to wait, or would; empty: they do not."""
        policy = sub.policy
        names_topic = policy.poison_policy is Poison.DEAD_LETTER
        if self.is_guarded and names_topic and not sub.policy_setter:
            return str(may_not_publish("", policy.dead_letter_topic))
        target = self._targets.get(self._key(sub))
        return target.fault if target is not None and sub.ledger.blocked else ""

    def check(self, policy: FailurePolicy, setter: str, done: Done) -> None:
        """Ask whether a topic takes dead letters, if it is there already; `done` with why it does not. A
        coordinator that is down now is asked when there are dead letters."""
        if not policy.dead_letter_topic:
            done(None)
            return

        def told(reply: Reply) -> None:
            is_refused = isinstance(reply.error, _REFUSALS)
            done(reply.error if is_refused else None)

        topic = policy.dead_letter_topic
        question = m.FindDeadLetterTopic(topic, create=False, setter=setter)
        self._state.boot.mailbox.call(COORDINATOR, question, on_reply=told)

    @property
    def is_busy(self) -> bool:
        """Whether dead letters wait."""
        return any(target.waiting for target in self._targets.values())

    def do_work(self, now_ns: int) -> None:
        """Publish dead letters that wait."""
        if self._access is not None and self._access.version != self._version:
            self._version = self._access.version
            self._check_targets()
        for key, target in list(self._targets.items()):
            if not target.waiting and not target.in_flight:
                del self._targets[key]
            elif target.waiting and now_ns >= target.retry_ns and not target.is_opening:
                if target.places:
                    self._publish_some(target)
                else:
                    self._open(key, target)

    def _check_targets(self) -> None:
        """Stop what goes on without a right, now that rights have changed."""
        for key, target in self._targets.items():
            if target.places:
                self._when_allowed(key, target, lambda: None)

    def _when_allowed(
        self, key: tuple[str, str], target: _Target, go_on: Callable[[], None]
    ) -> None:
        """Go on if dead letters may go to a topic on behalf of a principal, now or when that is known; have them wait
        otherwise."""

        def step() -> None:
            topic, setter = key
            try:
                if self._access is not None:
                    self._access.authorize(setter, Permission.PRODUCE, topic)
            except PermissionDenied:
                raise may_not_publish(setter, topic) from None
            go_on()

        when_decided(step, lambda error: self._fail(key, target, error))

    # ------------------------------------------------------------ opening

    def _open(self, key: tuple[str, str], target: _Target) -> None:
        """Find or create the topic, and open a producer on each of its partitions."""
        target.is_opening = True
        self._when_allowed(key, target, lambda: self._find(key, target))

    def _find(self, key: tuple[str, str], target: _Target) -> None:
        topic, setter = key
        mailbox = self._state.boot.mailbox

        def located(reply: Reply) -> None:
            if reply.error is not None:
                self._fail(key, target, reply.error)
                return
            places = [_Place(*entry) for entry in reply.value.partitions]

            def ready() -> None:
                target.places, target.is_opening, target.fault = places, False, ""

            def opened(error: DanubeError | None) -> None:
                if error is not None:
                    self._fail(key, target, error)
                else:
                    self._when_allowed(key, target, ready)

            with Countdown(opened) as countdown:
                for place in places:
                    self._open_place(place, countdown.add())

        mailbox.call(COORDINATOR, m.FindDeadLetterTopic(topic, setter=setter), on_reply=located)

    def _open_place(self, place: _Place, done: Done) -> None:
        def opened(value: m.Opened | None, error: DanubeError | None) -> None:
            if value is None:
                done(error or Internal("a producer was not opened"))
                return
            place.producer_id, place.epoch = value.producer_id, value.producer_epoch
            place.next_sequence = value.next_sequence
            done(None)

        own = self._state.boot.config.process_index
        name = f"{PRODUCER_NAME}-{own}"
        if place.process != own:
            self._state.boot.mailbox.call(
                place.process, m.OpenProducer(place.partition_id, name),
                on_reply=lambda reply: opened(reply.value, reply.error),
            )  # fmt: skip
            return
        try:
            self._producers.register(self._session, place.partition_id, name, opened)
        except DanubeError as error:
            opened(None, error)

    @property
    def _session(self) -> int:
        """Session number of our own producers: below -1, like those of other processes."""
        return -1 - self._state.boot.config.process_index

    def _fail(self, key: tuple[str, str], target: _Target, error: DanubeError) -> None:
        """Open the topic again in a while: it cannot be published to just now."""
        if target.fault != str(error):
            _log.warning("dead letters for %s have to wait: %s", key[0], error)
        target.fault = str(error)
        target.places, target.is_opening = [], False
        target.retry_ns = self._state.now_ns + RETRY_NS

    # ------------------------------------------------------------ publishing

    def _publish_some(self, target: _Target) -> None:
        repeated: list[_DeadLetter] = []
        while target.waiting and target.places and len(target.in_flight) < IN_FLIGHT_MAX:
            message = target.waiting.popleft()
            sub, offset = message.sub, message.offset
            partition = self._state.partition(sub.partition_id)
            if partition is None or partition.subscriptions.get(sub.name) is not sub:
                continue
            if message.policy is not sub.policy:
                continue  # it was given another chance
            if sub.ledger.state_of(offset)[0] is not State.BLOCKED:
                continue  # it was acked or skipped meanwhile
            if (sub, offset) in target.in_flight:
                repeated.append(message)  # it failed once more: wait for the outcome of the first
                continue
            try:
                found = partition.frame_at(self._reader.read_now, offset)
            except DanubeError as error:
                _log.error("a dead letter of %s cannot be read: %s", partition.topic, error)
                continue
            if isinstance(found, Stored) and place_of(found, offset) >= 0:
                self._publish(target, message, found)
            elif isinstance(found, Gap):  # gone from the log meanwhile
                self._mark_acked(message)
            elif self._reader.is_in_history(partition, offset):
                repeated.append(message)  # it is being fetched
        target.waiting += repeated

    def _publish(self, target: _Target, message: _DeadLetter, stored: Stored) -> None:
        place = target.places[target.turn % len(target.places)]
        destination = self._key(message.sub)
        try:
            frame = self._frame(message, stored, place)
        except DanubeError as error:  # compressed garbage: it stays blocked
            _log.error(
                "message %d of %s is no dead letter: %s", message.offset, destination[0], error
            )
            return
        target.turn += 1
        place.next_sequence += 1
        key = message.sub, message.offset
        target.in_flight.add(key)
        bundle = sealed_bundle([(place.partition_id, frame)])

        def answered(status: int, text: str) -> None:
            target.in_flight.discard(key)
            if status in _DONE:
                self._mark_acked(message)
                return
            if status == InvalidArgument.code:  # too large with its attributes: it stays blocked
                _log.error("message %d cannot go to %s: %s", message.offset, destination[0], text)
                return
            target.waiting.appendleft(message)
            if target.places and place in target.places:
                self._fail(destination, target, DanubeError(text))

        if place.process == self._state.boot.config.process_index:

            def done(publication: Publication) -> None:
                status = publication.statuses[0]
                answered(status, publication.texts.get(status, f"status {status}"))

            publication = Publication(self._session, 0, done)
            self._intake.publish(publication, bytearray(bundle), self._state.now_wall_ns)
            return

        def replied(reply: Reply) -> None:
            status = Status.NOT_OWNER if reply.error is not None else reply.value[0]
            answered(status, str(reply.error or f"status {status}"))

        self._state.boot.mailbox.call(place.process, m.PublishBundle(), bundle, on_reply=replied)

    def _frame(self, message: _DeadLetter, stored: Stored, place: _Place) -> bytearray:
        """Copy the message into a frame, with attributes that say where it comes from."""
        view = FrameView(stored.memory)
        row = place_of(stored, message.offset)
        attributes = (view.attributes(row, row + 1) or [{}])[0]
        sub = message.sub
        partition = self._state.catalog.by_id[sub.partition_id]
        origin = {
            "x-original-topic": partition.topic,
            "x-original-partition": str(partition.assigned.index),
            "x-original-subscription": sub.name,
            "x-original-topic-offset": str(message.offset),
            "x-delivery-attempt": str(message.failures),
            "x-failure-reason": message.reason[:REASON_CHARACTERS_MAX],
            "x-poison-policy": sub.policy.poison_policy.value,
        }
        return encode_frame(
            view.payloads(row, row + 1),
            keys=view.keys(row, row + 1),
            attributes=[attributes | origin],
            event_times=view.event_times(row, row + 1),
            producer_id=place.producer_id,
            base_sequence=place.next_sequence,
            publish_time_ns=self._state.now_wall_ns,
            producer_epoch=place.epoch,
            schema_id=view.schema_id,
            schema_version=view.schema_version,
        )

    def _mark_acked(self, message: _DeadLetter) -> None:
        message.sub.dead_letter_done(message.offset, message.offset + 1)
        self._consumers.touch(message.sub)
