"""Publishing to a partition of another worker: passed on through the mailbox, answered when that answers.

    client --OPEN_PRODUCER, PUBLISH--> worker A --open_producer, publish--> worker B (owner)
           <----- RESULT, PUBLISHED --          <------ when durable -------

For clients that keep one connection, and for what the broker itself publishes. A frame that goes
this way is copied once more and must fit the mailbox; clients that look topics up never need it.
On the owner all passed-on producers of a peer belong to one session, with a negative number.
"""

from __future__ import annotations

from collections.abc import Callable

from danube_fast.broker import messages as m
from danube_fast.errors import NotOwner
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.net import protocol as p
from danube_fast.net.protocol import Status
from danube_fast.net.session import Session
from danube_fast.roles import COORDINATOR
from danube_fast.workers.process.mailbox import Reply, Request
from danube_fast.workers.shard.deliver.delivery import Delivery
from danube_fast.workers.shard.publish.audit_lines import AuditLines
from danube_fast.workers.shard.publish.group import Publication
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.publish.producers import Producers
from danube_fast.workers.shard.state import ShardState, not_here

__all__ = ["Forwarder"]

OWNERS_MAX = 100_000
"""Partitions of other workers that are remembered; above, all are forgotten and asked for again."""


def _session_of(request: Request[m.OpenProducer] | Request[m.PublishBundle]) -> int:
    """Session number of the producers of a peer: below -1, which stands for no session."""
    return -1 - request.peer


class Forwarder:
    """Pass producers and publishes on to other workers, and serve those of others."""

    def __init__(
        self, state: ShardState, delivery: Delivery, intake: Intake, producers: Producers,
        passes_on: bool = True,
    ) -> None:  # fmt: skip
        """`passes_on`: whether clients may publish by way of this worker."""
        self._state, self._delivery = state, delivery
        self._intake, self._producers = intake, producers
        self._owners: dict[int, int] = {}
        self._passes_on = passes_on
        intake.forward = self.publish
        producers.open_elsewhere = self.open_producer
        mailbox = state.boot.mailbox
        AuditLines(state, intake, producers)
        mailbox.serve(m.OpenProducer, self._open_here)
        mailbox.serve(m.PublishBundle, self._publish_here)
        mailbox.epoch_watchers.append(self._restarted)

    def _restarted(self, peer: int, epoch: int) -> None:
        """Forget partitions of a restarted peer: its producers have no session any more, publishers look up again."""
        self._owners = {pid: owner for pid, owner in self._owners.items() if owner != peer}

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
        if (
            owner is None or publication.session < 0
        ):  # passed on by another worker, which looks the owner up again
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
        self._state.boot.mailbox.call(owner, m.PublishBundle(), bundle, on_reply=answered)
        return True

    # ------------------------------------------------------------ on the owner

    def _open_here(self, request: Request[m.OpenProducer]) -> None:
        asked, session = request.message, _session_of(request)
        self._producers.register(session, asked.partition_id, asked.name, request.respond)

    def _publish_here(self, request: Request[m.PublishBundle]) -> None:
        publication = Publication(
            _session_of(request), 0, lambda publication: request.reply(publication.statuses)
        )
        self._intake.publish(publication, bytearray(request.body), self._state.now_wall_ns)
