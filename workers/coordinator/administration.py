"""ADMIN: administrative operations, those that change something with a record in the audit log before.

read    --> run
change  --> may it? --> not too many? --> begin in the log, durable --> may it still? --> run --> end in the log --> RESULT
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from danube_fast.broker import admin
from danube_fast.broker.admin.registry import AdminContext, resource_of
from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.broker.topics.policy import TopicPolicy
from danube_fast.errors import DanubeError, Internal, PermissionDenied, Unavailable
from danube_fast.net import protocol
from danube_fast.net.session import Session
from danube_fast.security.audit import (
    NAME_CHARACTERS_MAX,
    AuditRecord,
    cut_arguments,
    fingerprint,
    shown_address,
    shown_arguments,
    shown_text,
)
from danube_fast.security.authorization import Authorizer
from danube_fast.types import REPLY_TOPICS
from danube_fast.undecided import Undecided
from danube_fast.workers.coordinator.audit import AuditLog
from danube_fast.workers.coordinator.change_rates import ChangeRates
from danube_fast.workers.process.denials import Denial

__all__ = ["READS", "SHOWN_ARGUMENTS", "Administration", "record_of"]

_log = logging.getLogger(__name__)

READS = frozenset({
    "check_permission", "cluster_status", "describe_namespace", "describe_server_key", "describe_subscription", "describe_topic", "list_audit", "list_clients",
    "list_namespaces", "list_security", "list_sign_ons", "list_subscriptions", "list_topics", "namespace_policy", "topic_policy",
    "topic_stats",
    # of readers of history, who change nothing that others see
    "flush_history", "release_history_hold", "renew_history_hold",
})  # fmt: skip
"""Operations that are recorded only when they are denied. All others, new ones too, count as changes."""

OF_REPLIES = frozenset({"create_topic", "delete_topic"})
"""What every client that asks and is answered does with a reply topic."""
SHOWN_ARGUMENTS = frozenset({
    "binding", "count", "credential", "credentials", "disabled", "dispatch", "durability", "expires_seconds", "force", "groups", "key_id", "name", "namespace",
    "partition", "partitions", "permissions", "principal", "public_key", "record_kind", "role", "roles", "scope", "source", "step", "subject", "subscription", "topic",
    "values", "worker", *TopicPolicy.__struct_fields__, *FailurePolicy.__struct_fields__,
})  # fmt: skip
"""Arguments whose values are recorded. Free texts such as labels are not among them: they may hold anything."""

DENIED_ARGUMENTS_BYTES_MAX = 600
"""Of a denied change, which costs the log more than its answer costs its client."""
Reply = Callable[[int, protocol.ServerCommand], None]


def record_of(session: Session, request: int, action: str, resource: str) -> AuditRecord:
    """Make the record of what a client wants, without its arguments."""
    return AuditRecord(
        event="",
        principal=shown_text(session.principal),
        proof=fingerprint(session.proof),
        address=shown_address(session.address),
        action=action,
        resource=shown_text(resource, NAME_CHARACTERS_MAX),
        request=f"{session.number}.{request}",
    )


class Administration:
    """Run the operations of one coordinator. Used by its loop only."""

    def __init__(
        self, context: AdminContext, authorizer: Authorizer, audit: AuditLog | None, reply: Reply,
        rates: ChangeRates,
    ) -> None:  # fmt: skip
        """`audit`: where changes are recorded; None: nowhere. `reply` answers a session, by its number. `rates`: of the
        changes that are recorded."""
        self._context, self._authorizer, self._audit = context, authorizer, audit
        self._rates = rates
        self._reply = reply

    def handle(self, session: Session, command: protocol.Admin) -> None:
        """Run an ADMIN command, now or once its record is durable."""
        number = session.number

        def on_end(value: Any, error: DanubeError | None) -> None:
            outcome: protocol.ServerCommand = protocol.Result(command.request, value)
            if error is not None:
                outcome = protocol.Error(command.request, error.code, str(error))
            self._reply(number, outcome)

        audit, resource = self._audit, _resource_of(command)
        if audit is None or self._is_of_reply(session, command.operation, resource):
            self._run(session, command, on_end)
            return

        def on_read(value: Any, error: DanubeError | None) -> None:
            if isinstance(error, PermissionDenied):
                self._note(audit, session, command, resource)
            on_end(value, error)

        if command.operation in READS:
            self._run(session, command, on_read)
            return
        record = record_of(session, command.request, command.operation, resource)
        try:
            authorize = self._authorizer.authorize
            admin.check(authorize, session.principal, command.operation, command.arguments)
            arguments = shown_arguments(command.arguments, SHOWN_ARGUMENTS)
            record = msgspec.structs.replace(record, arguments=arguments)
            self._rates.charge(
                session.principal, record, proof=session.proof, address=session.address
            )
        except Undecided:
            raise
        except DanubeError as error:
            on_read(None, error)
            return

        def on_changed(value: Any, error: DanubeError | None) -> None:
            audit.end(record, error)
            on_end(value, error)

        def begun(error: DanubeError | None) -> None:
            if error is not None:
                on_end(None, error)
            elif session.closed:  # revoked meanwhile, perhaps
                audit.end(record, Unavailable("the session has ended"))
            else:
                try:
                    self._run(session, command, on_changed)
                except Undecided as undecided:
                    undecided.then(lambda: begun(None))
                except Exception as fault:  # one bad request must not end the others' sessions
                    _log.exception("%s failed", command.operation)
                    text = f"{command.operation} failed: {fault!r}; see the broker's log"
                    on_changed(None, Internal(text))

        audit.begin(record, begun)

    def _run(
        self, session: Session, command: protocol.Admin,
        on_end: Callable[[Any, DanubeError | None], None],
    ) -> None:  # fmt: skip
        """Run an operation, if the session's principal may. Raises Undecided."""
        answer, who = admin.Answer(on_end), session.principal
        answer.is_wanted = lambda: not session.closed
        admin.run(
            self._context, self._authorizer, who, command.operation, command.arguments, answer
        )

    def _is_of_reply(self, session: Session, operation: str, resource: str) -> bool:
        """Whether a client makes or deletes a reply topic, or changes its own: any client may, as often as it likes, and
        would push what others did out of the log."""
        if not resource.startswith(REPLY_TOPICS):
            return False
        if operation in OF_REPLIES:
            return True
        record = self._context.topics.topic(resource)
        return record is not None and record.owner == session.principal

    @staticmethod
    def _note(audit: AuditLog, session: Session, command: protocol.Admin, resource: str) -> None:
        request = f"{session.number}.{command.request}"
        who = session.principal, session.proof, session.address
        arguments: dict[str, Any] = {}
        if command.operation not in READS:
            arguments = shown_arguments(command.arguments, SHOWN_ARGUMENTS)
        # or denials would push each other out
        arguments = cut_arguments(arguments, DENIED_ARGUMENTS_BYTES_MAX)
        audit.denials.note(
            Denial(command.operation, *who, resource, request=request, arguments=tuple(arguments.items()))
        )  # fmt: skip


def _resource_of(command: protocol.Admin) -> str:
    """Name what an operation is about, as its rights name it; of one that does not exist nothing."""
    operation = admin.OPERATIONS.get(command.operation)
    return "" if operation is None else resource_of(operation, command.arguments)
