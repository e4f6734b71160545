"""What commands of clients need on a worker, and those that are about the session itself."""

from __future__ import annotations

from typing import Any

from danube_fast.broker.subscription.consumer import Parting
from danube_fast.net import protocol as p
from danube_fast.net.session import Session
from danube_fast.types import Permission
from danube_fast.workers.process.commands import OWN_SESSION, Commands
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.state import ShardState

__all__ = ["PERMISSIONS", "SessionCommands"]

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


class SessionCommands:
    """PING and BYE, and the resources of all commands of one worker."""

    def __init__(
        self, state: ShardState, commands: Commands, delivery: Delivery, consumers: Consumers
    ) -> None:
        self._state, self._delivery, self._consumers = state, delivery, consumers
        commands.permissions = PERMISSIONS
        commands.resource_of = self._resource
        commands.handlers |= {p.Ping: self._ping, p.Bye: self._bye}

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

    def _ping(self, session: Session, command: p.Ping) -> None:
        for consumer_id, frames, offset in command.taken:
            consumer = session.consumers.get(consumer_id)
            if consumer is not None:
                consumer.report(frames, offset)
        self._delivery.send(session, [p.encode(p.Pong(command.request))])

    def _bye(self, session: Session, command: p.Bye) -> None:
        self._delivery.result(session, command.request)
        self._consumers.close_session(session, Parting.CLOSED)
