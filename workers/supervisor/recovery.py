"""Let an administrator into a secured broker again whose keys are lost: offline, under the lock of the data directory.

    bootstrap-admin.key   a fresh key pair, as at the first start
    recover-admin         its public key: the next start takes it although there is an administrator already

Who may write the data directory may do this; there is no other way in.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from danube_fast.durable import replace_file, sync_directory
from danube_fast.errors import Unavailable
from danube_fast.security.curve import new_key_pair, write_key_file
from danube_fast.security.server_keys import ServerKeys
from danube_fast.workers.process.layout import BOOTSTRAP_KEY, RECOVER_ADMIN
from danube_fast.workers.supervisor.datadir import DataDirectory

__all__ = ["Recovered", "recover"]


@dataclass(frozen=True)
class Recovered:
    """Result of a recovery. No secret is in it."""

    admin_key: Path
    """File with the key of an administrator; good for one connection, behind the next start."""
    server_keys: list[str]
    """Public keys that clients pin, the newest first."""


def recover(data_dir: Path, *, new_server_key: bool) -> Recovered:
    """Make a fresh key of an administrator, which the next start takes; with `new_server_key` a new server key, too.

    Raises NotFound if there is no data directory, FailedPrecondition if a broker runs there (with its pid) or the server
    key is lost, InvalidArgument if it is damaged, Unavailable if nothing can be written.
    """
    folder = data_dir.absolute()
    with contextlib.closing(DataDirectory.open_existing(folder)):
        keys = ServerKeys(folder)
        rotation = keys.replace() if new_server_key else keys.open()
        path = folder / BOOTSTRAP_KEY
        pair = new_key_pair()
        try:
            path.unlink(missing_ok=True)
            sync_directory(folder)
            write_key_file(path, pair)
            # last: without it the key is good for nothing
            replace_file(folder / RECOVER_ADMIN, f"{pair.public}\n".encode())
        except OSError as error:
            raise Unavailable(f"cannot write to {folder}: {error}; see to its disk") from error
        return Recovered(path, rotation.keys)
