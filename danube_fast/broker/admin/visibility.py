"""The parts of a list that its asker may be told: those that the principal may look up."""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.broker.admin.registry import AdminContext, Answer, Asker, Steps
from danube_fast.broker.answers import ClientConnection
from danube_fast.errors import DanubeError
from danube_fast.types import REPLY_TOPICS

__all__ = ["Visibility", "answer_in_slices"]


class Visibility:
    """Which topics and subscriptions one asker may be told of, for one command."""

    def __init__(self, context: AdminContext, asker: Asker) -> None:
        """Raises PermissionDenied, Unavailable, Undecided, whatever there is to list: before anything is looked at."""
        self._topics, self._principal = context.topics, asker.principal
        self._is_enforced = context.security.is_enforced
        self._is_visible = asker.visible()

    def shows_topic(self, topic: str) -> bool:
        """Whether a topic may be named. A reply topic is named to the principal that made it: who has its name can reply."""
        if self._is_enforced and topic.startswith(REPLY_TOPICS):
            record = self._topics.topic(topic)
            return record is not None and record.owner == self._principal
        return self._is_visible(topic)

    def shows_namespace(self, namespace: str) -> bool:
        """Whether a namespace may be named."""
        return self._is_visible(f"namespace:{namespace}")

    def shows_subscription(self, topic: str, subscription: str) -> bool:
        """Whether a subscription may be named."""
        return self._is_visible(f"{topic}#{subscription}")

    def hide(self, client: ClientConnection) -> None:
        """Take out of a row what is open on topics that may not be named; the counts stay."""
        client.producers = [each for each in client.producers if self.shows_topic(each.topic)]
        client.consumers = [each for each in client.consumers if self.shows_topic(each.topic)]


def answer_in_slices(context: AdminContext, answer: Answer, steps: Callable[[], Steps]) -> None:
    """Take steps that end with the answer, a slice of them in each turn of the loop."""

    def guarded() -> Steps:
        try:
            yield from steps()
        except DanubeError as error:
            answer.fail(error)

    context.in_slices(guarded())
