"""Keys that tokens are verified with: a set of public ones (JWKS) from a file or a URL, or a shared secret from a file.

A key is good for one algorithm, the one of its kind, whatever a token says: RSA for RS256, P-256 for ES256, Ed25519 for
EdDSA, a secret for HS256. So no token makes a public key a secret.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import stat
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from danube_fast.errors import InvalidArgument, Unavailable
from danube_fast.security.issuers import Issuer
from danube_fast.security.private_files import PrivateFile, read_private

__all__ = ["KID_CHARACTERS_MAX", "KeySet", "check_files", "load_keys", "parse_jwks"]

JWKS_BYTES_MAX = 256 * 1024
KEYS_MAX = 64
KID_CHARACTERS_MAX = 256
SECRET_BYTES_MIN = 32
"""As many as SHA-256 has."""
_SECRET_FILE = PrivateFile(
    noun="secret file",
    remedy=f"write {SECRET_BYTES_MIN} random characters or more into it, as the issuer has them",
    bytes_max=1024,
    lost_remedy="get a new secret from the issuer",
)
_KEYS_FILE = PrivateFile(
    noun="file of keys",
    remedy="get the keys (JWKS) of the issuer",
    others=stat.S_IWGRP | stat.S_IWOTH,
    mode_remedy="chmod go-w",
    bytes_max=JWKS_BYTES_MAX,
)
RSA_BITS_MIN = 2048
RSA_BITS_MAX = 8192
FETCH_SECONDS = 10.0
"""For all of a fetch."""
STEP_SECONDS = 5.0
"""For each of its reads."""
_READ_BYTES = 16 * 1024
_PRIVATE = ("d", "p", "q", "k")
_HTTP_OK = 200


class KeySet:
    """Keys of one issuer."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str], Any] = {}
        """By algorithm and kid."""

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, algorithm: str, kid: str, key: Any) -> None:
        """Add a key; of two of the same name the first one counts."""
        self._keys.setdefault((algorithm, kid), key)

    def find(self, algorithm: str, kid: str | None) -> Any:
        """Return the key that a token names; without a name the only one of its algorithm. None: there is none."""
        if kid is not None:
            return self._keys.get((algorithm, kid))
        mine = [key for (good_for, _), key in self._keys.items() if good_for == algorithm]
        return mine[0] if len(mine) == 1 else None


def load_keys(issuer: Issuer) -> KeySet:
    """Read or fetch the keys of an issuer; may take `FETCH_SECONDS`. Raises Unavailable, FailedPrecondition, InvalidArgument."""
    if issuer.secret_file:
        return _read_secret(Path(issuer.secret_file))
    if issuer.jwks_file:
        return parse_jwks(read_private(Path(issuer.jwks_file), _KEYS_FILE), issuer)
    return parse_jwks(_fetch(issuer.jwks_url, issuer.jwks_ca), issuer)


def check_files(issuer: Issuer) -> None:
    """Raise FailedPrecondition, InvalidArgument, Unavailable if the files that an issuer names cannot be used; fetch nothing."""
    if issuer.jwks_url:
        _context(issuer.jwks_ca)
    else:
        load_keys(issuer)


def _read_secret(path: Path) -> KeySet:
    secret = read_private(path, _SECRET_FILE).strip()
    if len(secret) < SECRET_BYTES_MIN:
        raise InvalidArgument(f"the secret in {path} is too short; {_SECRET_FILE.remedy}")
    if secret.startswith((b"-----BEGIN", b"ssh-")):
        raise InvalidArgument(f"{path} holds a key of another kind; {_SECRET_FILE.remedy}")
    keys = KeySet()
    keys.add("HS256", "", secret)
    return keys


def parse_jwks(content: bytes, issuer: Issuer) -> KeySet:
    """Read a set of keys; those that are of no use here are left out. Raises InvalidArgument if none is left."""
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        found = None
    listed = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(listed, list) or len(listed) > KEYS_MAX:
        raise InvalidArgument(
            f"the keys of issuer {issuer.name} are no JWKS of at most {KEYS_MAX} keys; check {issuer.source}"
        )
    keys = KeySet()
    for each in listed:
        algorithm = _algorithm_of(each)
        if algorithm in issuer.algorithms:
            key = _key_of(each, algorithm)
            if key is not None:
                keys.add(algorithm, each.get("kid", ""), key)
    if not len(keys):
        raise InvalidArgument(
            f"the keys of issuer {issuer.name} have none for {', '.join(issuer.algorithms)}; check its "
            f"algorithms, and {issuer.source}"
        )
    return keys


def _algorithm_of(jwk: Any) -> str:
    """Return the one algorithm that a key is good for; empty: for none that is used here."""
    if not isinstance(jwk, dict) or any(name in jwk for name in _PRIVATE):
        return ""
    kid = jwk.get("kid", "")
    if not isinstance(kid, str) or len(kid) > KID_CHARACTERS_MAX:
        return ""
    match jwk.get("kty"), jwk.get("crv"):
        case "RSA", None:
            algorithm = "RS256"
        case "EC", "P-256":
            algorithm = "ES256"
        case "OKP", "Ed25519":
            algorithm = "EdDSA"
        case _:
            return ""
    operations = jwk.get("key_ops", ["verify"])
    is_for_signing = jwk.get("use", "sig") == "sig"
    is_for_signing = is_for_signing and isinstance(operations, list) and "verify" in operations
    return algorithm if is_for_signing and jwk.get("alg", algorithm) == algorithm else ""


def _key_of(jwk: dict[str, Any], algorithm: str) -> Any:
    """Make the key; None if it is malformed or too weak."""
    import jwt

    try:
        key = jwt.PyJWK(jwk, algorithm).key
    except Exception:  # whatever a malformed key does inside the libraries, it is no key
        return None
    if algorithm == "RS256" and not RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX:
        return None
    return key


def _fetch(url: str, ca: str) -> bytes:
    """GET a small document, without following redirects. Raises Unavailable."""
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    context = _context(ca)
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port, timeout=STEP_SECONDS, context=context
    )
    watch = threading.Timer(FETCH_SECONDS, _abort, [connection])
    watch.daemon = True
    watch.start()
    try:
        connection.request("GET", path, headers={"Accept": "application/json"})
        response = connection.getresponse()
        if response.status != _HTTP_OK:
            raise Unavailable(f"{url} answers with status {response.status}; check jwks_url")
        content = b""
        while len(content) <= JWKS_BYTES_MAX and (piece := response.read1(_READ_BYTES)):
            content += piece
        is_short = response.length not in (None, 0)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"cannot fetch {url}: {error}; it is tried again") from None
    finally:
        watch.cancel()
        connection.close()
    if len(content) > JWKS_BYTES_MAX or is_short:
        raise Unavailable(
            f"{url} answers more than {JWKS_BYTES_MAX} bytes, or stops within its answer"
        )
    return content


def _context(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise Unavailable(f"cannot read the certificates in {ca}: {error}; check jwks_ca") from None


def _abort(connection: http.client.HTTPSConnection) -> None:
    """End a fetch that takes too long, from beside it."""
    sock = connection.sock
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
