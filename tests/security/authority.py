"""A CA of tests: certificates of clients with any subject, and lists of those that it has revoked."""

from __future__ import annotations

import datetime as dt
import itertools
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from danube_fast.security.certificates import NewCertificate, fingerprint_of

_numbers = itertools.count(1)
PEM = serialization.Encoding.PEM


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def name(text: str) -> x509.Name:
    return x509.Name.from_rfc4514_string(text)


class Authority:
    """Signs what it is asked to. An authority that is `of` a certificate signs with that one's key, one with a `parent` has
    its own certificate from there."""

    def __init__(
        self, subject: str = "CN=ca", of: NewCertificate | None = None, *, parent: Authority | None = None,
        signs_lists: bool = True,
    ) -> None:  # fmt: skip
        self.revoked: list[x509.Certificate] = []
        if of is not None:
            self.certificate = x509.load_pem_x509_certificate(of.certificate.read_bytes())
            key = serialization.load_pem_private_key(of.key.read_bytes(), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            self._key = key
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        own = name(subject)
        self.certificate = (
            self._builder(own, parent.certificate.subject if parent else own, self._key, 3650)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
            .add_extension(
                x509.KeyUsage(False, False, False, False, False, True, signs_lists, False, False),
                True,
            )
            .sign((parent or self)._key, hashes.SHA256())
        )

    @staticmethod
    def _builder(
        subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(next(_numbers))
            .not_valid_before(now() - dt.timedelta(days=400))
            .not_valid_after(now() + dt.timedelta(days=days))
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(PEM)

    def issue(
        self, folder: Path, subject: str | x509.Name, *, days: float = 30,
        purpose: x509.ObjectIdentifier = ExtendedKeyUsageOID.CLIENT_AUTH, chain: bytes = b"",
    ) -> NewCertificate:  # fmt: skip
        """A certificate of a client; `chain` stands behind it in its file."""
        key = ec.generate_private_key(ec.SECP256R1())
        titles = name(subject) if isinstance(subject, str) else subject
        made = (
            self._builder(titles, self.certificate.subject, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), False)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir()
        paths = folder / "tls.pem", folder / "tls.key"
        paths[0].write_bytes(made.public_bytes(PEM) + chain)
        paths[1].write_bytes(
            key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        paths[1].chmod(0o600)
        return NewCertificate(*paths, fingerprint_of(made.public_bytes(serialization.Encoding.DER)))

    def revoke(self, *revoked: NewCertificate | Authority) -> None:
        self.revoked += [
            each.certificate
            if isinstance(each, Authority)
            else x509.load_pem_x509_certificate(each.certificate.read_bytes())
            for each in revoked
        ]

    def crl(
        self, *, hours: float = 24, begin_days: float = 30, signer: Authority | None = None,
        extension: x509.ExtensionType | None = None, number: int | None = None,
    ) -> bytes:  # fmt: skip
        """The list of what was revoked, in PEM, good for so long; `signer`: whose key signs it in this one's name;
        `extension`: a critical one; `number`: the CRL number."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now() - dt.timedelta(days=begin_days))
            .next_update(now() + dt.timedelta(hours=hours))
        )
        if extension is not None:
            builder = builder.add_extension(extension, True)
        if number is not None:
            builder = builder.add_extension(x509.CRLNumber(number), False)
        for each in self.revoked:
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder()
                .serial_number(each.serial_number)
                .revocation_date(now() - dt.timedelta(days=1))
                .build()
            )
        return builder.sign((signer or self)._key, hashes.SHA256()).public_bytes(PEM)


def write_pem(path: Path, *parts: bytes) -> Path:
    """Write PEM in one step, as operators should."""
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(b"".join(parts))
    beside.rename(path)
    return path
