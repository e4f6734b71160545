// A danube-fast client for Node.js in one file, from docs/protocol.md alone; the twin of raw_client.py.
//
// It publishes messages in frames, sends one frame twice to see it recognised, then subscribes, checks
// and unpacks what is delivered, acknowledges it durably and says goodbye. To read, not to use: it has
// no reconnects, no compression and no partitioned topics.
//
//     npm install zeromq @msgpack/msgpack
//     node raw_client.mjs [endpoint] [topic] [message count]

import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const HELLO = 1, PING = 2, BYE = 3, LOOKUP = 4;
const OPEN_PRODUCER = 10, PUBLISH = 11, CLOSE_PRODUCER = 12;
const SUBSCRIBE = 20, FLOW = 21, ACK = 22, CLOSE_CONSUMER = 25;
const WELCOME = 64, PONG = 65, RESULT = 67, PUBLISHED = 68, DELIVER = 69, PRODUCER_NAMES = 71;

const ACCEPTED = 0, DUPLICATE = 1;
const FRAME_MAGIC = 0x46524644, BUNDLE_MAGIC = 0x4e424644, HEADER_BYTES = 128, SPLIT = 1;
const PAYLOAD_VALIDITY = 1, PAYLOAD_OFFSETS = 2, PAYLOAD_DATA = 3;
const KEY_VALIDITY = 4, KEY_OFFSETS = 5, KEY_DATA = 6, OFFSET_DELTAS = 17;

const ANSWER_MS = 30_000; // after so much silence the broker counts as dead
const CREDIT_BYTES = 65_536, CREDIT_MESSAGES = 32;
const CONSUMER_ID = 1, FLOW_ID = 1, SUBSCRIPTION = "raw-client-node";

// producer_id needs all 64 bits: 64-bit numbers are BigInt, and maps may have them as keys
const PACK = { useBigInt64: true };
const UNPACK = { useBigInt64: true, mapKeyConverter: String };

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, value) => {
  for (let bit = 0; bit < 8; bit++) value = (value >>> 1) ^ (value & 1 ? 0x82f63b78 : 0);
  return value;
});

function crc32c(...pieces) {
  let crc = 0xffffffff;
  for (const piece of pieces)
    for (const byte of piece) crc = (crc >>> 8) ^ CRC_TABLE[(crc ^ byte) & 255];
  return (crc ^ 0xffffffff) >>> 0;
}

const bodyCrc = (frame) =>
  crc32c(frame.subarray(0, 20), frame.subarray(24, 64), frame.subarray(128));

function check(condition, text) {
  if (!condition) throw new Error(text);
}

const paddedBytes = (byteCount) => Math.ceil(byteCount / 8) * 8;

// Validity bitmap, offsets and data of a list of Buffers or nulls, as Arrow has them.
function column(values) {
  const bitmap = Buffer.alloc(Math.ceil(values.length / 8));
  const offsets = Buffer.alloc(4 * (values.length + 1));
  let end = 0;
  values.forEach((value, i) => {
    if (value !== null) bitmap[i >> 3] |= 1 << (i & 7);
    end += value === null ? 0 : value.length;
    offsets.writeInt32LE(end, 4 * (i + 1));
  });
  return [bitmap, offsets, Buffer.concat(values.filter((value) => value !== null))];
}

// One frame of a list of { key, payload }, each a Buffer or null.
function packFrame(messages, producerId, producerEpoch, baseSequence) {
  const payloads = messages.map((message) => message.payload);
  const keys = messages.map((message) => message.key);
  const [payloadValidity, payloadOffsets, payloadData] = column(payloads);
  const [keyValidity, keyOffsets, keyData] = column(keys);
  const buffers = []; // in ascending order of the id
  if (payloads.includes(null)) buffers.push([PAYLOAD_VALIDITY, payloadValidity]);
  buffers.push([PAYLOAD_OFFSETS, payloadOffsets], [PAYLOAD_DATA, payloadData]);
  if (keys.some((key) => key !== null))
    buffers.push([KEY_VALIDITY, keyValidity], [KEY_OFFSETS, keyOffsets], [KEY_DATA, keyData]);
  let at = HEADER_BYTES + 8 + 8 * buffers.length;
  const frameBytes = buffers.reduce((sum, [, data]) => sum + paddedBytes(data.length), at);
  const frame = Buffer.alloc(frameBytes);
  frame.writeUInt32LE(buffers.length, HEADER_BYTES);
  buffers.forEach(([id, data], i) => {
    frame.writeUInt16LE(id, HEADER_BYTES + 8 + 8 * i);
    frame.writeUInt32LE(data.length, HEADER_BYTES + 12 + 8 * i);
    data.copy(frame, at);
    at += paddedBytes(data.length);
  });
  frame.writeUInt32LE(FRAME_MAGIC, 0);
  frame.writeUInt8(1, 4); // version
  frame.writeUInt32LE(frameBytes, 8);
  frame.writeUInt32LE(messages.length, 12);
  frame.writeUInt32LE(frameBytes - HEADER_BYTES, 16); // raw_body_bytes
  frame.writeBigUInt64LE(BigInt(producerId), 24);
  frame.writeBigUInt64LE(BigInt(baseSequence), 32);
  frame.writeBigInt64LE(BigInt(Date.now()) * 1_000_000n, 40);
  frame.writeUInt32LE(producerEpoch, 48);
  frame.writeUInt32LE(bodyCrc(frame), 20);
  return frame;
}

