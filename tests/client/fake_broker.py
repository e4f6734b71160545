"""A broker in a thread, small enough to be read in one go: one ROUTER plays bootstrap and worker.

It keeps messages in memory, numbers them, deduplicates by (producer name, sequence), and delivers to
exclusive, shared and reader consumers. Faults are switched on by tests: `refuse` answers publishes
with a status, `forget_sessions` drops every session, `mute` stops all replies.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from typing import Any

import numpy as np
import zmq

from danube_fast.errors import FailedPrecondition, NotFound
from danube_fast.frame.bundle import bundle_entries, sealed_bundle
from danube_fast.frame.kernel import address_of
from danube_fast.frame.split import split_frame
from danube_fast.frame.stamp import stamp
from danube_fast.frame.view import FrameView
from danube_fast.net import protocol as p
from danube_fast.net.host import host_id

LIMITS = {
    "heartbeat_ms": 100,
    "heartbeat_idle_ms": 500,
    "session_timeout_ms": 2000,
    "frame_bytes_max": 256 * 1024,
    "message_bytes_max": 4 * 1024 * 1024,
    "bundle_bytes_max": 32 * 1024 * 1024,
}


class Partition:
    def __init__(self, partition_id: int, topic: str) -> None:
        self.partition_id = partition_id
        self.topic = topic
        self.frames: list[tuple[int, int, bytearray]] = []  # base offset, count, stamped frame
        self.next_offset = 0
        self.producers: dict[str, dict[str, Any]] = {}
        self.subs: dict[str, dict[str, Any]] = {}


class Topic:
    def __init__(self, name: str, options: dict[str, Any], first_id: int) -> None:
        self.name = name
        self.options = {"dispatch": "reliable", "durability": "fsync", "partitions": 0, **options}
        count = self.options["partitions"]
        names = [f"{name}-part-{i}" for i in range(count)] or [name]
        self.partitions = [Partition(first_id + i, n) for i, n in enumerate(names)]


class Session:
    def __init__(self, number: int) -> None:
        self.number = number
        self.token = os.urandom(8)
        self.consumers: dict[int, dict[str, Any]] = {}
        self.flows: dict[int, list[int]] = collections.defaultdict(lambda: [0, 0])
        self.identity = b""


class FakeBroker:
    def __init__(self, prepare: Any = lambda context, socket: None, port: int = 0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        prepare(self.context, self.socket)
        self.socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.url = f"danube://127.0.0.1:{self.port}"
        self.ipc = ""  # endpoint on this host, which LOOKUP tells
        self.topics: dict[str, Topic] = {}
        self.by_partition: dict[int, Partition] = {}
        self.sessions: dict[int, Session] = {}
        self.by_identity: dict[bytes, Session] = {}
        self.commands = collections.Counter[str]()
        self.refuse: collections.deque[tuple[int, str]] = collections.deque()
        self.drop_publishes = self.hellos = 0
        self.stopping = self.mute = self.ignore_admin = self.hold_acks = self.deliver_late = False
        self.ack_commands = self.ack_timeout_ms = 0
        self.held: list[tuple[bytes, Any]] = []
        self.extended: list[tuple[int, list[int], int]] = []
        self.waiting: list[tuple[bytes, p.Lookup, float]] = []
        self.publish_sizes: list[int] = []
        self.bundle_counts: list[int] = []
        """Frames in each PUBLISH."""
        self.lock = threading.RLock()
        self.error: BaseException | None = None
        self._next_session = self._next_id = 1
        self.thread = threading.Thread(target=self._run, name="fake-broker", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.stopping = True
        self.thread.join(60)
        self.socket.close(0)
        self.context.term()
        if self.error is not None:
            raise self.error

    # ------------------------------------------------------------ switches

    def forget_sessions(self) -> None:
        """As after a restart: nobody is known, consumers are gone."""
        with self.lock:
            for session in list(self.sessions.values()):
                for consumer_id in list(session.consumers):
                    self._detach(session, consumer_id)
            self.sessions.clear()
            self.by_identity.clear()
            for partition in self.by_partition.values():
                for state in partition.producers.values():
                    state["session"] = None

    def forget_connections(self) -> None:
        """As after a lost connection: sessions live on, but under other identities."""
        with self.lock:
            self.by_identity.clear()

    def release_acks(self) -> None:
        with self.lock:
            self.hold_acks = False
            held, self.held = self.held, []
            for identity, command in held:
                self.reply(identity, command)

    def delete(self, name: str) -> None:
        with self.lock:
            topic = self.topics.pop(name)
            for partition in topic.partitions:
                del self.by_partition[partition.partition_id]
            for session in self.sessions.values():
                for consumer_id, consumer in list(session.consumers.items()):
                    if consumer["partition"] in topic.partitions:
                        del session.consumers[consumer_id]
                        detail = {"code": 35, "text": f"{name} was deleted"}
                        self.reply(session.identity, p.ConsumerEvent(consumer_id, "closed", detail))

    def event(self, kind: str, detail: dict[str, Any]) -> None:
        """Tell every consumer."""
        with self.lock:
            for session in self.sessions.values():
                for consumer_id in session.consumers:
                    self.reply(session.identity, p.ConsumerEvent(consumer_id, kind, detail))

    def wait(self, what: str, ready: Any, seconds: float = 60.0) -> None:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            with self.lock:
                if ready():
                    return
            time.sleep(0.002)
        raise AssertionError(f"{what} did not happen within {seconds} s")

    # ------------------------------------------------------------ loop

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        try:
            while not self.stopping:
                ready = poller.poll(5)
                with self.lock:
                    while ready and not self.mute:
                        try:
                            parts = self.socket.recv_multipart(zmq.NOBLOCK)
                        except zmq.Again:
                            break
                        self._handle(parts)
                    self._answer_waiting()
                if self.mute:
                    time.sleep(0.005)
        except BaseException as error:
            self.error = error
            raise

    def reply(self, identity: bytes, *parts: Any) -> None:
        command, *rest = parts
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([identity, p.encode(command), *rest], zmq.NOBLOCK)

    def _handle(self, parts: list[bytes]) -> None:
        identity, head, *rest = parts
        command = p.decode_client_command(head)
        name = type(command).__name__
        self.commands[name] += 1
        if isinstance(command, p.Hello):
            self._hello(identity, command)
            return
        session = self.by_identity.get(identity)
        if session is None:
            text = "say HELLO first"
            self.reply(identity, p.Error(getattr(command, "request", 0), p.Status.NO_SESSION, text))
            return
        try:
            if name != "Watch":  # nothing ever changes here
                getattr(self, f"_on_{name.lower()}")(session, identity, command, *rest)
        except (NotFound, FailedPrecondition) as error:
            self.reply(identity, p.Error(command.request, error.code, str(error)))

    def _hello(self, identity: bytes, command: p.Hello) -> None:
        self.hellos += 1
        session = self.sessions.get(command.session)
        resumed = session is not None and session.token == command.token
        if session is None or not resumed:
            session = self.sessions[self._next_session] = Session(self._next_session)
            self._next_session += 1
        session.identity = identity
        self.by_identity[identity] = session
        welcome = p.Welcome(
            command.request, session.number, session.token, 1, "fake", host_id(), resumed, LIMITS
        )
        self.reply(identity, welcome)

    def _on_ping(self, session: Session, identity: bytes, command: p.Ping) -> None:
        self.reply(identity, p.Pong(command.request))

    def _on_bye(self, session: Session, identity: bytes, command: p.Bye) -> None:
        for consumer_id in list(session.consumers):
            self._detach(session, consumer_id)
        self.reply(identity, p.Result(command.request))

    # ------------------------------------------------------------ topics

    def create(self, name: str, **options: Any) -> Topic:
        with self.lock:
            topic = self.topics[name] = Topic(name, options, self._next_id)
            self._next_id += len(topic.partitions)
            for partition in topic.partitions:
                self.by_partition[partition.partition_id] = partition
            return topic

    def _on_lookup(self, session: Session, identity: bytes, command: p.Lookup) -> None:
        topic = self.topics.get(command.topic)
        if topic is None and command.create is not None:
            topic = self.create(command.topic, **command.create)
        if topic is None and command.wait_ms:
            self.waiting.append((identity, command, time.monotonic() + command.wait_ms / 1000))
            return
        if topic is None:
            raise NotFound(f"{command.topic} does not exist; danube-fast topics create it")
        for option, value in (command.create or {}).items():
            if topic.options[option] != value:
                raise FailedPrecondition(f"{option} is {topic.options[option]!r}, not {value!r}")
        endpoint = f"tcp://127.0.0.1:{self.port}"
        places = [[x.partition_id, x.topic, 0, endpoint, self.ipc] for x in topic.partitions]
        answer = {
            "topic": topic.name,
            "dispatch": topic.options["dispatch"],
            "durability": topic.options["durability"],
            "partitioned": bool(topic.options["partitions"]),
            "partitions": places,
            "host_id": host_id(),
        }
        self.reply(identity, p.Result(command.request, answer))

    def _answer_waiting(self) -> None:
        waiting, self.waiting = self.waiting, []
        for identity, command, limit in waiting:
            if command.topic in self.topics:
                self._on_lookup(self.by_identity[identity], identity, command)
            elif time.monotonic() >= limit:
                text = f"{command.topic} does not exist; danube-fast topics create it"
                self.reply(identity, p.Error(command.request, NotFound.code, text))
            else:
                self.waiting.append((identity, command, limit))

    def _on_admin(self, session: Session, identity: bytes, command: p.Admin) -> None:
        if self.ignore_admin:
            return
        if command.operation == "list_topics":
            self.reply(identity, p.Result(command.request, [{"topic": t} for t in self.topics]))
        elif command.operation == "describe_subscription":
            topic = self.topics[command.arguments["topic"]]
            cursors = {}
            for partition in topic.partitions:
                acked = partition.subs[command.arguments["subscription"]]["acked"]
                cursors[partition.topic] = min(set(range(len(acked) + 1)) - acked)
            self.reply(identity, p.Result(command.request, {"cursors": cursors, "lag_messages": 0}))
        elif command.operation == "create_topic":
            topic = self.create(name=command.arguments["topic"])
            self.reply(identity, p.Result(command.request, {"topic": topic.name}))
        else:
            raise NotFound(f"no operation {command.operation!r}")

    # ------------------------------------------------------------ publishing

    def _on_openproducer(self, session: Session, identity: bytes, command: p.OpenProducer) -> None:
        partition = self.by_partition[command.partition_id]
        state = partition.producers.setdefault(
            command.name,
            {"id": len(partition.producers) + 1, "epoch": 0, "next": 0, "batches": {}},
        )
        state["epoch"] += 1
        state["session"] = session.number
        answer = {
            "producer_id": state["id"],
            "producer_epoch": state["epoch"],
            "next_sequence": state["next"],
        }
        self.reply(identity, p.Result(command.request, answer))

    def _on_closeproducer(
        self, session: Session, identity: bytes, command: p.CloseProducer
    ) -> None:
        self.reply(identity, p.Result(command.request))

    def _on_publish(
        self, session: Session, identity: bytes, command: p.Publish, bundle: bytes
    ) -> None:
        if self.drop_publishes:
            self.drop_publishes -= 1
            return
        outcome: list[int] = []
        texts: dict[int, str] = {}
        entries = bundle_entries(bundle)
        self.bundle_counts.append(len(entries))
        for partition_id, start, frame_bytes in entries:
            self.publish_sizes.append(frame_bytes)
            frame = bytearray(bundle[start : start + frame_bytes])
            status, offset, text = self._accept(session, partition_id, frame)
            outcome += (status, offset)
            texts |= {status: text} if text else {}
        answer = p.Published([(command.request, outcome)], texts)
        if self.hold_acks:
            self.held.append((identity, answer))
        else:
            self.reply(identity, answer)
        self._deliver()

    def _accept(
        self, session: Session, partition_id: int, frame: bytearray
    ) -> tuple[int, int, str]:
        partition = self.by_partition.get(partition_id)
        if partition is None:
            return p.Status.TOPIC_DELETED, 0, "deleted"
        view = FrameView(frame)
        view.check()
        states = [s for s in partition.producers.values() if s["id"] == view.producer_id]
        (state,) = states or [{"epoch": 0, "session": 0}]
        if (state["epoch"], state["session"]) != (view.producer_epoch, session.number):
            return p.Status.FENCED, 0, "fenced"
        sequence, count = view.base_sequence, view.message_count
        if sequence + count <= state["next"]:
            return p.Status.DUPLICATE, state["batches"][sequence], ""
        if sequence != state["next"]:
            return p.Status.OUT_OF_SEQUENCE, 0, ""
        if self.refuse:
            status, text = self.refuse.popleft()
            return status, 0, text
        offset = partition.next_offset
        stamp(address_of(frame), 1, 0, offset, time.time_ns(), 0, partition_id, 1, count)
        partition.frames.append((offset, count, frame))
        partition.next_offset += count
        state["next"] += count
        state["batches"][sequence] = offset
        return p.Status.OK, offset, ""

    # ------------------------------------------------------------ consuming

    def _on_subscribe(self, session: Session, identity: bytes, command: p.Subscribe) -> None:
        partition = self.by_partition.get(command.partition_id)
        if partition is None:
            raise NotFound("no such partition")
        position = command.position
        where = {"earliest": 0, "latest": partition.next_offset}.get(position, position)
        sub: dict[str, Any] = {"acked": set(), "next": where, "redeliver": [], "counts": {}}
        if command.type != "reader":
            sub = partition.subs.setdefault(command.subscription, sub)
            live = self._live(sub)
            if command.type == "exclusive" and live:
                raise FailedPrecondition("the subscription has a consumer; wait until it is gone")
        session.consumers[command.consumer_id] = {
            "partition": partition, "sub": sub, "flow": command.flow_id, "held": set(),
            "type": command.type,
        }  # fmt: skip
        answer = {
            "next_offset": sub["next"],
            "end_offset": partition.next_offset,
            "first_offset": 0,
            "ack_timeout_ms": self.ack_timeout_ms,
        }
        self.reply(identity, p.Result(command.request, answer))
        self._deliver()

    def _live(self, sub: dict[str, Any]) -> list[Any]:
        return [
            (session, consumer_id)
            for session in self.sessions.values()
            for consumer_id, consumer in session.consumers.items()
            if consumer["sub"] is sub
        ]

    def _on_flow(self, session: Session, identity: bytes, command: p.Flow) -> None:
        flow = session.flows[command.flow_id]
        flow[0] += command.byte_count
        flow[1] += command.message_count
        self._deliver()

    def _deliver(self) -> None:
        for session in () if self.deliver_late else self.sessions.values():
            for consumer_id, consumer in session.consumers.items():
                self._deliver_to(session, consumer_id, consumer)

    def _deliver_to(self, session: Session, consumer_id: int, consumer: dict[str, Any]) -> None:
        partition, sub = consumer["partition"], consumer["sub"]
        flow = session.flows[consumer["flow"]]
        for base, count, frame in partition.frames:
            if flow[0] <= 0 or flow[1] <= 0:
                return
            again = [o for o in sub["redeliver"] if base <= o < base + count]
            fresh = list(range(max(base, sub["next"]), base + count))
            rows = sorted({*again, *fresh} - sub["acked"])
            if not rows:
                continue
            sub["redeliver"] = [o for o in sub["redeliver"] if o not in again]
            sub["next"] = max(sub["next"], base + count)
            out = frame
            if len(rows) < count or again:
                counts = np.array([sub["counts"].get(o, 0) for o in rows], dtype=np.uint32)
                index = np.array([o - base for o in rows], dtype=np.int32)
                out = split_frame(FrameView(frame), index, counts)
            consumer["held"].update(rows)
            flow[0] -= len(out)
            flow[1] -= len(rows)
            names = {s["id"]: name for name, s in partition.producers.items()}
            self.reply(session.identity, p.ProducerNames(partition.partition_id, names))
            bundle = sealed_bundle([(partition.partition_id, out)])
            self.reply(session.identity, p.Deliver([consumer_id]), bundle)

    def _on_ack(self, session: Session, identity: bytes, command: p.Ack) -> None:
        self.ack_commands += 1
        for consumer_id, pairs in command.entries:
            consumer = session.consumers.get(consumer_id)
            if consumer is None:
                continue
            numbers = np.frombuffer(pairs, "<i8") if type(pairs) is bytes else pairs
            for start, end in zip(numbers[::2], numbers[1::2], strict=True):
                taken = {o for o in consumer["held"] if start <= o < end}
                consumer["held"] -= taken
                consumer["sub"]["acked"] |= taken
        if command.request:
            self.reply(identity, p.Result(command.request))

    def _on_nack(self, session: Session, identity: bytes, command: p.Nack) -> None:
        for consumer_id, pairs in command.entries:
            consumer = session.consumers.get(consumer_id)
            if consumer is not None:
                for start, end in zip(pairs[::2], pairs[1::2], strict=True):
                    self._give_back(consumer, {o for o in consumer["held"] if start <= o < end})
        self._deliver()

    def _on_extend(self, session: Session, identity: bytes, command: p.Extend) -> None:
        for consumer_id, pairs in command.entries:
            self.extended.append((consumer_id, pairs, command.milliseconds))

    def _give_back(self, consumer: dict[str, Any], offsets: set[int]) -> None:
        sub = consumer["sub"]
        consumer["held"] -= offsets
        for offset in offsets:
            sub["counts"][offset] = sub["counts"].get(offset, 0) + 1
        sub["redeliver"] = sorted({*sub["redeliver"], *offsets})

    def _on_seek(self, session: Session, identity: bytes, command: p.Seek) -> None:
        consumer = session.consumers[command.consumer_id]
        partition, sub = consumer["partition"], consumer["sub"]
        end = partition.next_offset
        if not command.dry_run:
            place = {"earliest": 0, "latest": end}.get(command.position, command.position)
            sub.update(next=min(place, end), acked=set(), redeliver=[])
            consumer["held"].clear()
        self.reply(identity, p.Result(command.request, {"end_offset": end}))
        self._deliver()

    def _on_closeconsumer(
        self, session: Session, identity: bytes, command: p.CloseConsumer
    ) -> None:
        self.deliver_late = False  # it is until this is read
        self._deliver()
        if command.consumer_id in session.consumers:
            self._detach(session, command.consumer_id)
        self.reply(identity, p.Result(command.request))
        self._deliver()

    def _detach(self, session: Session, consumer_id: int) -> None:
        consumer = session.consumers.pop(consumer_id)
        if consumer["type"] != "reader":
            self._give_back(consumer, set(consumer["held"]))

    def acked(self, topic: str, subscription: str) -> set[int]:
        """Offsets acked in a one-partition topic."""
        with self.lock:
            (partition,) = self.topics[topic].partitions
            return set(partition.subs[subscription]["acked"])
