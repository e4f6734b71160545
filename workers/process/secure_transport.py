"""Proofs of connections in one process of a secured broker: its key, who is let in, and the thread that ZeroMQ asks.

tcp     CURVE: the broker's key pair here, a registered public key there
ipc     the kernel's word for the local user
rings   the same, asked by `RingServer`
"""

from __future__ import annotations

from pathlib import Path

import zmq

from danube_fast.clock import Clock
from danube_fast.config import Settings
from danube_fast.net.zap import ZapThread
from danube_fast.security.curve import KeyPair, read_key_file
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.layout import SERVER_KEY

__all__ = ["SecureTransport"]


class SecureTransport:
    """Prove who comes in."""

    def __init__(self, keys: KeyPair, access: Access, zap: ZapThread) -> None:
        self.keys, self.access, self._zap = keys, access, zap

    @classmethod
    def make(
        cls, settings: Settings, data_dir: Path, context: zmq.Context[zmq.Socket[bytes]], clock: Clock
    ) -> SecureTransport | None:  # fmt: skip
        """Make it with the broker's key pair; None if security is off. Raises FailedPrecondition, InvalidArgument."""
        if settings.auth == "none":
            return None
        access = Access(clock)
        keys = read_key_file(data_dir / SERVER_KEY)
        return cls(keys, access, ZapThread(context, access.admits))

    def open(self) -> None:
        """Start to answer ZeroMQ; call it before sockets are bound. Raises Internal."""
        self._zap.start()

    def close(self) -> None:
        """Answer no more; call it before the context ends."""
        self._zap.stop()

    def admits_user(self, user: int) -> bool:
        """Whether a local user may have rings."""
        access = self.access
        return access.is_fresh and access.principal_of(f"uid:{user}") is not None
