"""Publishing to a partition of another worker: passed on through the mailbox, answered when it is.

    client --OPEN_PRODUCER, PUBLISH--> worker A --open_producer, publish--> worker B (owner)
           <----- RESULT, PUBLISHED --          <------ when durable -------

For clients that keep one connection, and for what the broker itself publishes. A frame that goes
this way is copied once more and must fit the mailbox; clients that look topics up never need it.
On the owner all passed-on producers of a peer belong to one session, with a negative number.
"""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.broker import messages as m
from danube_fast.errors import DanubeError, NotOwner
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.net import protocol as p
from danube_fast.net.protocol import Status
from danube_fast.net.session import Session
from danube_fast.roles import COORDINATOR
from danube_fast.workers.process.mailbox import Reply, Request
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.publish.group import Publication
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.publish.producers import Producers
from danube_fast.workers.shard.state import ShardState

__all__ = ["Forwarder"]

OWNERS_MAX = 100_000
"""Partitions of other workers that are remembered; beyond, all are forgotten and asked again."""


def _session_of(request: Request[m.OpenProducer] | Request[m.PublishBundle]) -> int:
    """Below -1, which stands for nobody."""
    return -1 - request.peer


class Forwarder:
    """Both sides of passing on, for one worker."""

    def __init__(
        self, state: ShardState, delivery: Delivery, intake: Intake, producers: Producers
    ) -> None:
        self._state, self._delivery = state, delivery
        self._intake, self._producers = intake, producers
        self._owners: dict[int, int] = {}
        intake.forward = self.publish
        producers.open_elsewhere = self.open_producer
        mailbox = state.boot.mailbox
        mailbox.serve(m.OpenProducer, self._open_here)
        mailbox.serve(m.PublishBundle, self._publish_here)
        mailbox.epoch_watchers.append(self._restarted)

    def _restarted(self, peer: int, epoch: int) -> None:
        """Its producers have no session any more: publishers look up and open again."""
        self._owners = {pid: owner for pid, owner in self._owners.items() if owner != peer}

    # ------------------------------------------------------------ on the worker that was asked

    def open_producer(self, session: Session, command: p.OpenProducer) -> None:
        """Open a producer on a partition that is not here; answers the client when it is open."""

        def answer(reply: Reply) -> None:
            if isinstance(reply.error, NotOwner):
                self._owners.pop(command.partition_id, None)
            if reply.error is None:
                self._delivery.result(session, command.request, reply.value)
            else:
                self._delivery.fail(session, command.request, reply.error)

        def found(owner: int) -> None:
            message = m.OpenProducer(command.partition_id, command.name)
            self._state.boot.mailbox.call(owner, message, on_reply=answer)

        self._find_owner(command.partition_id, found, answer)

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
                error = reply.error or NotOwner(text)
                failed(Reply(error=error))
                return
            if len(self._owners) >= OWNERS_MAX:
                self._owners.clear()
            self._owners[partition_id] = owner
            found(owner)

        self._state.boot.mailbox.call(COORDINATOR, m.FindOwner(partition_id), on_reply=located)

    def publish(
        self, publication: Publication, place: int, partition_id: int, frame: memoryview
    ) -> bool:
        """Pass one frame on; its status goes to `place`. False if nobody is known to own it."""
        owner = self._owners.get(partition_id)
        if owner is None or publication.session < 0:  # passed on by another worker, who looks again
            return False
        publication.pending += 1

        def answered(reply: Reply) -> None:
            status, offset = reply.value if reply.error is None else (Status.NOT_OWNER, 0)
            publication.statuses[place] = status
            publication.statuses[place + 1] = offset
            if status == Status.NOT_OWNER:
                self._owners.pop(partition_id, None)
            if reply.error is not None:
                publication.texts[Status.NOT_OWNER] = str(reply.error)
            self._intake.release(publication)

        bundle = sealed_bundle([(partition_id, frame)])
        self._state.boot.mailbox.call(owner, m.PublishBundle(), bundle, on_reply=answered)
        return True

    # ------------------------------------------------------------ on the owner

    def _open_here(self, request: Request[m.OpenProducer]) -> None:
        asked = request.message

        def done(opened: m.Opened | None, error: DanubeError | None) -> None:
            if error is not None:
                request.fail(error)
            else:
                request.reply(opened)

        self._producers.register(_session_of(request), asked.partition_id, asked.name, done)

    def _publish_here(self, request: Request[m.PublishBundle]) -> None:
        def done(publication: Publication) -> None:
            request.reply(publication.statuses)

        publication = Publication(_session_of(request), 0, done)
        self._intake.publish(publication, bytearray(request.body), self._state.now_wall_ns)
