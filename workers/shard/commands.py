"""Client commands on a shard worker: whose they are, whether they may, and who carries them out.

Producers and consumers bring the handlers of their commands (publish/producers.py,
deliver/consumer_commands.py); PUBLISH goes to publish/intake.py. A handler answers at once, or leaves
a callback with the journal and answers when its record is durable. Every command passes `authorize`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from danube_fast.broker.subscription.consumer import Parting
from danube_fast.errors import DanubeError, Internal, InvalidArgument
from danube_fast.net import protocol as p
from danube_fast.net.greeting import NO_SESSION_TEXT, Greeter
from danube_fast.net.protocol import Status
from danube_fast.net.session import Session
from danube_fast.security.authorization import Permission, authorize
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.state import ShardState

__all__ = ["Commands"]

_log = logging.getLogger(__name__)

OWN_SESSION = "session"
"""Resource of commands that name only what this session opened before, under `authorize`."""
PERMISSIONS: dict[type, Permission] = {
    p.OpenProducer: Permission.PRODUCE,
    p.Publish: Permission.PRODUCE,
    p.CloseProducer: Permission.PRODUCE,
    p.Subscribe: Permission.CONSUME,
    p.Flow: Permission.CONSUME,
    p.Ack: Permission.CONSUME,
    p.Nack: Permission.CONSUME,
    p.Seek: Permission.CONSUME,
    p.CloseConsumer: Permission.CONSUME,
    p.Extend: Permission.CONSUME,
}
"""What each command needs; the others need only a session."""


class Commands:
    """Handlers of one worker."""

    def __init__(
        self, state: ShardState, greeter: Greeter, delivery: Delivery, consumers: Consumers
    ) -> None:
        self._state, self._greeter = state, greeter
        self._delivery, self._consumers = delivery, consumers
        self.handlers: dict[type, Callable[[Session, Any], None]] = {
            p.Ping: self._ping,
            p.Bye: self._bye,
        }

    def handle(self, identity: bytes, command: Any) -> None:
        """Run one command of a connection."""
        if isinstance(command, p.Hello):
            answer = self._greeter.greet(identity, command, self._state.now_ns)
            self._delivery.reply(identity, answer)
            return
        request = getattr(command, "request", 0)
        session = self._state.sessions.by_identity(identity)
        if session is None:
            error = p.Error(request, Status.NO_SESSION, NO_SESSION_TEXT)
            self._delivery.reply(identity, error)
            return
        session.last_seen_ns = self._state.now_ns
        handler = self.handlers.get(type(command))
        try:
            if handler is None:
                raise InvalidArgument(
                    "this is the port of a worker, which serves only what is published and consumed; "
                    "connect to the address that `danube-fast serve` prints"
                )
            permission = PERMISSIONS.get(type(command))
            if permission is not None:
                authorize(session.principal, permission, self._resource(session, command))
            handler(session, command)
        except DanubeError as failure:
            self._delivery.fail(session, request, failure)
        except Exception as failure:  # one bad request must not end the others' sessions
            _log.exception("%s failed", type(command).__name__)
            text = f"{type(command).__name__} failed: {failure!r}; see the worker's log"
            self._delivery.fail(session, request, Internal(text))

    def _resource(self, session: Session, command: Any) -> str:
        """The topic that a command is about, as far as this worker knows it."""
        partition_id = getattr(command, "partition_id", None)
        if partition_id is None:
            consumer = session.consumers.get(getattr(command, "consumer_id", -1))
            if consumer is None:
                return OWN_SESSION
            partition_id = consumer.subscription.partition_id
        partition = self._state.partition(partition_id)
        return partition.topic if partition is not None else f"partition {partition_id}"

    # ------------------------------------------------------------ sessions

    def _ping(self, session: Session, command: p.Ping) -> None:
        for consumer_id, frames, offset in command.taken:
            consumer = session.consumers.get(consumer_id)
            if consumer is not None:
                consumer.report(frames, offset)
        self._delivery.send(session, [p.encode(p.Pong(command.request))])

    def _bye(self, session: Session, command: p.Bye) -> None:
        self._delivery.result(session, command.request)
        self._consumers.close_session(session, Parting.CLOSED)
