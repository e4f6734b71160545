"""The ZeroMQ context that all clients of a process share: one I/O thread for all, not one for each."""

from __future__ import annotations

import os
import threading

import zmq

__all__ = ["release_context", "take_context"]

Context = zmq.Context[zmq.Socket[bytes]]

SOCKETS_MAX = 16_384
"""Connections of all clients of a process; ZeroMQ's own 1,023 are too few for many clients."""

_lock = threading.Lock()
_users: dict[Context, int] = {}
_shared: dict[int, Context] = {}
"""By process: a forked child must not touch the one of its parent."""


def take_context() -> Context:
    """Return the context of this process. Give it back with `release_context`."""
    with _lock:
        context = _shared.get(os.getpid())
        if context is None:
            context = _shared[os.getpid()] = zmq.Context()
            context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        _users[context] = _users.get(context, 0) + 1
        return context


def release_context(context: Context) -> None:
    """Give the context back, when all sockets of a client are closed. The last one waits until all is sent, as far
    as sockets linger."""
    with _lock:
        _users[context] -= 1
        if _users[context]:
            return
        del _users[context]
        if _shared.get(os.getpid()) is context:
            del _shared[os.getpid()]
    context.term()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
