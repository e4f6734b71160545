"""Proofs that a client asks of its broker, fixed before it connects: its key, and the user that it runs as.

    tcp      CURVE, to the key that is pinned here; without one, nothing is proved
    ipc      the kernel says whose process listens; asked if a key or a user is pinned here
    rings    the same, asked always

Nothing is trusted because it was there first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from danube_fast.checks import check_whole
from danube_fast.errors import InvalidArgument
from danube_fast.security.curve import is_public_key, read_key_file

__all__ = ["Trust", "trust_of"]

_USER_MAX = (1 << 32) - 2
_ROOT = 0


@dataclass(frozen=True)
class Trust:
    """Whom a client takes for its broker."""

    server_key: str = ""
    """The broker's public CURVE key; empty if it is not pinned."""
    public: str = ""
    secret: str = field(default="", repr=False)
    users: frozenset[int] = frozenset()
    """Those whose processes may listen on this host."""
    is_secured: bool = False
    """Whether the application has pinned a key or a user: a broker that cannot prove to be it is refused."""


def trust_of(server_key: str | None, key_file: str | Path | None, server_uid: int | None) -> Trust:
    """Check the arguments of `connect()`, and read the key file.

    Raises InvalidArgument, and FailedPrecondition for a file that is missing or not private.
    """
    users = {os.geteuid(), _ROOT}
    if server_uid is not None:
        users.add(check_whole(server_uid, "server_uid", 0, _USER_MAX))
    if server_key is None:
        if key_file is not None:
            raise InvalidArgument(
                "key_file= is used with server_key= only; pass the broker's public key, too, 40 "
                "characters of Z85"
            )
        return Trust(users=frozenset(users), is_secured=server_uid is not None)
    if not (
        isinstance(server_key, str) and is_public_key(server_key)
    ):  # not repeated: perhaps the wrong half of a pair
        raise InvalidArgument(
            "server_key= is not the public key of a broker, which is 40 characters of Z85"
        )
    if key_file is None:
        raise InvalidArgument(
            "server_key= needs key_file=, a file with the key pair of this client; make one, and "
            "have its public key registered with the broker"
        )
    if not isinstance(key_file, str | Path):
        raise InvalidArgument("key_file= is the path of a file")
    pair = read_key_file(Path(key_file))
    return Trust(server_key, pair.public, pair.secret, frozenset(users), is_secured=True)
