"""LOOKUP: where a topic's partitions are, asked by clients, and by workers for dead-letter topics.

    LOOKUP --> topic? --> create, or park until it appears --> placed on its workers? --> RESULT

A LOOKUP that has to wait, for a missing topic or for a worker that is down, is parked until its time is up.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from contextlib import suppress
from typing import Any

from danube_fast.broker import messages as m
from danube_fast.broker.topics.creation import check_dead_letter_topic
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import PartitionRecord, TopicOptions, TopicRecord
from danube_fast.broker.topics.reply_topics import owner_of_new
from danube_fast.clock import MILLISECOND_NS, NEVER_NS
from danube_fast.errors import (
    AlreadyExists,
    DanubeError,
    Internal,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.net import protocol
from danube_fast.net.session import Session
from danube_fast.security.audit import NAME_CHARACTERS_MAX, AuditRecord, shown_text
from danube_fast.security.authorization import Authorizer, Permission
from danube_fast.types import PART_MARK, REPLY_TOPICS, TopicName, parse_topic
from danube_fast.undecided import Undecided, when_decided
from danube_fast.workers.coordinator.administration import record_of
from danube_fast.workers.coordinator.audit import AuditLog
from danube_fast.workers.coordinator.change_rates import ChangeRates
from danube_fast.workers.coordinator.connections import Connections
from danube_fast.workers.coordinator.placement import Placement
from danube_fast.workers.process.access import Access, may_not_publish
from danube_fast.workers.process.boot import Boot
from danube_fast.workers.process.mailbox import Request

__all__ = ["Lookups"]

_log = logging.getLogger(__name__)

PLACE_WAIT_MS = 5_000
"""How long a LOOKUP that names no time waits for a worker that is down."""
WAIT_MS_MAX = 600_000
PARKED_MAX = 100_000
"""LOOKUPs that wait for missing topics."""


class _Parked:
    """A LOOKUP that waits for its topic to appear."""

    __slots__ = ("command", "deadline_ns", "session")

    def __init__(self, session: int, command: protocol.Lookup, deadline_ns: int) -> None:
        self.session, self.command, self.deadline_ns = session, command, deadline_ns


class Lookups:
    """Answer the lookups of one coordinator. Used by its loop only."""

    def __init__(
        self, booted: Boot, connections: Connections, topics: TopicDirectory, placement: Placement,
        authorizer: Authorizer, audit: AuditLog | None, rates: ChangeRates,
    ) -> None:  # fmt: skip
        """`audit`: where topics that are made here are recorded; None: nowhere. `rates`: of those that are recorded."""
        self._audit, self._rates = audit, rates
        self._boot, self._connections = booted, connections
        self._topics, self._placement, self._authorizer = topics, placement, authorizer
        self._parked: dict[str, list[_Parked]] = {}
        self._deadlines: list[tuple[int, int, str]] = []
        self._order = itertools.count()
        connections.commands.handlers[protocol.Lookup] = self._lookup
        booted.mailbox.serve(m.FindDeadLetterTopic, self._asked_for_dead_letters)

    def do_work(self, now_ns: int) -> None:
        """Refuse lookups whose topic did not appear in time."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, _, topic = heapq.heappop(self._deadlines)
            waiting = self._parked.pop(topic, [])
            left = [parked for parked in waiting if parked.deadline_ns > now_ns]
            if left:
                self._parked[topic] = left
            for parked in waiting:
                if parked.deadline_ns > now_ns:
                    continue
                text = (
                    f"topic {topic} did not appear in {parked.command.wait_ms} ms; create it "
                    f"with: danube-fast topics create {topic}"
                )
                self._fail(parked.session, parked.command.request, NotFound(text))

    def next_deadline_ns(self) -> int:
        """When `do_work` must run again at the latest."""
        return self._deadlines[0][0] if self._deadlines else NEVER_NS

    def appeared(self, topic: str) -> None:
        """Go on with the lookups that wait for a topic, which exists now."""
        for parked in self._parked.pop(topic, []):
            session = self._connections.sessions.by_number(parked.session)
            if session is None:
                continue
            try:
                self._connections.commands.run(session, parked.command)
            except DanubeError as error:
                self._fail(parked.session, parked.command.request, error)

    # ---------------------------------------------------------------- clients

    def _lookup(
        self, session: Session, command: protocol.Lookup, begun: AuditRecord | None = None
    ) -> None:
        """Answer now, or when the topic is there and placed. `begun`: the record that allows to make it."""
        name, created = parse_topic(command.topic), None
        record, index = self._find(session.principal, name)
        options = TopicOptions.parse(command.create) if command.create is not None else None
        if record is None:
            record = self._create_or_park(session, command, options, begun)
            if record is None:
                return
            created = begun
        elif options is not None and index is None:
            self._topics.check_options(record, options)
        if begun is not None and created is None:  # another client was faster
            self._end(begun, AlreadyExists(f"topic {name} exists already"))
        self._answer_when_placed(session.number, command, record, index, created)

    def _find(self, principal: str, name: TopicName) -> tuple[TopicRecord | None, int | None]:
        """Find a topic, or a partition by its name: the rights to it are those to its topic. Raises PermissionDenied in
        the same words, and after the same questions, whether it exists or not."""
        # a client that says the name of a reply topic has it from a request
        is_reply = name.startswith(REPLY_TOPICS)
        permission = Permission.PRODUCE if is_reply else Permission.LOOKUP
        topic, (base, mark, number) = self._topics.topic(name), name.rpartition(PART_MARK)
        if mark and number.isdecimal() and not is_reply:  # it looks like a partition's
            part = None if topic is not None else self._topics.partition_of(name)
            with suppress(PermissionDenied):
                self._authorizer.authorize(principal, permission, base)
                if part is not None:
                    return part
        self._authorizer.authorize(principal, permission, name)
        return topic, None

    def _create_or_park(
        self, session: Session, command: protocol.Lookup, options: TopicOptions | None,
        begun: AuditRecord | None,
    ) -> TopicRecord | None:  # fmt: skip
        """Create the topic, or park the LOOKUP and return None. Raises NotFound if neither is wanted."""
        if options is not None and self._boot.settings.auto_create_topics:
            owner = self._authorize_creation(session.principal, parse_topic(command.topic), options)
            is_recorded = self._audit is not None and not command.topic.startswith(REPLY_TOPICS)
            if is_recorded and begun is None:
                # what cannot be made is no change: a client that tries in vain leaves nothing in the log
                self._topics.check_new(parse_topic(command.topic), options)
                self._begin(session, command)
                return None
            record = self._topics.create(command.topic, options, self._boot.clock.wall_ns(), owner)
            self.appeared(command.topic)
            return record
        if command.wait_ms <= 0:
            self._topics.require(command.topic)  # raises NotFound with the remedy
        if len(self._deadlines) >= PARKED_MAX:
            raise ResourceExhausted(
                f"{PARKED_MAX} lookups wait for topics already; create the topic first"
            )
        wait_ns = min(command.wait_ms, WAIT_MS_MAX) * MILLISECOND_NS
        parked = _Parked(session.number, command, self._boot.clock.monotonic_ns() + wait_ns)
        self._parked.setdefault(command.topic, []).append(parked)
        heapq.heappush(self._deadlines, (parked.deadline_ns, next(self._order), command.topic))
        return None

    def _begin(self, session: Session, command: protocol.Lookup) -> None:
        """Go on with a LOOKUP that makes a topic once that is recorded. Raises Unavailable for a client that has made too
        many: it asks again by itself."""
        record = record_of(session, command.request, "create_topic", command.topic)
        try:
            self._rates.charge(
                session.principal, record, proof=session.proof, address=session.address
            )
        except ResourceExhausted as error:
            raise Unavailable(str(error)) from None

        def begun(error: DanubeError | None) -> None:
            try:
                if error is not None:
                    raise error
                if session.closed:  # revoked meanwhile, perhaps
                    raise Unavailable("the session has ended")
                self._lookup(session, command, record)
            except Undecided as undecided:
                undecided.then(lambda: begun(None))
            except DanubeError as fault:
                if error is None:
                    self._end(record, fault)
                self._fail(session.number, command.request, fault)
            except Exception as fault:  # one bad request must not end the others' sessions
                _log.exception("LOOKUP failed")
                internal = Internal(f"Lookup failed: {fault!r}; see the broker's log")
                self._end(record, internal)
                self._fail(session.number, command.request, internal)

        if self._audit is not None:
            self._audit.begin(record, begun)

    def _end(self, record: AuditRecord, error: DanubeError | None) -> None:
        if self._audit is not None:
            self._audit.end(record, error)

    def _authorize_creation(self, principal: str, topic: TopicName, options: TopicOptions) -> str:
        """Ask for the right to make a topic by publishing to it: on the topic itself, or on all of its namespace. Return
        the owner of a reply topic, which any client may make."""
        if topic.startswith(REPLY_TOPICS):
            if not isinstance(self._authorizer, Access):
                return ""
            return owner_of_new(self._topics, topic, options, principal)
        try:
            self._authorizer.authorize(principal, Permission.MANAGE_TOPIC, topic)
        except PermissionDenied:
            namespace = f"namespace:{topic.namespace}"
            self._authorizer.authorize(principal, Permission.PRODUCE, namespace)
        return ""

    def _answer_when_placed(
        self, session: int, command: protocol.Lookup, record: TopicRecord, index: int | None,
        created: AuditRecord | None = None,
    ) -> None:  # fmt: skip
        partitions = self._topics.partitions(record)
        if index is not None:
            partitions = [partitions[index]]

        def placed(error: DanubeError | None) -> None:
            if created is not None:  # without its worker the topic is there all the same
                self._end(created, None if isinstance(error, Unavailable) else error)
            if error is not None:
                self._fail(session, command.request, error)
                return
            value = self._where(
                record, partitions, partitioned=record.partitioned and index is None
            )
            self._connections.reply(session, protocol.Result(command.request, value))

        wait_ms = min(command.wait_ms, WAIT_MS_MAX) if command.wait_ms > 0 else PLACE_WAIT_MS
        self._placement.when_placed(
            partitions, self._boot.clock.monotonic_ns() + wait_ms * MILLISECOND_NS, placed
        )

    def _where(
        self, record: TopicRecord, partitions: list[PartitionRecord], *, partitioned: bool
    ) -> dict[str, Any]:
        """Make the RESULT of a LOOKUP."""
        config, rows = self._boot.config, []
        for partition in partitions:
            process = config.process_of_log(partition.log_id)
            name, number = record.partition_topic(partition.index), config.processes.number(process)
            tcp = f"tcp://{config.advertise}:{self._boot.control.port(process)}"
            rows.append([partition.partition_id, name, number, tcp, config.ipc_endpoints[process]])
        return {
            "topic": record.topic,
            "dispatch": record.dispatch,
            "durability": record.durability,
            "partitioned": partitioned,
            "partitions": rows,
            "host_id": config.host_id,
        }

    def _fail(self, session: int, request: int, error: DanubeError) -> None:
        self._connections.reply(session, protocol.Error(request, error.code, str(error)))

    # ---------------------------------------------------------------- workers

    def _check_dead_letters(self, topic: TopicName, setter: str) -> None:
        """Raise what prevents that dead letters go to a topic, by a failure policy that a principal has set."""
        access = self._authorizer
        if not isinstance(access, Access):
            self._topics.check_takes_dead_letters(topic)
            return

        def may(permission: Permission, resource: str) -> bool:
            return access.permits(setter, permission, resource)

        if not may(Permission.PRODUCE, topic):
            raise may_not_publish(setter, topic)
        check_dead_letter_topic(self._topics, topic, may)

    def _create_dead_letter_topic(self, topic: TopicName, setter: str) -> TopicRecord:
        """Create a topic for the letters of a policy. Raises Unavailable if its setter has made too many changes: letters
        wait, and it is asked for again."""
        options = TopicOptions.parse({})
        if self._audit is not None:
            self._topics.check_new(topic, options)
            wanted = AuditRecord(
                event="", principal=setter, action="create_topic", resource=shown_text(topic, NAME_CHARACTERS_MAX)
            )  # fmt: skip
            try:
                self._rates.charge(setter, wanted)
            except ResourceExhausted:
                raise Unavailable(
                    f"{setter} has made more administrative changes than admin_changes_per_second_max allows, so {topic} is "
                    "made later"
                ) from None
        record = self._topics.create(topic, options, self._boot.clock.wall_ns())
        if self._audit is not None:
            self._audit.record("create_topic", principal=setter, resource=topic)
        self.appeared(topic)
        return record

    def _asked_for_dead_letters(self, request: Request[m.FindDeadLetterTopic]) -> None:
        when_decided(lambda: self._find_dead_letter_topic(request), request.fail)

    def _find_dead_letter_topic(self, request: Request[m.FindDeadLetterTopic]) -> None:
        name = parse_topic(request.message.topic)
        record = self._topics.topic(name)
        self._check_dead_letters(name, request.message.setter)
        if not request.message.create:
            request.reply(m.TopicPlaces([]))
            return
        if record is None:
            record = self._create_dead_letter_topic(name, request.message.setter)
        partitions = self._topics.partitions(record)

        def placed(error: DanubeError | None) -> None:
            if error is not None:
                request.fail(error)
                return
            process_of = self._boot.config.process_of_log
            places = [(part.partition_id, process_of(part.log_id)) for part in partitions]
            request.reply(m.TopicPlaces(places))

        deadline_ns = self._boot.clock.monotonic_ns() + PLACE_WAIT_MS * MILLISECOND_NS
        self._placement.when_placed(partitions, deadline_ns, placed)
