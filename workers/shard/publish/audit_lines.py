"""Lines of the audit log, published to its topic on the worker that owns it, for the coordinator.

    coordinator --PublishAudit--> producer of the partition, opened at the first --> intake --durable--> answered

At least once: lines whose answer is lost come again. Each line has a number by which a consumer tells.
"""

from __future__ import annotations

from danube_fast.broker import messages as m
from danube_fast.errors import DanubeError, Internal, error_from_code
from danube_fast.frame.bundle import sealed_bundle
from danube_fast.frame.pack import encode_frame
from danube_fast.net.protocol import Status
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.shard.publish.group import Publication
from danube_fast.workers.shard.publish.intake import Intake
from danube_fast.workers.shard.publish.producers import Producers
from danube_fast.workers.shard.state import ShardState

__all__ = ["AuditLines"]

PRODUCER_NAME = "audit"
_DONE = (Status.OK, Status.DUPLICATE)


class _Producer:
    """Our producer on one partition."""

    def __init__(self, opened: m.Opened) -> None:
        self.producer_id, self.epoch = opened.producer_id, opened.producer_epoch
        self.next_sequence = opened.next_sequence


class AuditLines:
    """Publish what the coordinator passes on. Used by the worker's loop only."""

    def __init__(self, state: ShardState, intake: Intake, producers: Producers) -> None:
        self._state, self._intake, self._producers = state, intake, producers
        self._open: dict[int, _Producer] = {}
        state.boot.mailbox.serve(m.PublishAudit, self._publish)

    def _publish(self, request: Request[m.PublishAudit]) -> None:
        number = request.message.partition_id
        self._state.served(number)
        producer = self._open.get(number)
        if producer is not None:
            self._send(request, producer)
            return

        def opened(value: m.Opened | None, error: DanubeError | None) -> None:
            if value is None:
                request.fail(error or Internal("a producer was not opened"))
                return
            producer = self._open[number] = _Producer(value)
            self._send(request, producer)

        self._producers.register(self._session(request), number, PRODUCER_NAME, opened)

    @staticmethod
    def _session(request: Request[m.PublishAudit]) -> int:
        """Session number of a peer's producers: below -1, which stands for no session."""
        return -1 - request.peer

    def _send(self, request: Request[m.PublishAudit], producer: _Producer) -> None:
        number, lines = request.message.partition_id, request.message.lines
        try:
            frame = encode_frame(
                lines,
                producer_id=producer.producer_id,
                base_sequence=producer.next_sequence,
                publish_time_ns=self._state.now_wall_ns,
                producer_epoch=producer.epoch,
            )
        except DanubeError as error:
            request.fail(error)
            return
        producer.next_sequence += len(lines)

        def done(publication: Publication) -> None:
            status = publication.statuses[0]
            if status in _DONE:
                request.reply()
                return
            self._open.pop(number, None)  # sequences are asked for anew
            text = publication.texts.get(status, f"status {status}")
            request.fail(error_from_code(status, text))

        publication = Publication(self._session(request), 0, done)
        bundle = sealed_bundle([(number, frame)])
        self._intake.publish(publication, bytearray(bundle), self._state.now_wall_ns)
