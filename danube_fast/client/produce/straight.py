r"""A plain publish: packed, sealed and sent by one thread in two kernels, its ack awaited in a third.

    publish(payload) -> lane with nothing unacked -> frame -> ring -> worker -> ring -> row of the ticket -> MessageId
                                                       \---> socket -> ... -> socket ---/

It leaves the lane as every other publish does: a frame that is unacked, under a request that is on its way. So
whatever is not an ack (a refusal, a lost session, the end of its time) finds it where it looks for frames, and ends
the ticket.
"""

from __future__ import annotations

from typing import Any

from danube_fast.client.link.answers import Ticket
from danube_fast.client.link.buffers import FRAME_AT, Sending
from danube_fast.client.produce.lane import Lane
from danube_fast.client.produce.lane_state import Phase
from danube_fast.client.produce.outgoing import Fields
from danube_fast.client.produce.state import ProducerState
from danube_fast.client.values.limits import MESSAGE_OVERHEAD_BYTES
from danube_fast.client.values.message import MessageId
from danube_fast.frame.cpython import BYTES_TYPE, NONE, OBJECTS_READABLE
from danube_fast.frame.hash import key_hash
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, BUNDLE_MAGIC, FRAME_OVERHEAD_BYTES
from danube_fast.frame.memory import store_u8, store_u32
from danube_fast.frame.pack_kernels import COUNT_SHIFT, pack_columns, pack_payloads
from danube_fast.frame.stamp import seal
from danube_fast.net.msgpack_kernel import FIXED_ARRAY, write_unsigned
from danube_fast.net.port_row import OUT, send_pair
from danube_fast.net.protocol import Publish, op_code
from danube_fast.ring.duplex_kernel import HEAD, push_pair
from danube_fast.ring.layout import WORD_BYTES

__all__ = ["PAYLOAD_BYTES_MAX", "StraightWay"]

PAYLOAD_BYTES_MAX = 16 * 1024 if OBJECTS_READABLE else -1
"""Larger ones take the way of all other messages, which knows what to do without room."""
_OVERHEAD_BYTES = FRAME_OVERHEAD_BYTES + MESSAGE_OVERHEAD_BYTES
"""What a frame has beside its one payload, at most."""
_PUBLISH, _FLOWING = op_code(Publish), Phase.FLOWING
_BYTES_MASK = (1 << COUNT_SHIFT) - 1
_BUNDLE_WORD_BYTES = 4


@kernel("int64(int64,int64,int64,int64,int64,int64,int64,int64,int64,int64)")
def _send_frame(
    row: int, has_rings: int, request: int, frame: int, frame_bytes: int, partition_id: int,
    producer_id: int, sequence: int, time_ns: int, epoch: int,
) -> int:  # fmt: skip
    """Seal a packed frame, which has room for its bundle before it, and send both, behind their PUBLISH: 0, or less
    without room in the rings; over a socket what `port_row.send_pair` says."""
    seal(frame, producer_id, sequence, time_ns, epoch, 0, 0)
    bundle, size = frame - FRAME_AT, FRAME_AT + frame_bytes
    store_u32(bundle, BUNDLE_MAGIC)
    store_u32(bundle + _BUNDLE_WORD_BYTES, 1)
    store_u32(frame - BUNDLE_ENTRY_BYTES, partition_id)
    store_u32(frame - BUNDLE_ENTRY_BYTES + _BUNDLE_WORD_BYTES, frame_bytes)
    head = row + (HEAD * WORD_BYTES if has_rings != 0 else OUT)
    store_u8(head, FIXED_ARRAY + 2)
    store_u8(head + 1, _PUBLISH)
    head_bytes = write_unsigned(head + 2, request) - head
    if has_rings != 0:
        return min(0, push_pair(row, head, head_bytes, bundle, size))
    return send_pair(row, head_bytes, bundle, size)


_send = direct(_send_frame)
_pack, _pack_columns = direct(pack_payloads), direct(pack_columns)


def send_alone(
    lane: Lane, message: list[bytes] | Fields, room: int, ticket: Ticket, *, has_row: bool = True
) -> bool:
    """Send one message, a list of its payload or all its fields, as a frame; False if that is larger than `room`, anything
    stands before it in the lane, or there is no way for it now, and nothing was done. Its ack completes the ticket, or
    goes to its row. Under the pump's lock."""
    connection, producer = lane.connection, lane.producer
    if lane.unacked or lane.plain or lane.batch.payloads or lane.phase is not _FLOWING:
        return False
    row = connection.free_row
    if not row or room < 0:
        return False
    pump, pool = producer.pump, producer.packer.pool
    buffer = pool.take(room)
    if type(message) is tuple:
        pool.one.hold(*message)
        packed = _pack_columns(buffer.address, room, pool.one.job_address, 0)
    else:
        packed = _pack(buffer.address, room, id(message), 0, BYTES_TYPE, NONE)
    request = connection.last_request = connection.last_request + 1
    is_packed = packed > _BYTES_MASK  # else it is too large, or cannot be packed, and others say so
    if not is_packed or (
        has_row and not pump.answers.expect(ticket, connection.link_number, request)
    ):
        pool.give_back(buffer)
        return False
    frame_bytes = packed & _BYTES_MASK
    sequence, clock = lane.next_sequence, pump.clock
    time_ns, deadline_ns = clock.wall_ns(), clock.monotonic_ns() + producer.timeout_ns
    sending = Sending(
        lane, buffer, frame_bytes, sequence, 1, [(0, ticket)], request, time_ns, deadline_ns
    )
    try:
        # an interrupt strikes behind a call only, so with the last of these all is done
        lane.next_sequence = sequence + 1
        lane.on_way += 1
        connection.bundler.on_way[request] = [sending]
        producer.unacked_bytes += frame_bytes
        pump.unacked_bytes += frame_bytes
        lane.unacked.append(sending)
        sent = _send(
            row, connection.has_rings, request, buffer.address, frame_bytes, lane.partition_id, lane.producer_id,
            sequence, time_ns, lane.producer_epoch,
        )  # fmt: skip
        if sent < 0:
            del connection.bundler.on_way[request]
            connection.bundler.send(sending)
        elif sent:  # something came in meanwhile, whose edge may be gone
            pump.after_send(connection)
        if not connection.beats_quickly:
            connection.beat_soon()
        if lane not in pump.armed:
            pump.arm(lane, deadline_ns)
    except BaseException:  # an interrupt: the connection starts over, and sends it
        lane.seal(sending)
        raise
    return True


