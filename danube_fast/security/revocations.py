"""Lists of revoked certificates (CRL) of the CAs of clients: read from PEM, and good only if these CAs have signed them.

    file --PEM--> each list --issuer is a CA of clients, may sign lists, has signed it; complete--> RevokedLists
                            '-----------------------------------------------------------------> InvalidArgument

Of one CA the newest list of a file counts, and `check_not_older` compares it with those that were in use: an older one knows
less, and would let in who has been revoked since. OpenSSL looks a certificate up in them. It would take any list, and refuse all clients of a CA whose list is not good.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
import ssl
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.security.audit import shown_time
from danube_fast.security.certificates import (
    check_package,
    crl_dates,
    crl_issuer_name,
    subject_name,
)
from danube_fast.security.private_files import PrivateFile, read_private

__all__ = [
    "CRL_FILE",
    "RevokedList",
    "RevokedLists",
    "Scope",
    "cas_without_list",
    "certificates_in",
    "check_lists",
    "check_not_older",
    "crls_in",
    "read_lists",
    "told_without_list",
]

_log = logging.getLogger(__name__)

CRL_FILE = PrivateFile(
    noun="file of revoked client certificates",
    remedy="give a PEM file with the CRL of each CA of clients (`openssl crl -inform DER` makes PEM of DER)",
    others=stat.S_IWOTH,
    mode_remedy="chmod o-w",
    bytes_max=32 << 20,
)
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_PEM_CRL_BEGIN, _PEM_CRL_END = b"-----BEGIN X509 CRL-----", b"-----END X509 CRL-----"
_PEM_CRL = re.compile(_PEM_CRL_BEGIN + rb"(.+?)" + _PEM_CRL_END, re.DOTALL)


Scope = tuple[bytes, bytes, bytes]
"""Name and public key of a CA, and for which of its certificates a list is, as the list says it; empty: for all."""


@dataclass(frozen=True)
class RevokedList:
    """One of a CA, in DER."""

    der: bytes
    ca: str
    """Its name, for people."""
    scope: Scope
    number: int | None
    """That of its CA, which counts them; None: that does not."""
    begin_ns: int
    """From when it is good, wall clock."""
    end_ns: int
    """Until when; 0: for ever."""

    def is_older_than(self, other: RevokedList) -> bool:
        """Whether its CA has made it before another one of the same scope."""
        if self.number is not None and other.number is not None:
            return (self.number, self.begin_ns) < (other.number, other.begin_ns)
        return self.begin_ns < other.begin_ns


@dataclass(frozen=True)
class RevokedLists:
    """Of one file."""

    pem: bytes
    """The lists alone, written anew: a certificate beside them would be a CA."""
    newest: dict[Scope, RevokedList]
    """Those in `pem`: of each scope the newest."""


def read_lists(path: Path, cas: bytes) -> RevokedLists:
    """Read the lists of a file, each signed by a CA of the text `cas` in PEM.

    Raises FailedPrecondition, InvalidArgument.
    """
    text = read_private(path, CRL_FILE)
    try:
        found = len(_PEM_CRL.findall(text))
        if not found or found != text.count(_PEM_CRL_BEGIN):
            raise InvalidArgument("not PEM, or cut short")
        newest: dict[Scope, RevokedList] = {}
        for each in check_lists(crls_in(text), cas):
            before = newest.get(each.scope)
            if before is None or before.is_older_than(each):
                newest[each.scope] = each
    except InvalidArgument as error:
        raise InvalidArgument(
            f"{path} is no {CRL_FILE.noun} ({error}); {CRL_FILE.remedy}"
        ) from None
    return RevokedLists(b"".join(_pem_of(each.der) for each in newest.values()), newest)


def check_not_older(
    lists: Iterable[RevokedList], before: Mapping[Scope, RevokedList], path: Path
) -> None:
    """Return if none of a file is older than the one of its scope `before`. Raises FailedPrecondition."""
    for each in lists:
        known = before.get(each.scope)
        if known is None or not each.is_older_than(known):
            continue
        raise FailedPrecondition(
            f"the list of revoked certificates of {each.ca} in {path} is older than the one that was in use: it "
            f"has {_issue_of(each)}, and that one had {_issue_of(known)}; give the newest of that CA"
        )


def _issue_of(each: RevokedList) -> str:
    """Say which one of its CA it is."""
    number = "" if each.number is None else f"number {each.number} and "
    return f"{number}the time {shown_time(each.begin_ns)}"


def _pem_of(der: bytes) -> bytes:
    """Write a list in PEM: two readers of one text may find different lists in it, and OpenSSL is to use what was checked."""
    return _PEM_CRL_BEGIN + b"\n" + base64.encodebytes(der) + _PEM_CRL_END + b"\n"


def check_lists(ders: list[bytes], cas: bytes) -> list[RevokedList]:
    """Read lists in DER if each can be used: it is a whole one, of a CA of the text `cas` in PEM, and signed by it.

    Raises InvalidArgument; FailedPrecondition where the package cryptography is missing.
    """
    check_package()
    known: dict[bytes, list[bytes]] = {}
    for ca in certificates_in(cas):
        known.setdefault(subject_name(ca), []).append(ca)  # a CA with a new key keeps its name
    return [_checked(der, known.get(crl_issuer_name(der), [])) for der in ders]


def _checked(der: bytes, issuers: list[bytes]) -> RevokedList:
    """Check one of them; `issuers`: the CAs of its name. Raises InvalidArgument."""
    from cryptography import x509

    try:
        crl = x509.load_der_x509_crl(der)
        name = f"{crl.issuer.rfc4514_string()!a:.300}"
        is_whole, (number, parts) = _is_whole(crl), _number_and_parts(crl)
    except (ValueError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):  # fmt: skip
        raise InvalidArgument("a list of revoked certificates in it cannot be read") from None
    if not issuers:
        raise InvalidArgument(f"its list of {name} is of no CA of clients")
    key = next(filter(None, (_key_behind(ca, crl) for ca in issuers)), None)
    if key is None:
        raise InvalidArgument(
            f"its list in the name of {name} is not signed by this CA, or this CA may sign no lists"
        )
    if not is_whole:
        raise InvalidArgument(f"its list of {name} is a part, as a delta CRL is, not a whole one")
    return RevokedList(der, name, (crl_issuer_name(der), key, parts), number, *crl_dates(der))


def _number_and_parts(crl: Any) -> tuple[int | None, bytes]:
    """Find the number of a list, and what it says about the certificates that it is for. Raises ValueError."""
    from cryptography import x509

    number, parts = None, b""
    for each in crl.extensions:
        if isinstance(each.value, x509.CRLNumber):
            number = int(each.value.crl_number)
        elif isinstance(each.value, x509.IssuingDistributionPoint):
            parts = each.value.public_bytes()
    return number, parts


def _key_behind(der: bytes, crl: Any) -> bytes | None:
    """Return the public key of a CA, in DER, if it has signed a list, and its certificate lets it do so."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    try:
        ca = x509.load_der_x509_certificate(der)
        usage = [each.value for each in ca.extensions if isinstance(each.value, x509.KeyUsage)]
        may_sign = all(each.crl_sign for each in usage)
        key = ca.public_key()
        if not may_sign or not crl.is_signature_valid(key):
            return None
        return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    except (
        ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
    ):  # fmt: skip
        return None  # OpenSSL could not use it either


