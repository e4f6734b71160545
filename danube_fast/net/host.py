"""The host's identity: equal on both sides exactly when ipc endpoints reach from one to the other.

Two processes share abstract sockets when they run under the same kernel boot and in the same
network namespace, so the identity is a hash of both. Broker and client call the same function.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket

__all__ = ["host_id"]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NETWORK_NAMESPACE = "/proc/self/ns/net"
_HOST_ID_DIGITS = 32


@functools.cache
def host_id() -> str:
    """32 hex digits, the same in every process that shares this boot and network namespace."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            boot = file.read().strip()
        namespace = str(os.stat(_NETWORK_NAMESPACE).st_ino)
    except OSError:
        # no /proc: the host name is the best that is left, and tcp always works
        boot, namespace = socket.gethostname(), ""
    return hashlib.sha256(f"{boot}/{namespace}".encode()).hexdigest()[:_HOST_ID_DIGITS]
