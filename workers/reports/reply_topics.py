"""Reply topics whose client is gone: a client deletes its own when it is closed, a killed one cannot.

worker: not read for `reply_topic_expiry_seconds` --ReplyTopicsAbandoned--> coordinator: deletes it
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from danube_fast.broker import admin
from danube_fast.broker import messages as m
from danube_fast.broker.admin.registry import AdminContext
from danube_fast.broker.admin.topics import delete_topic
from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError
from danube_fast.roles import COORDINATOR
from danube_fast.types import REPLY_TOPICS
from danube_fast.workers.process.mailbox import Mailbox, Request
from danube_fast.workers.shard.job import PeriodicJob

if TYPE_CHECKING:  # the coordinator, which every start waits for, imports this module and no shard
    from danube_fast.workers.shard.state import ShardState

__all__ = ["ReplyTopicExpiry", "ReplyTopics"]

_log = logging.getLogger(__name__)

LOOK_NS_MAX = 30 * SECOND_NS
TOLD_MAX = 100
"""Topics in one report; the others follow with the next."""


class ReplyTopics(PeriodicJob):
    """Report reply topics without readers. The worker's side."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._limit_ns = state.settings.reply_topic_expiry_seconds * SECOND_NS
        self.interval_ns = min(self._limit_ns // 4, LOOK_NS_MAX)
        self._idle_since_ns: dict[str, int] = {}

    def run(self, now_ns: int) -> None:
        """Report topics that had no reader for too long."""
        before, self._idle_since_ns = self._idle_since_ns, {}
        for partition in self._state.catalog.by_id.values():
            if partition.topic.startswith(REPLY_TOPICS) and not any(
                sub.consumers for sub in partition.all_subscriptions()
            ):
                self._idle_since_ns[partition.topic] = before.get(partition.topic, now_ns)
        told = [t for t, since in self._idle_since_ns.items() if now_ns - since >= self._limit_ns]
        if told:
            mailbox = self._state.boot.mailbox
            mailbox.notify(COORDINATOR, m.ReplyTopicsAbandoned(told[:TOLD_MAX]))


class ReplyTopicExpiry:
    """Delete reply topics that workers report. The coordinator's side."""

    def __init__(self, mailbox: Mailbox, context: AdminContext) -> None:
        self._context = context
        mailbox.serve(m.ReplyTopicsAbandoned, self._abandoned)

    def _abandoned(self, request: Request[m.ReplyTopicsAbandoned]) -> None:
        for topic in request.message.topics:
            if topic.startswith(REPLY_TOPICS):
                try:
                    answer = admin.Answer(lambda value, error: None)
                    delete_topic(self._context, answer, topic=topic)
                    _log.info("%s has no reader any more: deleted", topic)
                except DanubeError as error:
                    _log.debug("%s is not deleted: %s", topic, error)
