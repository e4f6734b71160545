"""Certificates of clients in the handshake: from which CAs they come, and which of them are revoked."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.security.certificates import NewCertificate, crl_dates, subject_of
from danube_fast.security.tls import ServerTls, client_context
from tests.security.authority import Authority, write_pem
from tests.security.test_tls import EchoServer, Looks, client_of, echoes, make, replace, tls_of

VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.fixture
def made(tmp_path: Path) -> NewCertificate:
    return make(tmp_path / "pair")


class Clients:
    """Connections of clients with certificates; one that is refused learns it at its first answer."""

    def __init__(
        self,
        echo: EchoServer,
        made: NewCertificate,
        version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    ) -> None:
        self._echo, self._made, self._version = echo, made, version

    def shown_by(self, own: NewCertificate) -> str:
        """The subject by which the server knows a client; empty: it was refused."""
        context = client_of(self._made, own)
        context.minimum_version = context.maximum_version = self._version
        try:
            with self._echo.connect(context) as connection:
                if not echoes(connection):
                    return ""
        except (ssl.SSLError, ConnectionError):
            return ""
        return subject_of(self._echo.peers[-1] or b"")


@pytest.mark.parametrize("version", VERSIONS, ids=repr)
def test_a_subject_comes_from_a_known_ca_only(
    made: NewCertificate, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Not from another CA of the same name, from a client that poses as a CA, from a server, from a self-made one."""
    from cryptography.x509.oid import ExtendedKeyUsageOID

    ca = Authority("CN=ca,O=Shop")
    orders = ca.issue(tmp_path / "orders", "CN=orders,O=Shop")
    ann = make(tmp_path / "ann", "ann")  # its own CA, as `new-certificate` makes it
    echo = EchoServer(
        tls_of(
            made,
            write_pem(tmp_path / "cas.pem", ca.pem, ann.certificate.read_bytes()),
        )
    )
    clients = Clients(echo, made, version)
    spoofs = {
        "other ca": Authority("CN=other").issue(tmp_path / "other", "CN=orders,O=Shop"),
        "same name": Authority("CN=ca,O=Shop").issue(tmp_path / "same", "CN=orders,O=Shop"),
        "client as ca": Authority(of=orders).issue(
            tmp_path / "leaf", "CN=admin,O=Shop", chain=orders.certificate.read_bytes()
        ),
        "trusted client as ca": Authority(of=ann).issue(
            tmp_path / "ann-leaf", "CN=orders,O=Shop", chain=ann.certificate.read_bytes()
        ),
        "self-made": make(tmp_path / "self", "orders"),
        "server": ca.issue(
            tmp_path / "server", "CN=orders,O=Shop", purpose=ExtendedKeyUsageOID.SERVER_AUTH
        ),
        "expired": ca.issue(tmp_path / "expired", "CN=orders,O=Shop", days=-1),
    }
    try:
        assert clients.shown_by(orders) == "CN=orders,O=Shop"
        assert clients.shown_by(ann) == "CN=ann"
        renewed = ca.issue(tmp_path / "renewed", "CN=orders,O=Shop")
        assert renewed.fingerprint != orders.fingerprint
        assert clients.shown_by(renewed) == "CN=orders,O=Shop"
        for what, spoof in spoofs.items():
            assert clients.shown_by(spoof) == "", what
        assert len(echo.peers) == 3
    finally:
        echo.close()


# ---------------------------------------------------------------- lists of revoked certificates


class Later:
    """A clock that is ahead."""

    seconds = 0

    def wall_ns(self) -> int:
        return SystemClock().wall_ns() + self.seconds * SECOND_NS

    def monotonic_ns(self) -> int:
        return self.seconds * SECOND_NS


class Revoking:
    """A server that looks at lists of two CAs, and clients of them."""

    def __init__(self, folder: Path, made: NewCertificate, version: ssl.TLSVersion) -> None:
        self.ca, self.other = Authority("CN=ca"), Authority("CN=other")
        self.mute = Authority("CN=mute", signs_lists=False)
        self.cas = write_pem(folder / "cas.pem", self.ca.pem, self.other.pem, self.mute.pem)
        self.crl = folder / "clients.crl"
        self.folder = folder
        self.write()
        self.echo = EchoServer(ServerTls(made.certificate, made.key, self.cas, self.crl))
        self.tls, self.looks = self.echo.tls, Looks(self.echo.tls)
        self._clients = Clients(self.echo, made, version)
        self._made = made

    def write(self, *parts: bytes) -> None:
        write_pem(self.crl, *(parts or (self.ca.crl(), self.other.crl())))

    def issue(self, name: str, ca: Authority | None = None) -> NewCertificate:
        return (ca or self.ca).issue(self.folder / name, f"CN={name}")

    def comes_in(self, own: NewCertificate) -> bool:
        return self._clients.shown_by(own) != ""

    def comes_in_without(self) -> bool:
        with self.echo.connect(client_context(self._made.fingerprint)) as connection:
            return echoes(connection)


