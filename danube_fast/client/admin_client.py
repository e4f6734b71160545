"""`client.admin`: every administrative operation as a method. The operations live in the broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from danube_fast.checks import check_text
from danube_fast.client.consume.consumers import Consumers
from danube_fast.client.consume.peek import peek_steps, tail_steps
from danube_fast.client.handle.redrive import redrive_steps
from danube_fast.client.link.loop import LoopDriver
from danube_fast.client.link.operations import admin_steps
from danube_fast.client.link.pump import Steps
from danube_fast.client.produce.producers import Producers
from danube_fast.client.values.arguments import Start
from danube_fast.client.values.message import Message

__all__ = ["AdminClient", "AsyncAdmin"]

TOPICS_PER_PAGE = 5000
"""Half of what a broker answers at most, so that a full page is never a cut one."""


class AdminClient:
    """Administrative operations of a broker. Answers are what the broker says: dicts and lists."""

    def __init__(self, producers: Producers, consumers: Consumers) -> None:
        self._producers = producers
        self._consumers = consumers
        self._routes = consumers.routes

    def steps(self, operation: str, **arguments: Any) -> Steps[Any]:
        """Any operation as steps; arguments that are None are left to the broker's defaults."""
        check_text(operation, "operation")
        given = {name: value for name, value in arguments.items() if value is not None}
        return admin_steps(self._routes.bootstrap, operation, given)

    def drive(self, steps: Steps[Any]) -> Any:
        """Carry steps out; a client of another kind does it in its own way."""
        return self._routes.pump.run(steps)

    def call(self, operation: str, **arguments: Any) -> Any:
        """Any operation by name, also one that this client does not know yet."""
        return self.drive(self.steps(operation, **arguments))

    def peek(self, topic: str, count: int = 10, position: Start = "earliest") -> list[Message]:
        """The first `count` messages from a position on; no subscription is needed. NotFound."""
        messages: list[Message] = self.drive(peek_steps(self._consumers, topic, count, position))
        return messages

    def tail(self, topic: str, count: int = 10) -> list[Message]:
        """The last `count` messages, oldest first; no subscription is needed. NotFound."""
        messages: list[Message] = self.drive(tail_steps(self._consumers, topic, count))
        return messages

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
        letter is redriven once. Raises NotFound, FailedPrecondition if no topic of dead letters is
        known, and DeadlineExceeded if letters do not come.
        """
        count: int = self.drive(
            redrive_steps(
                self._producers,
                self._consumers,
                topic,
                subscription,
                dead_letter_topic,
                max_messages,
            )
        )
        return count

    def purge_topic(self, topic: str) -> dict[str, Any]:
        """Drop everything published so far, for all subscriptions. NotFound, Unavailable."""
        answer: dict[str, Any] = self.call("purge_topic", topic=topic)
        return answer

    def skip_messages(
        self, topic: str, subscription: str, count: int | None = None
    ) -> dict[str, Any]:
        """Count the next `count` messages of each partition as acked; None: all. NotFound."""
        answer: dict[str, Any] = self.call(
            "skip_messages", topic=topic, subscription=subscription, count=count
        )
        return answer

    def create_topic(
        self,
        topic: str,
        *,
        dispatch: str | None = None,
        durability: str | None = None,
        partitions: int | None = None,
    ) -> dict[str, Any]:
        """Create a topic; its description. AlreadyExists if there is one of that name."""
        answer: dict[str, Any] = self.call(
            "create_topic",
            topic=topic,
            dispatch=dispatch,
            durability=durability,
            partitions=partitions,
        )
        return answer

    def delete_topic(self, topic: str) -> dict[str, Any]:
        """Delete a topic with its messages and subscriptions; its clients get TopicDeleted."""
        answer: dict[str, Any] = self.call("delete_topic", topic=topic)
        return answer

    def list_topics(
        self, namespace: str | None = None, *, pattern: str | None = None
    ) -> list[dict[str, Any]]:
        """Topics of a namespace, or matching a glob such as `/iot/dev-*`; all without either."""
        answer: list[dict[str, Any]] = self.drive(self._topics_steps(namespace, pattern))
        return answer

    def _topics_steps(
        self, namespace: str | None, pattern: str | None
    ) -> Steps[list[dict[str, Any]]]:
        """Ask for page after page: the broker lists so many topics at once at most."""
        found: list[dict[str, Any]] = []
        while True:
            page = yield from self.steps(
                "list_topics", namespace=namespace, pattern=pattern, limit=TOPICS_PER_PAGE,
                after=found[-1]["topic"] if found else None,
            )  # fmt: skip
            found += page
            if len(page) < TOPICS_PER_PAGE:
                return found

    def describe_topic(self, topic: str) -> dict[str, Any]:
        """Settings of a topic and where its partitions live. NotFound."""
        answer: dict[str, Any] = self.call("describe_topic", topic=topic)
        return answer

    def topic_stats(self, topic: str) -> dict[str, Any]:
        """Offsets, counts and subscriptions of a topic. NotFound, Unavailable."""
        answer: dict[str, Any] = self.call("topic_stats", topic=topic)
        return answer

    def set_topic(
        self, topic: str, *, durability: str | None = None, partitions: int | None = None
    ) -> dict[str, Any]:
        """Change a topic's durability, give it more partitions; in force when this returns."""
        answer: dict[str, Any] = self.call(
            "set_topic", topic=topic, durability=durability, partitions=partitions
        )
        return answer

    def topic_policy(self, topic: str, *, with_sources: bool = False) -> dict[str, Any]:
        """The values of its policy that are in force for a topic, defaults too; `with_sources` as {"values",
        "sources"}, which say of each whether the topic sets it, its namespace, or nothing does. NotFound."""
        given = {"with_sources": True} if with_sources else {}
        answer: dict[str, Any] = self.call("topic_policy", topic=topic, **given)
        return answer

    def set_topic_policy(self, topic: str, values: dict[str, Any]) -> dict[str, Any]:
        """Change values of a topic's policy, in force when this returns; None goes back to what the
        namespace says. The values in force. NotFound, InvalidArgument."""
        answer: dict[str, Any] = self.call("set_topic_policy", topic=topic, values=values)
        return answer

    def namespace_policy(self, namespace: str) -> dict[str, Any]:
        """The values that a namespace sets for its topics. NotFound."""
        answer: dict[str, Any] = self.call("namespace_policy", namespace=namespace)
        return answer

    def set_namespace_policy(self, namespace: str, values: dict[str, Any]) -> dict[str, Any]:
        """Change values for all topics of a namespace that set none of their own, in force when this
        returns; None goes back to the default. What it sets. NotFound, InvalidArgument."""
        answer: dict[str, Any] = self.call(
            "set_namespace_policy", namespace=namespace, values=values
        )
        return answer

    def move_topic(
        self, topic: str, worker: int, *, partition: int | None = None, timeout: float = 600.0
    ) -> dict[str, Any]:
        """Move a topic, or one of its partitions, to another worker (counted from 0); publishing and
        consuming go on meanwhile. What moved, in milliseconds. NotFound, FailedPrecondition, Unavailable.

        A move that takes longer than `timeout` seconds goes on all the same.
        """
        arguments: dict[str, Any] = {"topic": topic, "worker": worker}
        if partition is not None:
            arguments["partition"] = partition
        answer: dict[str, Any] = self.drive(
            admin_steps(self._routes.bootstrap, "move_topic", arguments, timeout)
        )
        return answer

    def list_subscriptions(self, topic: str) -> list[dict[str, Any]]:
        """Subscriptions of a topic: type, lag, what is unacked, who consumes."""
        answer: list[dict[str, Any]] = self.call("list_subscriptions", topic=topic)
        return answer

    def describe_subscription(self, topic: str, subscription: str) -> dict[str, Any]:
        """Lag, unacked messages, who holds them, and why nothing moves. NotFound."""
        answer: dict[str, Any] = self.call(
            "describe_subscription", topic=topic, subscription=subscription
        )
        return answer

    def delete_subscription(self, topic: str, subscription: str) -> Any:
        """Remove a subscription and its cursor."""
        return self.call("delete_subscription", topic=topic, subscription=subscription)

    def set_failure_policy(
        self, topic: str, subscription: str, values: dict[str, Any]
    ) -> dict[str, Any]:
        """Change fields of a subscription's failure policy; the policy. NotFound, InvalidArgument."""
        answer: dict[str, Any] = self.call(
            "set_failure_policy", topic=topic, subscription=subscription, values=values
        )
        return answer

    def create_namespace(self, namespace: str) -> Any:
        """Create a namespace. AlreadyExists."""
        return self.call("create_namespace", namespace=namespace)

    def delete_namespace(self, namespace: str) -> Any:
        """Delete an empty namespace. FailedPrecondition if it is not."""
        return self.call("delete_namespace", namespace=namespace)

    def list_namespaces(self) -> list[Any]:
        """Every namespace."""
        answer: list[Any] = self.call("list_namespaces")
        return answer

    def list_clients(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Connections to the coordinator and to each worker, at most `limit`, with the producers and
        consumers that are open on each. Unavailable while a worker is down."""
        answer: list[dict[str, Any]] = self.drive(self._clients_steps(limit))
        return answer

    def _clients_steps(self, limit: int | None) -> Steps[list[dict[str, Any]]]:
        rows: list[dict[str, Any]] = []
        after = ""
        while limit is None or len(rows) < limit:
            left = None if limit is None else limit - len(rows)
            page = yield from self.steps("list_clients", after=after, limit=left)
            rows += page["clients"]
            after = page["after"]
            if not after:
                break
        return rows

    def cluster_status(self) -> dict[str, Any]:
        """Processes, logs, counters."""
        answer: dict[str, Any] = self.call("cluster_status")
        return answer


class AsyncAdmin:
    """Every method of AdminClient, to be awaited."""

    def __init__(self, producers: Producers, consumers: Consumers, driver: LoopDriver) -> None:
        self._parts = producers, consumers
        self._driver = driver

    async def call(self, operation: str, **arguments: Any) -> Any:
        """Any operation by name."""
        return await self._driver.run(AdminClient(*self._parts).steps(operation, **arguments))

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_") or not hasattr(AdminClient, name):
            raise AttributeError(f"there is no administrative operation {name!r}")
        driver = self._driver

        class Recorder(AdminClient):
            def drive(self, steps: Steps[Any]) -> Any:
                return driver.run(steps)

        return cast("Callable[..., Awaitable[Any]]", getattr(Recorder(*self._parts), name))
