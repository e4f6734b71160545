"""The partitions that a consumer is attached to, and the credit that they share.

    route (topic) --> partitions --> attachment each, drawing on the credit of its worker

Partitions join when a topic grows or a pattern finds a new topic, and leave when a pattern's topic is
deleted. The window that the application chose is divided among the workers, however many
partitions there are.

All methods are called under the pump's lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

from danube_fast.client.consume.attachment import Attachment, Owner
from danube_fast.client.consume.credit import Credit
from danube_fast.client.link.connection import Connection
from danube_fast.client.link.steps import Steps, Wait
from danube_fast.client.topics.members import Members
from danube_fast.client.topics.routes import Partition, Routes, Topic, TopicUser, made_again
from danube_fast.client.topics.watcher import Watcher
from danube_fast.client.values.options import ConsumerOptions, Position
from danube_fast.errors import DanubeError, DeadlineExceeded, TopicDeleted
from danube_fast.types import Dispatch

__all__ = ["Partitions"]


class _Consumer(Owner, TopicUser, Protocol):
    """A consumer, as its partitions and topics see it."""


class Partitions:
    """Attachments of one consumer."""

    def __init__(
        self,
        consumer: _Consumer,
        routes: Routes,
        watcher: Watcher,
        attachments: list[Attachment],
        topics: Sequence[Topic],
        options: ConsumerOptions,
    ) -> None:
        """`attachments`: the list to keep them in."""
        self.pump = routes.pump
        self.attachments = attachments
        self.pattern = options.pattern
        self.routes: list[Topic] = []
        self._consumer = consumer
        self._routes = routes
        self._watcher = watcher
        self._options = options
        self._credits: dict[Connection, Credit] = {}
        self._subscribed = 0
        """As many of the first attachments were subscribed at the last look."""
        self.is_resting = False
        self.opened = False
        """The application has the consumer: no call waits that could hear of a further refusal."""
        self.members: Members | None = None
        if options.pattern is not None:
            self.members = Members(routes, self, options.pattern, options.position)
        connections = {p.connection: None for topic in topics for p in topic.partitions}
        self._divide(connections)
        for topic in topics:
            self._enter(topic, options.position)

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics that the consumer receives from now."""
        return tuple(route.name for route in self.routes)

    # ------------------------------------------------------------ coming

    def begin(self) -> None:
        """Follow what happens to the topics of the consumer, which is known to its client now."""
        for route in self.routes:
            route.user = weakref.ref(self._consumer)
            self._watcher.follow(route)
        if self.members is not None:
            self._watcher.add(self.members)

    def join(self, route: Topic, position: Position) -> None:
        """Attach to the partitions of one topic more."""
        route.user = weakref.ref(self._consumer)
        self._divide(partition.connection for partition in route.partitions)
        self._enter(route, position)
        self._watcher.follow(route)

    def _enter(self, route: Topic, position: Position) -> None:
        self.routes.append(route)
        for partition in route.partitions:
            self._attach(route, partition, position)

    def _attach(self, route: Topic, partition: Partition, position: Position) -> None:
        attachment = Attachment(
            self._consumer, partition, self._credits[partition.connection], position
        )
        attachment.tracks = route.dispatch != Dispatch.NON_RELIABLE.value
        attachment.route = route
        attachment.is_late = self.opened
        self.attachments.append(attachment)

    def _divide(self, connections: Iterable[Connection]) -> None:
        """Divide the window among these connections, too."""
        new = [c for c in dict.fromkeys(connections) if c not in self._credits]
        if not new:
            return
        count = len(self._credits) + len(new)
        window_bytes = max(1, self._options.permits_bytes // count)
        window_messages = max(1, self._options.permits_messages // count)
        for credit in self._credits.values():
            credit.resize(window_bytes, window_messages)
        for connection in new:
            self._credits[connection] = Credit(connection, window_bytes, window_messages)

    # ------------------------------------------------------------ leaving, moving

    def part(self, route: Topic) -> None:
        """Leave a topic, and drop what came of it and is still here."""
        route.user = None
        if route in self.routes:
            self.routes.remove(route)
        for attachment in [a for a in self.attachments if a.route is route]:
            self._consumer.restarted(attachment, sought=True)
            attachment.parted = True
            attachment.leave()
            self.attachments.remove(attachment)
        self._subscribed = 0
        self.pump.notify()

    def moved(self) -> None:
        """Follow topics that were looked up again to other workers, and attach to partitions that are new."""
        for route in list(self.routes):
            mine = {a.partition_id: a for a in self.attachments if a.route is route}
            places = {partition.partition_id: partition for partition in route.partitions}
            if not mine.keys() <= places.keys():
                self._replaced(route)
                continue
            self._divide(partition.connection for partition in route.partitions)
            for partition_id, partition in places.items():
                attachment = mine.get(partition_id)
                if attachment is None:
                    self._attach(route, partition, "earliest")
                elif partition.connection is not attachment.connection:
                    attachment.move(partition.connection, self._credits[partition.connection])

    def gone(self, route: Topic, error: DanubeError) -> None:
        """Leave a topic that does not exist any more, or fail, if it has no pattern to leave."""
        if self.members is not None:
            self.members.gone(route)
            return
        for attachment in [a for a in self.attachments if a.route is route]:
            attachment.fail(error)

    def _replaced(self, route: Topic) -> None:
        """Leave a topic that was deleted and made again, for the new one if a pattern asks for it."""
        self.gone(route, made_again(route))
        if self.members is not None:
            if route in self.routes:
                self.part(route)
            self.members.on_change("created", route.name)

    def has_only_left(self, attachment: Attachment, error: DanubeError) -> bool:
        """Whether an attachment has failed only because its topic leaves the pattern; leave it then."""
        if self.members is None or not isinstance(error, TopicDeleted):
            return False
        route = attachment.route
        if route is not None:
            self.members.gone(route)
            if route in self.routes:
                self.part(route)
        return True

    def lost(self, attachment: Attachment) -> None:
        """Look a topic up again whose partition the worker of an attachment does not have."""
        if attachment.route is not None:
            self._routes.refresh(attachment.route)

    def refuse(self, error: DanubeError) -> None:
        """End the consumer: nothing of the pattern can be had."""
        self._consumer.refuse(error)
        self.pump.notify()

    # ------------------------------------------------------------ resting

    def rest(self) -> None:
        """Leave every partition until `wake`; what waits goes to other consumers."""
        for attachment in self.attachments:
            attachment.rest()
        self.is_resting = True

    def wake(self) -> None:
        """Come back from a rest."""
        if self.is_resting:
            self.is_resting = False
            for attachment in self.attachments:
                attachment.wake()

    def attached_steps(self, deadline_ns: int) -> Steps[None]:
        """Come back from a rest or a move. Raises what ended the consumer, DeadlineExceeded."""
        consumer = self._consumer

        def is_attached() -> bool:
            return consumer.refusal is not None or all(a.subscribed for a in self.attachments)

        with self.pump.lock:
            self.wake()
        ready = yield Wait(is_attached, deadline_ns)
        if consumer.refusal is not None:
            raise consumer.refusal
        if not ready:
            raise DeadlineExceeded(
                "the consumer is not attached to all its partitions; look at `danube-fast status`"
            )

    # ------------------------------------------------------------ states

    @property
    def is_connected(self) -> bool:
        """Whether every partition is subscribed now, or the consumer rests."""
        return self.is_resting or all(
            a.subscribed and a.connection.is_open for a in self.attachments
        )

    @property
    def is_subscribed(self) -> bool:
        """Whether every partition has accepted the subscription, once: some may rest while others come."""
        if self.members is not None and not self.members.is_complete:
            return False
        attachments, at = self.attachments, self._subscribed
        while at < len(attachments) and attachments[at].ever_subscribed:
            at += 1
        self._subscribed = at
        return at >= len(attachments)

    def close(self) -> None:
        """Forget credit and topics to come: a lookup that is under way must not attach partitions that moved
        meanwhile again."""
        for route in self.routes:
            route.user = None
        if self.members is not None:
            self._watcher.remove(self.members)
            self.members.close()
        for credit in self._credits.values():
            credit.close()
