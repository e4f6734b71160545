"""Revoked CAs between a client and its root, and files of a server that change one by one, each with a fault of its own."""

from __future__ import annotations

import contextlib
import os
import resource
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

import danube_fast.security.tls as module
from danube_fast.descriptors import descriptor_limit, keep_reserve
from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.security.certificates import NewCertificate
from danube_fast.security.tls import ServerTls
from tests.security.authority import Authority, write_pem
from tests.security.test_client_certificates import VERSIONS, Clients, Later
from tests.security.test_tls import WAIT_SECONDS, EchoServer, Looks, make, replace
from tests.workers.broker import ROOT


class Chained:
    """A server, a root CA, CAs below it that sign clients, and the lists of all."""

    def __init__(self, folder: Path, version: ssl.TLSVersion) -> None:
        self.folder, self.cas, self.crl = folder, folder / "cas.pem", folder / "clients.crl"
        self.root = Authority("CN=root")
        self.shop = Authority("CN=shop", parent=self.root)
        self.bank = Authority("CN=bank", parent=self.root)
        self.deep = Authority("CN=deep", parent=self.shop)
        self.all = self.root, self.shop, self.bank, self.deep
        self.write_cas(*self.all)
        self.write_lists(*self.all)
        self.made = make(folder / "pair")
        self.clock = Later()
        self.tls = ServerTls(
            self.made.certificate, self.made.key, self.cas, self.crl, clock=self.clock
        )
        self.looks = Looks(self.tls)
        self.echo = EchoServer(self.tls)
        self._version = version
        self.shopper = self.issue("shopper", self.shop)
        self.banker = self.issue("banker", self.bank)
        self.diver = self.issue("diver", self.deep, self.shop)
        self.direct = self.issue("direct", self.root)

    def write_cas(self, *cas: Authority) -> None:
        write_pem(self.cas, *[each.pem for each in cas])

    def write_lists(self, *cas: Authority) -> None:
        write_pem(self.crl, *[each.crl() for each in cas])

    def issue(self, name: str, *cas: Authority) -> NewCertificate:
        """A client of the first; it shows those between."""
        chain = b"".join(each.pem for each in cas if each is not self.root)
        return cas[0].issue(self.folder / name, f"CN={name}", chain=chain)

    def inside(self) -> set[str]:
        """Which clients come in."""
        clients = Clients(self.echo, self.made, self._version)
        shown = map(clients.shown_by, (self.shopper, self.banker, self.diver, self.direct))
        return {each.removeprefix("CN=") for each in shown if each}


@pytest.fixture(params=VERSIONS, ids=repr)
def chained(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Chained]:
    rig = Chained(tmp_path, request.param)
    yield rig
    rig.echo.close()


ALL = {"shopper", "banker", "diver", "direct"}


# ---------------------------------------------------------------- chains


def test_clients_below_a_revoked_ca_are_refused_and_no_others(chained: Chained) -> None:
    assert chained.inside() == ALL
    chained.shop.revoke(chained.deep)
    chained.write_lists(*chained.all)
    assert chained.looks() and chained.inside() == ALL - {"diver"}
    chained.root.revoke(chained.shop)
    chained.write_lists(*chained.all)
    assert chained.looks() and chained.inside() == {"banker", "direct"}


def test_each_ca_of_a_chain_needs_a_list(chained: Chained) -> None:
    """Else one could be revoked, and no list would say so."""
    for missing, inside in (
        (chained.root, set()),
        (chained.shop, {"banker", "direct"}),
        (chained.deep, ALL - {"diver"}),
    ):
        chained.write_lists(*[each for each in chained.all if each is not missing])
        assert chained.looks() and not chained.tls.fault
        assert chained.inside() == inside, missing.certificate.subject


def test_a_list_of_a_ca_between_counts_when_that_ca_is_a_known_one(chained: Chained) -> None:
    chained.write_cas(chained.root, chained.shop, chained.bank)
    assert chained.looks() and "'CN=deep' is of no CA of clients" in chained.tls.fault
    chained.write_lists(chained.root, chained.shop, chained.bank)
    assert chained.looks() and not chained.tls.fault
    assert chained.inside() == ALL - {"diver"}
    chained.write_lists(*chained.all)
    assert not chained.looks() and "'CN=deep' is of no CA of clients" in chained.tls.fault
    chained.write_cas(*chained.all)
    assert chained.looks() and not chained.tls.fault and chained.inside() == ALL


