"""Proofs that a client asks of its broker, fixed before it connects: its keys, and the user that it runs as.

    tcp      CURVE, to one of the keys that are pinned here; without one, nothing is proved
    ipc      the kernel says whose process listens: a process of this user, of root, or of the user that is pinned
    rings    the same

Nothing is trusted because it was there first: keys are given by the application, or come with a sign-on over HTTPS.
Several are pinned while the broker's key is rotated. The one that proved itself last is asked for first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danube_fast.checks import check_whole
from danube_fast.client.values.limits import SERVER_KEYS_MAX
from danube_fast.clock import Clock
from danube_fast.errors import InvalidArgument
from danube_fast.security.curve import is_public_key, read_key_file

if TYPE_CHECKING:
    from danube_fast.client.sign_on.renewal import SignOn

__all__ = ["Trust", "server_keys_of", "sign_on_of", "trust_of"]

_USER_MAX = (1 << 32) - 2
_ROOT = 0


@dataclass
class Trust:
    """Whom a client takes for its broker, and by what it is known there. Used under the pump's lock."""

    server_keys: tuple[str, ...] = ()
    """The broker's public CURVE keys, any of them; empty if none is pinned. In the order in which they are tried."""
    public: str = ""
    secret: str = field(default="", repr=False)
    users: frozenset[int] = frozenset()
    """Those whose processes may listen on this host."""
    is_secured: bool = False
    """Whether the application has pinned a key or a user: a broker that cannot prove to be it is refused."""
    was_let_in: bool = False
    """Whether a process of the broker knows this client's key."""
    sign_on: SignOn | None = None
    """What registers the public key and brings the server's keys; None: an administrator has registered it."""

    @property
    def has_key(self) -> bool:
        """Whether both sides prove over tcp who they are."""
        return bool(self.server_keys) or self.sign_on is not None

    @property
    def allows_tcp(self) -> bool:
        """Whether tcp will do where the broker does not prove itself on this host: with a key, or with nothing pinned."""
        return self.has_key or not self.is_secured

    def is_ready(self) -> bool:
        """Whether a connection over tcp may be made now; take the keys that a sign-on has brought."""
        sign_on = self.sign_on
        if sign_on is None:
            return True
        if not sign_on.is_ready:
            return False
        if set(sign_on.server_keys) != set(self.server_keys):
            first = self.server_keys[:1]
            self.server_keys = sign_on.server_keys
            if first and first[0] in self.server_keys:
                self.prefer(first[0])
        return True

    def key_behind(self, key: str) -> str:
        """Return the key to try when that one was not the broker's; the first one if that is not known."""
        keys = self.server_keys
        return keys[(keys.index(key) + 1) % len(keys)] if key in keys else keys[0]

    def prefer(self, key: str) -> None:
        """Try that key first from now on: the broker has just proved it."""
        if key in self.server_keys and key != self.server_keys[0]:
            self.server_keys = (key, *(each for each in self.server_keys if each != key))


def trust_of(
    server_key: str | Sequence[str] | None,
    key_file: str | Path | None,
    server_uid: int | None,
    sign_on: SignOn | None = None,
) -> Trust:
    """Check the arguments of `connect()`, and read the key file; with a sign-on there is none.

    Raises InvalidArgument, and FailedPrecondition for a file that is missing or not private.
    """
    users = {os.geteuid(), _ROOT}
    if server_uid is not None:
        users.add(check_whole(server_uid, "server_uid", 0, _USER_MAX))
    if sign_on is not None:
        if key_file is not None:
            raise InvalidArgument(
                "key_file= and sign_on= are two ways in; give one of them (in the environment of commands "
                "DANUBE_KEY_FILE or DANUBE_SIGN_ON)"
            )
        pair = sign_on.pair
        return Trust(
            (), pair.public, pair.secret, frozenset(users), is_secured=True, sign_on=sign_on
        )
    if server_key is None:
        if key_file is not None:
            raise InvalidArgument(
                "key_file= is used with server_key= only; pass the broker's public key, too, 40 "
                "characters of Z85"
            )
        return Trust(users=frozenset(users), is_secured=server_uid is not None)
    keys = server_keys_of(server_key)
    if key_file is None:
        raise InvalidArgument(
            "server_key= needs key_file=, a file with the key pair of this client, or token= and sign_on=; make one, "
            "and have its public key registered with the broker"
        )
    if not isinstance(key_file, str | Path):
        raise InvalidArgument("key_file= is the path of a file")
    pair = read_key_file(Path(key_file))
    return Trust(keys, pair.public, pair.secret, frozenset(users), is_secured=True)


def server_keys_of(server_key: Any) -> tuple[str, ...]:
    """Read one key, or several with blanks or commas between them, or a sequence. Raises InvalidArgument."""
    if isinstance(server_key, str):
        found: list[Any] = server_key.replace(",", " ").split()
    else:
        found = list(server_key) if isinstance(server_key, list | tuple) else []
    keys = tuple(dict.fromkeys(each for each in found if isinstance(each, str)))
    are_keys = bool(keys) and all(map(is_public_key, keys))
    if not are_keys or not all(isinstance(each, str) for each in found):
        # not repeated: perhaps the wrong half of a pair
        raise InvalidArgument(
            "server_key= is not the public key of a broker, which is 40 characters of Z85, nor several of them with "
            "blanks between"
        )
    if len(keys) > SERVER_KEYS_MAX:
        raise InvalidArgument(
            f"server_key= has {len(keys)} keys, and at most {SERVER_KEYS_MAX} are tried; leave old ones out"
        )
    return keys


def sign_on_of(
    token: Any, sign_on: Any, tls: Any, server_key: str | Sequence[str] | None, clock: Clock
) -> SignOn | None:
    """Check the arguments of `connect()` about the sign-on; None if there is to be none. Raises InvalidArgument."""
    if sign_on is None:
        if token is not None:
            raise InvalidArgument(
                "token= goes to the sign-on port of the broker; give that as sign_on='https://HOST:PORT', too"
            )
        if tls is not None:
            raise InvalidArgument(
                "tls= says how the sign-on port proves itself; give that as sign_on='https://HOST:PORT', and a token="
            )
        return None
    # loaded for those who sign on alone: it brings TLS
    from danube_fast.client.sign_on.bearer import Bearer
    from danube_fast.client.sign_on.exchange import parse_address
    from danube_fast.client.sign_on.renewal import SignOn

    address = parse_address(sign_on)
    if token is None:
        raise InvalidArgument(
            "sign_on= needs token=: an API key or a JWT, or a function that returns one"
        )
    if not (tls is None or (isinstance(tls, str | Path) and str(tls))):
        raise InvalidArgument(
            "tls= is the path of a file with CAs, or sha256: and the fingerprint of the certificate"
        )
    pinned = () if server_key is None else server_keys_of(server_key)
    return SignOn(address, Bearer(token), "" if tls is None else str(tls), clock, pinned)
