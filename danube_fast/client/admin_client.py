# mypy: disable-error-code="empty-body"
"""`client.admin`: every administrative operation as a method. The operations live in the broker.

A method under `_operation` only declares its parameters: it runs the operation of its name in the broker's
registry (`broker/admin`).
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from danube_fast.checks import check_text
from danube_fast.client.consume.consumers import Consumers
from danube_fast.client.consume.peek import peek_steps, tail_steps
from danube_fast.client.faces import Run, twin
from danube_fast.client.handle.redrive import redrive_steps
from danube_fast.client.link.loop import LoopDriver
from danube_fast.client.link.operations import admin_steps
from danube_fast.client.link.steps import Steps
from danube_fast.client.produce.producers import Producers
from danube_fast.client.values.arguments import Start
from danube_fast.client.values.limits import REQUEST_TIMEOUT_SECONDS
from danube_fast.client.values.message import Message

__all__ = ["AdminClient", "AsyncAdmin"]

TOPICS_PER_PAGE = 5000
"""Half of what a broker answers at most, so that a full page is never a cut one."""
P = ParamSpec("P")
T = TypeVar("T")


def _operation(
    declared: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], T]:
    """Make a method that runs the operation of its name with the arguments of its declaration."""
    parameters = inspect.signature(declared)

    @functools.wraps(declared)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        given = parameters.bind(self, *args, **kwargs)
        given.apply_defaults()
        _, *arguments = given.arguments.items()
        return self._run(self._steps(declared.__name__, dict(arguments)))  # type: ignore[no-any-return]

    return method


class _AdminView:
    """Shared by both kinds of `admin`."""

    def __init__(self, producers: Producers, consumers: Consumers, run: Any) -> None:
        self._producers = producers
        self._consumers = consumers
        self._run: Run = run

    def _steps(self, operation: str, arguments: dict[str, Any]) -> Steps[Any]:
        """Run an operation; arguments that are None are left to the broker's defaults."""
        check_text(operation, "operation")
        given = {name: value for name, value in arguments.items() if value is not None}
        timeout = given.pop("timeout", REQUEST_TIMEOUT_SECONDS)
        return admin_steps(self._consumers.routes.bootstrap, operation, given, timeout)

    def _security_steps(self, kind: str) -> Steps[list[dict[str, Any]]]:
        """Ask for page after page."""
        field = {"principal": "name", "role": "name", "api_key": "id"}.get(kind, kind)
        found: list[dict[str, Any]] = []
        page: list[dict[str, Any]] | None = None
        while page is None or page:
            after = found[-1][field] if found else None
            page = yield from self._steps("list_security", {"record_kind": kind, "after": after})
            found += page
        return found

    def _topics_steps(
        self, namespace: str | None, pattern: str | None
    ) -> Steps[list[dict[str, Any]]]:
        """Ask for page after page: the broker lists so many topics at once at most."""
        found: list[dict[str, Any]] = []
        page: list[dict[str, Any]] | None = None
        while page is None or len(page) == TOPICS_PER_PAGE:
            after = found[-1]["topic"] if found else None
            page = yield from self._steps(
                "list_topics",
                {
                    "namespace": namespace,
                    "pattern": pattern,
                    "limit": TOPICS_PER_PAGE,
                    "after": after,
                },
            )
            found += page
        return found

    def _pages_steps(
        self, operation: str, rows_in: str, limit: int | None, **asked: Any
    ) -> Steps[list[dict[str, Any]]]:
        """Ask for page after page of an operation that says where to go on; `rows_in`: where a page has its rows."""
        rows: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None and (limit is None or len(rows) < limit):
            left = None if limit is None else limit - len(rows)
            page = yield from self._steps(operation, {**asked, "after": after, "limit": left})
            rows += page[rows_in]
            after = page["after"] or None
        return rows

    def _audit_steps(
        self, since_seconds: int, principal: str, denied: bool, limit: int
    ) -> Steps[list[dict[str, Any]]]:
        """Ask for page after page, and keep the newest."""
        found: deque[dict[str, Any]] = deque(maxlen=limit)
        asked = {"since_seconds": since_seconds, "principal": principal, "denied": denied}
        page = yield from self._steps("list_audit", asked)
        found += page["records"]
        while not page["is_last"]:
            page = yield from self._steps("list_audit", {**asked, "after": page["after"]})
            found += page["records"]
        return list(found)