function packBundle(partitionId, frames) {
  const directory = Buffer.alloc(8 + 8 * frames.length);
  directory.writeUInt32LE(BUNDLE_MAGIC, 0);
  directory.writeUInt32LE(frames.length, 4);
  frames.forEach((frame, i) => {
    directory.writeUInt32LE(partitionId, 8 + 8 * i);
    directory.writeUInt32LE(frame.length, 12 + 8 * i);
  });
  return Buffer.concat([directory, ...frames]);
}

function unpackBundle(part) {
  check(part.readUInt32LE(0) === BUNDLE_MAGIC, "a part that is no bundle");
  const frameCount = part.readUInt32LE(4);
  const frames = [];
  let position = 8 + 8 * frameCount;
  for (let i = 0; i < frameCount; i++) {
    const frameBytes = part.readUInt32LE(12 + 8 * i);
    frames.push(part.subarray(position, position + frameBytes));
    position += frameBytes;
  }
  check(position === part.length, "a bundle that is shorter or longer than its directory says");
  return frames;
}

function unpackColumn(buffers, count, validityId, offsetsId, dataId) {
  const [validity, offsets, data] = [validityId, offsetsId, dataId].map((id) => buffers.get(id));
  return Array.from({ length: count }, (_, i) => {
    if (!offsets || (validity && !((validity[i >> 3] >> (i & 7)) & 1))) return null;
    return data.subarray(offsets.readInt32LE(4 * i), offsets.readInt32LE(4 * i + 4));
  });
}

// A list of { offset, key, payload }; checks both checksums first.
function unpackFrame(frame) {
  check(frame.readUInt32LE(0) === FRAME_MAGIC && frame[4] === 1, "no frame");
  check(frame.readUInt32LE(8) === frame.length, "a frame of another length");
  check(crc32c(frame.subarray(0, 124)) === frame.readUInt32LE(124), "header_crc32c");
  check(bodyCrc(frame) === frame.readUInt32LE(20), "body_crc32c");
  check(frame[5] === 0, "compressed frames are left out of this example");
  const isSplit = (frame.readUInt16LE(6) & SPLIT) !== 0;
  const count = frame.readUInt32LE(12);
  const baseOffset = frame.readBigUInt64LE(80);
  const bufferCount = frame.readUInt32LE(HEADER_BYTES);
  const buffers = new Map();
  let position = HEADER_BYTES + 8 + 8 * bufferCount;
  for (let i = 0; i < bufferCount; i++) {
    const bufferBytes = frame.readUInt32LE(HEADER_BYTES + 12 + 8 * i);
    const id = frame.readUInt16LE(HEADER_BYTES + 8 + 8 * i);
    buffers.set(id, frame.subarray(position, position + bufferBytes));
    position += paddedBytes(bufferBytes);
  }
  const deltas = isSplit ? buffers.get(OFFSET_DELTAS) : undefined;
  const keys = unpackColumn(buffers, count, KEY_VALIDITY, KEY_OFFSETS, KEY_DATA);
  const payloads = unpackColumn(buffers, count, PAYLOAD_VALIDITY, PAYLOAD_OFFSETS, PAYLOAD_DATA);
  return payloads.map((payload, i) => {
    const offset = baseOffset + BigInt(deltas ? deltas.readUInt32LE(4 * i) : i);
    return { offset, key: keys[i], payload };
  });
}

// A DEALER socket with a session: sends commands, sorts what comes back.
class Connection {
  answers = new Map(); // request -> answer
  frames = []; // delivered
  lastRequest = 0;
  heartbeatMs = 1_000;

  static async open(endpoint) {
    const connection = new Connection();
    connection.socket = new Dealer({ linger: 0 });
    connection.socket.connect(endpoint);
    connection.welcome = await connection.ask(HELLO, [1, "raw-client-node"]);
    connection.heartbeatMs = connection.welcome[6].heartbeat_ms;
    return connection;
  }

  async send(command, ...bundle) {
    await this.socket.send([encode(command, PACK), ...bundle]);
  }

  // Send a command with a request number; the value of its answer.
  async ask(op, fields, ...bundle) {
    const request = ++this.lastRequest;
    await this.send([op, request, ...fields], ...bundle);
    while (!this.answers.has(request)) await this.receive();
    const answer = this.answers.get(request);
    this.answers.delete(request);
    return answer;
  }

