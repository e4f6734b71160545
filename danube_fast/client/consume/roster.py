"""The roster of a consumer: which partitions it is attached to, and the credit that they share.

    route (topic) --> partitions --> attachment each, drawing on the credit of its worker

Partitions join when a topic grows or a pattern finds a new topic, and leave when a pattern's topic is
deleted. The window that the application chose is divided among the workers, however many
partitions there are.

All methods are called under the pump's lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from danube_fast.client.consume.attachment import Attachment
from danube_fast.client.consume.credit import Credit
from danube_fast.client.link.connection import Connection
from danube_fast.client.options import ConsumerOptions, Position
from danube_fast.client.topics.members import Members
from danube_fast.client.topics.routes import made_again
from danube_fast.errors import DanubeError, TopicDeleted
from danube_fast.types import Dispatch

if TYPE_CHECKING:
    from danube_fast.client.consume.inbox import Inbox
    from danube_fast.client.core import Core
    from danube_fast.client.topics.routes import Partition, Topic

__all__ = ["Roster"]


class Roster:
    """Attachments of one inbox."""

    def __init__(
        self, inbox: Inbox, core: Core, topics: Sequence[Topic], options: ConsumerOptions
    ) -> None:
        self.attachments = inbox.attachments
        self.pattern = options.pattern
        self.routes: list[Topic] = []
        self._inbox = inbox
        self._core = core
        self._options = options
        self._credits: dict[Connection, Credit] = {}
        self._subscribed = 0
        """As many of the first attachments were subscribed when somebody looked."""
        self.opened = False
        """The application has the consumer: no call waits that could hear of a further refusal."""
        self.members: Members | None = None
        if options.pattern is not None:
            self.members = Members(core, self, options.pattern, options.position)
        connections = {p.connection: None for topic in topics for p in topic.partitions}
        self._divide(connections)
        for topic in topics:
            self._enter(topic, options.position)

    # ------------------------------------------------------------ coming

    def begin(self) -> None:
        """The consumer is known to its client: hear what happens to its topics."""
        for route in self.routes:
            route.user = weakref.ref(self._inbox)
            self._core.watcher.follow(route)
        if self.members is not None:
            self._core.watcher.add(self.members)

    def join(self, route: Topic, position: Position) -> None:
        """A topic comes to the others."""
        route.user = weakref.ref(self._inbox)
        self._divide(partition.connection for partition in route.partitions)
        self._enter(route, position)
        self._core.watcher.follow(route)

    def _enter(self, route: Topic, position: Position) -> None:
        self.routes.append(route)
        for partition in route.partitions:
            self._attach(route, partition, position)

    def _attach(self, route: Topic, partition: Partition, position: Position) -> None:
        attachment = Attachment(
            self._inbox, partition, self._credits[partition.connection], position
        )
        attachment.tracks = route.dispatch != Dispatch.NON_RELIABLE.value
        attachment.route = route
        attachment.is_late = self.opened
        self.attachments.append(attachment)

    def _divide(self, connections: object) -> None:
        """See to it that there is credit on these connections too, and that all share the window."""
        new = [c for c in dict.fromkeys(connections) if c not in self._credits]  # type: ignore[call-overload]
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
        """A topic leaves: what came of it and is still here is dropped."""
        route.user = None
        if route in self.routes:
            self.routes.remove(route)
        for attachment in [a for a in self.attachments if a.route is route]:
            self._inbox.restarted(attachment, sought=True)
            attachment.parted = True
            attachment.leave()
            self.attachments.remove(attachment)
        self._subscribed = 0
        self._inbox.pump.notify()

    def moved(self) -> None:
        """Topics were looked up again: other workers may have partitions, and there may be more."""
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
        """A topic does not exist any more."""
        if self.members is not None:
            self.members.gone(route)
            return
        for attachment in [a for a in self.attachments if a.route is route]:
            attachment.fail(error)

    def _replaced(self, route: Topic) -> None:
        """There is another topic of that name."""
        self.gone(route, made_again(route))
        if self.members is not None:
            if route in self.routes:
                self.part(route)
            self.members.on_change("created", route.name)

    def is_quiet(self, attachment: Attachment, error: DanubeError) -> bool:
        """An attachment failed: whether that is no more than a topic that leaves its pattern."""
        if self.members is None or not isinstance(error, TopicDeleted):
            return False
        route = attachment.route
        if route is not None:
            self.members.gone(route)
            if route in self.routes:
                self.part(route)
        return True

    def lost(self, attachment: Attachment) -> None:
        """The worker of an attachment does not have its partition: look the topic up again."""
        if attachment.route is not None:
            self._core.routes.refresh(attachment.route)

    def refuse(self, error: DanubeError) -> None:
        """Nothing of the pattern can be had."""
        self._inbox.refuse(error)
        self._inbox.pump.notify()

    # ------------------------------------------------------------ states

    @property
    def is_settled(self) -> bool:
        """Whether every partition has accepted the subscription, once: some may rest while others come."""
        if self.members is not None and not self.members.is_settled:
            return False
        attachments, at = self.attachments, self._subscribed
        while at < len(attachments) and attachments[at].ever_subscribed:
            at += 1
        self._subscribed = at
        return at >= len(attachments)

    def close(self) -> None:
        """Forget credit and topics to come: who still looks one up has nobody to tell, or partitions that
        moved meanwhile would be attached again."""
        for route in self.routes:
            route.user = None
        if self.members is not None:
            self.members.close()
        for credit in self._credits.values():
            credit.close()
