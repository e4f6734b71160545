"""TLS of the HTTP ports: the server's certificate, read again when its files change, and what a client trusts.

    certificate, key, client CAs, CRLs --read, checked--> context of new connections
      files change -------------> a new context, if they are sound; else the old one stays, and `fault` says why

A connection keeps the context that it began with; `trusts` says whether one that has shown a certificate may go on.
Sessions are never resumed: each handshake proves both sides anew.
"""

from __future__ import annotations

import binascii
import contextlib
import logging
import os
import re
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danube_fast.clock import SECOND_NS, Clock, SystemClock
from danube_fast.config import Settings
from danube_fast.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from danube_fast.security.certificates import (
    PIN_PREFIX,
    certificate_dates,
    crl_dates,
    crl_issuer_name,
    fingerprint_of,
    new_certificate,
    subject_name,
)
from danube_fast.security.live_files import LiveFiles
from danube_fast.security.private_files import PrivateFile, read_private

__all__ = [
    "PIN_PREFIX",
    "ServerTls",
    "cas_without_list",
    "check_fingerprint",
    "client_context",
    "dates_in",
    "fingerprint_of",
    "new_certificate",
    "read_certificate",
]

_log = logging.getLogger(__name__)

TRUST_NS = 2 * SECOND_NS
"""How long CAs and lists of revoked certificates count for connections that were made by them and then changed."""
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
_CRL = PrivateFile(
    noun="file of revoked client certificates",
    remedy="give a PEM file with the CRL of each CA of clients (`openssl crl -inform DER` makes PEM of DER)",
    others=stat.S_IWOTH,
    mode_remedy="chmod o-w",
    bytes_max=32 << 20,
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
_PEM_CRL_BEGIN = b"-----BEGIN X509 CRL-----"
_PEM_CRL = re.compile(_PEM_CRL_BEGIN + rb"(.+?)-----END X509 CRL-----", re.DOTALL)
_FINGERPRINT = re.compile(r"[0-9a-f]{64}\Z")


# ---------------------------------------------------------------- server


@dataclass(frozen=True)
class _Loaded:
    """Made of the files once."""

    context: _Context
    fingerprint: str
    expires_ns: int
    crls: dict[str, int]
    """Fingerprint of each list of revoked certificates -> when it ends, wall clock; 0: never."""


class _Context(ssl.SSLContext):
    """The context of connections that begin while it is the newest."""

    trust = ""
    """Fingerprint of what says which certificates of clients are good."""
    replaced_ns = 0
    """Since when another one is the newest, monotonic."""


class _LiveContext(ssl.SSLContext):
    """The context that servers are given: each new connection gets the newest one."""

    newest: _Context

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Begin a connection of an event loop."""
        return self.newest.wrap_bio(*arguments, **options)

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """Begin a connection of a socket."""
        return self.newest.wrap_socket(*arguments, **options)


class ServerTls:
    """Certificate, key, client CAs and CRLs of a server, live. `refresh` is called by one thread at a time; any may use the
    rest.

    Raises FailedPrecondition, InvalidArgument for files that cannot be used.
    """

    def __init__(
        self, certificate: Path, key: Path, client_ca: Path | None = None, client_crl: Path | None = None,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """`client_ca`: whose certificates clients may show; None: they are not asked for one. `client_crl`: which of
        these are revoked; None: none are."""
        self._certificate, self._key = certificate, key
        self._client_ca, self._client_crl = client_ca, client_crl
        self._clock = clock or SystemClock()
        self._has_warned = False
        self._crls: dict[str, int] | None = None
        paths = [path for path in (certificate, key, client_ca, client_crl) if path is not None]
        self._files = LiveFiles("the set of TLS files", paths, self._load_checked)
        self._live = _LiveContext(ssl.PROTOCOL_TLS_SERVER)
        self.reloads = 0
        """How often changed files were taken."""
        self._take(self._files.loaded)

    @classmethod
    def of(cls, settings: Settings) -> ServerTls:
        """Make it of the settings `tls_*`. Raises FailedPrecondition, InvalidArgument."""
        client_ca = Path(settings.tls_client_ca) if settings.tls_client_ca else None
        client_crl = Path(settings.tls_client_crl) if settings.tls_client_crl else None
        return cls(Path(settings.tls_certificate), Path(settings.tls_key), client_ca, client_crl)

    @property
    def context(self) -> ssl.SSLContext:
        """The context to listen with; the same object always."""
        return self._live

    @property
    def fault(self) -> str:
        """Why the newest files are not in use; empty: they are."""
        return self._files.fault

    @property
    def crl_expires_ns(self) -> int:
        """When the first list of revoked client certificates ends, wall clock; 0: never, or there is none."""
        return min((at_ns for at_ns in (self._crls or {}).values() if at_ns), default=0)

    def trusts(self, connection: ssl.SSLObject | ssl.SSLSocket) -> bool:
        """Whether what made the certificate of a connection's peer good is in use, or was a moment ago: a client that has
        just come in is to have its answer."""
        context = connection.context
        if not isinstance(context, _Context):
            return False
        age_ns = self._clock.monotonic_ns() - context.replaced_ns
        return context.trust == self._live.newest.trust or age_ns < TRUST_NS

    def refresh(self, now_ns: int) -> bool:
        """Read the files again if they have changed, and say whether they are in use from now on.

        `now_ns`: monotonic. What cannot be used is logged once for each change, tried again, and the old stays.
        """
        self._warn_of_expiry()
        if not self._files.refresh(now_ns):
            return False
        self._live.newest.replaced_ns = self._clock.monotonic_ns()
        self._take(self._files.loaded)
        self.reloads += 1
        _log.info("new TLS files are in use, with the certificate %s", self.fingerprint)
        return True

    def _take(self, loaded: _Loaded) -> None:
        self._live.newest = loaded.context
        self.fingerprint = loaded.fingerprint
        """Of the certificate in use: `sha256:` and 64 digits."""
        self.expires_ns = loaded.expires_ns
        """When the certificate in use ends; wall clock."""
        self._crls, self._has_warned = loaded.crls, False

    def _has_expired(self, at_ns: int) -> bool:
        return 0 < at_ns <= self._clock.wall_ns()

    def _check_crls(self, loaded: _Loaded) -> None:
        """Raise FailedPrecondition for a new list of revoked certificates that has expired: it would refuse all clients."""
        if self._crls is None:  # the first start takes what there is
            return
        new = loaded.crls.keys() - self._crls.keys()
        if any(self._has_expired(loaded.crls[each]) for each in new):
            raise FailedPrecondition(
                f"a new list of revoked certificates in {self._client_crl} has expired already; give the newest of its CA"
            )

    def _warn_of_expiry(self) -> None:
        """Log once when a list of revoked certificates has expired."""
        if not self._has_warned and self._has_expired(self.crl_expires_ns):
            self._has_warned = True
            _log.error(
                "a list of revoked certificates in %s has expired, and all client certificates of its CA are refused: "
                "give the newest of that CA", self._client_crl,
            )  # fmt: skip

    def _load_checked(self) -> _Loaded:
        """Load the files, of which a new list of revoked certificates may not have expired. Raises as `_load`."""
        loaded = self._load()
        self._check_crls(loaded)
        return loaded

    def _load(self) -> _Loaded:
        """Make a context of the files. Raises FailedPrecondition, InvalidArgument."""
        chain = read_private(self._certificate, _CERTIFICATE)
        key = read_private(self._key, _KEY)
        der = _first_certificate(chain, self._certificate)
        context = _Context(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
        context.num_tickets = 0
        context.set_alpn_protocols(["http/1.1"])
        self._load_pair(context, chain, key)
        crls: dict[str, int] = {}
        if self._client_ca is not None:
            cas, lists = _load_cas(context, self._client_ca), b""
            context.verify_mode = ssl.CERT_OPTIONAL
            if self._client_crl is not None:
                lists, crls = _load_crls(context, self._client_crl)
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
            context.trust = fingerprint_of(cas + b"\0" + lists)
        _, expires_ns = certificate_dates(der)
        return _Loaded(context, fingerprint_of(der), expires_ns, crls)

    def _load_pair(self, context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
        try:
            with _file_of(chain + b"\n" + key) as path:
                context.load_cert_chain(path, password=_no_password)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise FailedPrecondition(
                f"the certificate {self._certificate} and the key {self._key} cannot be used together "
                f"({_reason(error)}): give a PEM pair that belongs together, the key without a password"
            ) from None


def _no_password() -> str:
    raise ValueError("the key has a password")


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """Make a file in memory: OpenSSL loads what was read and checked, not what a file holds a moment later."""
    fd = os.memfd_create("danube-fast-tls", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _load_cas(context: ssl.SSLContext, path: Path) -> bytes:
    """Load the CAs of a file; its text. Raises FailedPrecondition, InvalidArgument."""
    text = read_private(path, _CLIENT_CA)
    try:
        context.load_verify_locations(cadata=text.decode("ascii"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{path} is no file of client CAs ({_reason(error)}); {_CLIENT_CA.remedy}"
        ) from None
    return text


def _load_crls(context: ssl.SSLContext, path: Path) -> tuple[bytes, dict[str, int]]:
    """Load the lists of revoked certificates of a file, and nothing else of it: a certificate would be a CA.

    Returns their text, and of each its fingerprint and when it ends. Raises FailedPrecondition, InvalidArgument.
    """
    text = read_private(path, _CRL)
    found = list(_PEM_CRL.finditer(text))
    try:
        if not found or len(found) != text.count(_PEM_CRL_BEGIN):
            raise ValueError("not PEM, or cut short")
        lists = b"\n".join(each[0] for each in found)
        ends = {
            fingerprint_of(der): crl_dates(der)[1]
            for der in (binascii.a2b_base64(each[1]) for each in found)
        }
        with _file_of(lists) as file:
            context.load_verify_locations(cafile=file)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{path} is no {_CRL.noun} ({_reason(error)}); {_CRL.remedy}"
        ) from None
    return lists, ends


def _reason(error: Exception) -> str:
    """Say what OpenSSL says, without places in its source."""
    reason = getattr(error, "reason", None)
    if isinstance(error, ssl.SSLError):
        return reason.lower().replace("_", " ") if reason else "not PEM"
    return error.strerror or "unreadable" if isinstance(error, OSError) else str(error)


def read_certificate(path: Path) -> bytes:
    """Read the first certificate of a PEM file, in DER. Raises FailedPrecondition, InvalidArgument."""
    return _first_certificate(read_private(path, _CERTIFICATE), path)


def dates_in(pem: bytes) -> list[tuple[int, int]]:
    """Return from when and until when each certificate and CRL of a text in PEM is good, as `certificate_dates` and
    `crl_dates` do. Raises InvalidArgument for damaged ones."""
    return [*map(certificate_dates, _certificates_in(pem)), *map(crl_dates, _crls_in(pem))]


def cas_without_list(cas: bytes, crls: bytes) -> int:
    """Return how many CAs of a text in PEM have no CRL in another one. Raises InvalidArgument for damaged ones."""
    listed = {crl_issuer_name(der) for der in _crls_in(crls)}
    return sum(subject_name(der) not in listed for der in _certificates_in(cas))


def _certificates_in(pem: bytes) -> list[bytes]:
    """Find all certificates, in DER. Raises InvalidArgument."""
    try:
        return [ssl.PEM_cert_to_DER_cert(each.decode("ascii")) for each in _PEM.findall(pem)]
    except ValueError as error:
        raise InvalidArgument(f"that is damaged PEM ({error}); write the file anew") from None


def _crls_in(pem: bytes) -> list[bytes]:
    """Find all CRLs, in DER. Raises InvalidArgument."""
    try:
        return [binascii.a2b_base64(each) for each in _PEM_CRL.findall(pem)]
    except ValueError as error:
        raise InvalidArgument(f"that is damaged PEM ({error}); write the file anew") from None


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
