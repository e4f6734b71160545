"""The broker is gone or silent: close() ends and says what was not acked, Ctrl-C ends every call."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from tests.crash.rig import Server

TOPIC = "/default/gone"
CLOSE_SECONDS = 1.0
WAIT_SECONDS = 60.0

BLOCKING_CALLS = """
import os, signal, sys, threading, time
import danube_fast

client = danube_fast.connect(sys.argv[1], timeout=600)
producer = client.producer("/default/t")
consumer = client.consumer("/default/t", subscription="s")
producer.publish(b"x")
message = consumer.receive(timeout=60)
print("ready", flush=True)
sys.stdin.readline()
producer.send(b"y")
CALLS = {
    "publish": lambda: producer.publish(b"z"),
    "client publish": lambda: client.publish("/default/t", b"z"),
    "flush": lambda: producer.flush(600),
    "receive": lambda: consumer.receive(),
    "receive_batch": lambda: consumer.receive_batch(),
    "iteration": lambda: next(iter(consumer)),
    "reader": lambda: list(client.reader("/default/t")),
    "new producer": lambda: client.producer("/default/u"),
    "new consumer": lambda: client.consumer("/default/u", subscription="s"),
    "admin": lambda: client.admin.list_topics(),
    "connect": lambda: danube_fast.connect(sys.argv[2], timeout=600),
    "close": lambda: client.close(timeout=600),
}
for name, call in CALLS.items():
    try:
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
        call()
        print(f"{name}: returned", flush=True)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", flush=True)
    except BaseException as error:
        print(f"{name}: {error!r}", flush=True)
print("end", flush=True)
os._exit(0)
"""


def test_ctrl_c_in_every_blocking_call(broker: Any) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        nobody.listen()
        silent = f"danube://127.0.0.1:{nobody.getsockname()[1]}"
        child = subprocess.Popen(
            [sys.executable, "-c", BLOCKING_CALLS, broker.url, silent],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            assert child.stdout.readline() == "ready\n"
            broker.mute = True
            out, errors = child.communicate("\n", timeout=200)
        finally:
            broker.mute = False
            if child.poll() is None:
                child.kill()
                child.communicate()
    *lines, last = out.splitlines()
    assert last == "end", f"{out}\n{errors}"
    wrong = [line for line in lines if not line.endswith(": interrupted")]
    assert not wrong, f"{wrong}\n{errors}"
    assert len(lines) == 12


def test_close_with_the_broker_killed(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", workers=1)
    with server:
        client = danube_fast.connect(server.url, timeout=600)
        producer = client.producer(TOPIC)
        consumer = client.consumer(TOPIC, subscription="s", initial_position="earliest")
        assert producer.publish(b"acked").offset == 0
        assert consumer.receive(timeout=60) is not None
        server.kill("all")
        for number in range(3):
            producer.send(b"%d" % number)
        began = time.monotonic()
        with pytest.raises(danube_fast.DeadlineExceeded, match="3 messages"):
            client.close(timeout=CLOSE_SECONDS)
        took = time.monotonic() - began
        assert took < WAIT_SECONDS, f"close(timeout={CLOSE_SECONDS}) took {took} s"
        began = time.monotonic()
        client.close()  # nothing is left to wait for
        assert time.monotonic() - began < WAIT_SECONDS
