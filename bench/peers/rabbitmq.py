"""RabbitMQ by pika: AMQP 0-9-1 with publisher confirms, to a classic queue, a quorum queue or a stream.

    sending     basic_publish() with a window of unconfirmed messages; the server confirms several at once
    receiving   basic_consume() with a prefetch of as many; one ack for all that a read has brought

The connection is pika's asynchronous one, its loop driven by whoever uses it: with its blocking one
each message would wait for its own confirm. Streams are reached through AMQP, too: their own protocol
has another client, another port and a plugin of the server.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
from collections.abc import Callable, Iterator, Sequence
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
from danube_fast.bench.peers.server import HOST, Server, free_port, start_server
from danube_fast.errors import DeadlineExceeded, Unavailable

__all__ = ["RabbitMQ"]

PROGRAMS = ("/usr/lib/rabbitmq/bin/rabbitmq-server", "rabbitmq-server")
"""Debian's command of that name becomes another user, who may not write to our folder."""
NAMES = ("epmd", "/usr/lib/erlang/bin/epmd", "/usr/local/lib/erlang/bin/epmd")
TRANSPORT = "tcp"
CALL_SECONDS = 60.0
OPEN_MAX = 16_384
"""Messages without a confirm, or without an ack of the consumer; AMQP has 16 bits for the latter."""
SLICES = 8
"""A window is published in so many parts; pika writes between them."""
START_SECONDS = 90.0
PERSISTENT, TRANSIENT = 2, 1


class _Link:
    """A connection with one channel, and the loop that it lives in."""

    def __init__(self, options: dict[str, Any]) -> None:
        import pika

        host, _, port = options["address"].partition(":")
        parameters = pika.ConnectionParameters(
            host=host, port=int(port), heartbeat=0, connection_attempts=1,
            socket_timeout=CALL_SECONDS, blocked_connection_timeout=CALL_SECONDS,
        )  # fmt: skip
        self._error: BaseException | None = None
        self._is_closing = False
        self.connection: Any = pika.SelectConnection(
            parameters,
            on_open_callback=self.stop,
            on_open_error_callback=self._on_end,
            on_close_callback=self._on_end,
        )
        self.loop: Any = self.connection.ioloop
        with self.closed_on_failure():
            self.run("the connection")
            self.channel: Any = self.connection.channel(on_open_callback=self.stop)
            self.channel.add_on_close_callback(self._on_end)
            self.run("a channel")

    @contextlib.contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Closes it if what is inside raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def stop(self, *_: Any) -> None:
        """Let `run` return: what it waited for has come."""
        self._has_come = True
        self.loop.stop()

    def fail(self, error: BaseException) -> None:
        """Let `run` raise; whoever closes has heard enough."""
        if not self._is_closing:
            self._error = self._error or error
            self.loop.stop()

    def _on_end(self, _: Any, reason: Any) -> None:
        self.fail(Unavailable(f"the AMQP server ended it: {reason!r}"))
        if self._is_closing:
            self.stop()

    def turn(self, seconds: float = 0.0) -> bool:
        """The loop until `stop`, or for so long; whether `stop` was called. Raises what failed."""
        self._has_come = False
        if self._error is None:
            timer = self.loop.call_later(seconds, self.loop.stop)
            self.loop.start()
            self.loop.remove_timeout(timer)
        if self._error is not None:
            raise self._error
        return self._has_come

    def run(self, what: str) -> None:
        """The loop until `stop`. Raises DeadlineExceeded."""
        if not self.turn(CALL_SECONDS):
            raise DeadlineExceeded(f"{what} took the AMQP server over {CALL_SECONDS:.0f} s")

    def close(self) -> None:
        self._is_closing = True
        self._error = None
        if self.connection.is_open:
            self.connection.close()
            while not self.connection.is_closed and self.turn(CALL_SECONDS):
                pass  # the channel ends before the connection does
        self.turn()  # pika closes its socket in a later round of the loop
        self.loop.close()


