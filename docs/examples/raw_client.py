"""A danube-fast client in one file, from docs/protocol.md alone: nothing of danube-fast is imported.

It publishes messages in frames, sends one frame twice to see it recognised, then subscribes, checks and
unpacks what is delivered, acknowledges it durably and says goodbye. To read, not to use: it has no
reconnects, no compression and no partitioned topics.

    python raw_client.py [endpoint] [topic] [message count]
"""

import struct
import sys

import msgpack
import zmq

HELLO, PING, BYE, LOOKUP = 1, 2, 3, 4
OPEN_PRODUCER, PUBLISH, CLOSE_PRODUCER = 10, 11, 12
SUBSCRIBE, FLOW, ACK, CLOSE_CONSUMER = 20, 21, 22, 25
WELCOME, PONG, RESULT, PUBLISHED, DELIVER, PRODUCER_NAMES = 64, 65, 67, 68, 69, 71

ACCEPTED, DUPLICATE = 0, 1
FRAME_MAGIC, BUNDLE_MAGIC, HEADER_BYTES, SPLIT = 0x46524644, 0x4E424644, 128, 1
PAYLOAD_VALIDITY, PAYLOAD_OFFSETS, PAYLOAD_DATA = 1, 2, 3
KEY_VALIDITY, KEY_OFFSETS, KEY_DATA, OFFSET_DELTAS = 4, 5, 6, 17

# The header of a frame, in three runs: up to body_crc32c, the rest of the client's half, the broker's half.
CLIENT_START = struct.Struct("<IBBHIII")
CLIENT_REST = struct.Struct("<QQqIIHB5x")
BROKER_HALF = struct.Struct("<QQQqQIIIIII")

ANSWER_MS = 30_000  # after so much silence the broker counts as dead
CREDIT_BYTES, CREDIT_MESSAGES = 65_536, 32
CONSUMER_ID, FLOW_ID, SUBSCRIPTION = 1, 1, "raw-client"

CRC_TABLE = list(range(256))
for _ in range(8):
    CRC_TABLE = [crc >> 1 ^ (crc & 1) * 0x82F63B78 for crc in CRC_TABLE]