class AdminClient(_AdminView):
    """Administrative operations of a broker. Answers are what the broker says: dicts and lists.

    Every method raises InvalidArgument for what cannot be, and Unavailable or DeadlineExceeded when the broker
    does not answer: then look whether the operation took place before you repeat it.
    """

    def __init__(self, producers: Producers, consumers: Consumers) -> None:
        super().__init__(producers, consumers, consumers.routes.pump.run)

    def call(self, /, operation: str, **arguments: Any) -> Any:
        """Run any operation by name, also one that this client does not know yet. NotFound."""
        return self._run(self._steps(operation, arguments))

    # ------------------------------------------------------------ messages

    def peek(self, topic: str, count: int = 10, position: Start = "earliest") -> list[Message]:
        """Return the first `count` messages from a position on; no subscription is needed. NotFound."""
        return self._run(peek_steps(self._consumers, topic, count, position))

    def tail(self, topic: str, count: int = 10) -> list[Message]:
        """Return the last `count` messages, oldest first; no subscription is needed. NotFound."""
        return self._run(tail_steps(self._consumers, topic, count))

    def redrive(
        self,
        topic: str,
        subscription: str,
        *,
        dead_letter_topic: str | None = None,
        max_messages: int | None = None,
    ) -> int:
        """Publish the dead letters of a subscription to its topic again; how many there were.

        They go to every subscription of the topic, without the attributes that made them dead letters.
        The place in the dead-letter topic is kept under the subscription `redrive-SUBSCRIPTION`, so each
        letter is redriven once. `dead_letter_topic`: that of the failure policy, unless given;
        `max_messages`: so many at most. Raises NotFound, FailedPrecondition if no topic of dead letters is
        known, and DeadlineExceeded if letters do not come.
        """
        return self._run(
            redrive_steps(
                self._producers,
                self._consumers,
                topic,
                subscription,
                dead_letter_topic,
                max_messages,
            )
        )

    @_operation
    def purge_topic(self, topic: str) -> dict[str, Any]:
        """Drop everything published so far, for all subscriptions. NotFound, Unavailable."""

    @_operation
    def skip_messages(
        self, topic: str, subscription: str, count: int | None = None
    ) -> dict[str, Any]:
        """Count the next `count` messages of each partition as acked; None: all. NotFound."""

    # ------------------------------------------------------------ topics

    @_operation
    def create_topic(
        self,
        topic: str,
        *,
        dispatch: str | None = None,
        durability: str | None = None,
        partitions: int | None = None,
    ) -> dict[str, Any]:
        """Create a topic; its description. `dispatch`: "reliable" (the default) or "non_reliable"; `durability`:
        "memory", "os" or "fsync" (the default, if reliable); `partitions`: none by default. AlreadyExists if
        there is one of that name."""

    @_operation
    def delete_topic(self, topic: str) -> dict[str, Any]:
        """Delete a topic with its messages and subscriptions; its clients get TopicDeleted. NotFound."""

    def list_topics(
        self, namespace: str | None = None, *, pattern: str | None = None
    ) -> list[dict[str, Any]]:
        """List topics of a namespace, or matching a glob such as `/iot/dev-*`; all without either."""
        return self._run(self._topics_steps(namespace, pattern))

    @_operation
    def describe_topic(self, topic: str) -> dict[str, Any]:
        """Return settings of a topic and where its partitions live. NotFound."""

    @_operation
    def topic_stats(self, topic: str) -> dict[str, Any]:
        """Return offsets, counts and subscriptions of a topic. NotFound, Unavailable."""

    @_operation
    def set_topic(
        self, topic: str, *, durability: str | None = None, partitions: int | None = None
    ) -> dict[str, Any]:
        """Change a topic's durability, give it more partitions; in force when this returns. NotFound,
        FailedPrecondition."""

    @_operation
    def topic_policy(self, topic: str, *, with_sources: bool = False) -> dict[str, Any]:
        """Return the values of its policy that are in force for a topic, defaults too; `with_sources` as {"values",
        "sources"}, which say of each whether the topic sets it, its namespace, or nothing does. NotFound."""

    @_operation
    def set_topic_policy(self, topic: str, values: dict[str, Any]) -> dict[str, Any]:
        """Change values of a topic's policy, in force when this returns; None goes back to what the
        namespace says. The values in force. NotFound, InvalidArgument."""

    @_operation
    def move_topic(
        self, topic: str, worker: int, *, partition: int | None = None, timeout: float = 600.0
    ) -> dict[str, Any]:
        """Move a topic, or one of its partitions, to another worker (counted from 0); publishing and
        consuming go on meanwhile. What moved, in milliseconds. NotFound, FailedPrecondition, Unavailable.

        A move that takes longer than `timeout` seconds goes on all the same.
        """

    @_operation
    def flush_history(
        self, topic: str, *, hold_seconds: int | None = None, timeout_ms: int | None = None,
        timeout: float = 70.0,
    ) -> dict[str, Any]:  # fmt: skip
        """Upload all messages of a topic up to now to the broker's object store: the store, and each partition's
        offsets. `hold_seconds`: its objects are not deleted for so long, for readers that have the store alone; of a
        topic without history a copy is there for so long. NotFound, FailedPrecondition for a topic that is in no log, or
        has no history and is not held, DeadlineExceeded after `timeout_ms` (60,000; an upload goes on, a copy does not),
        Unavailable."""

    @_operation
    def renew_history_hold(
        self, hold: str, *, hold_seconds: int, topic: str | None = None, timeout: float = 70.0
    ) -> dict[str, Any]:
        """Keep the objects of a hold for so many seconds from now on: the new `hold`, and when it `expires` (Unix
        time, seconds). `hold`: what `flush_history` or the last renewal has answered. NotFound if it was released or
        has expired: flush again; InvalidArgument, Unavailable. A secured broker wants to be told the `topic` that was
        flushed, unless the caller may consume all topics."""

    @_operation
    def release_history_hold(
        self, hold: str, *, topic: str | None = None, timeout: float = 70.0
    ) -> Any:
        """Give the objects of a hold back: they may be deleted. One that is gone already is no error. `topic`: as for a
        renewal. InvalidArgument, Unavailable."""

    # ------------------------------------------------------------ subscriptions

    @_operation
    def list_subscriptions(self, topic: str) -> list[dict[str, Any]]:
        """List subscriptions of a topic: type, lag, what is unacked, which consumers there are. NotFound."""

    @_operation
    def describe_subscription(self, topic: str, subscription: str) -> dict[str, Any]:
        """Return lag, unacked messages, which consumers have them, and why nothing moves. NotFound."""

    @_operation
    def delete_subscription(self, topic: str, subscription: str) -> Any:
        """Remove a subscription and its cursor; its consumers are closed. NotFound."""

    @_operation
    def set_failure_policy(
        self, topic: str, subscription: str, values: dict[str, Any]
    ) -> dict[str, Any]:
        """Change fields of a subscription's failure policy; the policy. NotFound, InvalidArgument."""

    # ------------------------------------------------------------ namespaces, broker

    @_operation
    def create_namespace(self, namespace: str) -> Any:
        """Create a namespace. AlreadyExists."""

    @_operation
    def delete_namespace(self, namespace: str) -> Any:
        """Delete an empty namespace. NotFound, FailedPrecondition if it is not empty."""

    @_operation
    def list_namespaces(self) -> list[Any]:
        """List every namespace, with the number of its topics."""

    @_operation
    def namespace_policy(self, namespace: str) -> dict[str, Any]:
        """Return the values that a namespace sets for its topics. NotFound."""

    @_operation
    def set_namespace_policy(self, namespace: str, values: dict[str, Any]) -> dict[str, Any]:
        """Change values for all topics of a namespace that set none of their own, in force when this
        returns; None goes back to the default. The values that it sets. NotFound, InvalidArgument."""

    @_operation
    def set_namespace_quota(self, namespace: str, values: dict[str, Any]) -> dict[str, Any]:
        """Change values of the quota that all topics of a namespace share, in force when this returns; None takes a limit
        away. All values in force. NotFound, InvalidArgument."""

    @_operation
    def describe_namespace(self, namespace: str) -> dict[str, Any]:
        """Return the policy that a namespace sets for its topics, and of each value of its quota the limit and what is
        used of it. NotFound."""

    def list_clients(self, limit: int | None = None) -> list[dict[str, Any]]:
        """List connections to the coordinator and to each worker, at most `limit`, with the producers and
        consumers that are open on each. Unavailable while a worker is down."""
        return self._run(self._pages_steps("list_clients", "clients", limit))

    @_operation
    def cluster_status(self) -> dict[str, Any]:
        """Return processes, logs, counters."""

    # ------------------------------------------------------------ security

    def list_security(self, record_kind: str) -> list[dict[str, Any]]:
        """List all records of a kind: principal, credential, role, binding or api_key. InvalidArgument."""
        return self._run(self._security_steps(record_kind))

    @_operation
    def set_principal(
        self, name: str, groups: list[str] | None = None, disabled: bool | None = None,
        credentials: list[str] | None = None, roles: list[str] | None = None, scope: str | None = None,
    ) -> Any:  # fmt: skip
        """Make a principal, or change its groups, or disable it, with credentials and with roles within a scope (by default
        the cluster), all of that or nothing; what it is now, with `groups` and `disabled`. NotFound for a role,
        FailedPrecondition if a credential proves another one, InvalidArgument."""

    @_operation
    def set_credential(
        self, credential: str, principal: str, expires_seconds: int | None = None,
        label: str | None = None,
    ) -> Any:  # fmt: skip
        """Let a credential (`curve:` and a public key, `uid:` and the number of a local user, `mtls:` and the SHA-256 of a
        certificate or its subject) prove that a client is this principal; what is None stays as it is. What it is now, with
        `expires_ns` and `label`. NotFound, FailedPrecondition if it proves another one, InvalidArgument."""

    @_operation
    def add_api_key(
        self, principal: str, key_id: str, salt: str, digest: str, expires_seconds: int | None = None,
        label: str | None = None,
    ) -> Any:  # fmt: skip
        """Let an API key sign on as this principal; `danube_fast.security.api_keys.new_api_key` draws it. NotFound,
        FailedPrecondition if the principal has two live ones, InvalidArgument."""

    @_operation
    def set_role(self, name: str, permissions: list[str]) -> Any:
        """Make a role of these permissions, or change it. InvalidArgument."""

    @_operation
    def set_binding(self, binding: str, subject: str, role: str, scope: str) -> Any:
        """Bind `user:NAME` or `group:NAME` to a role within a scope. InvalidArgument."""

    @_operation
    def delete_security(self, record_kind: str, name: str, *, force: bool | None = None) -> Any:
        """Delete a record; with a principal its credentials, bindings and sign-ons. NotFound, and without `force`
        FailedPrecondition if no administrator with a key would be left."""

    def list_sign_ons(
        self, principal: str = "", source: str = "", limit: int | None = None
    ) -> list[dict[str, Any]]:
        """List the keys that are signed on just now, at most `limit`: those of a principal (empty: of all), and of those the
        ones that a source has vouched for (`api_key:ID`, `jwt:ISSUER`, `authenticator:NAME`; empty: any)."""
        asked = {"principal": principal, "source": source}
        return self._run(self._pages_steps("list_sign_ons", "sign_ons", limit, **asked))

    @_operation
    def end_sign_ons(
        self, public_key: str | None = None, principal: str | None = None, source: str | None = None
    ) -> dict[str, Any]:
        """End the sign-on of a key, or those of a principal or of a source (`api_key:ID`, `jwt:ISSUER`, `authenticator:NAME`);
        give one of them: {"ended"}, their number, 0 for a user that has none. What they were made with stays good.
        InvalidArgument; NotFound for a principal that has neither a record nor a sign-on."""

    def list_audit(
        self, since_seconds: int = 0, *, principal: str = "", denied: bool = False,
        limit: int = 1000,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """List records of the audit log, oldest first, the newest `limit` of them: of the last `since_seconds` (0: all),
        of a principal (empty: of all), the denied ones alone. FailedPrecondition if there is none, Unavailable."""
        return self._run(self._audit_steps(since_seconds, principal, denied, limit))

    @_operation
    def check_permission(self, principal: str, permission: str, resource: str) -> dict[str, Any]:
        """Return {"allowed", "registered"}: whether a principal may do that, and has a record. InvalidArgument."""

    @_operation
    def describe_server_key(self) -> dict[str, Any]:
        """Return the public keys of the broker, the newest first, how far their rotation is, and which process has
        which. FailedPrecondition."""

    @_operation
    def rotate_server_key(self, step: str) -> dict[str, Any]:
        """Take a step of the rotation of the server key: prepare, activate, retire, or revert, which undoes one of the
        first two; the same as `describe_server_key`. FailedPrecondition, InvalidArgument."""


class AsyncAdmin(_AdminView):
    """Administrative operations of a broker. The methods are those of AdminClient, to be awaited."""

    def __init__(self, producers: Producers, consumers: Consumers, driver: LoopDriver) -> None:
        super().__init__(producers, consumers, driver.run)

    call = twin(AdminClient.call)
    peek = twin(AdminClient.peek)
    tail = twin(AdminClient.tail)
    redrive = twin(AdminClient.redrive)
    purge_topic = twin(AdminClient.purge_topic)
    skip_messages = twin(AdminClient.skip_messages)
    create_topic = twin(AdminClient.create_topic)
    delete_topic = twin(AdminClient.delete_topic)
    list_topics = twin(AdminClient.list_topics)
    describe_topic = twin(AdminClient.describe_topic)
    topic_stats = twin(AdminClient.topic_stats)
    set_topic = twin(AdminClient.set_topic)
    topic_policy = twin(AdminClient.topic_policy)
    set_topic_policy = twin(AdminClient.set_topic_policy)
    move_topic = twin(AdminClient.move_topic)
    flush_history = twin(AdminClient.flush_history)
    renew_history_hold = twin(AdminClient.renew_history_hold)
    release_history_hold = twin(AdminClient.release_history_hold)
    list_subscriptions = twin(AdminClient.list_subscriptions)
    describe_subscription = twin(AdminClient.describe_subscription)
    delete_subscription = twin(AdminClient.delete_subscription)
    set_failure_policy = twin(AdminClient.set_failure_policy)
    create_namespace = twin(AdminClient.create_namespace)
    delete_namespace = twin(AdminClient.delete_namespace)
    list_namespaces = twin(AdminClient.list_namespaces)
    namespace_policy = twin(AdminClient.namespace_policy)
    set_namespace_policy = twin(AdminClient.set_namespace_policy)
    set_namespace_quota = twin(AdminClient.set_namespace_quota)
    describe_namespace = twin(AdminClient.describe_namespace)
    list_clients = twin(AdminClient.list_clients)
    cluster_status = twin(AdminClient.cluster_status)
    list_security = twin(AdminClient.list_security)
    set_principal = twin(AdminClient.set_principal)
    set_credential = twin(AdminClient.set_credential)
    add_api_key = twin(AdminClient.add_api_key)
    set_role = twin(AdminClient.set_role)
    set_binding = twin(AdminClient.set_binding)
    delete_security = twin(AdminClient.delete_security)
    list_sign_ons = twin(AdminClient.list_sign_ons)
    end_sign_ons = twin(AdminClient.end_sign_ons)
    list_audit = twin(AdminClient.list_audit)
    check_permission = twin(AdminClient.check_permission)
    describe_server_key = twin(AdminClient.describe_server_key)
    rotate_server_key = twin(AdminClient.rotate_server_key)