class _Sender(Sender):
    def __init__(self, options: dict[str, Any]) -> None:
        import pika

        self._nack = pika.spec.Basic.Nack
        self._queue = options["topic"]
        mode = PERSISTENT if options["is_persistent"] else TRANSIENT
        self._properties = pika.BasicProperties(delivery_mode=mode)
        self._window = min(OPEN_MAX, window_messages(options["message_bytes"]))
        self._sent = self._confirmed = self._wanted = 0
        self._early: set[int] = set()
        """Confirmed beyond `_confirmed`, up to which all are."""
        self._link = _Link(options)
        with self._link.closed_on_failure():
            self._link.channel.confirm_delivery(self._on_confirm, callback=self._link.stop)
            self._link.run("the confirm mode")

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        if isinstance(method, self._nack):
            self._link.fail(Unavailable(f"the AMQP server refused message {method.delivery_tag}"))
            return
        early = self._early
        if method.multiple:
            self._confirmed = max(self._confirmed, method.delivery_tag)
            if early:
                self._early = early = {tag for tag in early if tag > self._confirmed}
        else:
            early.add(method.delivery_tag)
        while self._confirmed + 1 in early:
            self._confirmed += 1
            early.remove(self._confirmed)
        if self._open <= self._wanted:
            self._link.stop()

    @property
    def _open(self) -> int:
        return self._sent - self._confirmed - len(self._early)

    def _until_open(self, count: int) -> None:
        self._wanted = count
        while self._open > count:
            self._link.run("confirms")

    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        publish, queue, properties = (
            self._link.channel.basic_publish, self._queue, self._properties
        )  # fmt: skip
        step = max(1, self._window // SLICES)
        for one in lists:
            for start in range(0, len(one), step):
                self._until_open(self._window - step)
                some = one[start : start + step]
                for payload in some:
                    publish("", queue, payload, properties)
                self._sent += len(some)
                self._link.turn()
        self._until_open(0)

    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        publish, queue, properties = (
            self._link.channel.basic_publish, self._queue, self._properties
        )  # fmt: skip
        for number, payload in enumerate(payloads):
            before(number)
            publish("", queue, payload, properties)
            self._sent += 1
            self._until_open(0)

    def close(self) -> None:
        self._link.close()


class _Receiver(Receiver):
    """What one read of the socket brings is handed over, and acked, together."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._queue = options["topic"]
        self._waiting: list[bytes] = []
        self._tag = self._came = 0
        self._take: Take | None = None
        self._link = _Link(options)
        with self._link.closed_on_failure():
            self._subscribe(options)

    def _subscribe(self, options: dict[str, Any]) -> None:
        kind, window = options["queue"], min(OPEN_MAX, window_messages(options["message_bytes"]))
        channel = self._link.channel
        self._call(
            "the queue",
            channel.queue_declare, self._queue, durable=True, arguments={"x-queue-type": kind},
        )  # fmt: skip
        self._call("the prefetch", channel.basic_qos, prefetch_count=window)
        arguments = {"x-stream-offset": "first"} if kind == "stream" else {}
        self._call(
            "the subscription",
            channel.basic_consume, self._queue, self._on_message, arguments=arguments,
        )  # fmt: skip

    def _call(self, what: str, method: Callable[..., Any], *words: Any, **options: Any) -> None:
        method(*words, callback=self._link.stop, **options)
        self._link.run(what)

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        if not self._waiting and self._take is not None:
            self._link.loop.call_later(0, self._hand_over)  # after this read
        self._waiting.append(body)
        self._tag = method.delivery_tag

    def _hand_over(self) -> None:
        if self._take is None or not self._waiting:
            return
        some, self._waiting = self._waiting, []
        self._came += len(some)
        wants_more = self._take(some)
        self._link.channel.basic_ack(self._tag, multiple=True)
        if not wants_more:
            self._take = None
            self._link.stop()

    def receive(self, take: Take, silence_seconds: float) -> None:
        self._take, came = take, -1
        self._link.loop.call_later(0, self._hand_over)
        while came != self._came:
            came = self._came
            if self._link.turn(silence_seconds):
                break
        self._take = None

    def close(self) -> None:
        try:
            if self._link.connection.is_open:
                self._call("deleting the queue", self._link.channel.queue_delete, self._queue)
        finally:
            self._link.close()


def _variant(kind: str, durability: str, *, is_persistent: bool = True) -> Variant:
    options = {"queue": kind, "is_persistent": is_persistent}
    return Variant(f"rabbitmq {kind}", durability, TRANSPORT, False, options)


class RabbitMQ(Adapter):
    """rabbitmq-server, one node, by pika."""

    name = "rabbitmq"
    sender_kind, receiver_kind = _Sender, _Receiver
    variants = (
        _variant(
            "classic", "memory: transient messages, confirmed once the queue has them",
            is_persistent=False,
        ),
        _variant(
            "classic",
            "persistent messages, confirmed once in the page cache or consumed; no fsync (since 4.0)",
        ),
        _variant("quorum", "fsync of the log before the confirm, shared by a group; one replica"),
        _variant("stream", "confirmed from the page cache, no fsync; one replica"),
    )  # fmt: skip

    def absence(self) -> str | None:
        """The server, Erlang's epmd or the client."""
        if find_program(PROGRAMS) is None or find_program(NAMES) is None:
            return (
                "no rabbitmq-server with Erlang's epmd on PATH; install RabbitMQ"
                " (on Debian and Ubuntu: apt install rabbitmq-server)"
            )
        return None if has_module("pika") else "no Python client; pip install pika"

    def version(self) -> str:
        """Of RabbitMQ and pika."""
        # its own command for that leaves a cookie in the home folder and a daemon running
        home = Path(find_program(PROGRAMS) or PROGRAMS[0]).resolve().parents[1]
        found = sorted(path.name for path in home.glob("plugins/rabbit-*"))
        server = found[-1].removeprefix("rabbit-").removesuffix(".ez") if found else "unknown"
        return f"{server}, pika {importlib.metadata.version('pika')}"

    def start(self, folder: Path, variant: Variant) -> Server | None:
        """A node that knows no other, with a list of nodes of its own."""
        program, lister = find_program(PROGRAMS) or PROGRAMS[0], find_program(NAMES) or NAMES[0]
        names = start_server(
            folder, "epmd", lambda port, data: [lister, "-port", str(port), "-address", HOST]
        )
        try:
            node = start_server(
                folder,
                "rabbitmq-server",
                lambda port, data: _node(program, port, data, names.port),
                START_SECONDS,
            )
        except BaseException:
            names.stop()
            raise
        node.keep(names)
        return node


def _node(program: str, port: int, data: Path, names_port: int) -> list[str]:
    """Writes a node's settings; the command that starts it."""
    settings = data / "rabbitmq.conf"
    settings.write_text(f"listeners.tcp.1 = {HOST}:{port}\n")
    plugins = data / "enabled_plugins"
    plugins.write_text("[].\n")
    environment = {
        "HOME": str(data),  # Erlang's cookie
        "ERL_EPMD_PORT": str(names_port),
        "RABBITMQ_NODENAME": f"bench-{port}@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_CONF_ENV_FILE": str(data / "rabbitmq-env.conf"),
        "RABBITMQ_CONFIG_FILE": str(settings),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(data / "advanced.config"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        "RABBITMQ_MNESIA_BASE": str(data / "data"),
        "RABBITMQ_LOG_BASE": str(data / "log"),
        "RABBITMQ_PID_FILE": str(data / "pid"),
        # its script stays in front of the server, and takes its signals, unless a terminal is wanted
        "RABBITMQ_ALLOW_INPUT": "true",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            "-noinput -kernel inet_dist_use_interface {127,0,0,1}"
        ),
    }
    words = [f"{name}={value}" for name, value in environment.items()]
    return [shutil.which("env") or "env", *words, program]
