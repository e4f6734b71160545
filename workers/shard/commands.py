"""Permissions of client commands on a worker, and the commands about the session itself."""

from __future__ import annotations

from hmac import compare_digest
from typing import Any

from danube_fast.broker.subscription.consumer import UNREPORTED_MESSAGES, Parting, SubscriptionKind
from danube_fast.errors import DanubeError, FailedPrecondition, PermissionDenied
from danube_fast.net import protocol as p
from danube_fast.net.session import Session
from danube_fast.types import REPLY_TOPICS, Permission, parse_topic
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.commands import OWN_SESSION, Commands
from danube_fast.workers.shard.access_checks import subscription_resource
from danube_fast.workers.shard.deliver.consumers import Consumers
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.state import ShardState, not_here

__all__ = ["PERMISSIONS", "SessionCommands", "limits_of_sessions"]

_ABSENT = "/-/-"
"""Stands for the topic of a partition that is not here."""

_PRODUCING = p.OpenProducer, p.Publish, p.CloseProducer
_CONSUMING = p.Subscribe, p.Flow, p.Ack, p.Nack, p.Seek, p.CloseConsumer, p.Extend
PERMISSIONS: dict[type, Permission] = {
    **dict.fromkeys(_PRODUCING, Permission.PRODUCE),
    **dict.fromkeys(_CONSUMING, Permission.CONSUME),
}
"""Permission that each command needs; the others need only a session."""


def limits_of_sessions(access: Access | None) -> dict[str, int]:
    """Return what WELCOME tells beside the limits of all endpoints."""
    named = {"topics_named": 1} if access is not None and access.has_outer else {}
    return {"unreported_messages": UNREPORTED_MESSAGES, **named}


def _topic_named(command: Any) -> str:
    """Return the topic that a command says it opens. Raises InvalidArgument, FailedPrecondition."""
    is_producer = isinstance(command, p.OpenProducer)
    topic: Any = command.topic if is_producer else command.options.get("topic")
    if not topic:
        raise FailedPrecondition(
            "this broker has an authorizer of another package, which is asked about what is opened by its name: say the topic, "
            "as clients of the broker's version do"
        )
    return parse_topic(topic)


def _resource_of(topic: str, command: Any) -> str:
    """Name what a command that opens something on a topic needs its right on."""
    if isinstance(command, p.Subscribe) and command.type != SubscriptionKind.READER:
        return subscription_resource(topic, command.subscription)
    return topic


class SessionCommands:
    """Run PING and BYE, and find the resource of any command of one worker."""

    def __init__(
        self, state: ShardState, commands: Commands, delivery: Delivery, consumers: Consumers,
        access: Access | None,
    ) -> None:  # fmt: skip
        """`access`: who may do what; None: all may do all, or the environment's authorizer knows."""
        self._state, self._delivery, self._consumers = state, delivery, consumers
        self._access = access
        self._is_named = access is not None and access.has_outer
        """Whether what is opened has to be named: another package's authorizer is asked about that name, whatever the
        partition's number is. So the questions, and how long they take, tell nothing of the number."""
        commands.permissions = PERMISSIONS
        commands.resource_of = self._resource
        commands.more_needed = self._more_needed
        commands.refusal_of = self._refusal
        commands.handlers |= {p.Ping: self._ping, p.Bye: self._bye}

    def _resource(self, session: Session, command: Any) -> str:
        """Find the topic of a command that opens something; all others name what was opened before (decision 7)."""
        if not isinstance(command, p.OpenProducer | p.Subscribe):
            return OWN_SESSION
        if self._is_named:
            return _resource_of(_topic_named(command), command)
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
        return _resource_of(partition.topic, command)

    def _more_needed(self, command: Any) -> list[tuple[Permission, str]]:
        """Rights that a SUBSCRIBE needs on the topic that it names for dead letters. Raises NotOwner for a command with
        the right to another topic than that of its partition."""
        if self._is_named and isinstance(command, p.OpenProducer | p.Subscribe):
            partition = self._state.partition(command.partition_id)
            topic = "" if partition is None else partition.topic
            if not compare_digest(topic.encode(), _topic_named(command).encode()):
                raise not_here(command.partition_id)
        if not isinstance(command, p.Subscribe):
            return []
        if self._state.partition(command.partition_id) is None:
            return []  # so that no refusal tells which partitions are here
        policy = command.options.get("failure_policy")
        letters = policy.get("dead_letter_topic") if isinstance(policy, dict) else None
        return [(Permission.PRODUCE, letters)] if isinstance(letters, str) and letters else []

    def _refusal(self, session: Session, command: Any, error: PermissionDenied) -> DanubeError:
        """Tell a client that may not look a topic up the same as of one that is not here."""
        partition = self._state.partition(getattr(command, "partition_id", -1))
        topic = "" if partition is None else partition.topic
        if self._is_named:
            topic = _topic_named(command)
        if self._access is None or not topic:
            return error
        if self._access.permits(session.principal, Permission.LOOKUP, topic):
            return error
        return not_here(command.partition_id)

    def _ping(self, session: Session, command: p.Ping) -> None:
        for consumer_id, frames, offset in command.taken:
            consumer = session.consumers.get(consumer_id)
            if consumer is not None:
                consumer.report(frames, offset)
        self._delivery.send(session, [p.encode(p.Pong(command.request))])

    def _bye(self, session: Session, command: p.Bye) -> None:
        self._delivery.result(session, command.request)
        self._consumers.close_session(session, Parting.CLOSED)
