"""Consumers that leave or are closed, and subscriptions that have changed."""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.broker.subscription.consumer import Consumer, Parting, SubscriptionKind
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.net.session import Session
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.state import ShardState

__all__ = ["Consumers"]


class Consumers:
    """Detach and close consumers of one worker, across its sessions and subscriptions."""

    def __init__(self, state: ShardState, delivery: Delivery) -> None:
        self._state, self._delivery = state, delivery
        self.take_poisoned: Callable[[Subscription], None] = lambda sub: None
        """Takes a subscription with messages that failed too often."""

    def touch(self, sub: Subscription) -> None:
        """Note that a subscription may have messages to deliver, a cursor to record or dead letters to publish."""
        partition = self._state.partition(sub.partition_id)
        if partition is not None:
            self._state.mark_ready(partition)
            if sub.cursor_dirty:
                self._state.mark_cursor(partition)
            if sub.poisoned:
                self.take_poisoned(sub)

    def detach(self, session: Session, consumer: Consumer, how: Parting = Parting.CLOSED) -> None:
        """Take a consumer from its subscription; its unacked messages may go to others."""
        sub: Subscription = consumer.subscription
        sub.detach(consumer, how)
        self.touch(sub)
        session.consumers.pop(consumer.consumer_id, None)
        partition = self._state.partition(sub.partition_id)
        if partition is not None:
            if sub.kind is SubscriptionKind.READER and sub in partition.readers:
                partition.readers.remove(sub)
            self._state.mark_ready(partition)

    def close(self, session: Session, consumer: Consumer, **detail: object) -> None:
        """Detach a consumer, and tell its client why: `code` and `text`."""
        self._delivery.tell_closed(session, consumer, detail)
        self.detach(session, consumer, Parting.LOST)

    def close_all(self, sub: Subscription, code: int, text: str) -> None:
        """Detach every consumer of a subscription, and tell their clients why."""
        for consumer in list(sub.consumers):
            session = self._state.sessions.by_number(consumer.session)
            if session is not None:
                self.close(session, consumer, code=code, text=text)

    def resume(self, session: Session) -> None:
        """Deliver again to a session whose outbox is empty."""
        for flow in session.flows.values():
            for consumer in flow.users:
                partition = self._state.partition(consumer.subscription.partition_id)
                if partition is not None:
                    self._state.mark_ready(partition)

    def close_session(self, session: Session, parting: Parting = Parting.LOST) -> None:
        """End a session, by default as its client goes on with another, and detach all its consumers."""
        for consumer in list(session.consumers.values()):
            self.detach(session, consumer, parting)
        self._delivery.forget(session)
        self._state.sessions.close(session)