@pytest.fixture(params=VERSIONS, ids=repr)
def revoking(made: NewCertificate, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Revoking]:  # fmt: skip
    rig = Revoking(tmp_path, made, request.param)
    yield rig
    rig.echo.close()


def test_a_revoked_certificate_is_refused_and_others_are_not(revoking: Revoking) -> None:
    ann, ben = revoking.issue("ann"), revoking.issue("ben")
    far = revoking.issue("far", revoking.other)
    assert revoking.comes_in(ann) and revoking.comes_in(ben) and revoking.comes_in(far)
    revoking.ca.revoke(ann)
    revoking.write()
    assert revoking.looks() and revoking.tls.reloads == 1
    assert not revoking.comes_in(ann)
    assert revoking.comes_in(ben) and revoking.comes_in(far) and revoking.comes_in_without()


def test_a_ca_without_a_list_lets_no_client_in(revoking: Revoking) -> None:
    near, far = revoking.issue("near"), revoking.issue("far", revoking.other)
    revoking.write(revoking.ca.crl())
    assert revoking.looks()
    assert revoking.comes_in(near) and not revoking.comes_in(far) and revoking.comes_in_without()


def test_certificates_in_a_file_of_lists_are_no_cas(revoking: Revoking) -> None:
    third = Authority("CN=third")
    own = third.issue(revoking.folder / "own", "CN=own")
    revoking.ca.revoke(revoking.issue("gone"))
    revoking.write(third.pem, revoking.ca.crl(), third.pem)
    assert revoking.looks()
    assert not revoking.comes_in(own) and revoking.comes_in(revoking.issue("near"))


def with_changed_end(crl: bytes) -> bytes:
    """A list whose signature was changed a little."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    der = bytearray(x509.load_pem_x509_crl(crl).public_bytes(Encoding.DER))
    der[-1] ^= 1
    return x509.load_der_x509_crl(bytes(der)).public_bytes(Encoding.PEM)


def damaged(rig: Revoking) -> dict[str, tuple[bytes, str]]:
    """Files that are not to be taken, and what is said of them."""
    from cryptography import x509

    crl, other = rig.ca.crl(), rig.other.crl()
    body = crl.splitlines()
    parts = x509.IssuingDistributionPoint(
        None, None, False, False, frozenset([x509.ReasonFlags.key_compromise]), False, False
    )
    return {
        "empty": (b"", "is empty, and should be a file of revoked client certificates"),
        "text": (b"hello", "not PEM"),
        "a certificate": (rig.ca.pem, "not PEM"),
        "DER": (ssl.PEM_cert_to_DER_cert(rig.ca.pem.decode()), "openssl crl -inform DER"),
        "cut": (crl[: len(crl) // 2], "cut short"),
        "second cut": (crl + crl[: len(crl) // 2], "cut short"),
        "first cut": (crl[: len(crl) // 2] + crl, "cut short"),
        "other bytes": (b"\n".join([body[0], b"AAAA" * 16, *body[2:]]), "revoked"),
        "of another key": (rig.ca.crl(signer=Authority()) + other, "'CN=ca' is not signed by this"),
        "of the other ca": (rig.ca.crl(signer=rig.other) + other, "'CN=ca' is not signed by this"),
        "of no ca": (crl + other + Authority("CN=evil").crl(), "'CN=evil' is of no CA of clients"),
        "of a ca that may not": (rig.mute.crl(), "'CN=mute' is not signed by this"),
        "changed": (with_changed_end(crl) + other, "'CN=ca' is not signed by this"),
        "changes": (crl + rig.ca.crl(extension=x509.DeltaCRLIndicator(1)), "a delta CRL"),
        "some reasons": (rig.ca.crl(extension=parts) + other, "is a part"),
        "expired": (rig.ca.crl(hours=-1) + other, "has expired already"),
        "of tomorrow": (rig.ca.crl(begin_days=-0.5) + other, "is not good yet"),
    }


def test_a_list_that_cannot_be_used_leaves_the_old_one_and_is_said_once(
    revoking: Revoking, caplog: pytest.LogCaptureFixture
) -> None:
    ann, ben = revoking.issue("ann"), revoking.issue("ben")
    revoking.ca.revoke(ann)
    revoking.write()
    assert revoking.looks()
    cases = damaged(revoking)
    for what, (content, said) in cases.items():
        revoking.write()
        assert revoking.looks() and not revoking.tls.fault
        caplog.clear()
        revoking.write(content)
        assert not revoking.looks(4), what
        assert said in revoking.tls.fault, (what, revoking.tls.fault)
        assert len(caplog.records) == 1, (what, caplog.text)
        assert not revoking.comes_in(ann) and revoking.comes_in(ben), what
    revoking.crl.unlink()
    assert not revoking.looks() and "there is no file of revoked" in revoking.tls.fault
    assert not revoking.comes_in(ann) and revoking.comes_in(ben)
    revoking.write()
    assert revoking.looks() and not revoking.tls.fault


def test_a_start_with_a_list_that_cannot_be_used_is_refused(
    made: NewCertificate, tmp_path: Path
) -> None:
    rig = Revoking(tmp_path, made, ssl.TLSVersion.TLSv1_3)
    rig.echo.close()
    for what, (content, said) in damaged(rig).items():
        if what in ("expired", "of tomorrow"):  # clients without a certificate come in
            continue
        rig.write(content)
        with pytest.raises(InvalidArgument, match=said):
            ServerTls(made.certificate, made.key, rig.cas, rig.crl)
    rig.write()
    rig.crl.chmod(0o646)
    with pytest.raises(FailedPrecondition, match="other users may write the file of revoked"):
        ServerTls(made.certificate, made.key, rig.cas, rig.crl)


def test_an_expired_list_lets_no_client_in_and_is_said_once(
    made: NewCertificate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker starts with it, as with an expired certificate: API keys and health go on."""
    rig = Revoking(tmp_path, made, ssl.TLSVersion.TLSv1_3)
    rig.echo.close()
    rig.write(rig.ca.crl(hours=-1), rig.other.crl())
    echo = EchoServer(tls_of(made, rig.cas, rig.crl))
    clients, looks = Clients(echo, made), Looks(echo.tls)
    near, far = rig.issue("near"), rig.issue("far", rig.other)
    try:
        assert 0 < echo.tls.crl_expires_ns < SystemClock().wall_ns()
        assert not looks(4) and not echo.tls.fault
        assert sum("has expired" in each.getMessage() for each in caplog.records) == 1
        assert not clients.shown_by(near) and clients.shown_by(far) == "CN=far"
        new = make(tmp_path / "new")
        replace(made, new)
        assert looks() and echo.tls.fingerprint == new.fingerprint, "it holds up nothing else"
        rig.write()
        assert looks() and Clients(echo, new).shown_by(near) == "CN=near"
    finally:
        echo.close()


