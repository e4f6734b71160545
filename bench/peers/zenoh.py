"""Zenoh: two peers and one connection between them, by eclipse-zenoh. Nothing is kept, nothing is acked.

put() of each message with congestion control `block`: a full queue holds the publisher back instead of
dropping. The client gathers small messages into larger writes by itself; there is no call for a list.
"""

from __future__ import annotations

import importlib.metadata
import json
import queue
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
from danube_fast.bench.peers.server import Server
from danube_fast.errors import DeadlineExceeded

__all__ = ["Zenoh"]

MATCH_SECONDS = 30.0
MATCH_STEP_SECONDS = 0.01
RECEIVED_MAX = 10_000


def _open(options: dict[str, Any], side: str) -> Any:
    """A session that knows nobody but the other side."""
    import zenoh

    config = zenoh.Config()
    config.insert_json5("mode", json.dumps("peer"))
    config.insert_json5("scouting/multicast/enabled", "false")
    config.insert_json5("scouting/gossip/enabled", "false")
    config.insert_json5("transport/shared_memory/enabled", "false")  # leaves files behind
    endpoints = [f"tcp/{options['address']}"]
    config.insert_json5("listen/endpoints", json.dumps(endpoints if side == "listen" else []))
    config.insert_json5("connect/endpoints", json.dumps(endpoints if side == "connect" else []))
    return zenoh.open(config)


class _Sender(Sender):
    def __init__(self, options: dict[str, Any]) -> None:
        import zenoh

        self._session = _open(options, "connect")
        self._publisher = self._session.declare_publisher(
            f"bench/{options['topic']}",
            congestion_control=zenoh.CongestionControl.BLOCK,
            reliability=zenoh.Reliability.RELIABLE,
        )
        deadline = time.monotonic() + MATCH_SECONDS
        while not self._publisher.matching_status.matching:
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the two Zenoh peers did not find each other")
            time.sleep(MATCH_STEP_SECONDS)

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        put = self._publisher.put
        for one in lists:
            for payload in one:
                put(payload)

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        put = self._publisher.put
        for number, payload in enumerate(payloads):
            before(number)
            put(payload)

    def close(self) -> None:
        self._session.close()


class _Receiver(Receiver):
    """A callback in a thread of the client hands over to ours."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._session = _open(options, "listen")
        self._came: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        put = self._came.put
        self._subscriber = self._session.declare_subscriber(
            f"bench/{options['topic']}", lambda sample: put(sample.payload.to_bytes())
        )

    def receive(self, take: Take, silence_seconds: float) -> None:
        get, get_now = self._came.get, self._came.get_nowait
        while True:
            try:
                some = [get(timeout=silence_seconds)]
            except queue.Empty:
                return
            try:
                while len(some) < RECEIVED_MAX:
                    some.append(get_now())
            except queue.Empty:
                pass
            if not take(some):
                return

    def close(self) -> None:
        self._session.close()


class Zenoh(Adapter):
    """Two peers by eclipse-zenoh."""

    name = "zenoh"
    variants = (Variant("zenoh peers", "none: two sessions, no router, no acks", "tcp", False),)

    def absence(self) -> str | None:
        """The client; there is no server."""
        return None if has_module("zenoh") else "no Python client; pip install eclipse-zenoh"

    def version(self) -> str:
        """Of eclipse-zenoh."""
        return importlib.metadata.version("eclipse-zenoh")

    def start(self, folder: Path, variant: Variant) -> Server | None:
        """No server."""
        return None

    def open_sender(self, options: dict[str, Any]) -> Sender:
        """A session that connects."""
        return _Sender(options)

    def open_receiver(self, options: dict[str, Any]) -> Receiver:
        """A session that listens."""
        return _Receiver(options)
