"""TLS of the HTTP ports: the server's certificate, read again when its files change, and what a client trusts.

    certificate, key, client CA --read, checked--> context of new connections
      files change -------------> a new context, if they are sound; else the old one stays, and `fault` says why

A connection keeps the context that it began with. Sessions are never resumed: each handshake proves both sides anew.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danube_fast.clock import SECOND_NS
from danube_fast.config import Settings
from danube_fast.errors import (
    DanubeError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from danube_fast.security.certificates import (
    PIN_PREFIX,
    certificate_dates,
    fingerprint_of,
    new_certificate,
)
from danube_fast.security.private_files import PrivateFile, read_private

__all__ = [
    "PIN_PREFIX",
    "ServerTls",
    "check_fingerprint",
    "client_context",
    "fingerprint_of",
    "new_certificate",
    "read_certificate",
]

_log = logging.getLogger(__name__)

LOOK_NS = SECOND_NS
"""How often files are looked at; a change counts when it is seen twice, so a pair that is being written is whole."""
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2; those of 1.3 are all sound."""
_CERTIFICATES_BYTES_MAX = 4 << 20
"""A bundle of public CAs has a quarter of a MiB."""
_CERTIFICATE = PrivateFile(
    noun="certificate file",
    remedy="give a PEM file: the certificate of this host, then those between it and its CA",
    others=stat.S_IWOTH,
    mode_remedy="chmod o-w",
    bytes_max=_CERTIFICATES_BYTES_MAX,
)
_CLIENT_CA = PrivateFile(
    noun="file of client CAs",
    remedy="give a PEM file with the certificates of the CAs of clients",
    others=stat.S_IWOTH,
    mode_remedy="chmod o-w",
    bytes_max=_CERTIFICATES_BYTES_MAX,
)
_KEY = PrivateFile(
    noun="TLS key file",
    remedy="give a PEM file with the private key of the certificate; `danube-fast security new-certificate` makes both",
    others=stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO,  # a group may read: services share such keys
    mode_remedy="chmod 640",
    bytes_max=64 << 10,
    lost_remedy="get a new pair",
)
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_FINGERPRINT = re.compile(r"[0-9a-f]{64}\Z")


# ---------------------------------------------------------------- server


@dataclass(frozen=True)
class _Loaded:
    """Made of the files once."""

    context: ssl.SSLContext
    fingerprint: str
    expires_ns: int


