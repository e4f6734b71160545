"""API keys: texts that programs sign on with. The client draws them, the broker keeps a salted digest.

    dfk_<id>_<secret>     id: 16 characters, to find the record by; secret: 43, of 256 random bits

So many random bits are not guessed from a digest, so it is plain SHA-256 and not a slow one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from danube_fast.security.policy import Policy
from danube_fast.security.private_files import make_file
from danube_fast.security.records import ApiKey

__all__ = [
    "LIVE_KEYS_MAX",
    "PREFIX",
    "NewApiKey",
    "find",
    "id_of",
    "is_api_key",
    "new_api_key",
    "verify",
]

PREFIX = "dfk_"
"""Begins every API key; a token begins otherwise."""
LIVE_KEYS_MAX = 2
"""Of a principal: the one in use, and the one that takes its place."""
_ID_BYTES = 12
_SECRET_BYTES = 32
_SALT_BYTES = 16
_TEXT = re.compile(r"dfk_(?P<id>[A-Za-z0-9_-]{16})_(?P<secret>[A-Za-z0-9_-]{43})\Z")
_NO_SALT = "00" * _SALT_BYTES
_NO_DIGEST = "00" * hashlib.sha256().digest_size
"""No secret that is known has this digest."""


class NewApiKey(NamedTuple):
    """A key that was just drawn. All but the text goes to the broker."""

    text: str
    """Shown once. It is the secret."""
    id: str
    salt: str
    digest: str

    def __repr__(self) -> str:
        return f"NewApiKey(id={self.id!r})"


def new_api_key() -> NewApiKey:
    """Draw a key."""
    key_id, secret = secrets.token_urlsafe(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    salt = secrets.token_hex(_SALT_BYTES)
    return NewApiKey(f"{PREFIX}{key_id}_{secret}", key_id, salt, _digest(salt, secret))


def write_api_key(path: Path, text: str) -> None:
    """Write an API key to a new file of its owner alone. Raises AlreadyExists, FailedPrecondition."""
    make_file(path, f"{text}\n".encode(), "file of an API key")


def is_api_key(text: str) -> bool:
    """Whether a bearer's text is meant as an API key."""
    return text.startswith(PREFIX)


def id_of(text: str) -> str:
    """Return the id in an API key; empty if it is malformed."""
    found = _TEXT.match(text)
    return found["id"] if found is not None else ""


def verify(text: str, record: ApiKey | None) -> bool:
    """Whether a text is the key of that record; takes the same time for a wrong secret, and without a record."""
    found = _TEXT.match(text)
    secret = found["secret"] if found is not None else ""
    salt, digest = (record.salt, record.digest) if record else (_NO_SALT, _NO_DIGEST)
    is_same = hmac.compare_digest(_digest(salt, secret), digest)
    return is_same and found is not None and record is not None and found["id"] == record.id


def find(policy: Policy, text: str, now_ns: int) -> ApiKey | None:
    """Return the record of an API key that is good at that wall time, whatever its principal may do; None: it is not."""
    record = policy.get(f"api_key/{id_of(text)}")
    found = record if isinstance(record, ApiKey) else None
    is_good = verify(text, found)
    is_live = found is not None and not (found.expires_ns and now_ns >= found.expires_ns)
    return found if is_good and is_live else None


def _digest(salt: str, secret: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest()
