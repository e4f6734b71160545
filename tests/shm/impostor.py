"""A process of another user that listens where a broker's worker would.

    python -m tests.shm.impostor USER IPC_ENDPOINT

Everything is loaded before it changes its user. It says "ready", then one line for each message that reaches it, and
ends with its stdin.
"""

from __future__ import annotations

import os
import socket
import sys

import zmq

from danube_fast.ring.handover import address_beside


def main() -> None:
    """Listen for messages, and beside them for who asks for rings."""
    user, endpoint = int(sys.argv[1]), sys.argv[2]
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        socket.socket(socket.AF_UNIX) as rings,
    ):
        router.bind(endpoint)
        rings.bind(address_beside(endpoint))
        rings.listen()
        print("ready", flush=True)
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(sys.stdin, zmq.POLLIN)
        while True:
            for ready, _ in poller.poll():
                if ready is not router:
                    return
                print(router.recv_multipart()[1].hex(), flush=True)


if __name__ == "__main__":
    main()
