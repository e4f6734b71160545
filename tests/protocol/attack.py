"""Attacks by peers that speak ZeroMQ's wire protocol byte by byte (`bench/load/zmtp.py`): a program of its own.

    python -m tests.protocol.attack '{"kind": "endless", "port": 1234, "seconds": 3, ...}'

It says `ready` on stdout once it has begun, and a line of JSON with figures at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from typing import Any

from danube_fast.bench.load.zmtp import CurvePeer, NullPeer

__all__ = ["CurvePeer", "NullPeer"]

PIECE_BYTES = 1 << 18
SPARE_DESCRIPTORS = 100


def connect(plan: dict[str, Any]) -> NullPeer:
    """A peer, greeted by no one yet."""
    if "server_key" in plan:
        return CurvePeer(plan["port"], plan["server_key"], plan["public"], plan["secret"])
    return NullPeer(plan["port"])


def endless(plan: dict[str, Any]) -> dict[str, Any]:
    """Send one message without an end, and begin anew wherever the broker closes the connection."""
    end = time.monotonic() + plan["seconds"]
    found = {"connections": 0, "refused": 0, "sent": 0}
    part = bytes(plan["part_bytes"])
    while time.monotonic() < end:
        try:
            peer = connect(plan)
            peer.shake_hands()
        except OSError:
            found["refused"] += 1
            continue
        found["connections"] += 1
        with contextlib.suppress(OSError):
            if plan["hello"]:
                peer.hello()
            peer.socket.settimeout(0.5)  # where it is not read any more, others may still be
            many = max(1, PIECE_BYTES // (len(part) + 2))
            piece = peer.message(part, more=True) * many
            while time.monotonic() < end:
                if isinstance(peer, CurvePeer):  # each has a number of its own
                    count = max(1, PIECE_BYTES // (len(part) + 64))
                    piece = b"".join(peer.message(part, more=True) for _ in range(count))
                peer.socket.sendall(piece)
                found["sent"] += len(piece)
        peer.socket.close()
    return found


def handshakes(plan: dict[str, Any]) -> dict[str, Any]:
    """Fail handshakes, so many a second."""
    began = time.monotonic()
    found = {"tried": 0, "admitted": 0}
    while time.monotonic() - began < plan["seconds"]:
        ahead = found["tried"] / plan["rate"] - (time.monotonic() - began)
        if ahead > 0:
            time.sleep(min(ahead, 0.01))
            continue
        found["tried"] += 1
        peer = None
        try:
            peer = connect(plan)
            peer.shake_hands()
            found["admitted"] += 1
        except OSError:
            pass
        if peer is not None:
            peer.socket.close()
    return {**found, "rate": found["tried"] / (time.monotonic() - began)}


def half_open(plan: dict[str, Any]) -> dict[str, Any]:
    """Open connections up to some step of the handshake, and hold them until stdin ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = []
    for _ in range(min(plan["count"], hard - SPARE_DESCRIPTORS)):
        with contextlib.suppress(OSError):
            peer = connect(plan)
            held.append(peer)
            if plan["step"] == "half a greeting":
                peer.socket.sendall(b"\xff" + bytes(8) + b"\x7f")
            elif plan["step"] == "greeting":
                peer.greet()
            elif plan["step"] == "curve hello" and isinstance(peer, CurvePeer):
                peer.say_hello()
            elif plan["step"] == "handshake":
                peer.shake_hands()
    print("open", flush=True)
    sys.stdin.read()
    return {"held": len(held)}


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    os.nice(chosen.get("nice", 0))
    print("ready", flush=True)
    figures = {"endless": endless, "handshakes": handshakes, "half open": half_open}[
        chosen["kind"]
    ](chosen)
    print(json.dumps(figures), flush=True)
