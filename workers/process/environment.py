"""What a worker has from the machine it runs on: a socket, threads, chance, the host's boot.

A simulation passes an `Environment` of its own; everything else of the worker is the same there.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path

import zmq

from danube_fast.clock import Clock
from danube_fast.config import Settings
from danube_fast.metadata.lmdb_store import LmdbStore
from danube_fast.metadata.seal import SealFile
from danube_fast.metadata.store import MetadataStore
from danube_fast.net.greeting import message_bytes_max
from danube_fast.net.server import Server
from danube_fast.net.session import TOKEN_BYTES
from danube_fast.security import AllowAll, Authenticator, Authorizer, TrustClaims
from danube_fast.wal.background import Background
from danube_fast.workers.process.log_marks import LogMark, read_marks, write_marks
from danube_fast.workers.supervisor.datadir import METADATA_SEAL

__all__ = ["Environment"]

METADATA = "metadata"
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


_log = logging.getLogger(__name__)

MARKS_WAIT_SECONDS = 1.0


def _write_marks(metadata: Path, marks: Mapping[int, LogMark]) -> None:
    try:
        write_marks(metadata, marks)
    except OSError as error:  # an older note is as good, only not as new
        _log.warning("how far the logs are could not be noted: %s", error)


class Environment:
    """The machine as it is."""

    authenticator: Authenticator = TrustClaims()
    """Names the principals of connections."""
    authorizer: Authorizer = AllowAll()
    """Decides what they may do."""

    def __init__(self) -> None:
        self.background = Background()
        self._writer: threading.Thread | None = None

    def boot_id(self) -> str:
        """Another one after each boot of the host."""
        return BOOT_ID_PATH.read_text().strip()

    def new_token(self) -> bytes:
        """A secret that names a session."""
        return secrets.token_bytes(TOKEN_BYTES)

    def make_store(
        self, data_dir: Path, clock: Clock, *, accept_rollback: bool = False
    ) -> MetadataStore:
        """The metadata of a broker. Raises DataLoss, FailedPrecondition."""
        return LmdbStore(
            data_dir / METADATA, clock, data_dir / METADATA_SEAL, accept_older=accept_rollback
        )

    def sealed_revision(self, data_dir: Path) -> int | None:
        """Revision that the metadata has at least; None if nothing tells."""
        seal = SealFile(data_dir / METADATA_SEAL).read()
        return None if seal is None else seal.revision

    def read_marks(self, data_dir: Path) -> dict[int, LogMark]:
        """How far the metadata knows the logs, by log id."""
        return read_marks(data_dir / METADATA)

    def write_marks(self, data_dir: Path, marks: Mapping[int, LogMark]) -> bool:
        """Note it in a thread, for a disk may hang; False while the last ones are still under way."""
        if self._writer is not None and self._writer.is_alive():
            return False
        self._writer = threading.Thread(
            target=_write_marks, args=(data_dir / METADATA, marks), name="marks", daemon=True
        )
        self._writer.start()
        return True

    def finish_marks(self) -> None:
        """Give what is under way a moment."""
        if self._writer is not None:
            self._writer.join(MARKS_WAIT_SECONDS)

    def make_server(self, context: zmq.Context[zmq.Socket[bytes]], settings: Settings) -> Server:
        """The socket that clients connect to, not bound yet."""
        return Server(
            context,
            message_bytes_max=message_bytes_max(settings),
            handshake_timeout_ms=settings.handshake_timeout_ms,
        )
