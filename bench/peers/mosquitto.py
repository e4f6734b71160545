"""Mosquitto by paho-mqtt: MQTT 3.1.1 at QoS 0 (at most once) and at QoS 1 (a PUBACK for each message).

    QoS 0   publish(); after each list one message of QoS 1 to a topic that nobody reads, whose PUBACK
            says that the server has read the list: it takes the packets of a connection in order
    QoS 1   publish() with a window of messages whose PUBACK is open, at both ends

A connection lives in the thread that uses it: paho's own thread would only fight for the interpreter.
Above its limits (1,000 messages for a client, 20 of them without an ack) the server drops or holds
back; both are raised here, so that rates are compared and not limits.
"""

from __future__ import annotations

import importlib.metadata
import select
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from danube_fast.bench.peers.adapter import (
    Adapter,
    Before,
    Receiver,
    Sender,
    Take,
    Variant,
    find_program,
    has_module,
    window_messages,
)
from danube_fast.bench.peers.server import HOST, Server, start_server
from danube_fast.errors import DeadlineExceeded, Unavailable

__all__ = ["Mosquitto"]

PROGRAMS = ("mosquitto", "/usr/sbin/mosquitto", "/usr/local/sbin/mosquitto")
"""A system's own folder for servers is on the PATH of few users."""
TRANSPORT = "tcp"
RECEIVED_MAX = 10_000
CALL_SECONDS = 60.0
OPEN_MAX = 16_384
"""Messages without a PUBACK; MQTT numbers them with 16 bits."""
AUTOSAVE_SECONDS = 1800


class _Client:
    """A connection that is driven by whoever uses it."""

    def __init__(self, options: dict[str, Any], side: str) -> None:
        import paho.mqtt.client as mqtt
        from paho.mqtt.enums import CallbackAPIVersion

        self._ok = mqtt.MQTT_ERR_SUCCESS
        self.events = 0
        """PUBACKs or messages that have come."""
        self.answered = False
        # a session of QoS 1 outlives a connection: only then does the server have to keep messages
        self.client: Any = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            client_id=f"{options['topic']}-{side}",
            clean_session=not options["qos"],
        )
        # no limit of paho's: below one it looks through its whole window at each PUBACK
        self.client.max_inflight_messages_set(0)
        self.client.on_connect = self._on_answer
        self.client.on_subscribe = self._on_answer
        host, _, port = options["address"].partition(":")
        self.client.connect(host, int(port), keepalive=0)
        link: Any = self.client.socket()
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wait("the connection", lambda: self.answered)

    def _on_answer(self, client: Any, userdata: Any, *words: Any) -> None:
        """A CONNACK or a SUBACK, with one reason or a list of them before the properties."""
        reasons = words[-2] if isinstance(words[-2], list) else [words[-2]]
        if any(reason.is_failure for reason in reasons):
            raise Unavailable(f"the MQTT server refused: {reasons[0]}")
        self.answered = True

    def turn(self, seconds: float) -> None:
        """Read and write what can be, waiting so long for the first."""
        client = self.client
        link = client.socket()
        if link is None:
            raise Unavailable("the MQTT server closed the connection")
        readable, writable, _ = select.select(
            [link], [link] if client.want_write() else [], [], seconds
        )
        if writable:
            self._check(client.loop_write())
        if readable:
            before = -1
            while before != self.events:  # paho reads one message at a time
                before = self.events
                self._check(client.loop_read())

    def _check(self, code: Any) -> None:
        if code != self._ok:
            import paho.mqtt.client as mqtt

            raise Unavailable(f"the MQTT connection ended: {mqtt.error_string(code)}")

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Turn until it holds. Raises DeadlineExceeded."""
        deadline = time.monotonic() + CALL_SECONDS
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"{what} took the MQTT server over {CALL_SECONDS:.0f} s")
            self.turn(left)

    def close(self) -> None:
        self.client.disconnect()


class _AtMostOnce(Sender):
    """QoS 0: without a callback, for which paho would make two objects a message."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._link = _Client(options, "sender")
        self._topic = options["topic"]

    def _drain(self) -> None:
        client = self._link.client
        self._link.wait("taking what is sent", lambda: not client.want_write())

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        client, topic = self._link.client, self._topic
        publish, has_more = client.publish, client.want_write
        for one in lists:
            for payload in one:
                publish(topic, payload)
                if has_more():
                    self._drain()
            end = publish(f"{topic}/read", b"", 1)
            self._link.wait("reading a list", end.is_published)

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        client, topic = self._link.client, self._topic
        for number, payload in enumerate(payloads):
            before(number)
            client.publish(topic, payload)
            self._drain()

    def close(self) -> None:
        self._link.close()