def crc32c(*pieces):
    """The checksum of the pieces, one after the other."""
    crc = 0xFFFFFFFF
    for piece in pieces:
        for byte in piece:
            crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def column(values):
    """Validity bitmap, offsets and data of a list of bytes or None, as Arrow has them."""
    bitmap, offsets, data = bytearray((len(values) + 7) // 8), [0], b""
    for i, value in enumerate(values):
        if value is not None:
            bitmap[i // 8] |= 1 << i % 8
            data += value
        offsets.append(len(data))
    return bytes(bitmap), struct.pack(f"<{len(offsets)}i", *offsets), data


def pack_frame(messages, producer_id, producer_epoch, base_sequence):
    """One frame of a list of (key or None, payload or None)."""
    keys, payloads = [key for key, _ in messages], [payload for _, payload in messages]
    buffers = {}
    validity, buffers[PAYLOAD_OFFSETS], buffers[PAYLOAD_DATA] = column(payloads)
    if None in payloads:
        buffers[PAYLOAD_VALIDITY] = validity
    if any(key is not None for key in keys):
        buffers[KEY_VALIDITY], buffers[KEY_OFFSETS], buffers[KEY_DATA] = column(keys)
    body = struct.pack("<II", len(buffers), 0)
    for buffer_id in sorted(buffers):
        body += struct.pack("<HHI", buffer_id, 0, len(buffers[buffer_id]))
    for buffer_id in sorted(buffers):
        body += buffers[buffer_id] + bytes(-len(buffers[buffer_id]) % 8)
    frame_bytes = HEADER_BYTES + len(body)
    start = CLIENT_START.pack(FRAME_MAGIC, 1, 0, 0, frame_bytes, len(messages), len(body))
    rest = CLIENT_REST.pack(producer_id, base_sequence, 0, producer_epoch, 0, 0, 0)
    crc = struct.pack("<I", crc32c(start, rest, body))
    return start + crc + rest + bytes(BROKER_HALF.size) + body


def pack_bundle(partition_id, frames):
    directory = b"".join(struct.pack("<II", partition_id, len(frame)) for frame in frames)
    return struct.pack("<II", BUNDLE_MAGIC, len(frames)) + directory + b"".join(frames)


def unpack_bundle(part):
    """The frames of one bundle part."""
    magic, frame_count = struct.unpack_from("<II", part)
    check(magic == BUNDLE_MAGIC, "a part that is no bundle")
    position, frames = 8 + 8 * frame_count, []
    for i in range(frame_count):
        _, frame_bytes = struct.unpack_from("<II", part, 8 + 8 * i)
        frames.append(part[position : position + frame_bytes])
        position += frame_bytes
    check(position == len(part), "a bundle that is shorter or longer than its directory says")
    return frames


def unpack_column(buffers, count, validity_id, offsets_id, data_id):
    if offsets_id not in buffers:
        return [None] * count
    offsets = struct.unpack(f"<{count + 1}i", buffers[offsets_id])
    bitmap = buffers.get(validity_id, b"\xff" * ((count + 7) // 8))
    return [
        buffers[data_id][offsets[i] : offsets[i + 1]] if bitmap[i // 8] >> i % 8 & 1 else None
        for i in range(count)
    ]


def unpack_frame(frame):
    """A list of (offset, key, payload); checks both checksums first."""
    magic, version, codec, flags, frame_bytes, count, _ = CLIENT_START.unpack_from(frame)
    (body_crc,) = struct.unpack_from("<I", frame, 20)
    _, _, base_offset, *_, header_crc = BROKER_HALF.unpack_from(frame, 64)
    check((magic, version) == (FRAME_MAGIC, 1) and frame_bytes == len(frame), "no frame")
    check(crc32c(frame[:124]) == header_crc, "header_crc32c")
    check(crc32c(frame[0:20], frame[24:64], frame[128:]) == body_crc, "body_crc32c")
    check(codec == 0, "compressed frames are left out of this example")
    (buffer_count,) = struct.unpack_from("<I", frame, HEADER_BYTES)
    position, buffers = HEADER_BYTES + 8 + 8 * buffer_count, {}
    for i in range(buffer_count):
        buffer_id, _, buffer_bytes = struct.unpack_from("<HHI", frame, HEADER_BYTES + 8 + 8 * i)
        buffers[buffer_id] = frame[position : position + buffer_bytes]
        position += buffer_bytes + -buffer_bytes % 8
    deltas = range(count)
    if flags & SPLIT and OFFSET_DELTAS in buffers:
        deltas = struct.unpack(f"<{count}I", buffers[OFFSET_DELTAS])
    keys = unpack_column(buffers, count, KEY_VALIDITY, KEY_OFFSETS, KEY_DATA)
    payloads = unpack_column(buffers, count, PAYLOAD_VALIDITY, PAYLOAD_OFFSETS, PAYLOAD_DATA)
    return [(base_offset + deltas[i], keys[i], payloads[i]) for i in range(count)]


def check(condition, text):
    if not condition:
        raise SystemExit(f"raw_client: {text}")


class Connection:
    """A DEALER socket with a session: sends commands, sorts what comes back."""

    def __init__(self, context, endpoint):
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.last_request, self.heartbeat_ms = 0, 1_000
        self.answers, self.frames = {}, []  # request -> answer; (consumer_id, frame) delivered
        _, _, _, self.server_version, _, _, limits = self.ask(HELLO, 1, "raw-client")
        self.heartbeat_ms = limits["heartbeat_ms"]

    def send(self, op, *fields, bundle=None):
        command = msgpack.packb([op, *fields])
        self.socket.send_multipart([command] if bundle is None else [command, bundle])

    def ask(self, op, *fields, bundle=None):
        """Send a command with a request number; the value of its answer."""
        self.last_request += 1
        request = self.last_request
        self.send(op, request, *fields, bundle=bundle)
        while request not in self.answers:
            self.receive()
        return self.answers.pop(request)

    def close(self):
        self.ask(BYE)
        self.socket.close()

    def receive(self):
        """Wait for one message from the broker; PING while there is none."""
        silent_ms = 0
        while not self.socket.poll(self.heartbeat_ms):
            silent_ms += self.heartbeat_ms
            check(silent_ms < ANSWER_MS, "the broker is silent")
            self.last_request += 1
            self.send(PING, self.last_request)
        command, *bundles = self.socket.recv_multipart()
        op, *fields = msgpack.unpackb(command, strict_map_key=False)  # keys may be numbers
        if op == WELCOME:
            self.answers[fields[0]] = fields[1:]
        elif op == RESULT:
            self.answers[fields[0]] = fields[1]
        elif op == PUBLISHED:
            self.answers.update(fields[0])  # request -> [status, offset, status, offset, ...]
        elif op == DELIVER:
            frames = [frame for bundle in bundles for frame in unpack_bundle(bundle)]
            self.frames += zip(fields[0], frames, strict=True)
        else:  # ERROR, CONSUMER_EVENT
            check(op in (PONG, PRODUCER_NAMES), f"not hoped for: {[op, *fields]}")


def publish(worker, partition_id, messages, frame_messages):
    """Publish the messages, then the last frame once more; the offset of the first message."""
    producer = worker.ask(OPEN_PRODUCER, partition_id, "raw-client")
    producer_id, epoch = producer["producer_id"], producer["producer_epoch"]
    frames = []
    for start in range(0, len(messages), frame_messages):
        some, sequence = messages[start : start + frame_messages], producer["next_sequence"] + start
        frames.append(pack_frame(some, producer_id, epoch, sequence))
    pairs = worker.ask(PUBLISH, bundle=pack_bundle(partition_id, frames))
    check(pairs[0::2] == [ACCEPTED] * len(frames), f"refused: {pairs}")
    print(f"published {len(messages)} messages in {len(frames)} frames from offset {pairs[1]} on")
    again = worker.ask(PUBLISH, bundle=pack_bundle(partition_id, frames[-1:]))
    check(again == [DUPLICATE, pairs[-1]], f"not recognised: {again}")
    print(f"sent one frame again: DUPLICATE of offset {again[1]}")
    worker.ask(CLOSE_PRODUCER, partition_id, producer_id)
    return pairs[1]


def consume(worker, partition_id, first, count):
    """Receive and acknowledge `count` messages from offset `first` on: (offset, key, payload)."""
    worker.ask(SUBSCRIBE, CONSUMER_ID, FLOW_ID, partition_id, SUBSCRIPTION, "exclusive", "earliest")
    worker.send(FLOW, FLOW_ID, CREDIT_BYTES, CREDIT_MESSAGES)
    received = []
    while len(received) < count:
        while not worker.frames:
            worker.receive()
        _, frame = worker.frames.pop(0)
        messages = unpack_frame(frame)
        received += [message for message in messages if message[0] >= first]  # no older leftovers
        worker.send(FLOW, FLOW_ID, len(frame), len(messages))  # give back what it used
    end = received[-1][0] + 1
    worker.ask(ACK, [[CONSUMER_ID, [0, end]]])
    print(f"received {len(received)} messages, both checksums right; acknowledged below {end}")
    worker.ask(CLOSE_CONSUMER, CONSUMER_ID)
    return received


def main(endpoint="tcp://127.0.0.1:6650", topic="/default/raw-client", count="100"):
    context = zmq.Context()
    bootstrap = Connection(context, endpoint)
    found = bootstrap.ask(LOOKUP, topic, {"dispatch": "reliable", "durability": "fsync"})
    bootstrap.close()
    partition_id, _, _, worker_endpoint, _ = found["partitions"][0]
    worker = Connection(context, worker_endpoint)
    print(f"danube-fast {worker.server_version}: {topic} is partition {partition_id}")
    sent = []
    for i in range(int(count)):
        key = b"key-%d" % (i // 3) if i % 3 == 0 else None
        sent.append((key, None if i == 7 else b"message %d" % i))  # number 7 is a tombstone
    first = publish(worker, partition_id, sent, frame_messages=8)
    received = consume(worker, partition_id, first, len(sent))
    check([message[0] for message in received] == [first + i for i in range(len(sent))], "offsets")
    check([message[1:] for message in received] == sent, "keys or payloads differ")
    worker.close()
    context.term()
    print(f"ok: {len(sent)} messages came back as they were sent")


if __name__ == "__main__":
    main(*sys.argv[1:])
