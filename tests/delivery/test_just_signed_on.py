"""Keys that have just signed on, at processes that have not heard of that: they are not refused, and come in."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from danube_fast.errors import DanubeError
from danube_fast.security.curve import read_key_file
from tests.delivery.sign_on_rig import IssuerKey, SignOnServer
from tests.delivery.test_security import TOPIC
from tests.delivery.test_sign_on_ends import key, server, sign_on
from tests.workers.broker import wait_until

__all__ = ["key", "server"]

REFUSED = 400
JOIN_SECONDS = 60.0


def verdicts(server: SignOnServer, name: str, port: int) -> list[int]:
    """What a process says of that key until it lets it in, or refuses it: codes of ZAP."""
    pair = read_key_file(server.folder / f"{name}.key")
    codes: list[int] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.curve_publickey, client.curve_secretkey = pair.public.encode(), pair.secret.encode()
        client.curve_serverkey = server.server_key.encode()
        ended = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        monitor = client.get_monitor_socket(ended)
        client.connect(f"tcp://127.0.0.1:{port}")
        try:
            assert monitor.poll(30_000), f"no handshake has ended in time, behind {codes}"
            event = recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                codes.append(int(event["value"]))
        finally:
            client.disable_monitor()
            monitor.close()
    return codes


def test_a_coordinator_that_has_started_again_refuses_none_before_it_is_told(
    server: SignOnServer, key: IssuerKey
) -> None:
    sign_on(server, key.token(), "mine")
    pids = server.pids()
    os.kill(pids["sign_on"], signal.SIGSTOP)
    came: list[Any] = []

    def come_in() -> None:
        try:
            with server.come_in("mine", timeout=30.0) as client:
                came.append(client.producer(TOPIC, timeout=30.0).publish(b"in").offset)
        except DanubeError as error:
            came.append(error)

    thread = threading.Thread(target=come_in)
    try:
        os.kill(pids["coordinator"], signal.SIGKILL)

        def is_back() -> bool:
            try:
                return server.pids()["coordinator"] != pids["coordinator"]
            except DanubeError:
                return False

        wait_until("the next coordinator", is_back)
        codes = verdicts(server, "mine", server.port)
        assert codes and REFUSED not in codes, codes
        thread.start()
    finally:
        os.kill(pids["sign_on"], signal.SIGCONT)
    thread.join(JOIN_SECONDS)
    assert came == [0]
    server.new_key("eve")
    wait_until(
        "a refusal of a key that no one has signed on",
        lambda: REFUSED in verdicts(server, "eve", server.port),
    )


def test_a_worker_that_was_stopped_does_not_refuse_a_key_that_has_signed_on_meanwhile(
    server: SignOnServer, key: IssuerKey
) -> None:
    pids = server.pids()
    assert server.broker is not None
    port = server.broker.ready["worker_ports"][0]
    os.kill(pids["worker-0"], signal.SIGSTOP)
    try:
        sign_on(server, key.token(), "mine")
    finally:
        os.kill(pids["worker-0"], signal.SIGCONT)
    codes = verdicts(server, "mine", port)
    assert REFUSED not in codes
    with server.come_in("mine") as client:
        assert client.producer(TOPIC).publish(b"in").offset >= 0


@pytest.mark.parametrize("killed", ["coordinator", "sign_on"])
def test_a_start_of_one_of_both_ends_with_refusals_of_keys_that_no_one_knows(
    server: SignOnServer, killed: str
) -> None:
    """Also when the process of sign-on has nothing to tell."""
    server.new_key("eve")
    pid = server.pids()[killed]
    os.kill(pid, signal.SIGKILL)

    def is_refused() -> bool:
        try:
            return server.pids()[killed] != pid and REFUSED in verdicts(server, "eve", server.port)
        except DanubeError:
            return False

    wait_until("a refusal", is_refused)