def test_a_connection_below_a_ca_that_is_revoked_later_is_not_trusted(chained: Chained) -> None:
    connection = chained.tls.context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)
    chained.root.revoke(chained.shop)
    chained.write_lists(*chained.all)
    chained.clock.seconds = 1000
    assert chained.tls.trusts(connection)
    assert chained.looks() and chained.tls.trusts(connection), "it has just come in"
    chained.clock.seconds += 2
    assert not chained.tls.trusts(connection)


# ---------------------------------------------------------------- lists that may not go back


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        ({"number": 8, "begin_days": 20}, {"number": 7, "begin_days": 10}),
        ({"number": 8, "begin_days": 20}, {"number": 8, "begin_days": 21}),
        ({"begin_days": 20}, {"begin_days": 21}),
        ({"number": 1, "begin_days": 20}, {"begin_days": 21}),
        ({"begin_days": 20}, {"number": 9, "begin_days": 21}),
    ],
    ids=["number", "same-number", "date", "new-has-no-number", "old-has-no-number"],
)  # fmt: skip
def test_an_older_list_does_not_replace_a_newer_one(
    chained: Chained, caplog: pytest.LogCaptureFixture, newer: dict[str, Any], older: dict[str, Any]
) -> None:
    others = b"".join(each.crl() for each in chained.all if each is not chained.shop)
    replayed = chained.shop.crl(**older)
    chained.shop.revoke(chained.shopper)
    newest = chained.shop.crl(**newer)
    write_pem(chained.crl, others, newest)
    assert chained.looks() and not chained.tls.fault and chained.inside() == ALL - {"shopper"}
    caplog.clear()
    write_pem(chained.crl, others, replayed)
    assert not chained.looks(4) and chained.inside() == ALL - {"shopper"}
    assert "'CN=shop'" in chained.tls.fault and str(chained.crl) in chained.tls.fault
    assert "is older than the one that was in use" in chained.tls.fault
    assert len([each for each in caplog.records if each.levelname == "ERROR"]) == 1, "said once"
    write_pem(chained.crl, others, newest)
    assert not chained.looks(4) and not chained.tls.fault
    write_pem(chained.crl, others)
    assert chained.looks() and not chained.tls.fault, "without a list none come in"
    assert chained.inside() == {"banker", "direct"}
    write_pem(chained.crl, others, replayed)
    assert not chained.looks(4) and "is older than" in chained.tls.fault, "nor by a way round"
    write_pem(chained.crl, others, replayed, newest, replayed)
    assert chained.looks() and not chained.tls.fault, "of one CA the newest counts"
    assert chained.inside() == ALL - {"shopper"}


def test_another_ca_counts_for_itself(chained: Chained) -> None:
    """One with the same name and another key, too; and of one CA each kind of lists, as the list says it."""
    write_pem(chained.crl, *[each.crl(number=50) for each in chained.all])
    assert chained.looks()
    again = Authority("CN=root")
    chained.write_cas(*chained.all, again)
    others = b"".join(each.crl(number=50) for each in chained.all)
    write_pem(chained.crl, others, again.crl(number=3, begin_days=35))
    assert chained.looks() and not chained.tls.fault and chained.inside() == ALL
    kinds = [_list_for(users=True), _list_for(users=False)]
    numbers = [(3, 35), (4, 34)]
    for kind in kinds:
        parts = [
            each.crl(number=number, begin_days=days, extension=kind)
            for each in chained.all
            for number, days in numbers
        ]
        write_pem(chained.crl, others, *parts)
        assert chained.looks() and not chained.tls.fault, kind
    part = chained.root.crl(number=3, begin_days=35, extension=kinds[0])
    write_pem(chained.crl, others, part)
    assert not chained.looks(4) and "number 3 and " in chained.tls.fault
    assert "that one had number 4 and " in chained.tls.fault


def _list_for(*, users: bool) -> x509.IssuingDistributionPoint:
    """Say that a list is for the certificates of users alone, or for those of CAs."""
    return x509.IssuingDistributionPoint(
        full_name=None, relative_name=None, only_contains_user_certs=users,
        only_contains_ca_certs=not users, only_some_reasons=None, indirect_crl=False,
        only_contains_attribute_certs=False,
    )  # fmt: skip


# ---------------------------------------------------------------- files that change one by one


