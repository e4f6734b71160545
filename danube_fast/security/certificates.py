"""X.509 certificates: their fingerprints, dates and subjects, when lists of revoked ones end, and new ones for a host
that has no CA."""

from __future__ import annotations

import datetime as dt
import hashlib
import ipaddress
import re
import warnings
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
    "canonical_subject",
    "certificate_dates",
    "check_package",
    "crl_dates",
    "crl_issuer_name",
    "fingerprint_of",
    "new_certificate",
    "subject_name",
    "subject_of",
]

PIN_PREFIX = "sha256:"
DAYS = 3650
"""Of a self-signed certificate."""
DAYS_MAX = 36_500
_READABLE = 0o644
_CLOCKS_DIFFER = dt.timedelta(hours=1)
"""A certificate is good from so long before now on."""
_VERSION, _INTEGER, _LONG = 0xA0, 0x02, 0x80
"""Of DER: the tags of a certificate's version and of a number, the mark of a long length."""
_VALIDITY, _SUBJECT = 3, 4
"""Places in `_certificate_fields`."""
_CRL_ISSUER = 1
"""Place in `_crl_fields`."""
_UTC_TIME = 0x17
_TIMES = _UTC_TIME, 0x18
"""Of DER: the tags of a time with two digits of the year, and with four."""
_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?\Z")


def fingerprint_of(der: bytes) -> str:
    """Return `sha256:` and the digits of the SHA-256 of a certificate in DER."""
    return PIN_PREFIX + hashlib.sha256(der).hexdigest()


def certificate_dates(der: bytes) -> tuple[int, int]:
    """Return from when and until when a certificate in DER is good, wall clock in nanoseconds. Raises InvalidArgument."""
    try:
        begin = _element(der, _certificate_fields(der)[_VALIDITY].start)
        end = _element(der, begin.end)
        return _time(der, begin), _time(der, end)
    except (IndexError, ValueError):
        raise InvalidArgument(
            "the dates of a certificate cannot be read; make it anew, as X.509 version 3"
        ) from None


def crl_dates(der: bytes) -> tuple[int, int]:
    """Return from when and until when a list of revoked certificates (CRL) in DER is good, wall clock in nanoseconds;
    until 0: for ever. Raises InvalidArgument.
    """
    try:
        _, _, begin, *rest = _crl_fields(der)
        end_ns = _time(der, rest[0]) if rest and rest[0].tag in _TIMES else 0
        return _time(der, begin), end_ns
    except (IndexError, ValueError):
        raise InvalidArgument(
            "the dates of a list of revoked certificates cannot be read; fetch it again from its CA"
        ) from None


def subject_name(der: bytes) -> bytes:
    """Return the subject of a certificate in DER, as it stands there. Raises InvalidArgument."""
    try:
        return _content(der, _certificate_fields(der)[_SUBJECT])
    except (IndexError, ValueError):
        raise InvalidArgument("a certificate cannot be read; make it anew") from None


def crl_issuer_name(der: bytes) -> bytes:
    """Return the name of the CA of a CRL in DER, as it stands there. Raises InvalidArgument."""
    try:
        return _content(der, _crl_fields(der)[_CRL_ISSUER])
    except (IndexError, ValueError):
        raise InvalidArgument("a CRL cannot be read; fetch it again from its CA") from None


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


def _fields(der: bytes) -> list[_Element]:
    """Find what is signed of a certificate or a CRL. Raises IndexError, ValueError."""
    signed = _element(der, _element(der, 0).start)
    found, at = [], signed.start
    while at < signed.end:
        found.append(_element(der, at))
        at = found[-1].end
    return found


def _certificate_fields(der: bytes) -> list[_Element]:
    """Serial number, algorithm, issuer, validity, subject, and more. Raises IndexError, ValueError."""
    found = _fields(der)
    return found[1:] if found[0].tag == _VERSION else found


def _crl_fields(der: bytes) -> list[_Element]:
    """Algorithm, issuer, begin, perhaps end, and more. Raises IndexError, ValueError."""
    found = _fields(der)
    return found[1:] if found[0].tag == _INTEGER else found


def _content(der: bytes, element: _Element) -> bytes:
    return der[element.start : element.end]


def _time(der: bytes, element: _Element) -> int:
    """Read a time of a certificate, in nanoseconds. Raises ValueError."""
    if element.tag not in _TIMES:
        raise ValueError("no time")
    text = _content(der, element).decode("ascii")
    if element.tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        text = ("19" if text >= "5" else "20") + text
    read = dt.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=dt.UTC)
    return int(read.timestamp()) * SECOND_NS


def subject_of(der: bytes) -> str:
    """Return the subject of a certificate in DER as `canonical_subject` writes it; empty: it has none that can be read.

    It is empty where the package cryptography is missing, too: no subject can be registered there.
    """
    try:
        from cryptography import x509
    except ImportError:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that are too long: no text stands for them
            return _subject_text(x509.load_der_x509_certificate(der).subject)
    except (ValueError, x509.InvalidVersion):
        return ""


def canonical_subject(text: str) -> str:
    """Write the subject of a certificate in the one form that is compared. Raises FailedPrecondition, InvalidArgument.

    The form is that of RFC 4514: the most specific part first, parts of one level in alphabetical order, no character
    escaped without need.
    """
    check_package()
    from cryptography import x509

    if not text:
        raise InvalidArgument(
            "an empty subject is that of no one: register the certificate itself, with --certificate-of FILE"
        )
    try:
        return _subject_text(x509.Name.from_rfc4514_string(text))
    except ValueError:
        raise InvalidArgument(
            f"{text!a:.300} is not the subject of a certificate: write it like CN=orders,O=Shop, without spaces between "
            "the parts, the other way round than `openssl x509 -subject` prints it; or give a certificate that has it, "
            "with --certificate-subject-of FILE"
        ) from None


def _subject_text(name: Any) -> str:
    """Write a Name of the package cryptography."""
    levels = (
        "+".join(sorted(part.rfc4514_string() for part in level)) for level in reversed(name.rdns)
    )
    return ",".join(levels)


def check_package() -> None:
    """Raise FailedPrecondition where the package cryptography is missing: it is an extra."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise FailedPrecondition(
            "certificates are made, their subjects read, and lists of revoked ones checked by the package cryptography, "
            "which is not installed; run: pip install 'danube-fast[security]'"
        ) from error


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
    check_package()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

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