def take_ack(lane: Lane, ticket: Ticket) -> None:
    """Take what a leader has read for the ticket's row; look for it elsewhere if there is nothing. Under the pump's
    lock."""
    answer = lane.producer.pump.answers.take(ticket)
    bundler = lane.connection.bundler
    if answer is not None:
        bundler.settle_one(*answer)
    elif not ticket.done:
        bundler.look_for_answers()


class StraightWay(ProducerState):
    """A producer whose messages go this way when they can."""

    __slots__ = ("_alone_bytes_max", "_next_lane", "_only", "_quick", "lanes", "quick")

    _alone_bytes_max: int
    """Larger payloads, and larger frames of anything else, do not; -1: none does."""
    _quick: Lane | None
    """The lane that every message may use without looking further; None = none may."""
    quick: Lane | None
    """The same, if small payloads may be appended to its `plain` without the lock."""

    lanes: list[Lane]
    """One for each partition, in their order."""
    _only: Lane | None
    """The lane of a topic with one partition."""
    _next_lane: int

    def _lane_for(self, key: bytes | None) -> Lane:
        """By key hash, or round-robin by batch."""
        if self._only is not None:
            return self._only
        if key is not None:
            return self.lanes[key_hash(key) % len(self.lanes)]
        lane = self.lanes[self._next_lane]
        if lane.is_empty:
            self._next_lane = (self._next_lane + 1) % len(self.lanes)
            lane = self.lanes[self._next_lane]
        return lane

    def publish_plain(self, payload: Any) -> MessageId | None:
        """Publish a payload alone, and wait for its ack; None, and nothing was done, if that takes more than
        a frame in an idle lane, or if an event loop waits for acks."""
        if type(payload) is not bytes or len(payload) > self._alone_bytes_max:
            return None
        return self._publish_alone(None, [payload], len(payload) + _OVERHEAD_BYTES)

    def publish_columns(self, fields: Fields) -> MessageId | None:
        """Do the same with a checked message that has more than a payload, if its frame is not too large."""
        return self._publish_alone(fields[1], fields, self._alone_bytes_max)

    def send_columns(self, fields: Fields, ticket: Ticket) -> bool:
        """Send such a message, whose ack shall complete the ticket; False if nothing was done. Under the pump's lock."""
        lane, is_whole = self._lane_alone(fields[1]), False
        if lane is None or self.pump.on_progress is not None:
            return False
        try:
            is_sent = send_alone(lane, fields, self._alone_bytes_max, ticket, has_row=False)
            is_whole = True
        finally:
            if not is_whole:
                lane.connection.reset()  # an interrupt: perhaps it was sent
        return is_sent

    def _lane_alone(self, key: bytes | None) -> Lane | None:
        """Under the lock: the lane of a message with that key, if nothing must be looked at before."""
        lane = self._quick
        if lane is not None or key is None or self._errors or self._refusal is not None:
            return lane
        lane = self._lane_for(key)
        return lane if lane.failure is None and self.window_open else None

    def _publish_alone(
        self, key: bytes | None, message: list[bytes] | Fields, room: int
    ) -> MessageId | None:
        """Publish one message whose frame has at most `room` bytes, and wait for its ack."""
        pump, ticket = self.pump, Ticket()
        if pump.is_inside():
            return None
        # not `acquire`: an interrupt may strike as that returns, and the lock would be kept
        with pump.lock:
            lane = self._quick or self._lane_alone(key)
            if lane is None or pump.on_progress is not None or (pump.leader and pump.leads):
                return None
            connection, is_whole = lane.connection, False
            try:
                is_sent = send_alone(lane, message, room, ticket)
                try:
                    if is_sent:
                        pump.await_answer(ticket)
                finally:
                    if ticket.row:
                        take_ack(lane, ticket)
                    is_whole = True
            finally:
                # an interrupt: perhaps half of it was sent, or its answer half taken
                if not is_whole:
                    if ticket.row:
                        pump.answers.take(ticket)
                    connection.reset()
            if not is_sent:
                return None
        if not ticket.done:  # the answer was for a session that is lost since
            pump.wait(ticket.is_complete)
        return ticket.message_id or self._outcome(ticket)

    def _outcome(self, ticket: Ticket) -> MessageId:
        """Return the id of a message; raise the error that kept it out, or why the client does not wait any more."""
        if not ticket.done and self._refusal is not None:
            raise self._refusal
        return ticket.result()
