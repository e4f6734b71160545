"""X.509 certificates: their fingerprints and dates, and new ones for a host that has no CA."""

from __future__ import annotations

import datetime as dt
import hashlib
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from danube_fast.clock import SECOND_NS, Clock, SystemClock
from danube_fast.durable import sync_directory
from danube_fast.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from danube_fast.security.private_files import write_new

__all__ = [
    "DAYS",
    "PIN_PREFIX",
    "NewCertificate",
    "certificate_dates",
    "fingerprint_of",
    "new_certificate",
]

PIN_PREFIX = "sha256:"
DAYS = 3650
"""Of a self-signed certificate."""
DAYS_MAX = 36_500
_READABLE = 0o644
_CLOCKS_DIFFER = dt.timedelta(hours=1)
"""A certificate is good from so long before now on."""
_VERSION, _UTC_TIME, _LONG = 0xA0, 0x17, 0x80
"""Of DER: the tag of a version, of a time with two digits of the year, the mark of a long length."""
_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?\Z")


def fingerprint_of(der: bytes) -> str:
    """Return `sha256:` and the digits of the SHA-256 of a certificate in DER."""
    return PIN_PREFIX + hashlib.sha256(der).hexdigest()


def certificate_dates(der: bytes) -> tuple[int, int]:
    """Return from when and until when a certificate in DER is good, wall clock in nanoseconds. Raises InvalidArgument."""
    try:
        certificate = _element(der, 0)
        signed = _element(der, certificate.start)
        at = signed.start
        if der[at] == _VERSION:
            at = _element(der, at).end
        for _ in range(3):  # serial number, algorithm, issuer
            at = _element(der, at).end
        begin = _element(der, _element(der, at).start)
        end = _element(der, begin.end)
        return _time(der, begin), _time(der, end)
    except (IndexError, ValueError):
        raise InvalidArgument(
            "the dates of a certificate cannot be read; make it anew, as X.509 version 3"
        ) from None


class _Element(NamedTuple):
    """Where the content of an element of DER is."""

    tag: int
    start: int
    end: int


def _element(der: bytes, at: int) -> _Element:
    """Find the element that begins there. Raises IndexError, ValueError."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & _LONG:
        count = length & ~_LONG
        length = int.from_bytes(der[start : start + count], "big")
        start += count
    if start + length > len(der):
        raise ValueError("behind the end")
    return _Element(tag, start, start + length)


def _time(der: bytes, element: _Element) -> int:
    """Read a time of a certificate, in nanoseconds. Raises ValueError."""
    text = der[element.start : element.end].decode("ascii")
    if element.tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        text = ("19" if text >= "5" else "20") + text
    read = dt.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=dt.UTC)
    return int(read.timestamp()) * SECOND_NS


class NewCertificate(NamedTuple):
    """Files of a new certificate, and what pins it."""

    certificate: Path
    key: Path
    fingerprint: str


def new_certificate(
    folder: Path, names: Sequence[str], days: int = DAYS, clock: Clock | None = None
) -> NewCertificate:
    """Make a self-signed certificate for host names and addresses, and its key (ECDSA, P-256), in `folder`.

    The files are `tls.pem` and `tls.key`, the key readable by its owner alone. Raises AlreadyExists, InvalidArgument,
    FailedPrecondition.
    """
    if not names or not 1 <= days <= DAYS_MAX:
        raise InvalidArgument(
            f"a certificate needs a name, and 1 to {DAYS_MAX} days; give the host names and addresses that clients use"
        )
    from ssl import PEM_cert_to_DER_cert  # all processes import this module, few use TLS

    certificate, key = _certificate_and_key(names, days, (clock or SystemClock()).wall_ns())
    paths = folder / "tls.pem", folder / "tls.key"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_new(paths[1], key)
        try:
            write_new(paths[0], certificate, _READABLE)
        except BaseException:
            paths[1].unlink()
            raise
        sync_directory(folder)
    except FileExistsError:
        raise AlreadyExists(
            f"{folder} holds a certificate or its key already, and neither is overwritten; give a new folder"
        ) from None
    except OSError as error:
        raise FailedPrecondition(
            f"cannot write a certificate to {folder}: {error}; make it writable for this user"
        ) from error
    return NewCertificate(*paths, fingerprint_of(PEM_cert_to_DER_cert(certificate.decode())))


def _certificate_and_key(names: Sequence[str], days: int, now_ns: int) -> tuple[bytes, bytes]:
    """Make them in PEM. Raises FailedPrecondition, InvalidArgument."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError as error:
        raise FailedPrecondition(
            "certificates are made by the package cryptography, which is not installed; run: pip install "
            "'danube-fast[security]'"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    begin = dt.datetime.fromtimestamp(now_ns // SECOND_NS, dt.UTC)
    try:
        titles = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0][:64])])
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = (
            x509.CertificateBuilder()
            .subject_name(titles)
            .issuer_name(titles)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin - _CLOCKS_DIFFER)
            .not_valid_after(begin + dt.timedelta(days=days))
            .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(
                x509.KeyUsage(True, False, False, False, False, False, False, False, False), True
            )
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                False,
            )
            .add_extension(own, False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), False
            )
        )
    except ValueError as error:
        raise InvalidArgument(
            f"a certificate cannot have these names ({error}); write host names in ASCII, or addresses"
        ) from None
    signed = builder.sign(key, hashes.SHA256())
    encoding = serialization.Encoding.PEM
    return signed.public_bytes(encoding), key.private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(text: str) -> Any:
    """Make a name of a certificate: an address or a host name. Raises ValueError."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not _HOST.match(text):
        raise ValueError(f"{text!a:.100} is no host name")
    return x509.DNSName(text)