  // Wait for one message from the broker; PING while there is none.
  async receive() {
    let parts;
    for (let silentMs = 0; parts === undefined; silentMs += this.heartbeatMs) {
      check(silentMs < ANSWER_MS, "the broker is silent");
      if (silentMs > 0) await this.send([PING, ++this.lastRequest]);
      this.socket.receiveTimeout = this.heartbeatMs;
      parts = await this.socket.receive().catch((error) => {
        if (error.code !== "EAGAIN") throw error;
      });
    }
    const [op, ...fields] = decode(parts[0], UNPACK);
    if (op === WELCOME) this.answers.set(fields[0], fields.slice(1));
    else if (op === RESULT) this.answers.set(fields[0], fields[1]);
    else if (op === PUBLISHED) for (const [request, pairs] of fields[0]) this.answers.set(request, pairs);
    else if (op === DELIVER) for (const part of parts.slice(1)) this.frames.push(...unpackBundle(part));
    else check([PONG, PRODUCER_NAMES].includes(op), `not hoped for: ${[op, ...fields]}`);
  }

  async close() {
    await this.ask(BYE, []);
    this.socket.close();
  }
}

// Publish the messages, then the last frame once more; the offset of the first message.
async function publish(worker, partitionId, messages, frameMessages) {
  const producer = await worker.ask(OPEN_PRODUCER, [partitionId, "raw-client-node"]);
  const { producer_id: id, producer_epoch: epoch, next_sequence: sequence } = producer;
  const frames = [];
  for (let i = 0; i < messages.length; i += frameMessages)
    frames.push(packFrame(messages.slice(i, i + frameMessages), id, epoch, BigInt(sequence) + BigInt(i)));
  const pairs = await worker.ask(PUBLISH, [], packBundle(partitionId, frames));
  check(frames.every((_, i) => pairs[2 * i] === ACCEPTED), `refused: ${pairs}`);
  console.log(`published ${messages.length} messages in ${frames.length} frames from offset ${pairs[1]} on`);
  const again = await worker.ask(PUBLISH, [], packBundle(partitionId, frames.slice(-1)));
  check(again[0] === DUPLICATE && again[1] === pairs.at(-1), `not recognised: ${again}`);
  console.log(`sent one frame again: DUPLICATE of offset ${again[1]}`);
  await worker.ask(CLOSE_PRODUCER, [partitionId, id]);
  return BigInt(pairs[1]);
}

// Receive and acknowledge `count` messages from offset `first` on.
async function consume(worker, partitionId, first, count) {
  const where = [partitionId, SUBSCRIPTION, "exclusive", "earliest"];
  await worker.ask(SUBSCRIBE, [CONSUMER_ID, FLOW_ID, ...where]);
  await worker.send([FLOW, FLOW_ID, CREDIT_BYTES, CREDIT_MESSAGES]);
  const received = [];
  while (received.length < count) {
    while (worker.frames.length === 0) await worker.receive();
    const frame = worker.frames.shift();
    const messages = unpackFrame(frame);
    received.push(...messages.filter(({ offset }) => offset >= first)); // no older leftovers
    await worker.send([FLOW, FLOW_ID, frame.length, messages.length]); // give back what it used
  }
  const end = received.at(-1).offset + 1n;
  await worker.ask(ACK, [[[CONSUMER_ID, [0, end]]]]);
  console.log(`received ${received.length} messages, both checksums right; acknowledged below ${end}`);
  await worker.ask(CLOSE_CONSUMER, [CONSUMER_ID]);
  return received;
}

async function main(endpoint = "tcp://127.0.0.1:6650", topic = "/default/raw-client", count = "100") {
  const bootstrap = await Connection.open(endpoint);
  const found = await bootstrap.ask(LOOKUP, [topic, { dispatch: "reliable", durability: "fsync" }]);
  await bootstrap.close();
  const [partitionId, , , workerEndpoint] = found.partitions[0];
  const worker = await Connection.open(workerEndpoint);
  console.log(`danube-fast ${worker.welcome[3]}: ${topic} is partition ${partitionId}`);
  const sent = Array.from({ length: Number(count) }, (_, i) => ({
    key: i % 3 === 0 ? Buffer.from(`key-${i / 3}`) : null,
    payload: i === 7 ? null : Buffer.from(`message ${i}`), // number 7 is a tombstone
  }));
  const first = await publish(worker, partitionId, sent, 8);
  const received = await consume(worker, partitionId, first, sent.length);
  const same = (one, other) => (one === null || other === null ? one === other : one.equals(other));
  received.forEach(({ offset, key, payload }, i) => {
    check(offset === first + BigInt(i), `offset ${offset}`);
    check(same(key, sent[i].key) && same(payload, sent[i].payload), `message ${i} differs`);
  });
  await worker.close();
  console.log(`ok: ${sent.length} messages came back as they were sent`);
}

await main(...process.argv.slice(2));
