"""Publishing to a partition of another worker: passed on through the mailbox, answered when that answers.

    client --OPEN_PRODUCER, PUBLISH--> worker A --open_producer, publish--> worker B (owner)
           <----- RESULT, PUBLISHED --          <------ when durable -------

For clients that keep one connection, and for what the broker itself publishes. A frame that goes
this way is copied once more and must fit the mailbox; clients that look topics up never need it.
On the owner a negative number stands for the client's session on the worker that passes its producers on. They count
there as what is open until the client closes them, its session ends, or that worker is started again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from danube_fast.broker import messages as m
from danube_fast.broker.admission.layout import (
    ProducerWord,
    is_passed_on,
    passed_on_session,
    peer_of,
)
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import NotOwner, ResourceExhausted
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.net import protocol as p
from danube_fast.net.protocol import Status
from danube_fast.net.session import Session
from danube_fast.roles import COORDINATOR
from danube_fast.workers.process.mailbox import Reply, Request
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.job import PeriodicJob
from danube_fast.workers.shard.publish.audit_lines import AuditLines
from danube_fast.workers.shard.publish.group import Publication
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.publish.producers import Producers
from danube_fast.workers.shard.state import ShardState, not_here

__all__ = ["Forwarder"]

OWNERS_MAX = 100_000
"""Partitions of other workers that are remembered; above, all are forgotten and asked for again."""

ENDED_NS = 250 * MILLISECOND_NS
"""How often it is looked for sessions that have ended."""
ENDED_MAX = 1000
"""So many are told at once: a notice must fit the mailbox."""


def _session_of(
    request: Request[m.OpenProducer] | Request[m.PublishBundle] | Request[m.CloseProducer],
) -> int:
    """Session number of a peer's client, or of the peer itself."""
    return passed_on_session(request.peer, request.message.session)


