"""The machine of a worker: its socket, threads, random numbers, the host's boot.

A simulation passes an `Environment` of its own; all else of the worker is the same there.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path

import zmq

from danube_fast.clock import MILLISECOND_NS, Clock, SystemClock
from danube_fast.config import Settings
from danube_fast.history.stores.opening import open_store
from danube_fast.history.stores.store import ObjectStore
from danube_fast.metadata.lmdb_store import LmdbStore
from danube_fast.metadata.seal import SealFile
from danube_fast.metadata.store import MetadataStore
from danube_fast.net.connection_guard import ConnectionGuard
from danube_fast.net.greeting import message_bytes_max
from danube_fast.net.guarded_connection import Limits
from danube_fast.net.server import PART_BYTES_MAX_SLACK, Server
from danube_fast.net.session import TOKEN_BYTES
from danube_fast.security import AllowAll, Authenticator, Authorizer, TrustClaims
from danube_fast.wal.background import Background
from danube_fast.workers.process.layout import METADATA, METADATA_SEAL
from danube_fast.workers.process.log_marks import LogMark, read_marks, write_marks
from danube_fast.workers.process.secure_transport import SecureTransport

__all__ = ["Environment"]

SOCKET_BYTES = 8 * 1024 * 1024
"""Bytes of a connection that the system holds for ZeroMQ, at most."""
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


_log = logging.getLogger(__name__)

MARKS_WAIT_SECONDS = 1.0


def _write_marks(metadata: Path, marks: Mapping[int, LogMark]) -> None:
    try:
        write_marks(metadata, marks)
    except OSError as error:  # the older marks are still true
        _log.warning("the positions of the logs could not be recorded: %s", error)


class Environment:
    """Give access to the real machine."""

    authenticator: Authenticator = TrustClaims()
    """Names the principals of connections."""
    authorizer: Authorizer = AllowAll()
    """Decides what principals may do."""

    def __init__(self) -> None:
        self.background = Background()
        self._writer: threading.Thread | None = None

    def boot_id(self) -> str:
        """Read the id of the host's boot, a new one after each."""
        return BOOT_ID_PATH.read_text().strip()

    def new_token(self) -> bytes:
        """Draw a secret that names a session."""
        return secrets.token_bytes(TOKEN_BYTES)

    def make_store(
        self, data_dir: Path, clock: Clock, *, accept_rollback: bool = False
    ) -> MetadataStore:
        """Open the metadata of a broker. Raises DataLoss, FailedPrecondition."""
        return LmdbStore(
            data_dir / METADATA, clock, data_dir / METADATA_SEAL, accept_older=accept_rollback
        )

    def open_history(self, url: str, clock: Clock, scratch: Path) -> ObjectStore:
        """Open the object store of a broker's history. Raises InvalidArgument."""
        return open_store(url, clock, scratch)

    def sealed_revision(self, data_dir: Path) -> int | None:
        """Read the revision that the metadata has at least; None without a seal."""
        seal = SealFile(data_dir / METADATA_SEAL).read()
        return None if seal is None else seal.revision

    def read_marks(self, data_dir: Path) -> dict[int, LogMark]:
        """Read how far the metadata knows the logs, by log id."""
        return read_marks(data_dir / METADATA)

    def write_marks(self, data_dir: Path, marks: Mapping[int, LogMark]) -> bool:
        """Write the marks in a thread, for a disk may hang; False while the last write is still under way."""
        if self._writer is not None and self._writer.is_alive():
            return False
        self._writer = threading.Thread(
            target=_write_marks, args=(data_dir / METADATA, marks), name="marks", daemon=True
        )
        self._writer.start()
        return True

    def finish_marks(self) -> None:
        """Wait a moment for the write that is under way."""
        if self._writer is not None:
            self._writer.join(MARKS_WAIT_SECONDS)

    def make_server(
        self, context: zmq.Context[zmq.Socket[bytes]], settings: Settings, secured: SecureTransport | None = None
    ) -> Server:  # fmt: skip
        """Make the socket that clients connect to, not bound yet. `secured`: what proves who connects; None: no client is asked."""
        server = Server(
            context,
            message_bytes_max=message_bytes_max(settings),
            handshake_timeout_ms=settings.handshake_timeout_ms,
            curve_secret="" if secured is None else secured.keys.secret,
            proves=secured is not None,
        )
        limits = Limits(
            stranger_ns=settings.handshake_timeout_ms * MILLISECOND_NS,
            session_bytes=message_bytes_max(settings) + PART_BYTES_MAX_SLACK + SOCKET_BYTES,
            clients_max=settings.sessions_max,
            failures_max=settings.handshakes_failed_per_second_max,
        )
        server.guard = ConnectionGuard(context, server.socket, limits, SystemClock())
        return server
