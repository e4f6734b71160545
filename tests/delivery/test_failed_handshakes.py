"""A flood of handshakes with unknown keys from one address, beside honest clients of another one."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from danube_fast.security.curve import new_key_pair
from tests.delivery.test_security import SecuredServer

MOST = 20
FLOODERS = 8
SECONDS = 4.0
REST_SECONDS = 0.6
"""Of the second for which an address is held off."""
CONNECT_SECONDS = 20.0


class Flood:
    """A thread that shakes hands with a key that no one knows, again and again, from 127.0.0.2."""

    def __init__(self, server: SecuredServer) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._server, self._pair = server, new_key_pair()
        self._stop = threading.Event()
        self.failed_at: list[float] = []
        """When a handshake failed, by the monotonic clock."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        sockets = dict(self._connect(poller) for _ in range(FLOODERS))
        while not self._stop.is_set():
            for monitor, _ in poller.poll(100):
                self.failed_at.append(time.monotonic())  # ZeroMQ does not come again by itself
                poller.unregister(monitor)
                self._end(monitor, sockets.pop(monitor))
                sockets.update([self._connect(poller)])
        for monitor, made in sockets.items():
            self._end(monitor, made)

    def _connect(self, poller: zmq.Poller) -> tuple[Any, Any]:
        made = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public.encode())
        made.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
        made.setsockopt(zmq.CURVE_SERVERKEY, self._server.server_key.encode())
        monitor = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        poller.register(monitor, zmq.POLLIN)
        made.connect(f"tcp://127.0.0.2:0;127.0.0.1:{self._server.port}")
        return monitor, made

    @staticmethod
    def _end(monitor: Any, made: Any) -> None:
        made.disable_monitor()
        monitor.close(0)
        made.close(0)

    def close(self) -> None:
        """End it, once or twice."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.mark.parametrize("most", [MOST, 0])
def test_a_flood_of_unknown_keys_is_held_off_and_others_come_in(tmp_path: Path, most: int) -> None:
    """With the bound it comes to rest for a second again and again, without it never; a loaded machine slows both."""
    with (
        SecuredServer(tmp_path / "data", tmp_path, handshakes_failed_per_second_max=most) as server,
        ExitStack() as stack,
    ):
        server.make_ann()
        ann = stack.enter_context(server.come_in("ann"))
        producer = ann.producer("/default/t")
        producer.publish(b"before")
        flood = Flood(server)
        stack.callback(flood.close)
        deadline = time.monotonic() + CONNECT_SECONDS
        while not flood.failed_at:
            assert time.monotonic() < deadline, f"no handshake failed in {CONNECT_SECONDS} s"
            time.sleep(0.01)
        began = time.monotonic()
        while time.monotonic() < began + SECONDS:
            with server.come_in("ann") as other:  # of another address: at once
                other.producer("/default/t").publish(b"during")
            producer.publish(b"during")
        flood.close()
        rests = sum(
            later - before >= REST_SECONDS for before, later in itertools.pairwise(flood.failed_at)
        )
        print(f"{len(flood.failed_at)} handshakes failed, with {rests} rests")
        if not most:
            assert not rests, "it was held off without a bound"
            return
        assert rests >= 2, "it was not held off"
        # the guard takes its time to see the last of them, while each flooder has others under way
        assert len(flood.failed_at) <= 3 * (MOST + FLOODERS) * (rests + 2)
        with socket.socket() as late:
            late.settimeout(CONNECT_SECONDS)
            late.bind(("127.0.0.2", 0))
            late.connect(("127.0.0.1", server.port))
            assert late.recv(1) == b"\xff", "the greeting of ZeroMQ"
