"""A plain publish over rings: packed, sealed, pushed and signalled by one thread in two kernels, its ack awaited in a third.

    publish(payload) -> lane with nothing unacked -> frame -> ring -> worker -> ring -> row of the ticket -> MessageId

It leaves the lane as every other publish does: a frame that is unacked, under a request that is on its way. So
whatever is not an ack (a refusal, a lost session, the end of its time) finds it where it looks for frames, and ends
the ticket.
"""

from __future__ import annotations

from danube_fast.client.link.answers import Ticket
from danube_fast.client.link.buffers import FRAME_AT, Sending
from danube_fast.client.produce.lane import Lane, Phase
from danube_fast.client.values.limits import MESSAGE_OVERHEAD_BYTES
from danube_fast.frame.cpython import BYTES_TYPE, NONE, OBJECTS_READABLE
from danube_fast.frame.kernel import direct, kernel
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, BUNDLE_MAGIC, FRAME_OVERHEAD_BYTES
from danube_fast.frame.memory import store_u8, store_u32
from danube_fast.frame.pack_kernels import COUNT_SHIFT, pack_payloads
from danube_fast.frame.stamp import seal
from danube_fast.net.msgpack_kernel import FIXED_ARRAY, write_unsigned
from danube_fast.net.protocol import Publish, op_code
from danube_fast.ring.duplex_kernel import HEAD, push_pair
from danube_fast.ring.layout import WORD_BYTES

__all__ = ["PAYLOAD_BYTES_MAX", "send_alone"]

PAYLOAD_BYTES_MAX = 16 * 1024 if OBJECTS_READABLE else -1
"""Larger ones take the way of all other messages, which knows what to do without room."""
_OVERHEAD_BYTES = FRAME_OVERHEAD_BYTES + MESSAGE_OVERHEAD_BYTES
"""What a frame has beside its one payload, at most."""
_PUBLISH = op_code(Publish)
_BYTES_MASK = (1 << COUNT_SHIFT) - 1
_BUNDLE_WORD_BYTES = 4


@kernel("int64(int64,int64,int64,int64,int64,int64,int64,int64,int64)")
def _push_frame(
    row: int, request: int, frame: int, frame_bytes: int, partition_id: int,
    producer_id: int, sequence: int, time_ns: int, epoch: int,
) -> int:  # fmt: skip
    """Seal a packed frame, which has room for its bundle before it, and send it as a PUBLISH; less than 0 without room."""
    seal(frame, producer_id, sequence, time_ns, epoch, 0, 0)
    bundle = frame - FRAME_AT
    store_u32(bundle, BUNDLE_MAGIC)
    store_u32(bundle + _BUNDLE_WORD_BYTES, 1)
    store_u32(frame - BUNDLE_ENTRY_BYTES, partition_id)
    store_u32(frame - BUNDLE_ENTRY_BYTES + _BUNDLE_WORD_BYTES, frame_bytes)
    head = row + HEAD * WORD_BYTES
    store_u8(head, FIXED_ARRAY + 2)
    store_u8(head + 1, _PUBLISH)
    head_bytes = write_unsigned(head + 2, request) - head
    return push_pair(row, head, head_bytes, bundle, FRAME_AT + frame_bytes)


_push, _pack = direct(_push_frame), direct(pack_payloads)


def send_alone(lane: Lane, items: list[bytes], ticket: Ticket) -> bool:
    """Send a list of one payload as a frame over rings, whose ack the ticket's row shall get; False if anything stands
    before it in the lane, and nothing was done. Under the pump's lock."""
    connection, producer = lane.connection, lane.producer
    row = connection.free_row
    if not row or lane.unacked or lane.batch.payloads or lane.phase is not Phase.FLOWING:
        return False
    pump = producer.pump
    request = connection.next_request()
    if not pump.answers.expect(ticket, connection.link_number, request):
        return False
    buffer = producer.packer.pool.take(len(items[0]) + _OVERHEAD_BYTES)
    packed: int = _pack(buffer.address, buffer.capacity_bytes, id(items), 0, BYTES_TYPE, NONE)
    frame_bytes, sequence = packed & _BYTES_MASK, lane.next_sequence
    sending = Sending(lane, buffer, frame_bytes, sequence, 1)
    sending.callbacks = [(0, ticket)]
    sending.request = request
    time_ns = sending.publish_time_ns = pump.clock.wall_ns()
    sending.deadline_ns = pump.clock.monotonic_ns() + producer.timeout_ns
    try:
        lane.next_sequence = sequence + 1
        lane.unacked.append(sending)
        lane.on_way += 1
        connection.bundler.on_way[request] = [sending]
        producer.sent(frame_bytes)
        pushed = _push(
            row, request, buffer.address, frame_bytes, lane.partition_id, lane.producer_id, sequence,
            time_ns, lane.producer_epoch,
        )  # fmt: skip
        if pushed < 0:
            del connection.bundler.on_way[request]
            connection.bundler.send(sending)
        connection.beat_soon()
        if lane not in pump.armed:
            pump.arm(lane, sending.deadline_ns)
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