def _is_whole(crl: Any) -> bool:
    """Whether OpenSSL uses a list by itself: not one of changes, of some reasons, of other CAs, or of a kind to come."""
    from cryptography import x509

    for each in crl.extensions:
        if isinstance(each.value, x509.IssuingDistributionPoint):
            if each.value.indirect_crl or each.value.only_some_reasons:
                return False
        elif each.critical:
            return False
    return True


def cas_without_list(cas: bytes, crls: bytes) -> int:
    """Return how many CAs of a text in PEM have no CRL in another one. Raises InvalidArgument for damaged ones."""
    listed = {crl_issuer_name(der) for der in crls_in(crls)}
    return sum(subject_name(der) not in listed for der in certificates_in(cas))


def told_without_list(cas: bytes | None, lists: bytes | None, path: Path | None) -> int:
    """Return how many CAs in use have no CRL in use, and log it; `path`: where the lists are from. None: there are none."""
    count = cas_without_list(cas, lists) if cas is not None and lists is not None else 0
    if count:
        _log.error(
            "%d of the CAs of clients have no list of revoked certificates in %s, and all their clients are refused: add "
            "the list of each, or take the CA out", count, path,
        )  # fmt: skip
    return count


def certificates_in(pem: bytes) -> list[bytes]:
    """Find all certificates, in DER. Raises InvalidArgument."""
    try:
        return [ssl.PEM_cert_to_DER_cert(each.decode("ascii")) for each in _PEM.findall(pem)]
    except ValueError as error:
        raise InvalidArgument(f"that is damaged PEM ({error}); write the file anew") from None


def crls_in(pem: bytes) -> list[bytes]:
    """Find all CRLs, in DER. Raises InvalidArgument."""
    try:
        return [binascii.a2b_base64(each) for each in _PEM_CRL.findall(pem)]
    except ValueError as error:
        raise InvalidArgument(f"that is damaged PEM ({error}); write the file anew") from None
