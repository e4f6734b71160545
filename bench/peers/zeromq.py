"""Raw ZeroMQ: two processes and one socket between them. No broker, nothing is kept, nothing is acked.

    push-pull         each message a ZeroMQ message
    push-pull lists   many in one part, cut by size at the other end: what batching by hand brings
    pub-sub           many topics: the topic's name in a part of its own, one subscription to their common prefix
    req-rep           requests and replies

A full queue blocks the sender (SNDHWM, of pub-sub with XPUB_NODROP), so nothing is lost while both ends live.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from danube_fast.bench.load.requests import LOOK_SECONDS
from danube_fast.bench.peers.adapter import (
    Adapter,
    After,
    Before,
    Receiver,
    Requester,
    Responder,
    Sender,
    Take,
    Variant,
    topic_names,
    window_messages,
)
from danube_fast.bench.plan import LISTS
from danube_fast.bench.workloads.reference import PART_BYTES, open_socket, stalled

__all__ = ["ZeroMQ"]

DURABILITY = "none: two sockets, no broker, no acks"
TRANSPORT = "ipc"
RECEIVED_MAX = 10_000
LINGER_MS = 30_000


class _Sender(Sender):
    def __init__(self, options: dict[str, Any]) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = open_socket(self._context, zmq.PUSH)
        self._is_joined = bool(options.get("is_joined"))
        self._part_messages = max(1, PART_BYTES // options["message_bytes"])
        if not self._is_joined:
            self._socket.setsockopt(zmq.SNDHWM, window_messages(options["message_bytes"]))
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)  # what is queued goes before it closes
        self._socket.connect(options["address"])

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        send = self._socket.send
        try:
            if self._is_joined:
                step = self._part_messages
                for one in lists:
                    for start in range(0, len(one), step):
                        send(b"".join(one[start : start + step]), copy=False)
            else:
                for one in lists:
                    for payload in one:
                        send(payload)
        except zmq.Again:
            raise stalled() from None

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        send = self._socket.send
        try:
            for number, payload in enumerate(payloads):
                before(number)
                send(payload)
        except zmq.Again:
            raise stalled() from None

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class _Publisher(Sender):
    """Each message behind the name of its topic."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = open_socket(self._context, zmq.XPUB)
        self._topics = itertools.cycle([name.encode() for name in topic_names(options, ":")])
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        self._socket.setsockopt(zmq.SNDHWM, window_messages(options["message_bytes"]))
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.bind(options["address"])
        try:
            self._socket.recv()  # the subscription
        except zmq.Again:
            raise stalled() from None

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        send = self._socket.send
        try:
            for one in lists:
                for payload, topic in zip(one, self._topics, strict=False):
                    send(topic, zmq.SNDMORE)
                    send(payload)
        except zmq.Again:
            raise stalled() from None

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        for number, payload in enumerate(payloads):
            before(number)
            self.send_lists([[payload]])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class _Receiver(Receiver):
    def __init__(self, options: dict[str, Any]) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = open_socket(self._context, zmq.PULL)
        self._message_bytes = options["message_bytes"]
        self._is_joined = bool(options.get("is_joined"))
        if not self._is_joined:
            self._socket.setsockopt(zmq.RCVHWM, window_messages(self._message_bytes))
        self._socket.bind(options["address"])

    def receive(self, take: Take, silence_seconds: float) -> None:
        receive, size = self._socket.recv, self._message_bytes
        silence_ms = int(silence_seconds * 1000)
        while self._socket.poll(silence_ms):
            some: list[bytes] = []
            try:
                while len(some) < RECEIVED_MAX:
                    part = receive(zmq.NOBLOCK)
                    if self._is_joined:
                        some += [part[at : at + size] for at in range(0, len(part), size)]
                    else:
                        some.append(part)
            except zmq.Again:
                pass
            if some and not take(some):
                return

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


class _Subscriber(Receiver):
    """One subscription to what the names of all topics begin with."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = open_socket(self._context, zmq.SUB)
        names = topic_names(options, ":")
        self._place = {name.encode(): index for index, name in enumerate(names)}
        self._socket.setsockopt(zmq.RCVHWM, window_messages(options["message_bytes"]))
        self._socket.setsockopt(zmq.SUBSCRIBE, options["topic"].encode())
        self._socket.connect(options["address"])  # once the publisher is there, subscribed

    def receive(self, take: Take, silence_seconds: float) -> None:
        receive, silence_ms = self._socket.recv, int(silence_seconds * 1000)
        while self._socket.poll(silence_ms):
            some: list[bytes] = []
            topic = b""
            try:
                while len(some) < RECEIVED_MAX:
                    topic = receive(zmq.NOBLOCK)
                    some.append(receive())
            except zmq.Again:
                pass
            if not some:
                continue
            self.last_topic = self._place[topic]
            if not take(some):
                return

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


class _Requester(Requester):
    """A REQ socket."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = open_socket(self._context, zmq.REQ)
        self._socket.connect(options["address"])

    def request_each(self, payloads: Sequence[bytes], before: Before, after: After) -> None:
        send, receive = self._socket.send, self._socket.recv
        try:
            for number, payload in enumerate(payloads):
                before(number)
                send(payload)
                after(receive())
        except zmq.Again:
            raise stalled() from None

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class _Responder(Responder):
    """A REP socket."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = open_socket(self._context, zmq.REP)
        self._socket.bind(options["address"])

    def reply_each(self, reply_to: Callable[[bytes], bytes], is_over: Callable[[], bool]) -> None:
        look_ms = int(LOOK_SECONDS * 1000)
        while True:
            if self._socket.poll(look_ms):
                self._socket.send(reply_to(self._socket.recv()))
            elif is_over():
                return

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ZeroMQ(Adapter):
    """libzmq through pyzmq."""

    name = "zeromq"
    requester_kind, responder_kind = _Requester, _Responder
    variants = (
        Variant("zeromq push-pull", DURABILITY, TRANSPORT, False),
        Variant(
            "zeromq push-pull lists", DURABILITY, TRANSPORT, False, {"is_joined": True},
            ("throughput",), LISTS,
        ),
        Variant("zeromq pub-sub", DURABILITY, TRANSPORT, False, {"has_topics": True}, ("topics",)),
        Variant("zeromq req-rep", DURABILITY, TRANSPORT, False, {}, ("requests",)),
    )  # fmt: skip

    def absence(self) -> str | None:
        """Nothing: we stand on it."""
        return None

    def version(self) -> str:
        """Of libzmq and pyzmq."""
        return f"{zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}"

    def open_sender(self, options: dict[str, Any]) -> Sender:
        """A PUSH socket, for many topics a publisher."""
        kind = _Publisher if options.get("has_topics") else _Sender
        return self._open(kind, options)  # type: ignore[no-any-return]

    def open_receiver(self, options: dict[str, Any]) -> Receiver:
        """A PULL socket, for many topics a subscriber."""
        kind = _Subscriber if options.get("has_topics") else _Receiver
        return self._open(kind, options)  # type: ignore[no-any-return]

    def _open(self, kind: Any, options: dict[str, Any]) -> Any:
        """Over an abstract socket: nothing in the file system."""
        return super()._open(kind, options | {"address": f"ipc://@danube-bench-{options['topic']}"})
