"""iceoryx2: samples in shared memory, by its Python bindings. No broker, nothing is kept or acked.

    publisher --samples in shared memory--> subscriber       an event wakes the subscriber up

    iceoryx2         each message a sample
    iceoryx2 lists   many in one sample, cut by size at the other end: what batching by hand brings

The bindings hand out addresses: bytes are copied into a sample at one end and out of it at the other. A
full buffer holds the publisher back. The subscriber is woken for WAKE_MESSAGES, or in `latency` for each one.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from danube_fast.bench.peers.adapter import (
    Adapter,
    Before,
    Receiver,
    Sender,
    Take,
    Variant,
    has_module,
)
from danube_fast.bench.plan import LISTS

__all__ = ["Iceoryx"]

DURABILITY = "none: samples in shared memory, no broker, no acks"
BUFFER_SAMPLES = {False: 4096, True: 64}
"""Joined or not -> samples on their way; a full buffer has been announced before."""
WAKE_MESSAGES = 256
JOINED_BYTES = 256 * 1024
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is
RECEIVED_MAX = 10_000
NAP_MS = 100


def _is_joined(options: dict[str, Any]) -> bool:
    return bool(options.get("is_joined"))


def _open(options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A node, the service with the samples, the service that wakes; files under the topic's name."""
    import iceoryx2 as iox2

    iox2.set_log_level(iox2.LogLevel.Error)
    config = iox2.config.global_config()
    config.global_cfg.root_path = iox2.Path.new(options["folder"])
    config.global_cfg.prefix = iox2.FileName.new(f"{options['topic']}_")
    node = iox2.NodeBuilder.new().config(config).create(iox2.ServiceType.Ipc)
    samples = (
        node.service_builder(iox2.ServiceName.new("samples"))
        .publish_subscribe(iox2.Slice[ctypes.c_uint8])
        .enable_safe_overflow(False)
        .subscriber_max_buffer_size(BUFFER_SAMPLES[_is_joined(options)])
        .max_publishers(1)
        .max_subscribers(1)
        .history_size(0)
        .open_or_create()
    )
    events = node.service_builder(iox2.ServiceName.new("events")).event().open_or_create()
    return node, samples, events


class _Sender(Sender):
    def __init__(self, options: dict[str, Any]) -> None:
        import iceoryx2 as iox2

        self._node, self._samples, self._events = _open(options)
        size = options["message_bytes"]
        self._joined = max(1, JOINED_BYTES // size) if _is_joined(options) else 1
        self._publisher = (
            self._samples.publisher_builder()
            .initial_max_slice_len(size * self._joined)
            .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._notifier = self._events.notifier_builder().create()

    def _send(self, payload: bytes) -> None:
        sample = self._publisher.loan_slice_uninit(len(payload))
        ctypes.memmove(sample.payload_ptr, payload, len(payload))
        sample.assume_init().send()

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        send, wake, joined = self._send, self._notifier.notify, self._joined
        for one in lists:
            if joined > 1:
                for start in range(0, len(one), joined):
                    send(b"".join(one[start : start + joined]))
                    wake()
                continue
            for start in range(0, len(one), WAKE_MESSAGES):
                for payload in one[start : start + WAKE_MESSAGES]:
                    send(payload)
                wake()

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        send, wake = self._send, self._notifier.notify
        for number, payload in enumerate(payloads):
            before(number)
            send(payload)
            wake()

    def close(self) -> None:
        self._notifier.delete()
        self._publisher.delete()
        self._samples.delete()
        self._events.delete()


class _Receiver(Receiver):
    def __init__(self, options: dict[str, Any]) -> None:
        import iceoryx2 as iox2

        self._node, self._samples, self._events = _open(options)
        self._is_joined = _is_joined(options)
        self._size = options["message_bytes"]
        buffer = BUFFER_SAMPLES[self._is_joined]
        self._subscriber = self._samples.subscriber_builder().buffer_size(buffer).create()
        self._listener = self._events.listener_builder().create()
        self._nap = iox2.Duration.from_millis(NAP_MS)

    def receive(self, take: Take, silence_seconds: float) -> None:
        receive, copy = self._subscriber.receive, ctypes.string_at
        is_joined, size = self._is_joined, self._size
        heard = time.monotonic()
        while time.monotonic() - heard < silence_seconds:
            some: list[bytes] = []
            while len(some) < RECEIVED_MAX:
                sample = receive()
                if sample is None:
                    break
                payload = sample.payload()
                content = copy(payload.as_ptr(), payload.len())
                sample.delete()
                if is_joined:
                    some += [content[at : at + size] for at in range(0, len(content), size)]
                else:
                    some.append(content)
            if some:
                if not take(some):
                    return
                heard = time.monotonic()
            else:
                self._listener.timed_wait(self._nap)

    def close(self) -> None:
        self._listener.delete()
        self._subscriber.delete()
        self._samples.delete()
        self._events.delete()


class Iceoryx(Adapter):
    """Two processes by iceoryx2."""

    name = "iceoryx2"
    sender_kind, receiver_kind = _Sender, _Receiver
    variants = (
        Variant("iceoryx2", DURABILITY, "shm", False),
        Variant(
            "iceoryx2 lists", DURABILITY, "shm", False, {"is_joined": True}, ("throughput",), LISTS
        ),
    )

    def absence(self) -> str | None:
        """The bindings; there is no server."""
        return None if has_module("iceoryx2") else "no Python bindings; pip install iceoryx2"

    def version(self) -> str:
        """Of the bindings."""
        return importlib.metadata.version("iceoryx2")

    def sweep(self, topic: str) -> None:
        """The bindings leave a file of the node in shared memory."""
        for left in SHARED_MEMORY.glob(f"{topic}_*"):
            left.unlink(missing_ok=True)
