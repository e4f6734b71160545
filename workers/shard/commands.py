"""Permissions of client commands on a worker, and the commands about the session itself."""

from __future__ import annotations

from hmac import compare_digest
from typing import Any

from danube_fast.broker.subscription.consumer import Parting, SubscriptionKind
from danube_fast.errors import DanubeError, PermissionDenied
from danube_fast.net import protocol as p
from danube_fast.net.session import Session
from danube_fast.types import REPLY_TOPICS, Permission
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.commands import OWN_SESSION, Commands
from danube_fast.workers.shard.access_checks import subscription_resource
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.state import ShardState, not_here

__all__ = ["PERMISSIONS", "SessionCommands"]

_ABSENT = "/-/-"
"""Stands for the topic of a partition that is not here."""

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
        self, state: ShardState, commands: Commands, delivery: Delivery, consumers: Consumers,
        access: Access | None,
    ) -> None:  # fmt: skip
        """`access`: who may do what; None: all may do all, or the environment's authorizer knows."""
        self._state, self._delivery, self._consumers = state, delivery, consumers
        self._access = access
        commands.permissions = PERMISSIONS
        commands.resource_of = self._resource
        commands.more_needed = self._dead_letter_rights
        commands.refusal_of = self._refusal
        commands.handlers |= {p.Ping: self._ping, p.Bye: self._bye}

    def _resource(self, session: Session, command: Any) -> str:
        """Find the topic of a command that opens something; all others name what was opened before (decision 7)."""
        if not isinstance(command, p.OpenProducer | p.Subscribe):
            return OWN_SESSION
        partition = self._state.partition(command.partition_id)
        if partition is None:
            # its owner asks for the right, or there is nothing to be had: which takes as long as a refusal does
            if self._access is not None:
                try:
                    self._access.authorize(session.principal, PERMISSIONS[type(command)], _ABSENT)
                except PermissionDenied:
                    self._access.permits(session.principal, Permission.LOOKUP, _ABSENT)
            return OWN_SESSION
        if isinstance(command, p.OpenProducer) and partition.topic.startswith(REPLY_TOPICS):
            # numbers can be guessed: only the name shows that the client was asked, or is the one that asks
            is_named = compare_digest(command.topic.encode(), partition.topic.encode())
            if self._access is not None and not is_named:
                raise not_here(partition.partition_id)
        if isinstance(command, p.Subscribe) and command.type != SubscriptionKind.READER:
            return subscription_resource(partition.topic, command.subscription)
        return partition.topic

    def _dead_letter_rights(self, command: Any) -> list[tuple[Permission, str]]:
        """Rights that a SUBSCRIBE needs on the topic that it names for dead letters."""
        if not isinstance(command, p.Subscribe):
            return []
        if self._state.partition(command.partition_id) is None:
            return []  # so that no refusal tells which partitions are here
        policy = command.options.get("failure_policy")
        topic = policy.get("dead_letter_topic") if isinstance(policy, dict) else None
        return [(Permission.PRODUCE, topic)] if isinstance(topic, str) and topic else []

    def _refusal(self, session: Session, command: Any, error: PermissionDenied) -> DanubeError:
        """Tell a client that may not look a topic up the same as of one that is not here."""
        partition = self._state.partition(getattr(command, "partition_id", -1))
        access = self._access
        if access is None or partition is None:
            return error
        if access.permits(session.principal, Permission.LOOKUP, partition.topic):
            return error
        return not_here(partition.partition_id)

    def _ping(self, session: Session, command: p.Ping) -> None:
        for consumer_id, frames, offset in command.taken:
            consumer = session.consumers.get(consumer_id)
            if consumer is not None:
                consumer.report(frames, offset)
        self._delivery.send(session, [p.encode(p.Pong(command.request))])

    def _bye(self, session: Session, command: p.Bye) -> None:
        self._delivery.result(session, command.request)
        self._consumers.close_session(session, Parting.CLOSED)
