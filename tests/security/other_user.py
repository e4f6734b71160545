"""Another user of the host, who tries all that a local process can.

    python -m tests.security.other_user USER

Everything is loaded before it changes its user. Reads one line of JSON, a plan, and answers with one: what each attempt
came to. The plan {"take": ENDPOINT} listens there, and beside it, until stdin ends.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

import danube_fast
from danube_fast.errors import DanubeError
from danube_fast.net import protocol as p
from danube_fast.ring.handover import address_beside, dial, take

SECONDS = 30.0
SILENCE_MS = 1500
"""Several times what an answer takes on this host."""


def outcome(call: Callable[[], Any]) -> str:
    """The name of the error that a call ends with, or what it returns."""
    try:
        return str(call())
    except (DanubeError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return type(error).__name__


def ask_for_rings(endpoint: str) -> str:
    """How a worker answers who asks for rings."""
    sock = dial(endpoint)
    if sock is None:
        return "no listener"
    with sock:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            select.select([sock], [], [], 0.1)
            try:
                if (link := take(sock, 1 << 20)) is not None:
                    link.close()
                    return "rings"
            except DanubeError as error:
                return str(error)
    return "silence"


def say_hello(endpoint: str) -> str:
    """How a worker answers a HELLO over ipc, which libzmq delivers only when ZAP has admitted the sender."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket_:
        socket_.setsockopt(zmq.LINGER, 0)
        socket_.connect(endpoint)
        socket_.send(p.encode(p.Hello(1, p.PROTOCOL_VERSION, "raw", {"principal": "ann"})))
        return "answered" if socket_.poll(SILENCE_MS) else "silence"


def read(path: str) -> str:
    with open(path, "rb") as file:
        return f"{len(file.read(64))} bytes"


def look_into(pid: int) -> dict[str, str]:
    """What can be learned of a process of the broker."""
    place = Path(f"/proc/{pid}")
    return {
        "memory": outcome(lambda: read(f"{place}/mem")),
        "environment": outcome(lambda: read(f"{place}/environ")),
        "descriptors": outcome(lambda: os.listdir(place / "fd")),
        "maps": outcome(lambda: read(f"{place}/maps")),
        "a signal": outcome(lambda: os.kill(pid, 0)),
    }


def publish(plan: dict[str, Any], topic: str, transport: str) -> str:
    """Publish one message; whether by rings."""
    with danube_fast.connect(
        plan["url"], server_key=plan["server_key"], key_file=plan["key_file"], transport=transport,
        timeout=SECONDS,
    ) as client:  # fmt: skip
        client.producer(topic).publish(b"x")
        (connection,) = client._core.routes.workers.values()
        return "rings" if connection.has_rings else "tcp"


def attempts(plan: dict[str, Any]) -> dict[str, Any]:
    """Try everything."""
    return {
        "user": os.geteuid(),
        "rings": {endpoint: ask_for_rings(endpoint) for endpoint in plan["endpoints"]},
        "ipc": {endpoint: say_hello(endpoint) for endpoint in plan["endpoints"]},
        "files": {path: outcome(lambda path=path: read(path)) for path in plan["files"]},
        "folders": {path: outcome(lambda path=path: os.listdir(path)) for path in plan["folders"]},
        "processes": {pid: look_into(pid) for pid in plan["pids"]},
        "publish": {
            topic: outcome(lambda topic=topic: publish(plan, topic, plan["transport"]))
            for topic in plan["topics"]
        },
    }


def take_name(endpoint: str) -> None:
    """Listen where a worker would, as soon as that is free."""
    deadline = time.monotonic() + SECONDS
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        socket.socket(socket.AF_UNIX) as rings,
    ):
        while True:
            try:
                rings.bind(address_beside(endpoint))
                router.bind(endpoint)
                break
            except (OSError, zmq.ZMQError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.001)
        rings.listen()
        print(json.dumps({"taken": endpoint}), flush=True)
        sys.stdin.read()


def main() -> None:
    """Become the user and do what the plan says."""
    user = int(sys.argv[1])
    plan = json.loads(sys.stdin.readline())
    if "warm" in plan:  # a client that works loads all that is imported late
        publish({**plan, "key_file": plan["warm"]}, plan["topics"][0], "tcp")
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    if "take" in plan:
        take_name(plan["take"])
        return
    print(json.dumps(attempts(plan)), flush=True)


if __name__ == "__main__":
    main()
