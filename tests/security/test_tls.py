"""TLS of servers and clients: what is trusted, what is refused, and certificates that change under open connections."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from danube_fast.security.certificates import NewCertificate, new_certificate
from danube_fast.security.tls import ServerTls, check_fingerprint, client_context, fingerprint_of

WAIT_SECONDS = 30
DAY_NS = 24 * 3600 * SECOND_NS


class At:
    """A clock that stands still."""

    def __init__(self, wall_ns: int) -> None:
        self._wall_ns = wall_ns

    def wall_ns(self) -> int:
        return self._wall_ns

    def monotonic_ns(self) -> int:
        return 0


def make(folder: Path, *names: str, days: int = 30, ago_days: int = 0) -> NewCertificate:
    now_ns = SystemClock().wall_ns() - ago_days * DAY_NS
    return new_certificate(folder, names or ("localhost", "127.0.0.1"), days, At(now_ns))


def tls_of(
    made: NewCertificate, client_ca: Path | None = None, client_crl: Path | None = None
) -> ServerTls:
    return ServerTls(made.certificate, made.key, client_ca, client_crl)


class EchoServer:
    """Answers each connection with what it says, over TLS, in threads."""

    def __init__(self, tls: ServerTls) -> None:
        self.tls = tls
        self.peers: list[bytes | None] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        connection.settimeout(WAIT_SECONDS)
        with (
            contextlib.suppress(OSError),
            connection,
            self.tls.context.wrap_socket(connection, server_side=True) as secure,
        ):
            self.peers.append(secure.getpeercert(binary_form=True))
            while data := secure.recv(1024):
                secure.sendall(data)

    def connect(self, context: ssl.SSLContext, name: str = "localhost") -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), WAIT_SECONDS)
        try:
            return context.wrap_socket(plain, server_hostname=name)
        except BaseException:
            plain.close()
            raise

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_SECONDS)


@pytest.fixture
def made(tmp_path: Path) -> NewCertificate:
    return make(tmp_path / "pair")


@pytest.fixture
def server(made: NewCertificate) -> Iterator[EchoServer]:
    echo = EchoServer(tls_of(made))
    yield echo
    echo.close()


def echoes(connection: ssl.SSLSocket) -> bool:
    connection.sendall(b"ping")
    return connection.recv(16) == b"ping"


# ---------------------------------------------------------------- what a client trusts


def test_a_certificate_is_trusted_as_a_ca_and_as_a_pin(
    server: EchoServer, made: NewCertificate
) -> None:
    upper = made.fingerprint.removeprefix("sha256:").upper()
    spaced = ":".join(upper[at : at + 2] for at in range(0, 64, 2))
    for tls in (
        str(made.certificate), made.fingerprint, f"sha256:{spaced}", f"sha256:{'0' * 64},{made.fingerprint}",
        f"sha256:{'0' * 64}, {upper}",
    ):  # fmt: skip
        with server.connect(client_context(tls)) as connection:
            assert echoes(connection), tls
            assert connection.version() == "TLSv1.3"


def test_strict_checks_of_newer_versions_of_python_accept_it(
    server: EchoServer, made: NewCertificate
) -> None:
    context = client_context(str(made.certificate))
    context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    for name in ("localhost", "127.0.0.1"):
        with server.connect(context, name) as connection:
            assert echoes(connection)


def test_other_servers_are_refused(
    server: EchoServer, made: NewCertificate, tmp_path: Path
) -> None:
    other = make(tmp_path / "other")
    cases = {
        "": "localhost",  # the system's CAs
        str(other.certificate): "localhost",
        other.fingerprint: "localhost",
        str(made.certificate): "example.com",
    }
    for tls, name in cases.items():
        with pytest.raises(ssl.SSLCertVerificationError):
            server.connect(client_context(tls), name)


def test_an_expired_certificate_is_refused_by_a_ca(tmp_path: Path) -> None:
    made = make(tmp_path / "old", days=1, ago_days=3)
    echo = EchoServer(tls_of(made))
    try:
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            echo.connect(client_context(str(made.certificate)))
        assert echo.tls.expires_ns < SystemClock().wall_ns()
    finally:
        echo.close()


def test_old_versions_of_tls_are_refused(server: EchoServer, made: NewCertificate) -> None:
    context = client_context(made.fingerprint)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        server.connect(context)
    context.maximum_version = context.minimum_version = ssl.TLSVersion.TLSv1_2
    with server.connect(context) as connection:
        assert echoes(connection)
        cipher = connection.cipher()
        assert cipher is not None and cipher[0].startswith("ECDHE-")
    context.set_ciphers("AES128-SHA:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        server.connect(context)


def test_a_pin_is_checked_in_event_loops_too(
    server: EchoServer, made: NewCertificate, tmp_path: Path
) -> None:
    other = make(tmp_path / "other")

    async def connect(tls: str) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=client_context(tls), server_hostname="localhost"
            )
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
            writer.close()
            await writer.wait_closed()

    asyncio.run(connect(made.fingerprint))
    with pytest.raises(ssl.SSLCertVerificationError, match="pinned") as caught:
        asyncio.run(connect(other.fingerprint))
    assert str(caught.value) == caught.value.verify_message, "a sentence, no tuple"


@pytest.mark.parametrize(
    "text", ["sha256:", "sha256:12", "sha256:" + "g" * 64, "sha256:,", "sha256:" + "0" * 65]
)
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="64 digits"):
        client_context(text)
    with pytest.raises(InvalidArgument, match="64 digits"):
        check_fingerprint(b"x", text)


def test_a_fingerprint_is_checked_alone() -> None:
    check_fingerprint(b"x", fingerprint_of(b"x"))
    for der in (b"", b"y"):
        with pytest.raises(PermissionDenied, match="another certificate"):
            check_fingerprint(der, fingerprint_of(b"x"))


def test_what_is_no_ca_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="cannot read the CA file"):
        client_context(str(tmp_path / "missing.pem"))
    (tmp_path / "text.pem").write_text("hello")
    with pytest.raises(InvalidArgument, match="holds no certificates"):
        client_context(str(tmp_path / "text.pem"))


# ---------------------------------------------------------------- files of a server


def test_a_key_that_others_read_is_refused(made: NewCertificate) -> None:
    for mode in (0o644, 0o660, 0o604, 0o641):
        made.key.chmod(mode)
        with pytest.raises(FailedPrecondition, match=rf"TLS key file .*{mode:04o}.*chmod 640"):
            tls_of(made)
    for mode in (0o600, 0o400, 0o640, 0o440):
        made.key.chmod(mode)
        tls_of(made)
    made.certificate.chmod(0o646)
    with pytest.raises(FailedPrecondition, match="other users may write the certificate file"):
        tls_of(made)


def test_files_that_are_no_pair_are_refused_and_not_quoted(
    made: NewCertificate, tmp_path: Path
) -> None:
    other = make(tmp_path / "other")
    key = made.key.read_text()
    with pytest.raises(FailedPrecondition, match=r"cannot be used together.*mismatch"):
        ServerTls(made.certificate, other.key)
    with pytest.raises(FailedPrecondition, match="there is no TLS key file"):
        ServerTls(made.certificate, tmp_path / "missing")
    with pytest.raises(InvalidArgument, match="holds no certificate"):
        ServerTls(made.key, made.key)
    for text in ("hello", key[: len(key) // 2], "-----BEGIN PRIVATE KEY-----\n!\n-----END PRIVATE KEY-----\n"):  # fmt: skip
        made.key.write_text(text)
        with pytest.raises(FailedPrecondition, match="cannot be used together") as caught:
            tls_of(made)
        assert key.splitlines()[1] not in str(caught.value)
        assert caught.value.__cause__ is None


def test_a_key_with_a_password_is_refused_without_a_question(made: NewCertificate) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(made.key.read_bytes(), None)
    made.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    with pytest.raises(FailedPrecondition, match="without a password"):
        tls_of(made)


def test_a_file_of_client_cas_without_one_is_refused(made: NewCertificate, tmp_path: Path) -> None:
    path = tmp_path / "cas.pem"
    for text in ("hello", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match="no file of client CAs"):
            tls_of(made, path)


# ---------------------------------------------------------------- certificates that change


def replace(made: NewCertificate, by: NewCertificate) -> None:
    """Put another pair in the place of one, file by file, each by a rename."""
    for old, new in ((made.certificate, by.certificate), (made.key, by.key)):
        beside = old.with_name(f".{old.name}")
        shutil.copy2(new, beside)
        beside.rename(old)


class Looks:
    """A server's looks at its files, a second apart."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls, self._now_ns = tls, 0

    def __call__(self, times: int = 3) -> bool:
        found = False
        for _ in range(times):
            self._now_ns += SECOND_NS
            found = self._tls.refresh(self._now_ns) or found
        return found


