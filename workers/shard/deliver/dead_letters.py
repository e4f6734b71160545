"""Dead letters: messages that failed too often go to another topic, then count as acked.

    poisoned -> queue -> target of its topic: find the topic, open producers -> publish -> settled

The topic may live on another worker: then frames pass through the mailbox, as those of clients do
(`forward.py`). A letter is settled in its subscription only when it is durable; whatever fails is
tried again, so a letter may appear twice after a crash or a move, and is never lost.
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
from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.errors import DanubeError, FailedPrecondition, Internal, InvalidArgument
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.view import FrameView
from danube_fast.net.protocol import Status
from danube_fast.roles import COORDINATOR
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
"""Letters of one target that are published and not durable yet."""
RETRY_NS = 1_000_000_000
REASON_CHARACTERS_MAX = 1000
_DONE = (Status.OK, Status.DUPLICATE)


def refuse_own_topic(policy: FailurePolicy, topic: str) -> None:
    """Raises InvalidArgument for a policy that publishes the letters of a topic to itself: they would fail
    there again, for ever."""
    if policy.dead_letter_topic == topic:
        raise InvalidArgument(
            f"dead_letter_topic {topic} is the topic of the subscription itself, where its letters would "
            "fail again and again; name another one"
        )


class _Letter(NamedTuple):
    """One message that failed too often."""

    sub: Subscription
    offset: int
    failures: int
    reason: str
    policy: FailurePolicy
    """Under which it failed: under another it gets another chance, and then another letter."""


class _Place:
    """A partition of a dead-letter topic, and our producer there."""

    __slots__ = ("epoch", "next_sequence", "partition_id", "process", "producer_id")

    def __init__(self, partition_id: int, process: int) -> None:
        self.partition_id = partition_id
        self.process = process
        self.producer_id = self.epoch = self.next_sequence = 0


class _Target:
    """What waits for one dead-letter topic."""

    __slots__ = ("fault", "in_flight", "is_opening", "letters", "places", "retry_ns", "turn")

    def __init__(self) -> None:
        self.letters: deque[_Letter] = deque()
        self.places: list[_Place] = []
        self.is_opening = False
        self.in_flight: set[tuple[Subscription, int]] = set()
        """Letters that are published and not durable yet."""
        self.retry_ns = 0
        self.turn = 0
        self.fault = ""
        """Why letters have to wait; empty: they do not."""


class DeadLetters(Job):
    """All targets of one worker. Used by its loop only."""

    def __init__(
        self, state: ShardState, consumers: Consumers, producers: Producers, intake: Intake,
        reader: LogReader,
    ) -> None:  # fmt: skip
        self._state = state
        self._consumers = consumers
        self._producers = producers
        self._intake = intake
        self._reader = reader
        consumers.take_poisoned = self.take
        self._targets: dict[str, _Target] = {}

    def take(self, sub: Subscription) -> None:
        """Publish what a subscription has poisoned."""
        target = self._targets.setdefault(sub.policy.dead_letter_topic, _Target())
        for start, end, failures, reason in sub.take_poisoned():
            target.letters += [
                _Letter(sub, offset, failures, reason, sub.policy) for offset in range(start, end)
            ]

    def fault_of(self, sub: Subscription) -> str:
        """Why the letters of a subscription have to wait; empty: they do not."""
        target = self._targets.get(sub.policy.dead_letter_topic)
        return target.fault if target is not None and sub.ledger.blocked else ""

    def check(self, policy: FailurePolicy, done: Callable[[DanubeError | None], None]) -> None:
        """Ask whether a topic takes dead letters, if it is there already; `done` with why it does not. Who
        cannot be asked just now is asked when there are letters."""
        if not policy.dead_letter_topic:
            done(None)
            return

        def told(reply: Reply) -> None:
            is_refused = isinstance(reply.error, FailedPrecondition | InvalidArgument)
            done(reply.error if is_refused else None)

        question = m.FindLetterTopic(policy.dead_letter_topic, create=False)
        self._state.boot.mailbox.call(COORDINATOR, question, on_reply=told)

    @property
    def is_busy(self) -> bool:
        """Whether letters wait."""
        return bool(self._targets) and any(each.letters for each in self._targets.values())

    def do_work(self, now_ns: int) -> None:
        """Publish what can be published."""
        for topic, target in list(self._targets.items()):
            if not target.letters and not target.in_flight:
                del self._targets[topic]
            elif target.letters and now_ns >= target.retry_ns and not target.is_opening:
                if target.places:
                    self._publish_some(target)
                else:
                    self._open(topic, target)

    # ------------------------------------------------------------ opening

    def _open(self, topic: str, target: _Target) -> None:
        """Find the topic, which is made if it is missing, and open a producer on its partitions."""
        target.is_opening = True
        mailbox = self._state.boot.mailbox

        def located(reply: Reply) -> None:
            if reply.error is not None:
                self._fail(topic, target, reply.error)
                return
            places = [_Place(*entry) for entry in reply.value.partitions]
            left = len(places)

            def opened(place: _Place, value: m.Opened | None, error: DanubeError | None) -> None:
                nonlocal left
                left -= 1
                if value is None:
                    self._fail(topic, target, error or Internal("a producer was not opened"))
                    return
                place.producer_id = value.producer_id
                place.epoch = value.producer_epoch
                place.next_sequence = value.next_sequence
                if left == 0 and target.is_opening:
                    target.places, target.is_opening, target.fault = places, False, ""

            for place in places:
                self._open_place(place, opened)

        mailbox.call(COORDINATOR, m.FindLetterTopic(topic), on_reply=located)

    def _open_place(
        self, place: _Place, opened: Callable[[_Place, m.Opened | None, DanubeError | None], None]
    ) -> None:
        own = self._state.boot.config.process_index
        name = f"{PRODUCER_NAME}-{own}"
        if place.process != own:
            self._state.boot.mailbox.call(
                place.process, m.OpenProducer(place.partition_id, name),
                on_reply=lambda reply: opened(place, reply.value, reply.error),
            )  # fmt: skip
            return
        try:
            self._producers.register(
                self._session, place.partition_id, name,
                lambda value, error: opened(place, value, error),
            )  # fmt: skip
        except DanubeError as error:
            opened(place, None, error)

    @property
    def _session(self) -> int:
        """The session of our own producers: below -1, like those of other processes."""
        return -1 - self._state.boot.config.process_index

    def _fail(self, topic: str, target: _Target, error: DanubeError) -> None:
        """Something is not there: begin again in a while."""
        if target.fault != str(error):
            _log.warning("dead letters for %s have to wait: %s", topic, error)
        target.fault = str(error)
        target.places, target.is_opening = [], False
        target.retry_ns = self._state.now_ns + RETRY_NS

    # ------------------------------------------------------------ publishing

    def _publish_some(self, target: _Target) -> None:
        repeated: list[_Letter] = []
        while target.letters and target.places and len(target.in_flight) < IN_FLIGHT_MAX:
            letter = target.letters.popleft()
            partition = self._state.partition(letter.sub.partition_id)
            if partition is None or partition.subscriptions.get(letter.sub.name) is not letter.sub:
                continue
            if letter.policy is not letter.sub.policy:
                continue  # it was given another chance
            if letter.sub.ledger.state_of(letter.offset)[0] is not State.BLOCKED:
                continue  # somebody has decided otherwise
            if (letter.sub, letter.offset) in target.in_flight:
                repeated.append(
                    letter
                )  # it came again meanwhile and failed: see what becomes of the first
                continue
            try:
                found = partition.frame_at(self._reader.read_now, letter.offset)
            except DanubeError as error:
                _log.error("a dead letter of %s cannot be read: %s", partition.topic, error)
                continue
            if isinstance(found, Stored) and place_of(found, letter.offset) >= 0:
                self._publish(target, letter, found)
            elif isinstance(found, Gap):  # gone from the log meanwhile
                self._settle(letter)
        target.letters += repeated

    def _publish(self, target: _Target, letter: _Letter, stored: Stored) -> None:
        place = target.places[target.turn % len(target.places)]
        topic = letter.sub.policy.dead_letter_topic
        try:
            frame = self._frame(letter, stored, place, place.next_sequence)
        except DanubeError as error:  # compressed garbage: it stays blocked
            _log.error("message %d of %s is no dead letter: %s", letter.offset, topic, error)
            return
        target.turn += 1
        place.next_sequence += 1
        key = letter.sub, letter.offset
        target.in_flight.add(key)
        bundle = sealed_bundle([(place.partition_id, frame)])

        def answered(status: int, text: str) -> None:
            target.in_flight.discard(key)
            if status in _DONE:
                self._settle(letter)
                return
            if status == InvalidArgument.code:  # too large with its attributes: it stays blocked
                _log.error("message %d is no letter for %s: %s", letter.offset, topic, text)
                return
            target.letters.appendleft(letter)
            if target.places and place in target.places:
                self._fail(topic, target, DanubeError(text))

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

    def _frame(self, letter: _Letter, stored: Stored, place: _Place, sequence: int) -> bytearray:
        """The message as it was, and attributes that say where it comes from."""
        view = FrameView(stored.memory)
        row = place_of(stored, letter.offset)
        keys = view.keys(row, row + 1)
        attributes = (view.attributes(row, row + 1) or [{}])[0]
        sub = letter.sub
        partition = self._state.catalog.by_id[sub.partition_id]
        return encode_frame(
            view.payloads(row, row + 1),
            keys=keys,
            attributes=[
                attributes
                | {
                    "x-original-topic": partition.topic,
                    "x-original-partition": str(partition.assigned.index),
                    "x-original-subscription": sub.name,
                    "x-original-topic-offset": str(letter.offset),
                    "x-delivery-attempt": str(letter.failures),
                    "x-failure-reason": letter.reason[:REASON_CHARACTERS_MAX],
                    "x-poison-policy": sub.policy.poison_policy.value,
                }
            ],
            event_times=view.event_times(row, row + 1),
            producer_id=place.producer_id,
            base_sequence=sequence,
            publish_time_ns=self._state.now_wall_ns,
            producer_epoch=place.epoch,
            schema_id=view.schema_id,
            schema_version=view.schema_version,
        )

    def _settle(self, letter: _Letter) -> None:
        letter.sub.dead_letter_done(letter.offset, letter.offset + 1)
        self._consumers.touch(letter.sub)