def test_a_ca_that_is_taken_away_counts_no_more_though_its_list_is_left(
    chained: Chained, caplog: pytest.LogCaptureFixture
) -> None:
    other = Authority("CN=other")
    chained.write_cas(*chained.all, other)
    assert chained.looks()
    chained.write_lists(*chained.all, other)
    assert chained.looks() and not chained.tls.fault
    stranger = other.issue(chained.folder / "stranger", "CN=stranger")
    clients = Clients(chained.echo, chained.made)
    assert clients.shown_by(stranger)
    chained.write_cas(*chained.all)
    caplog.clear()
    assert chained.looks()
    assert not clients.shown_by(stranger) and chained.inside() == ALL
    assert not chained.looks(4)
    said = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert len(said) == 1 and str(chained.crl) in said[0] and "'CN=other'" in said[0]
    assert str(chained.crl) in chained.tls.fault
    with pytest.raises(InvalidArgument, match="'CN=other' is of no CA of clients"):
        ServerTls(chained.made.certificate, chained.made.key, chained.cas, chained.crl)
    chained.write_cas(*chained.all, other)
    assert chained.looks() and not chained.tls.fault and clients.shown_by(stranger)


def test_openssl_gets_the_list_that_was_checked(chained: Chained) -> None:
    """And no other one, whatever else stands in its block: headers, a second list."""
    chained.shop.revoke(chained.shopper)
    signed = chained.shop.crl().splitlines()
    others = b"".join(each.crl() for each in chained.all if each is not chained.shop)
    forged = Authority("CN=shop").crl().splitlines()
    block = b"\n".join([*signed[:-1], *forged[1:]])
    write_pem(chained.crl, others, b"# of the shop\n", block, b"\n# end")
    if chained.looks():
        assert chained.inside() == ALL - {"shopper"}
    else:
        assert "cannot be read" in chained.tls.fault and chained.inside() == ALL
    write_pem(chained.crl, others, b"\r\n".join(signed))
    assert chained.looks() or chained.tls.reloads == 1
    assert not chained.tls.fault and chained.inside() == ALL - {"shopper"}


def test_a_ca_with_a_new_key_keeps_its_name(chained: Chained) -> None:
    again = Authority("CN=root")
    chained.write_cas(*chained.all, again)
    write_pem(chained.crl, *[each.crl() for each in chained.all[1:]], again.crl())
    assert chained.looks() and not chained.tls.fault
    chained.write_cas(*chained.all)
    assert chained.looks() and "'CN=root' is not signed by this CA" in chained.tls.fault
    assert chained.inside() == set(), "the list in use is not signed by this root"


def test_a_damaged_file_holds_up_no_other(chained: Chained) -> None:
    tls, key = chained.tls, chained.made.key.read_bytes()
    write_pem(chained.made.key, b"damaged").chmod(0o600)
    chained.root.revoke(chained.shop)
    chained.write_lists(*chained.all)
    assert chained.looks(), "a revocation waits for a sound key"
    assert str(chained.made.key) in tls.fault and chained.inside() == {"banker", "direct"}
    write_pem(chained.crl, Authority("CN=evil").crl())
    write_pem(chained.cas, b"damaged")
    assert not chained.looks(4) and chained.inside() == {"banker", "direct"}
    for path in (chained.made.key, chained.cas, chained.crl):
        assert str(path) in tls.fault, tls.fault
    write_pem(chained.made.key, key).chmod(0o600)
    new = make(chained.folder / "new")
    replace(chained.made, new)
    assert chained.looks() and tls.fingerprint == new.fingerprint, "a certificate waits for a list"
    assert str(chained.made.key) not in tls.fault
    chained.write_cas(*chained.all)
    chained.write_lists(*chained.all)
    chained.looks()
    assert not tls.fault


def test_a_file_that_is_only_touched_changes_nothing(chained: Chained) -> None:
    for path in (chained.made.certificate, chained.cas, chained.crl):
        write_pem(path, path.read_bytes())
    assert not chained.looks(4) and chained.tls.reloads == 0 and not chained.tls.fault


def test_a_list_of_tomorrow_is_taken_tomorrow(chained: Chained) -> None:
    """Clocks differ by seconds."""
    write_pem(chained.crl, *[each.crl(begin_days=-0.5) for each in chained.all])
    assert not chained.looks(4) and "is not good yet" in chained.tls.fault
    assert chained.inside() == ALL
    chained.clock.seconds = 13 * 3600
    assert chained.looks() and not chained.tls.fault


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("name", ["cas.pem", "clients.crl", "pair/tls.pem", "pair/tls.key"])
@pytest.mark.parametrize(
    ("put", "said"),
    [
        (put_fifo, "is not a file"), (put_folder, "is not a file"), (put_loop, "cannot read"), (Path.unlink, "there is no"),
        (lambda path: path.chmod(0o606), "other users may"), (lambda path: path.write_bytes(b""), "is empty"),
    ],
    ids=["fifo", "folder", "loop", "gone", "mode", "empty"],
)  # fmt: skip
def test_what_is_no_file_leaves_the_old_one_in_use(
    tmp_path: Path, name: str, put: Callable[[Path], None], said: str
) -> None:
    rig = Chained(tmp_path, ssl.TLSVersion.TLSv1_3)
    try:
        put(tmp_path / name)
        assert not rig.looks(4)
        assert said in rig.tls.fault and str(tmp_path / name) in rig.tls.fault, rig.tls.fault
        assert rig.inside() == ALL
        with pytest.raises((InvalidArgument, FailedPrecondition), match=said):
            ServerTls(rig.made.certificate, rig.made.key, rig.cas, rig.crl)
    finally:
        rig.echo.close()


