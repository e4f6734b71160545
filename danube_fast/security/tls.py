"""TLS of the HTTP ports: the server's certificate, read again when its files change, and what a client trusts.

    certificate and key ---read, checked--> the pair   --,
    client CAs ------------read, checked--> the CAs    --+--> context of new connections
    CRLs --read, checked against the CAs--> the lists  --'
      files change ------> a new context, of what is sound; for what is not the old stays, and `fault` says why

A connection keeps the context that it began with; `trusts` says whether one that has shown a certificate may go on.
Sessions are never resumed: each handshake proves both sides anew.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from danube_fast.clock import SECOND_NS, Clock, SystemClock
from danube_fast.config import Settings
from danube_fast.descriptors import from_reserve
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
    fingerprint_of,
    new_certificate,
)
from danube_fast.security.live_files import LiveFiles
from danube_fast.security.private_files import PrivateFile, read_private
from danube_fast.security.revocations import (
    CRL_FILE,
    RevokedList,
    RevokedLists,
    Scope,
    certificates_in,
    check_not_older,
    crls_in,
    read_lists,
    told_without_list,
)

__all__ = [
    "PIN_PREFIX",
    "ServerTls",
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
_KEY = PrivateFile(
    noun="TLS key file",
    remedy="give a PEM file with the private key of the certificate; `danube-fast security new-certificate` makes both",
    others=stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO,  # a group may read: services share such keys
    mode_remedy="chmod 640",
    bytes_max=64 << 10,
    lost_remedy="get a new pair",
)
_FINGERPRINT = re.compile(r"[0-9a-f]{64}\Z")


# ---------------------------------------------------------------- server


@dataclass(frozen=True)
class _Pair:
    """A certificate, with those between it and its CA, and its key, in PEM."""

    chain: bytes
    key: bytes = field(repr=False)
    fingerprint: str
    expires_ns: int


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

    A file that cannot be used holds up no other: a damaged certificate no revocation, a damaged CRL no certificate.
    Raises FailedPrecondition, InvalidArgument for files that cannot be used.

    One that `may_wait` begins without a pair that can be used: `fingerprint` is empty until there is one, and no handshake
    succeeds.
    """

    def __init__(
        self, certificate: Path, key: Path, client_ca: Path | None = None, client_crl: Path | None = None,
        clock: Clock | None = None, *, may_wait: bool = False,
    ) -> None:  # fmt: skip
        """`client_ca`: whose certificates clients may show; None: they are not asked for one. `client_crl`: which of
        these, and which CAs between, are revoked; None: none are."""
        self._clock = clock or SystemClock()
        self._client_crl, self._has_warned = client_crl, False
        self._pair: LiveFiles[_Pair | None] = LiveFiles(
            "the TLS pair", [certificate, key], lambda: _read_pair(certificate, key),
            (lambda: None) if may_wait else None,
        )  # fmt: skip
        self._cas: LiveFiles[bytes] | None = None
        self._lists: LiveFiles[RevokedLists] | None = None
        self._newest: dict[Scope, RevokedList] = {}
        """Of all lists of revoked certificates that were ever taken, also of those that have left the file: none comes back
        behind a newer one."""
        if client_ca is not None:
            ca = client_ca
            self._cas = LiveFiles(f"the {_CLIENT_CA.noun}", [ca], lambda: _read_cas(ca))
        if client_crl is not None:
            crl = client_crl
            self._lists = LiveFiles(f"the {CRL_FILE.noun}", [crl], lambda: self._read_lists(crl))
        self._live = _LiveContext(ssl.PROTOCOL_TLS_SERVER)
        self._live.newest = _Context(ssl.PROTOCOL_TLS_SERVER)
        self.reloads = 0
        """How often changed files were taken."""
        self._take()

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
        files = (self._pair, self._cas, self._lists)
        return "; ".join(each.fault for each in files if each is not None and each.fault)

    @property
    def crl_expires_ns(self) -> int:
        """When the first list of revoked client certificates ends, wall clock; 0: never, or there is none."""
        lists = self._lists.loaded.newest.values() if self._lists is not None else ()
        return min((each.end_ns for each in lists if each.end_ns), default=0)

    def trusts(self, connection: ssl.SSLObject | ssl.SSLSocket) -> bool:
        """Whether what made the certificate of a connection's peer good is in use, or was a moment ago: a client that has
        just come in is to have its answer."""
        context = connection.context
        if not isinstance(context, _Context):
            return False
        age_ns = self._clock.monotonic_ns() - context.replaced_ns
        return context.trust == self._live.newest.trust or age_ns < TRUST_NS

    def refresh(self, now_ns: int) -> bool:
        """Read the files again if they have changed, and say whether new ones are in use from now on.

        `now_ns`: monotonic. What cannot be used is logged once for each change, tried again, and the old stays.
        """
        self._warn_of_expiry()
        self._pair.refresh(now_ns)
        if self._cas is not None and self._cas.refresh(now_ns) and self._lists is not None:
            self._lists.doubt()  # they may be of CAs that are gone
        if self._lists is not None:
            self._lists.refresh(now_ns)
        if self._content() == self._taken:
            return False
        self._take()
        self.reloads += 1
        _log.info("new TLS files are in use, with the certificate %s", self.fingerprint)
        return True

    def _content(self) -> tuple[_Pair | None, bytes | None, bytes | None]:
        """Collect what is good of the files."""
        return (
            self._pair.loaded,
            self._cas.loaded if self._cas is not None else None,
            self._lists.loaded.pem if self._lists is not None else None,
        )

    def _take(self) -> None:
        content = self._content()
        pair, context = content[0], _context_of(*content)
        self._live.newest.replaced_ns = self._clock.monotonic_ns()
        self._live.newest = context
        self._taken = content
        """What the newest context is made of."""
        self.fingerprint = pair.fingerprint if pair is not None else ""
        """Of the certificate in use: `sha256:` and 64 digits; empty: there is none yet."""
        self.expires_ns = pair.expires_ns if pair is not None else 0
        """When the certificate in use ends; wall clock."""
        self.unlisted = told_without_list(content[1], content[2], self._client_crl)
        """How many CAs of clients have no list of revoked certificates, though lists are asked for."""
        self._has_warned = False

    def _has_expired(self, at_ns: int) -> bool:
        return 0 < at_ns <= self._clock.wall_ns()

    def _read_lists(self, path: Path) -> RevokedLists:
        """Read the lists of revoked certificates. A new one must be good now: else it would refuse all clients of its CA.
        None may be older than one before it.

        Raises FailedPrecondition, InvalidArgument.
        """
        lists = read_lists(path, self._cas.loaded if self._cas is not None else b"")
        if self._lists is not None:  # the first start takes what there is
            self._check_new(lists, self._lists.loaded, path)
        try:
            _add_lists(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), lists.pem)
        except OSError as error:
            raise InvalidArgument(
                f"{path} is no {CRL_FILE.noun} ({_reason(error)}); {CRL_FILE.remedy}"
            ) from None
        self._newest |= lists.newest
        return lists

    def _check_new(self, lists: RevokedLists, old: RevokedLists, path: Path) -> None:
        """Raise FailedPrecondition if one is older than one before, or one that was not there is not good now: it would refuse
        all clients of its CA."""
        new = [each for scope, each in lists.newest.items() if each != old.newest.get(scope)]
        ended = [each.ca for each in new if self._has_expired(each.end_ns)]
        if ended:
            raise FailedPrecondition(
                f"the new list of revoked certificates of {ended[0]} in {path} has expired already; give the newest of "
                "that CA"
            )
        if any(each.begin_ns > self._clock.wall_ns() for each in new):
            raise FailedPrecondition(
                f"a new list of revoked certificates in {path} is not good yet; it is taken when it is: compare the "
                "clock of this host with that of the CA"
            )
        check_not_older(lists.newest.values(), self._newest, path)

    def _warn_of_expiry(self) -> None:
        """Log once when a list of revoked certificates has expired."""
        if not self._has_warned and self._has_expired(self.crl_expires_ns):
            self._has_warned = True
            _log.error(
                "a list of revoked certificates in %s has expired, and all client certificates of its CA are refused: "
                "give the newest of that CA", self._client_crl,
            )  # fmt: skip


