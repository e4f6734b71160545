"""The parts of a list that its asker may be told: those that the principal may look up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from danube_fast.broker.admin.registry import AdminContext, Answer, Asker
from danube_fast.broker.answers import ClientConnection
from danube_fast.errors import DanubeError
from danube_fast.types import REPLY_TOPICS
from danube_fast.undecided import Steps, allowed

__all__ = ["Visibility", "answer_in_slices"]

T = TypeVar("T")


class Visibility:
    """Which topics and subscriptions one asker may be told of, for one command. Asks for each of them once: a list that
    waits for answers begins again with each, and goes on with those that its asker has."""

    def __init__(self, context: AdminContext, asker: Asker) -> None:
        self._topics, self._asker = context.topics, asker
        self._is_enforced = context.security.is_enforced

    def shows_topic(self, topic: str) -> bool:
        """Whether a topic may be named. A reply topic is named to the principal that made it: who has its name can reply."""
        if self._is_enforced and topic.startswith(REPLY_TOPICS):
            record = self._topics.topic(topic)
            return record is not None and record.owner == self._asker.principal
        return self._asker.may_see(topic)

    def shows_namespace(self, namespace: str) -> bool:
        """Whether a namespace may be named."""
        return self._asker.may_see(_namespace(namespace))

    def shows_subscription(self, topic: str, subscription: str) -> bool:
        """Whether a subscription may be named."""
        return self._asker.may_see(_subscription(topic, subscription))

    def learn_topics(self, topics: Iterable[str]) -> None:
        """Ask about many at once, where that is possible. Raises Unavailable, Undecided."""
        self._asker.learn(self._asked_about(topics))

    def learn_subscriptions(self, topic: str, subscriptions: Iterable[str]) -> None:
        """Ask about many at once, where that is possible. Raises Unavailable, Undecided."""
        self._asker.learn(self._asked_about(_subscription(topic, each) for each in subscriptions))

    def learns_topics(
        self, of: Callable[[list[T]], Iterable[str]]
    ) -> Callable[[list[T]], Steps] | None:
        """Return what `sift` learns about items by, `of` which are their topics."""
        return self._asker.learns(lambda items: self._asked_about(of(items)))

    def learns_namespaces(self) -> Callable[[list[str]], Steps] | None:
        """Return what `sift` learns about namespaces by."""
        return self._asker.learns(lambda names: map(_namespace, names))

    def _asked_about(self, names: Iterable[str]) -> Iterable[str]:
        return (each for each in names if not (self._is_enforced and each.startswith(REPLY_TOPICS)))

    def hide(self, client: ClientConnection) -> None:
        """Take out of a row what is open on topics that may not be named; the counts stay."""
        client.producers = allowed(client.producers, lambda each: self.shows_topic(each.topic))
        client.consumers = allowed(client.consumers, lambda each: self.shows_topic(each.topic))


def _namespace(name: str) -> str:
    return f"namespace:{name}"


def _subscription(topic: str, name: str) -> str:
    return f"{topic}#{name}"


def answer_in_slices(context: AdminContext, answer: Answer, steps: Callable[[], Steps]) -> None:
    """Take steps that end with the answer, a slice of them in each turn of the loop."""

    def guarded() -> Steps:
        try:
            yield from steps()
        except DanubeError as error:
            answer.fail(error)

    context.in_slices(guarded())