class _AtLeastOnce(Sender):
    """QoS 1."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._link = _Client(options, "sender")
        self._link.client.on_publish = self._on_puback
        self._topic = options["topic"]
        self._window = min(OPEN_MAX, window_messages(options["message_bytes"]))
        self._sent = 0

    def _on_puback(self, *_: Any) -> None:
        self._link.events += 1

    def _until_open(self, count: int) -> None:
        self._link.wait("acks", lambda: self._sent - self._link.events <= count)

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        publish, topic, window = self._link.client.publish, self._topic, self._window
        for one in lists:
            for payload in one:
                publish(topic, payload, 1)
                self._sent += 1
                if self._sent - self._link.events >= window:
                    self._until_open(window // 2)
        self._until_open(0)

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        publish, topic = self._link.client.publish, self._topic
        for number, payload in enumerate(payloads):
            before(number)
            publish(topic, payload, 1)
            self._sent += 1
            self._until_open(0)

    def close(self) -> None:
        self._link.close()


class _Receiver(Receiver):
    def __init__(self, options: dict[str, Any]) -> None:
        self._waiting: list[bytes] = []
        self._link = _Client(options, "receiver")
        self._link.client.on_message = self._on_message
        self._link.answered = False
        self._link.client.subscribe(options["topic"], options["qos"])
        self._link.wait("the subscription", lambda: self._link.answered)

    def _on_message(self, client: Any, userdata: Any, message: Any) -> None:
        """The PUBACK of one of QoS 1 is sent when this returns."""
        self._waiting.append(message.payload)
        if len(self._waiting) < RECEIVED_MAX:
            self._link.events += 1

    def receive(self, take: Take, silence_seconds: float) -> None:
        while True:
            deadline = time.monotonic() + silence_seconds
            while not self._waiting:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._link.turn(left)
            some, self._waiting = self._waiting, []
            if not take(some):
                return

    def close(self) -> None:
        self._link.close()


class Mosquitto(Adapter):
    """mosquitto by paho-mqtt."""

    name = "mosquitto"
    receiver_kind = _Receiver
    variants = (
        Variant(
            "mosquitto qos 0", "none: in memory until delivered, at most once", TRANSPORT, True,
            {"qos": 0, "persistence": "false"},
        ),
        Variant(
            "mosquitto qos 1", "memory, acked (persistence false)", TRANSPORT, False,
            {"qos": 1, "persistence": "false"},
        ),
        Variant(
            "mosquitto qos 1",
            f"memory, acked; all written to a file every {AUTOSAVE_SECONDS} s"
            " (persistence true, autosave_interval default)",
            TRANSPORT, False, {"qos": 1, "persistence": "true"},
        ),
    )  # fmt: skip

    def absence(self) -> str | None:
        """The server or the client."""
        if find_program(PROGRAMS) is None:
            return "no mosquitto on PATH; install one (on Debian and Ubuntu: apt install mosquitto)"
        return None if has_module("paho") else "no Python client; pip install paho-mqtt"

    def version(self) -> str:
        """Of mosquitto and paho-mqtt."""
        program = find_program(PROGRAMS) or PROGRAMS[0]
        words = subprocess.run(
            [program, "-h"], capture_output=True, text=True, check=False, timeout=10
        ).stdout.split()
        server = words[2] if words[1:2] == ["version"] and len(words) > 2 else "unknown"
        return f"{server}, paho-mqtt {importlib.metadata.version('paho-mqtt')}"

    def start(self, folder: Path, variant: Variant) -> Server | None:
        """One server for a variant: its persistence is a setting of the server."""
        program = find_program(PROGRAMS) or PROGRAMS[0]

        def command(port: int, data: Path) -> list[str]:
            lines = [
                f"listener {port} {HOST}",
                "allow_anonymous true",
                "user root",  # who starts it as root has a folder that no other user may write to
                "set_tcp_nodelay true",
                f"persistence {variant.options['persistence']}",
                f"persistence_location {data}/",
                f"autosave_interval {AUTOSAVE_SECONDS}",
                f"max_inflight_messages {OPEN_MAX}",
                "max_queued_messages 0",
                "log_dest stderr",
                "log_type error",
                "log_type warning",
            ]
            settings = data / "mosquitto.conf"
            settings.write_text("\n".join(lines) + "\n")
            return [program, "-c", str(settings)]

        return start_server(folder, "mosquitto", command)

    def open_sender(self, options: dict[str, Any]) -> Sender:
        """PUBLISH of the variant's QoS."""
        return _AtLeastOnce(options) if options["qos"] else _AtMostOnce(options)
