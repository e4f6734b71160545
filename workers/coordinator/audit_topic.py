"""The topic of the audit log, `/system/audit`: the lines of the files again, each a message, for who consumes them.

    files --page--> not published yet --PublishAudit--> worker that owns the topic --durable--> how far it is, on record

The files are the truth. The topic follows: made at the first need, at least once behind a kill (a line has a number), and
waiting as long as its worker is down. No client writes to it or changes it (`security/policy.py`); one that was there before
the broker published anything was made by a client, and is deleted.
"""

from __future__ import annotations

import logging
from typing import Any

from danube_fast.broker import admin
from danube_fast.broker import messages as m
from danube_fast.broker.admin.policies import policy_summary, set_topic_policy
from danube_fast.broker.admin.registry import AdminContext
from danube_fast.broker.admin.topics import create_topic, delete_topic
from danube_fast.broker.topics.policy import RetentionPolicy, TopicPolicy
from danube_fast.broker.topics.records import TopicRecord
from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError, InvalidArgument
from danube_fast.security.audit import encode_record
from danube_fast.security.audit_files import (
    Published,
    begun_anew,
    read_page,
    read_published,
    write_published,
)
from danube_fast.types import AUDIT_TOPIC, Durability
from danube_fast.workers.coordinator.audit import AuditLog

__all__ = ["AuditTopic"]

_log = logging.getLogger(__name__)

DAY_SECONDS = 24 * 3600
POLICY: dict[str, Any] = {
    **policy_summary(TopicPolicy()),  # else who manages the namespace could let records expire
    "retention_policy": RetentionPolicy.UNTIL_EXPIRED.value,
    "retention_seconds": 30 * DAY_SECONDS,
    "subscription_expiry_seconds": 30 * DAY_SECONDS,
}
"""Of the topic. No client may delete a subscription of it, so those that are not used go by themselves."""
PAGE_BYTES = 64 * 1024
LOOK_NS = SECOND_NS // 4
RETRY_NS = SECOND_NS


class AuditTopic:
    """Publish the records of one broker. Used by the coordinator's loop only."""

    def __init__(self, context: AdminContext, audit: AuditLog) -> None:
        self._context, self._audit = context, audit
        found = self._read()
        self._is_first = found is None
        """Whether a topic that is there now is none of ours."""
        self._published = found or Published()
        self._saved = self._published
        self._is_busy = False
        self._next_ns = 0
        self._moves = 0
        """How often the files had been moved away when they were read last."""
        self.fault = ""
        """Why records have to wait; empty: they do not."""

    def _read(self) -> Published | None:
        try:
            return read_published(self._audit.folder)
        except OSError as error:
            _log.warning("%s cannot be read, all is published again: %s", self._audit.folder, error)
            return None

    def do_work(self, now_ns: int) -> None:
        """Go a step on, if it is time and there is something to publish."""
        if self._is_busy or now_ns < self._next_ns:
            return
        self._next_ns = now_ns + LOOK_NS
        if self._moves != self._audit.moves:
            self._moves = self._audit.moves
            self._begin_anew()
        if self._audit.seq <= self._published.seq:
            self.close()
            return
        try:
            record = self._prepare()
            if record is not None:
                self._publish(record)
        except (DanubeError, OSError) as error:
            self._failed(error)

    def _begin_anew(self) -> None:
        """Find the place to go on from: the newest file was moved away."""
        seq, cursor = self._published.seq, self._published.cursor
        try:
            cursor = begun_anew(self._audit.folder, cursor)
        except (InvalidArgument, OSError) as error:
            _log.debug("%s is read from its beginning: %s", self._audit.folder, error)
            cursor = ""
        self._published = Published(seq, cursor)

    def close(self) -> None:
        """Record how far the topic is."""
        if self._saved == self._published:
            return
        try:
            write_published(self._audit.folder, self._published)
            self._saved = self._published
        except OSError as error:  # then some come twice behind a restart
            _log.debug("how far %s is cannot be recorded: %s", AUDIT_TOPIC, error)

    # ---------------------------------------------------------------- the topic

    def _prepare(self) -> TopicRecord | None:
        """Return the topic; None: it is being made. Raises DanubeError."""
        record = self._context.topics.topic(AUDIT_TOPIC)
        is_foreign = record is not None and (self._is_first or record.partitioned)
        if is_foreign:
            delete_topic(self._context, self._answer(), topic=AUDIT_TOPIC)
        elif record is None:
            self._published = Published()
            durability = Durability.FSYNC.value
            create_topic(self._context, self._answer(), topic=AUDIT_TOPIC, durability=durability)
        elif record.policy != POLICY:
            set_topic_policy(self._context, self._answer(), topic=AUDIT_TOPIC, values=POLICY)
        else:
            return record
        self._is_first = False
        return None

    def _answer(self) -> admin.Answer:
        """Go on when an operation has answered."""
        self._is_busy = True

        def answered(value: Any, error: DanubeError | None) -> None:
            self._is_busy = False
            if error is not None:
                self._failed(error)

        return admin.Answer(answered)

    def _failed(self, error: Exception) -> None:
        """Try again in a while."""
        self._is_busy = False
        self._next_ns = self._context.clock.monotonic_ns() + RETRY_NS
        if str(error) != self.fault:
            self.fault = str(error)
            _log.info("%s has to wait: %s", AUDIT_TOPIC, error)

    # ---------------------------------------------------------------- lines

    def _publish(self, topic: TopicRecord) -> None:
        """Publish a page. Raises OSError, InvalidArgument for a place that is damaged."""
        try:
            page = read_page(self._audit.folder, self._published.cursor, PAGE_BYTES)
        except InvalidArgument:
            page = read_page(self._audit.folder, "", PAGE_BYTES)
        seq, lines = self._published.seq, []
        for record in page.records:
            if record.seq > seq:
                seq = record.seq
                lines.append(encode_record(record).rstrip())
        reached = Published(seq, page.cursor)
        if not lines:
            self._published = reached
            if not page.is_last:
                self._next_ns = 0
            return
        self._is_busy = True

        def published(value: Any, error: DanubeError | None) -> None:
            self._is_busy = False
            if isinstance(error, InvalidArgument):  # a message may not be as large as these lines
                _log.error("records up to %d are not published: %s", seq, error)
            elif error is not None:
                self._failed(error)
                return
            self._published, self.fault, self._next_ns = reached, "", 0

        (partition,) = self._context.topics.partitions(topic)
        worker = self._context.process_of(partition.log_id)
        self._context.ask(worker, m.PublishAudit(partition.partition_id, lines), published)