def test_a_new_pair_is_taken_and_open_connections_go_on(
    server: EchoServer, made: NewCertificate, tmp_path: Path
) -> None:
    looks, tls = Looks(server.tls), server.tls
    assert not looks(3)
    with server.connect(client_context(made.fingerprint)) as old:
        assert echoes(old)
        new = make(tmp_path / "new")
        replace(made, new)
        assert looks() and tls.reloads == 1 and tls.fingerprint == new.fingerprint
        with server.connect(client_context(new.fingerprint)) as connection:
            assert echoes(connection)
        with pytest.raises(ssl.SSLCertVerificationError):
            server.connect(client_context(made.fingerprint))
        assert echoes(old), "an open connection has ended"
    assert not looks(3)


def test_a_damaged_pair_is_not_taken_and_said_once(
    server: EchoServer, made: NewCertificate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looks, tls = Looks(server.tls), server.tls
    before = made.fingerprint
    other = make(tmp_path / "other")
    sound = made.key.read_bytes()
    shutil.copy2(other.key, made.key)
    assert not looks(5)
    assert tls.fingerprint == before and "cannot be used together" in tls.fault
    assert len(caplog.records) == 1, caplog.text
    with server.connect(client_context(before)) as connection:
        assert echoes(connection)
    made.key.unlink()
    assert not looks(5)
    assert "there is no TLS key file" in tls.fault and len(caplog.records) == 2
    assert sound.splitlines()[1].decode() not in caplog.text
    new = make(tmp_path / "new")
    replace(made, new)
    assert looks() and tls.fault == "" and tls.fingerprint == new.fingerprint


def test_a_pair_that_is_being_written_is_not_taken(
    server: EchoServer, made: NewCertificate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looks = Looks(server.tls)
    new = make(tmp_path / "new")
    shutil.copy2(new.certificate, made.certificate)
    assert not looks(1)
    shutil.copy2(new.key, made.key)
    assert not looks(1)
    assert not server.tls.fault and not caplog.records
    assert looks(1)


def test_links_that_are_switched_are_followed(tmp_path: Path) -> None:
    """As orchestrators mount secrets: a link to a folder is replaced."""
    first, second = make(tmp_path / "1"), make(tmp_path / "2")
    link = tmp_path / "now"
    link.symlink_to(first.certificate.parent)
    tls = ServerTls(link / "tls.pem", link / "tls.key")
    looks = Looks(tls)
    beside = tmp_path / "next"
    beside.symlink_to(second.certificate.parent)
    beside.rename(link)
    assert looks() and tls.fingerprint == second.fingerprint


def client_of(server_certificate: NewCertificate, own: NewCertificate) -> ssl.SSLContext:
    context = client_context(server_certificate.fingerprint)
    context.load_cert_chain(own.certificate, own.key)
    return context


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=repr)
def test_client_certificates_are_asked_for_and_their_cas_change(
    made: NewCertificate, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    ann, ben = make(tmp_path / "ann", "ann"), make(tmp_path / "ben", "ben")
    old = make(tmp_path / "old", "old", days=1, ago_days=3)
    cas = tmp_path / "cas.pem"
    cas.write_bytes(ann.certificate.read_bytes() + old.certificate.read_bytes())
    echo = EchoServer(tls_of(made, cas))
    looks = Looks(echo.tls)

    def comes_in(own: NewCertificate, session: ssl.SSLSession | None = None) -> bool:
        context = contexts.setdefault(own.fingerprint, client_of(made, own))
        context.minimum_version = context.maximum_version = version
        try:
            with echo.connect(context) as connection:
                return echoes(connection) and connection.session_reused is False
        except (ssl.SSLError, ConnectionError):
            return False

    contexts: dict[str, ssl.SSLContext] = {}
    try:
        with echo.connect(client_context(made.fingerprint)) as connection:
            assert echoes(connection) and echo.peers == [None]
        assert comes_in(ann)
        assert echo.peers[-1] is not None and fingerprint_of(echo.peers[-1]) == ann.fingerprint
        assert not comes_in(ben) and not comes_in(old)
        shutil.copy2(ben.certificate, cas)
        assert looks()
        assert comes_in(ben) and not comes_in(ann)
    finally:
        echo.close()


def test_a_session_is_not_resumed_behind_a_change_of_cas(
    made: NewCertificate, tmp_path: Path
) -> None:
    ann, ben = make(tmp_path / "ann", "ann"), make(tmp_path / "ben", "ben")
    cas = tmp_path / "cas.pem"
    shutil.copy2(ann.certificate, cas)
    echo = EchoServer(tls_of(made, cas))
    context = client_of(made, ann)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        with echo.connect(context) as connection:
            assert echoes(connection)
            session = connection.session
        shutil.copy2(ben.certificate, cas)
        assert Looks(echo.tls)()
        with (
            pytest.raises((ssl.SSLError, ConnectionError)),
            socket.create_connection(("127.0.0.1", echo.port), WAIT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as again,
        ):
            echoes(again)
    finally:
        echo.close()
