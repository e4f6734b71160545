"""A client that takes rings and writes nonsense into every word of them, for ever.

    python -m tests.shm.scribbler IPC_ENDPOINT SEED

It changes positions, lengths and contents while the worker reads and writes, asks for wake-ups that
it does not need, floods the socket, fills its bell, leaves its pipe unread or has it block, loses its
bells, and closes descriptors in the middle. Each time the worker has had enough of it, it comes again.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time

from danube_fast.errors import DanubeError
from danube_fast.net import protocol as p
from danube_fast.ring.duplex import Duplex
from danube_fast.ring.duplex_kernel import BELL_OUT, signal_peer, word_of
from danube_fast.ring.handover import dial, take

WAIT_SECONDS = 60.0


def enter(endpoint: str) -> Duplex | None:
    """Rings, if the worker gives any in time."""
    sock = dial(endpoint)
    deadline = time.monotonic() + WAIT_SECONDS
    while sock is not None and time.monotonic() < deadline:
        try:
            duplex = take(sock, 1 << 20)
        except DanubeError:
            break
        if duplex is not None:
            return duplex
        time.sleep(0.001)
    if sock is not None:
        sock.close()
    return None


def spoil(duplex: Duplex, draw: random.Random) -> None:
    """One visit."""
    memory = memoryview(duplex._in._view.obj).cast("B")  # type: ignore[arg-type]
    words = memory.cast("q")
    half = len(words) // 2
    sock = duplex._socket
    for _ in range(draw.randrange(1, 400)):
        kind = draw.randrange(9)
        if kind < 3:
            place = draw.choice((0, 1, 16, 17, 18, 32, 33, 48, 49, 64, draw.randrange(half)))
            words[place + draw.choice((0, half))] = draw.choice(
                (
                    0,
                    1,
                    -1,
                    8,
                    64,
                    -(1 << 63),
                    (1 << 63) - 1,
                    draw.getrandbits(16),
                    draw.getrandbits(63),
                )
            )
        elif kind == 3:
            start = draw.randrange(len(memory))
            junk = draw.randbytes(draw.randrange(1, 5000))[: len(memory) - start]
            memory[start : start + len(junk)] = junk
        elif kind == 4:
            with contextlib.suppress(DanubeError):
                head = p.encode(p.Hello(1, p.PROTOCOL_VERSION, "scribbler"))
                duplex.send(
                    [draw.choice((head, draw.randbytes(20))), draw.randbytes(draw.randrange(3000))]
                )
        elif kind == 5:
            with contextlib.suppress(DanubeError):
                duplex.receive()
        elif kind == 6:
            if draw.random() < 0.02:  # which is the end of the visit
                with contextlib.suppress(OSError):
                    sock.send(bytes(draw.randrange(1, 3000)), socket.MSG_DONTWAIT)
        elif kind == 7:
            spoil_bells(duplex, draw)
        else:
            signal_peer(duplex.row)
    if draw.random() < 0.3:
        sock.shutdown(draw.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)))
        time.sleep(0.01)


def spoil_bells(duplex: Duplex, draw: random.Random) -> None:
    """Do one thing to the bells that is not to be done; what would make this process wait is left out."""
    bell, pipe = word_of(duplex.row, BELL_OUT), duplex.fileno()
    kind = draw.randrange(5)
    with contextlib.suppress(OSError):
        if kind == 0:
            os.eventfd_write(bell, (1 << 64) - 2)
        elif kind == 1:
            os.eventfd_read(bell)
        elif kind == 2:
            duplex.hear()
        elif kind == 3:
            os.set_blocking(bell, True)
            time.sleep(0.001)
            os.set_blocking(bell, False)
        elif draw.random() < 0.05:
            with open(os.devnull, "r+b", buffering=0) as null:
                os.dup2(null.fileno(), draw.choice((bell, pipe)), inheritable=False)


def main() -> None:
    """Until it is killed."""
    endpoint, seed = sys.argv[1], int(sys.argv[2])
    draw = random.Random(seed)
    visits = 0
    while True:
        duplex = enter(endpoint)
        if duplex is None:
            continue
        with contextlib.suppress(OSError):
            spoil(duplex, draw)
        duplex.close()
        visits += 1
        os.write(1, b"v")


if __name__ == "__main__":
    main()