class Forwarder(PeriodicJob):
    """Pass producers and publishes on to other workers, and serve those of others."""

    interval_ns = ENDED_NS

    def __init__(
        self, state: ShardState, delivery: Delivery, intake: Intake, producers: Producers,
        passes_on: bool = True,
    ) -> None:  # fmt: skip
        """`passes_on`: whether clients may publish by way of this worker."""
        self._state, self._delivery = state, delivery
        self._intake, self._producers = intake, producers
        self._owners: dict[int, int] = {}
        self._asked: dict[int, set[int]] = {}
        """By session number: the workers that were asked to open a producer for it."""
        self._passes_on = passes_on
        intake.forward = self.publish
        producers.open_elsewhere = self.open_producer
        producers.close_elsewhere = self.close_producer
        mailbox = state.boot.mailbox
        AuditLines(state, intake, producers)
        mailbox.serve(m.OpenProducer, self._open_here)
        mailbox.serve(m.CloseProducer, self._close_here)
        mailbox.serve(m.SessionsEnded, self._end_here)
        mailbox.serve(m.PublishBundle, self._publish_here)
        mailbox.epoch_watchers.append(self._restarted)

    def _restarted(self, peer: int, epoch: int) -> None:
        """Forget partitions of a restarted peer: its producers have no session any more, publishers look up again. And
        close what it passed on: its clients open again."""
        self._owners = {pid: owner for pid, owner in self._owners.items() if owner != peer}
        tables = self._state.tables
        openers = tables.producers[: tables.producer_count, ProducerWord.SESSION]
        passed_on = np.unique(openers[is_passed_on(openers) & (peer_of(openers) == peer)])
        if len(passed_on):
            self._producers.release_all(passed_on.tolist())

    def run(self, now_ns: int) -> None:
        """Tell the owners of passed-on producers which sessions have ended."""
        ended: dict[int, list[int]] = {}
        for number, owners in self._asked.items():
            if self._state.sessions.by_number(number) is None:
                for owner in owners:
                    ended.setdefault(owner, []).append(number)
        for owner, numbers in ended.items():
            try:
                self._state.boot.mailbox.notify(owner, m.SessionsEnded(numbers[:ENDED_MAX]))
            except ResourceExhausted:  # its ring is full: the next time
                continue
            for number in numbers[:ENDED_MAX]:
                self._asked[number].discard(owner)
                if not self._asked[number]:
                    del self._asked[number]

    # ------------------------------------------------------------ on the worker that was asked

    def open_producer(self, session: Session, command: p.OpenProducer) -> None:
        """Open a producer on a partition that is not here; answers the client when it is open. Raises NotOwner in a
        secured broker: on the owner all clients of this worker would look alike."""
        if not self._passes_on:
            raise not_here(command.partition_id)

        def answer(reply: Reply) -> None:
            if isinstance(reply.error, NotOwner):
                self._owners.pop(command.partition_id, None)
            self._delivery.respond(session, command.request, reply.value, reply.error)

        def found(owner: int) -> None:
            self._asked.setdefault(session.number, set()).add(owner)
            message = m.OpenProducer(command.partition_id, command.name, session.number)
            self._state.boot.mailbox.call(owner, message, on_reply=answer)

        self._find_owner(command.partition_id, found, answer)

    def close_producer(self, session: Session, command: p.CloseProducer) -> None:
        """Close a producer that was passed on, wherever that was."""
        message = m.CloseProducer(command.partition_id, command.producer_id, session.number)
        for owner in self._asked.get(session.number, ()):
            self._state.boot.mailbox.notify(owner, message)

    def _find_owner(
        self, partition_id: int, found: Callable[[int], None], failed: Callable[[Reply], None]
    ) -> None:
        known = self._owners.get(partition_id)
        if known is not None:
            found(known)
            return

        def located(reply: Reply) -> None:
            owner = reply.value.process if reply.error is None else None
            if owner is None or owner == self._state.boot.config.process_index:
                text = f"partition {partition_id} is not here; look the topic up again"
                failed(Reply(error=reply.error or NotOwner(text)))
                return
            if len(self._owners) >= OWNERS_MAX:
                self._owners.clear()
            self._owners[partition_id] = owner
            found(owner)

        self._state.boot.mailbox.call(COORDINATOR, m.FindOwner(partition_id), on_reply=located)

    def publish(
        self, publication: Publication, place: int, partition_id: int, frame: memoryview
    ) -> bool:
        """Pass one frame on; its status goes to `place`. False if no owner is known."""
        owner = self._owners.get(partition_id)
        # what another worker has passed on is not passed on again: that worker looks the owner up anew
        if owner is None or publication.session < 0:
            return False
        publication.pending += 1

        def answered(reply: Reply) -> None:
            status, offset = reply.value if reply.error is None else (Status.NOT_OWNER, 0)
            publication.statuses[place : place + 2] = status, offset
            if status == Status.NOT_OWNER:
                self._owners.pop(partition_id, None)
            if reply.error is not None:
                publication.texts[Status.NOT_OWNER] = str(reply.error)
            self._intake.release(publication)

        bundle = sealed_bundle([(partition_id, frame)])
        message = m.PublishBundle(publication.session)
        self._state.boot.mailbox.call(owner, message, bundle, on_reply=answered)
        return True

    # ------------------------------------------------------------ on the owner

    def _open_here(self, request: Request[m.OpenProducer]) -> None:
        asked, session = request.message, _session_of(request)
        self._producers.register(session, asked.partition_id, asked.name, request.respond)

    def _close_here(self, request: Request[m.CloseProducer]) -> None:
        closed = request.message
        self._producers.release(closed.partition_id, closed.producer_id, _session_of(request))

    def _end_here(self, request: Request[m.SessionsEnded]) -> None:
        numbers = [passed_on_session(request.peer, each) for each in request.message.sessions]
        self._producers.release_all(numbers)

    def _publish_here(self, request: Request[m.PublishBundle]) -> None:
        publication = Publication(
            _session_of(request), 0, lambda publication: request.reply(publication.statuses)
        )
        self._intake.publish(publication, bytearray(request.body), self._state.now_wall_ns)
