"""Zenoh: two peers and one connection between them, by eclipse-zenoh. Nothing is kept, nothing is acked.

put() of each message with congestion control `block`: a full queue holds the publisher back instead of
dropping. The client gathers small messages into larger writes by itself; there is no call for a list.
Of many topics each has a publisher of its own, and one subscriber has them all by a wildcard. Requests go
from a querier to a queryable.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from danube_fast.bench.load.requests import LOOK_SECONDS, REPLY_SECONDS
from danube_fast.bench.peers.adapter import (
    STREAMS,
    Adapter,
    After,
    Before,
    Receiver,
    Requester,
    Responder,
    Sender,
    Take,
    Variant,
    has_module,
    topic_names,
)
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


def _wait_for_match(declared: Any) -> None:
    """Until a publisher or a querier knows the other side."""
    deadline = time.monotonic() + MATCH_SECONDS
    while not declared.matching_status.matching:
        if time.monotonic() > deadline:
            raise DeadlineExceeded("the two Zenoh peers did not find each other")
        time.sleep(MATCH_STEP_SECONDS)


class _Sender(Sender):
    def __init__(self, options: dict[str, Any]) -> None:
        import zenoh

        self._session = _open(options, "connect")
        self._publishers = [
            self._session.declare_publisher(
                f"bench/{topic}",
                congestion_control=zenoh.CongestionControl.BLOCK,
                reliability=zenoh.Reliability.RELIABLE,
            )
            for topic in topic_names(options, "/")
        ]
        for publisher in self._publishers:
            _wait_for_match(publisher)

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        puts = itertools.cycle([publisher.put for publisher in self._publishers])
        for one in lists:
            for payload, put in zip(one, puts, strict=False):
                put(payload)

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        put = self._publishers[0].put
        for number, payload in enumerate(payloads):
            before(number)
            put(payload)

    def close(self) -> None:
        self._session.close()


class _Receiver(Receiver):
    """A callback in a thread of the client hands over to ours."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._session = _open(options, "listen")
        self._came: queue.SimpleQueue[Any] = queue.SimpleQueue()
        keys = [f"bench/{topic}" for topic in topic_names(options, "/")]
        self._place = {key: index for index, key in enumerate(keys)}
        self._subscriber = self._session.declare_subscriber(
            keys[0] if len(keys) == 1 else f"bench/{options['topic']}/*", self._came.put
        )

    def receive(self, take: Take, silence_seconds: float) -> None:
        get, get_now = self._came.get, self._came.get_nowait
        while True:
            try:
                sample = get(timeout=silence_seconds)
            except queue.Empty:
                return
            some = [sample.payload.to_bytes()]
            try:
                while len(some) < RECEIVED_MAX:
                    sample = get_now()
                    some.append(sample.payload.to_bytes())
            except queue.Empty:
                pass
            self.last_topic = self._place[str(sample.key_expr)]
            if not take(some):
                return

    def close(self) -> None:
        self._session.close()


class _Requester(Requester):
    """A querier; the first reply is handed on without waiting for the query's end."""

    def __init__(self, options: dict[str, Any]) -> None:
        import zenoh

        self._session = _open(options, "connect")
        self._querier = self._session.declare_querier(
            f"bench/{options['topic']}",
            consolidation=zenoh.ConsolidationMode.NONE,
            congestion_control=zenoh.CongestionControl.BLOCK,
            timeout=REPLY_SECONDS,
        )
        _wait_for_match(self._querier)

    def request_each(self, payloads: Sequence[bytes], before: Before, after: After) -> None:
        get = self._querier.get
        for number, payload in enumerate(payloads):
            before(number)
            after(get(payload=payload).recv().ok.payload.to_bytes())

    def close(self) -> None:
        self._session.close()


class _Responder(Responder):
    """A queryable; its callback runs in a thread of the client."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._session = _open(options, "listen")
        self._key = f"bench/{options['topic']}"
        self._reply_to: Callable[[bytes], bytes] = bytes
        self._queryable = self._session.declare_queryable(self._key, self._on_query)

    def _on_query(self, query: Any) -> None:
        with query:
            query.reply(self._key, self._reply_to(query.payload.to_bytes()))

    def reply_each(self, reply_to: Callable[[bytes], bytes], is_over: Callable[[], bool]) -> None:
        self._reply_to = reply_to
        while not is_over():
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        self._session.close()


class Zenoh(Adapter):
    """Two peers by eclipse-zenoh."""

    name = "zenoh"
    sender_kind, receiver_kind = _Sender, _Receiver
    requester_kind, responder_kind = _Requester, _Responder
    variants = (
        Variant(
            "zenoh peers", "none: two sessions, no router, no acks", "tcp", False,
            workloads=(*STREAMS, "topics", "requests"),
        ),
    )  # fmt: skip

    def absence(self) -> str | None:
        """The client; there is no server."""
        return None if has_module("zenoh") else "no Python client; pip install eclipse-zenoh"

    def version(self) -> str:
        """Of eclipse-zenoh."""
        return importlib.metadata.version("eclipse-zenoh")