def _context_of(pair: _Pair | None, cas: bytes | None, lists: bytes | None) -> _Context:
    """Make the context of new connections of what was read and checked. Raises OSError if memory or descriptors end."""
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    if pair is not None:
        _add_pair(context, pair.chain, pair.key)
    if cas is not None:
        context.load_verify_locations(cadata=cas.decode("ascii"))
        context.verify_mode = ssl.CERT_OPTIONAL
        if lists is not None:
            _add_lists(context, lists)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN
        context.trust = fingerprint_of(cas + b"\0" + (lists or b""))
    return context


def _read_pair(certificate: Path, key_path: Path) -> _Pair:
    """Read a certificate and its key. Raises FailedPrecondition, InvalidArgument."""
    chain = read_private(certificate, _CERTIFICATE)
    key = read_private(key_path, _KEY)
    der = _first_certificate(chain, certificate)
    try:
        _add_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), chain, key)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise FailedPrecondition(
            f"the certificate {certificate} and the key {key_path} cannot be used together "
            f"({_reason(error)}): give a PEM pair that belongs together, the key without a password"
        ) from None
    _, expires_ns = certificate_dates(der)
    return _Pair(chain, key, fingerprint_of(der), expires_ns)


def _read_cas(path: Path) -> bytes:
    """Read the CAs of a file. Raises FailedPrecondition, InvalidArgument."""
    text = read_private(path, _CLIENT_CA)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=text.decode("ascii"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{path} is no file of client CAs ({_reason(error)}); {_CLIENT_CA.remedy}"
        ) from None
    return text


def _add_pair(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    """Give a context a certificate and its key. Raises OSError, ValueError."""
    _give_file(
        chain + b"\n" + key, lambda path: context.load_cert_chain(path, password=_no_password)
    )


def _add_lists(context: ssl.SSLContext, lists: bytes) -> None:
    """Give a context lists of revoked certificates. Raises OSError."""
    _give_file(lists, lambda path: context.load_verify_locations(cafile=path))


def _no_password() -> str:
    raise ValueError("the key has a password")


def _give_file(content: bytes, load: Callable[[str], None]) -> None:
    """Let OpenSSL load a file in memory: what was read and checked, not what a file holds a moment later.

    Its descriptors may be of the reserve: a crowd of clients holds up no revocation. Raises OSError, ValueError.
    """

    def give() -> None:
        with os.fdopen(os.memfd_create("danube-fast-tls", os.MFD_CLOEXEC), "wb") as file:
            file.write(content)
            file.flush()
            load(f"/proc/self/fd/{file.fileno()}")

    from_reserve(give)


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
    return [*map(certificate_dates, certificates_in(pem)), *map(crl_dates, crls_in(pem))]


def _first_certificate(pem: bytes, path: Path) -> bytes:
    """Find the first certificate of a file, in DER. Raises InvalidArgument."""
    try:
        return certificates_in(pem)[0]
    except (InvalidArgument, IndexError):
        raise InvalidArgument(
            f"{path} holds no certificate in PEM; {_CERTIFICATE.remedy}"
        ) from None


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