class _LiveContext(ssl.SSLContext):
    """The context that servers are given: each new connection gets the newest one."""

    newest: ssl.SSLContext

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Begin a connection of an event loop."""
        return self.newest.wrap_bio(*arguments, **options)

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """Begin a connection of a socket."""
        return self.newest.wrap_socket(*arguments, **options)


class ServerTls:
    """Certificate, key and client CA of a server, live. `refresh` is called by one thread; any may use `context`.

    Raises FailedPrecondition, InvalidArgument for files that cannot be used.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        """`client_ca`: whose certificates clients may show; None: they are not asked for one."""
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._seen = self._taken = self._signature()
        self._looked_ns: int | None = None
        self._live = _LiveContext(ssl.PROTOCOL_TLS_SERVER)
        self.fault = ""
        """Why the newest files are not in use; empty: they are."""
        self.reloads = 0
        """How often changed files were taken."""
        self._take(self._load())

    @classmethod
    def of(cls, settings: Settings) -> ServerTls:
        """Make it of `tls_certificate`, `tls_key` and `tls_client_ca`. Raises FailedPrecondition, InvalidArgument."""
        client_ca = Path(settings.tls_client_ca) if settings.tls_client_ca else None
        return cls(Path(settings.tls_certificate), Path(settings.tls_key), client_ca)

    @property
    def context(self) -> ssl.SSLContext:
        """The context to listen with; the same object always."""
        return self._live

    def refresh(self, now_ns: int) -> bool:
        """Read the files again if they have changed, and say whether they are in use from now on.

        `now_ns`: monotonic. What cannot be used is logged once for each change, tried again, and the old stays.
        """
        if self._looked_ns is not None and now_ns - self._looked_ns < LOOK_NS:
            return False
        self._looked_ns = now_ns
        seen, self._seen = self._seen, self._signature()
        if self._seen == self._taken or self._seen != seen:
            if self._seen == self._taken:
                self.fault = ""  # put back as they were
            return False
        try:
            loaded = self._load()
        except DanubeError as error:
            if str(error) != self.fault:
                self.fault = str(error)
                _log.error("the certificate in use stays: %s", error)
            return False
        self._taken, self.fault = self._seen, ""
        self._take(loaded)
        self.reloads += 1
        _log.info("new certificate %s", self.fingerprint)
        return True

    def _take(self, loaded: _Loaded) -> None:
        self._live.newest = loaded.context
        self.fingerprint = loaded.fingerprint
        """Of the certificate in use: `sha256:` and 64 digits."""
        self.expires_ns = loaded.expires_ns
        """When the certificate in use ends; wall clock."""

    def _signature(self) -> list[tuple[int, ...]]:
        """Describe the files so that a change shows."""
        found: list[tuple[int, ...]] = []
        for path in (self._certificate, self._key, self._client_ca):
            try:
                entry = os.stat(path) if path is not None else None
            except OSError:
                entry = None
            found.append(
                (entry.st_dev, entry.st_ino, entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns)
                if entry is not None
                else ()
            )
        return found

    def _load(self) -> _Loaded:
        """Make a context of the files. Raises FailedPrecondition, InvalidArgument."""
        chain = read_private(self._certificate, _CERTIFICATE)
        key = read_private(self._key, _KEY)
        der = _first_certificate(chain, self._certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
        context.num_tickets = 0
        context.set_alpn_protocols(["http/1.1"])
        self._load_pair(context, chain, key)
        if self._client_ca is not None:
            _load_cas(context, self._client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
        _, expires_ns = certificate_dates(der)
        return _Loaded(context, fingerprint_of(der), expires_ns)

    def _load_pair(self, context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
        """Load what was read and checked, not what the files hold a moment later."""
        try:
            fd = os.memfd_create("danube-fast-tls", os.MFD_CLOEXEC)
            try:
                os.write(fd, chain + b"\n" + key)
                context.load_cert_chain(f"/proc/self/fd/{fd}", password=_no_password)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise FailedPrecondition(
                f"the certificate {self._certificate} and the key {self._key} cannot be used together "
                f"({_reason(error)}): give a PEM pair that belongs together, the key without a password"
            ) from None


def _no_password() -> str:
    raise ValueError("the key has a password")


def _load_cas(context: ssl.SSLContext, path: Path) -> None:
    text = read_private(path, _CLIENT_CA)
    try:
        context.load_verify_locations(cadata=text.decode("ascii"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{path} is no file of client CAs ({_reason(error)}); {_CLIENT_CA.remedy}"
        ) from None


def _reason(error: Exception) -> str:
    """Say what OpenSSL says, without places in its source."""
    reason = getattr(error, "reason", None)
    if isinstance(error, ssl.SSLError):
        return reason.lower().replace("_", " ") if reason else "not PEM"
    return error.strerror or "unreadable" if isinstance(error, OSError) else str(error)


def read_certificate(path: Path) -> bytes:
    """Read the first certificate of a PEM file, in DER. Raises FailedPrecondition, InvalidArgument."""
    return _first_certificate(read_private(path, _CERTIFICATE), path)


def _first_certificate(pem: bytes, path: Path) -> bytes:
    """Find the first certificate of a file, in DER. Raises InvalidArgument."""
    found = _PEM.search(pem)
    try:
        if found:
            return ssl.PEM_cert_to_DER_cert(found[0].decode("ascii"))
    except ValueError:
        pass
    raise InvalidArgument(f"{path} holds no certificate in PEM; {_CERTIFICATE.remedy}")


# ---------------------------------------------------------------- client


class _PinnedObject(ssl.SSLObject):
    """A connection of an event loop that ends in its handshake unless the certificate is a pinned one."""

    def do_handshake(self) -> None:
        """Shake hands. Raises SSLCertVerificationError."""
        super().do_handshake()
        _check_pins(self)


class _PinnedSocket(ssl.SSLSocket):
    """A connected socket of the same kind."""

    def do_handshake(self, block: bool = False) -> None:
        """Shake hands. Raises SSLCertVerificationError."""
        super().do_handshake(block)
        _check_pins(self)


class _PinnedContext(ssl.SSLContext):
    """Trusts certificates by their fingerprints alone."""

    sslobject_class = _PinnedObject
    sslsocket_class = _PinnedSocket
    pins = ""


def _check_pins(connection: Any) -> None:
    try:
        check_fingerprint(connection.getpeercert(binary_form=True) or b"", connection.context.pins)
    except PermissionDenied as error:
        # the kind of error that users of `ssl` expect in a handshake
        refused = ssl.SSLCertVerificationError(1, str(error))
        refused.verify_message = str(error)  # else its text is a tuple
        raise refused from None


def client_context(tls: str = "") -> ssl.SSLContext:
    """Make the context of clients that trust what `tls` says.

    `tls`: the path of a PEM file with CAs, or with the certificate itself; `sha256:` and the fingerprint of the
    certificate, several with commas between them while it is rotated; empty: the CAs of this system. With CAs the host
    name is checked. With fingerprints the certificate alone counts, and its handshake fails with
    SSLCertVerificationError for any other. Raises InvalidArgument, NotFound.
    """
    if tls.startswith(PIN_PREFIX):
        pinned = _PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
        pinned.pins = ",".join(_pins(tls))
        pinned.check_hostname = False
        pinned.verify_mode = ssl.CERT_NONE  # the fingerprint is checked instead
        context: ssl.SSLContext = pinned
    else:
        context = ssl.create_default_context()
        if tls:
            context = _context_of_cas(tls)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _context_of_cas(path: str) -> ssl.SSLContext:
    """Make a context that trusts the CAs of a file and no other. Raises InvalidArgument, NotFound."""
    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError as error:
        raise InvalidArgument(
            f"{path} holds no certificates in PEM ({_reason(error)}); give the CA's, or the server's own"
        ) from None
    except OSError as error:
        raise NotFound(
            f"cannot read the CA file {path} ({error.strerror}); give the path of a PEM file, or {PIN_PREFIX} and a "
            "fingerprint"
        ) from error


def check_fingerprint(der: bytes, tls: str) -> None:
    """Return if a certificate in DER is one of those that `tls` pins. Raises PermissionDenied, InvalidArgument."""
    if not der or fingerprint_of(der).removeprefix(PIN_PREFIX) not in _pins(tls):
        raise PermissionDenied(
            "the server shows another certificate than the pinned one: it was renewed, or this is another server; ask "
            "its operator for the fingerprint, never the connection"
        )


def _pins(tls: str) -> list[str]:
    """Read fingerprints: 64 digits each, in either case, with or without colons. Raises InvalidArgument."""
    pins = [
        part.strip().removeprefix(PIN_PREFIX).replace(":", "").lower() for part in tls.split(",")
    ]
    if not all(_FINGERPRINT.match(pin) for pin in pins):
        raise InvalidArgument(
            f"{tls!a:.200} does not pin a certificate; write {PIN_PREFIX} and the 64 digits of its SHA-256, several "
            "with commas between them"
        )
    return pins
