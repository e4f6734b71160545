"""The parts of a list that its asker may be told: those that the principal may look up."""

from __future__ import annotations

import logging
from collections.abc import Callable

from danube_fast.broker.admin.registry import AdminContext, Answer, Asker, Steps
from danube_fast.broker.answers import ClientConnection
from danube_fast.errors import DanubeError, Internal
from danube_fast.types import REPLY_TOPICS
from danube_fast.visible import narrowest

__all__ = ["Visibility", "answer_in_slices"]

_log = logging.getLogger(__name__)


class Visibility:
    """Which topics and subscriptions one asker may be told of, for one command."""

    def __init__(self, context: AdminContext, asker: Asker) -> None:
        """Raises Unavailable, Undecided, whatever there is to list: make it before looking at that."""
        self._topics, self._principal = context.topics, asker.principal
        self._is_enforced = context.security.is_enforced
        self._visible = asker.visible()

    @property
    def fronts(self) -> tuple[str, ...]:
        """How the names of all topics begin that may be named; see `danube_fast/visible.py`."""
        fronts = self._visible.fronts
        return narrowest([*fronts, REPLY_TOPICS]) if self._is_enforced else fronts

    def shows_topic(self, topic: str) -> bool:
        """Whether a topic may be named. A reply topic is named to the principal that made it: who has its name can reply."""
        if self._is_enforced and topic.startswith(REPLY_TOPICS):
            record = self._topics.topic(topic)
            return record is not None and record.owner == self._principal
        return self._visible.shows(topic)

    def shows_namespace(self, namespace: str) -> bool:
        """Whether a namespace may be named."""
        return f"/{namespace}/".startswith(self._visible.fronts) and self._visible.shows(
            f"namespace:{namespace}"
        )

    def shows_subscription(self, topic: str, subscription: str) -> bool:
        """Whether a subscription may be named."""
        return self._visible.shows(f"{topic}#{subscription}")

    def hide(self, client: ClientConnection) -> None:
        """Take out of a row what is open on topics and subscriptions that may not be named; the counts stay."""
        client.producers = [each for each in client.producers if self.shows_topic(each.topic)]
        client.consumers = [
            each
            for each in client.consumers
            if self.shows_topic(each.topic)
            and (not each.subscription or self.shows_subscription(each.topic, each.subscription))
        ]


def answer_in_slices(context: AdminContext, answer: Answer, steps: Callable[[], Steps]) -> None:
    """Take steps that end with the answer, a slice of them in each turn of the loop."""

    def guarded() -> Steps:
        try:
            for _ in steps():
                if not answer.is_wanted():
                    return
                yield None
        except DanubeError as error:
            answer.fail(error)
        except Exception as fault:  # of one client
            _log.exception("a list failed")
            answer.fail(Internal(f"the list failed: {fault!r}; see the broker's log"))

    context.in_slices(answer.asker.principal, guarded())
