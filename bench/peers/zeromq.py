"""Raw ZeroMQ: two processes and one socket between them. No broker, nothing is kept, nothing is acked.

    push-pull         each message a ZeroMQ message
    push-pull lists   many in one part, cut by size at the other end: what batching by hand brings

A full queue blocks the sender (SNDHWM), so nothing is lost while both ends live.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from danube_fast.bench.peers.adapter import (
    Adapter,
    Before,
    Receiver,
    Sender,
    Take,
    Variant,
    window_messages,
)
from danube_fast.bench.peers.server import Server
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


class ZeroMQ(Adapter):
    """libzmq through pyzmq."""

    name = "zeromq"
    variants = (
        Variant("zeromq push-pull", DURABILITY, TRANSPORT, False),
        Variant(
            "zeromq push-pull lists",
            DURABILITY,
            TRANSPORT,
            False,
            {"is_joined": True},
            ("throughput",),
            LISTS,
        ),
    )

    def absence(self) -> str | None:
        """Nothing: we stand on it."""
        return None

    def version(self) -> str:
        """Of libzmq and pyzmq."""
        return f"{zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}"

    def start(self, folder: Path, variant: Variant) -> Server | None:
        """No server."""
        return None

    def open_sender(self, options: dict[str, Any]) -> Sender:
        """A PUSH socket."""
        return _Sender(options | {"address": _endpoint(options)})

    def open_receiver(self, options: dict[str, Any]) -> Receiver:
        """A PULL socket."""
        return _Receiver(options | {"address": _endpoint(options)})


def _endpoint(options: dict[str, Any]) -> str:
    """An abstract socket: nothing in the file system."""
    return f"ipc://@danube-bench-{options['topic']}"
