"""LOOKUP: where a topic's partitions are, asked by clients, and by workers for dead-letter topics.

    LOOKUP --> topic? --> create, or park until it appears --> placed on its workers? --> RESULT

A LOOKUP that has to wait, for a missing topic or for a worker that is down, is parked until its time is up.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Any

from danube_fast.broker import messages as m
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import PartitionRecord, TopicOptions, TopicRecord
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import DanubeError, NotFound, PermissionDenied, ResourceExhausted
from danube_fast.net import protocol
from danube_fast.net.session import Session
from danube_fast.security.authorization import Authorizer, Permission
from danube_fast.types import REPLY_TOPICS, TopicName, parse_topic
from danube_fast.workers.coordinator.connections import Connections
from danube_fast.workers.coordinator.placement import Placement
from danube_fast.workers.process.boot import Boot
from danube_fast.workers.process.mailbox import NEVER_NS, Request

__all__ = ["Lookups"]

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
        authorizer: Authorizer,
    ) -> None:  # fmt: skip
        self._boot, self._connections = booted, connections
        self._topics, self._placement, self._authorizer = topics, placement, authorizer
        self._parked: dict[str, list[_Parked]] = {}
        self._deadlines: list[tuple[int, int, str]] = []
        self._order = itertools.count()
        connections.commands.handlers[protocol.Lookup] = self._lookup
        booted.mailbox.serve(m.FindDeadLetterTopic, self._find_dead_letter_topic)

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
                self._lookup(session, parked.command)
            except DanubeError as error:
                self._fail(parked.session, parked.command.request, error)

    # ---------------------------------------------------------------- clients

    def _lookup(self, session: Session, command: protocol.Lookup) -> None:
        name = parse_topic(command.topic)
        self._authorizer.authorize(session.principal, Permission.LOOKUP, name)
        record, index = self._topics.topic(name), None
        if record is None and (part := self._topics.partition_of(name)) is not None:
            record, index = part
        options = TopicOptions.parse(command.create) if command.create is not None else None
        if record is None:
            record = self._create_or_park(session, command, options)
            if record is None:
                return
        elif options is not None and index is None:
            self._topics.check_options(record, options)
        self._answer_when_placed(session.number, command, record, index)

    def _create_or_park(
        self, session: Session, command: protocol.Lookup, options: TopicOptions | None
    ) -> TopicRecord | None:
        """Create the topic, or park the LOOKUP and return None. Raises NotFound if neither is wanted."""
        if options is not None and self._boot.settings.auto_create_topics:
            self._authorize_creation(session.principal, parse_topic(command.topic))
            record = self._topics.create(command.topic, options, self._boot.clock.wall_ns())
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

    def _authorize_creation(self, principal: str, topic: TopicName) -> None:
        """Ask for the right to make a topic by publishing to it: on the topic itself, or on all of its namespace."""
        if topic.startswith(REPLY_TOPICS):
            return
        try:
            self._authorizer.authorize(principal, Permission.MANAGE_TOPIC, topic)
        except PermissionDenied:
            namespace = f"namespace:{topic.namespace}"
            self._authorizer.authorize(principal, Permission.PRODUCE, namespace)

    def _answer_when_placed(
        self, session: int, command: protocol.Lookup, record: TopicRecord, index: int | None
    ) -> None:
        partitions = self._topics.partitions(record)
        if index is not None:
            partitions = [partitions[index]]

        def placed(error: DanubeError | None) -> None:
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

    def _find_dead_letter_topic(self, request: Request[m.FindDeadLetterTopic]) -> None:
        name = parse_topic(request.message.topic)
        record = self._topics.topic(name)
        self._topics.check_takes_dead_letters(name)
        if not request.message.create:
            request.reply(m.TopicPlaces([]))
            return
        if record is None:
            record = self._topics.create(name, TopicOptions.parse({}), self._boot.clock.wall_ns())
            self.appeared(name)
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
