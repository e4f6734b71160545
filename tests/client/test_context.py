"""Clients of one process share a ZeroMQ context."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

import danube_fast
from danube_fast.client.link import connection
from danube_fast.client.link import context as shared
from danube_fast.client.link.answers import ANSWERED
from danube_fast.client.link.deliveries import Deliveries

TOPIC = "/default/shared"
MANY = """
import resource, zmq
from danube_fast.client.link.context import release_context, take_context
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
context = take_context()
sockets = [context.socket(zmq.DEALER) for _ in range(1500)]
for socket in sockets:
    socket.close(0)
release_context(context)
print(context.closed)
"""


def test_who_closes_leaves_the_others_alone(broker: Any) -> None:
    before = set(shared._shared.values())
    first = danube_fast.connect(broker.url)
    second = danube_fast.connect(broker.url)
    (context,) = shared._shared.values()
    assert first._core.machine._context is second._core.machine._context is context
    first.close()
    first.close()
    assert not context.closed
    with second.producer(TOPIC) as producer:
        assert producer.publish(b"x").offset == 0
    second.close()
    assert context.closed != bool(before), "the last one closes it, unless others were there"


def test_there_is_room_for_many_connections() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    broken = MANY.replace("take_context()", "zmq.Context()", 1)
    done = subprocess.run(
        [sys.executable, "-c", broken], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Too many open files" in done.stderr, "the limit that this is about is gone"


def test_an_interrupt_while_reading_leaves_nothing_unread(broker: Any) -> None:
    """The interrupted socket is read again by the next who waits, though its edge is gone."""
    with danube_fast.connect(broker.url) as client, client.producer(TOPIC) as producer:
        producer.publish(b"x")
        pump = client._core.pump

        class Interrupted:
            reads = 0

            def drain(self, lazily: bool = False) -> int:
                self.reads += 1
                if self.reads == 1:
                    raise KeyboardInterrupt
                return 0

            def reset(self) -> None:
                self.was_reset = True

        other: Any = Interrupted()
        with pump.lock:
            pump._sockets.append(other)
            pump._unread[other] = None
        with pytest.raises(KeyboardInterrupt):
            pump.wait(lambda: False, pump.clock.monotonic_ns() + 1_000_000_000)
        assert not pump.wait(lambda: False, pump.clock.monotonic_ns() + 1)
        assert other.reads == 2
        assert other.was_reset
        with pump.lock:
            pump._sockets.remove(other)
        assert producer.publish(b"y").offset == 1


class Strikes:
    """Raises KeyboardInterrupt once, in the main thread, when a message is taken from a socket and not handled yet: by
    a kernel, or by Python, where the kernel leaves everything."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch, *, by_kernel: bool) -> None:
        self.left = 1
        decode, take = connection.decode_server_command, connection.take_from_socket

        def strike_decoder(head: memoryview) -> Any:
            command = decode(head)
            self._strike(type(command).__name__ == kind)
            return command

        def strike_kernel(*words: int) -> int:
            consumer_id = take(*words)
            is_answered = self._answers[1] == ANSWERED
            self._strike(consumer_id > 0 if kind == "Deliver" else is_answered)
            return consumer_id

        def leave_all(deliveries: Deliveries, *_: Any) -> int:
            deliveries.are_all = False
            return 0

        if by_kernel:
            monkeypatch.setattr(connection, "take_from_socket", strike_kernel)
        else:
            monkeypatch.setattr(Deliveries, "take_all", leave_all)
            monkeypatch.setattr(connection, "decode_server_command", strike_decoder)

    def watch(self, client: danube_fast.Client) -> None:
        """Look at the rows of that client, whose first is the state of the one thread that publishes."""
        self._answers = client._core.pump.answers._words

    def _strike(self, is_due: bool) -> None:
        if is_due and self.left and threading.current_thread() is threading.main_thread():
            self.left = 0
            raise KeyboardInterrupt


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("kind", ["Published", "Deliver"])
def test_what_an_interrupt_tore_comes_again(
    broker: Any, monkeypatch: pytest.MonkeyPatch, kind: str, by_kernel: bool
) -> None:
    """An interrupt strikes when a message is taken from the socket and not handled yet, and parts of
    it may be left there: an ack is heard and a message received all the same."""
    with (
        danube_fast.connect(broker.url) as client,
        client.producer(TOPIC) as producer,
        client.consumer(TOPIC, subscription="torn", initial_position="earliest") as consumer,
    ):
        strikes = Strikes(kind, monkeypatch, by_kernel=by_kernel)
        strikes.watch(client)
        calls = {
            "Published": lambda: producer.publish(b"x"),
            "Deliver": lambda: [producer.publish(b"x"), consumer.receive(timeout=60)],
        }
        with pytest.raises(KeyboardInterrupt):
            calls[kind]()
        assert not strikes.left, "nothing was interrupted"
        last = producer.publish(b"y")
        got = [consumer.receive(timeout=60) for _ in range(last.offset + 1)]
        assert [message.payload for message in got if message][-2:] == [b"x", b"y"]
        assert producer.flush(10) == last
