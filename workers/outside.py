"""What a worker has from the machine it runs on: a socket, threads, chance, the host's boot.

A simulation passes an `Outside` of its own; everything else of the worker is the same there.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import zmq

from danube_fast.clock import Clock
from danube_fast.config import Settings
from danube_fast.metadata.lmdb_store import LmdbStore
from danube_fast.metadata.store import MetadataStore
from danube_fast.net.greeting import message_bytes_max
from danube_fast.net.server import Server
from danube_fast.net.session import TOKEN_BYTES
from danube_fast.wal.background import Background
from danube_fast.workers.datadir import METADATA_SEAL

__all__ = ["Outside"]

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class Outside:
    """The machine as it is."""

    def __init__(self) -> None:
        self.background = Background()

    def boot_id(self) -> str:
        """Another one after each boot of the host."""
        return BOOT_ID_PATH.read_text().strip()

    def new_token(self) -> bytes:
        """A secret that names a session."""
        return secrets.token_bytes(TOKEN_BYTES)

    def make_store(self, data_dir: Path, clock: Clock) -> MetadataStore:
        """The metadata of a broker. Raises DataLoss, FailedPrecondition."""
        return LmdbStore(data_dir / "metadata", clock, data_dir / METADATA_SEAL)

    def make_server(self, context: zmq.Context[zmq.Socket[bytes]], settings: Settings) -> Server:
        """The socket that clients connect to, not bound yet."""
        return Server(
            context,
            message_bytes_max=message_bytes_max(settings),
            handshake_timeout_ms=settings.handshake_timeout_ms,
        )