def test_a_list_that_expires_in_use_is_said_once(
    made: NewCertificate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, ca = Later(), Authority()
    files = write_pem(tmp_path / "cas", ca.pem), write_pem(tmp_path / "crl", ca.crl(hours=2))
    looks = Looks(ServerTls(made.certificate, made.key, *files, clock=clock))
    looks(3)
    assert not caplog.records
    clock.seconds = 2 * 3600
    looks(3)
    assert len(caplog.records) == 1 and "give the newest of that CA" in caplog.text


def test_connections_that_have_proved_something_are_trusted_until_that_changes(
    made: NewCertificate, tmp_path: Path
) -> None:
    rig = Revoking(tmp_path, made, ssl.TLSVersion.TLSv1_3)
    rig.echo.close()
    changes: dict[str, tuple[Callable[[], object], bool]] = {
        "certificate": (lambda: replace(made, make(tmp_path / "new")), True),
        "crl": (lambda: (rig.ca.revoke(rig.issue("gone")), rig.write()), False),
        "ca": (lambda: shutil.copy2(write_pem(tmp_path / "x", rig.ca.pem), rig.cas), False),
    }
    clock = Later()
    tls = ServerTls(made.certificate, made.key, rig.cas, rig.crl, clock=clock)
    looks = Looks(tls)
    for what, (change, is_trusted) in changes.items():
        connection = tls.context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)
        assert tls.trusts(connection)
        change()
        clock.seconds += 1000
        assert tls.trusts(connection), what
        assert looks(), what
        assert tls.trusts(connection), "it has just come in"
        clock.seconds += 2
        assert tls.trusts(connection) == is_trusted, what


def test_the_dates_of_a_list_are_read(tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    ca = Authority()
    ca.revoke(*[ca.issue(tmp_path / str(number), "CN=x") for number in range(3)])
    for hours in (1, 24 * 365 * 30):
        read = x509.load_pem_x509_crl(ca.crl(hours=hours))
        der = read.public_bytes(Encoding.DER)
        assert read.next_update_utc is not None
        expected = (read.last_update_utc.timestamp(), read.next_update_utc.timestamp())
        assert crl_dates(der) == tuple(int(each) * SECOND_NS for each in expected)
        for cut in (b"", b"x", der[:30], bytes(100), b"\xff" * 100):
            with pytest.raises(InvalidArgument, match="fetch it again"):
                crl_dates(cut)