def test_a_switched_folder_changes_cas_and_lists_at_once(tmp_path: Path) -> None:
    """As Kubernetes mounts them: files are links through `..data`, which is a link to the newest folder."""
    made, old, new = make(tmp_path / "pair"), Authority("CN=old"), Authority("CN=new")
    volume = tmp_path / "volume"
    for number, ca in enumerate((old, new)):
        (volume / f"..{number}").mkdir(parents=True)
        write_pem(volume / f"..{number}" / "cas.pem", ca.pem)
        write_pem(volume / f"..{number}" / "clients.crl", ca.crl())
    (volume / "..data").symlink_to("..0")
    for name in ("cas.pem", "clients.crl"):
        (volume / name).symlink_to(f"..data/{name}")
    tls = ServerTls(made.certificate, made.key, volume / "cas.pem", volume / "clients.crl")
    looks, echo = Looks(tls), EchoServer(tls)
    clients = Clients(echo, made)
    ann, ben = old.issue(tmp_path / "ann", "CN=ann"), new.issue(tmp_path / "ben", "CN=ben")
    try:
        assert clients.shown_by(ann) and not clients.shown_by(ben)
        (volume / "..tmp").symlink_to("..1")
        (volume / "..tmp").rename(volume / "..data")
        assert looks() and tls.reloads == 1 and not tls.fault
        assert not clients.shown_by(ann) and clients.shown_by(ben)
    finally:
        echo.close()


def test_a_file_that_grows_is_not_taken_before_it_is_whole(chained: Chained) -> None:
    """Written in place, not renamed: a look between two writes sees a change, and waits for the next."""
    chained.root.revoke(chained.shop)
    whole = b"".join(each.crl() for each in chained.all)
    with chained.crl.open("wb", buffering=0) as file:
        for at in range(0, len(whole), 300):
            file.write(whole[at : at + 300])
            assert not chained.looks(1) and not chained.tls.fault
    assert chained.looks(2) and not chained.tls.fault and chained.inside() == {"banker", "direct"}


def revoke_without_descriptors(folder: str) -> str:
    """In a process of its own: a revocation while none is left but the reserve."""
    rig = Chained(Path(folder), ssl.TLSVersion.TLSv1_3)
    rig.root.revoke(rig.shop)
    rig.write_lists(*rig.all)
    new = make(rig.folder / "new")
    replace(rig.made, new)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256), min(hard, 256)))
    keep_reserve()
    limit, taken = descriptor_limit(), []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    is_in_use = rig.looks() and rig.tls.fingerprint == new.fingerprint
    fault, is_kept = rig.tls.fault, descriptor_limit() == limit
    for fd in taken:
        os.close(fd)
    rig.made = new
    inside = sorted(rig.inside())
    rig.echo.close()
    return f"{is_in_use} {is_kept} {inside} {fault}"


def test_clients_that_take_all_descriptors_hold_up_no_revocation(tmp_path: Path) -> None:
    script = (
        "import sys; from tests.security.test_revocations import revoke_without_descriptors as f; "
        "print(f(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, timeout=WAIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "True True ['banker', 'direct']", (done.stdout, done.stderr)


def test_a_shortage_of_descriptors_is_no_end(
    chained: Chained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read is in use as soon as a context can be made of it."""
    chained.root.revoke(chained.shop)
    chained.write_lists(*chained.all)
    made = module._context_of
    monkeypatch.setattr(module, "_context_of", _no_descriptor)
    with pytest.raises(OSError, match="Too many"):
        chained.looks()
    assert chained.inside() == ALL
    monkeypatch.setattr(module, "_context_of", made)
    assert chained.looks(1) and chained.inside() == {"banker", "direct"}


def _no_descriptor(*_: object) -> None:
    raise OSError(24, "Too many open files")


def test_a_server_without_the_package_says_what_to_install(
    chained: Chained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsigned lists would be taken else."""
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(FailedPrecondition, match=r"pip install 'danube-fast\[security\]'"):
        ServerTls(chained.made.certificate, chained.made.key, chained.cas, chained.crl)
    ServerTls(chained.made.certificate, chained.made.key, chained.cas)
