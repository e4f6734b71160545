"""Permissions of client commands on a worker, and the commands about the session itself."""

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

_PRODUCING = p.OpenProducer, p.Publish, p.CloseProducer
_CONSUMING = p.Subscribe, p.Flow, p.Ack, p.Nack, p.Seek, p.CloseConsumer, p.Extend
PERMISSIONS: dict[type, Permission] = {
    **dict.fromkeys(_PRODUCING, Permission.PRODUCE),
    **dict.fromkeys(_CONSUMING, Permission.CONSUME),
}
"""Permission that each command needs; the others need only a session."""


class SessionCommands:
    """Run PING and BYE, and find the resource of any command of one worker."""

    def __init__(
        self, state: ShardState, commands: Commands, delivery: Delivery, consumers: Consumers
    ) -> None:
        self._state, self._delivery, self._consumers = state, delivery, consumers
        commands.permissions = PERMISSIONS
        commands.resource_of = self._resource
        commands.handlers |= {p.Ping: self._ping, p.Bye: self._bye}

    def _resource(self, session: Session, command: Any) -> str:
        """Find the topic of a command, as far as this worker knows it."""
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
