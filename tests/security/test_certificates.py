"""Certificates that we make, and what is read of any."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import AlreadyExists, InvalidArgument
from danube_fast.security.certificates import (
    canonical_subject,
    certificate_dates,
    fingerprint_of,
    new_certificate,
    subject_of,
)
from danube_fast.security.records import Credential, check_record
from danube_fast.security.tls import read_certificate
from tests.security.authority import Authority
from tests.security.test_tls import DAY_NS, make


def test_a_new_certificate_has_private_files_and_dates(tmp_path: Path) -> None:
    before_ns = SystemClock().wall_ns()
    made = new_certificate(tmp_path / "new", ["broker.example", "*.example", "10.0.0.7", "::1"])
    assert made.key.stat().st_mode & 0o777 == 0o600
    assert made.certificate.stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path / "new")) == ["tls.key", "tls.pem"]
    der = ssl.PEM_cert_to_DER_cert(made.certificate.read_text())
    assert fingerprint_of(der) == made.fingerprint
    begin_ns, end_ns = certificate_dates(der)
    assert begin_ns < before_ns
    assert abs(end_ns - before_ns - 3650 * DAY_NS) < 60 * SECOND_NS
    from cryptography import x509

    read = x509.load_der_x509_certificate(der)
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["broker.example", "*.example"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "::1"]
    assert not read.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize("days", [1, 9000, 36_500])
def test_dates_are_read_in_both_forms(tmp_path: Path, days: int) -> None:
    """Two digits of the year up to 2049, four from then on."""
    from cryptography import x509

    made = make(tmp_path / "new", days=days)
    der = ssl.PEM_cert_to_DER_cert(made.certificate.read_text())
    read = x509.load_der_x509_certificate(der)
    expected = (read.not_valid_before_utc.timestamp(), read.not_valid_after_utc.timestamp())
    assert certificate_dates(der) == tuple(int(each) * SECOND_NS for each in expected)


def test_what_is_no_certificate_has_no_dates(tmp_path: Path) -> None:
    der = ssl.PEM_cert_to_DER_cert(make(tmp_path / "new").certificate.read_text())
    for damaged in (b"", b"x", b"\x30\x82", der[:40], bytes(100), b"\xff" * 100, der[:4] * 50):
        with pytest.raises(InvalidArgument):
            certificate_dates(damaged)


def test_a_pair_is_never_overwritten(tmp_path: Path) -> None:
    made = make(tmp_path / "new")
    before = made.key.read_bytes(), made.certificate.read_bytes()
    with pytest.raises(AlreadyExists, match="neither is overwritten"):
        make(tmp_path / "new")
    made.key.unlink()
    with pytest.raises(AlreadyExists):
        make(tmp_path / "new")
    assert os.listdir(tmp_path / "new") == ["tls.pem"]
    assert made.certificate.read_bytes() == before[1]


@pytest.mark.parametrize("names", [[], [""], ["a b"], ["h\u00f6st"], ["*"], ["x" * 254]], ids=ascii)
def test_what_is_no_host_name_is_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        new_certificate(tmp_path / "new", names)
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------- subjects


SUBJECTS = {
    "CN=orders,O=Shop": "CN=orders,O=Shop",
    "OU=b+CN=a,O=Shop": "CN=a+OU=b,O=Shop",
    r"CN=a\,O\=Shop": r"CN=a\,O=Shop",
    r"CN=a\2Cb\+c\;\<\>\"\\": r"CN=a\,b\+c\;\<\>\"\\",
    r"CN=\ a\ ,O=\#1": r"CN=\ a\ ,O=\#1",
    r"CN=a\00.evil": r"CN=a\00.evil",
    r"CN=\C3\A4,O=Köln": "CN=ä,O=Köln",
    "2.5.4.3=a,1.2.840.113549.1.9.1=a@b": "CN=a,1.2.840.113549.1.9.1=a@b",
    "CN=订单,C=DE": "CN=订单,C=DE",
    "CN=a,CN=b": "CN=a,CN=b",
    "O=": "O=",
}
"""As written -> as compared."""


@pytest.mark.parametrize(("text", "form"), SUBJECTS.items(), ids=ascii)
def test_a_subject_is_compared_in_one_form(tmp_path: Path, text: str, form: str) -> None:
    assert canonical_subject(text) == form == canonical_subject(form)
    made = Authority().issue(tmp_path / "own", text)
    assert subject_of(read_certificate(made.certificate)) == form
    check_record(Credential(f"mtls:{form}", "ann"))


def test_subjects_that_differ_have_forms_that_differ(tmp_path: Path) -> None:
    """No writing of one subject reads as another: order, level, case, escapes, blanks, look-alikes."""
    texts = [
        "CN=orders,O=Shop", "O=Shop,CN=orders", "CN=orders+O=Shop", r"CN=orders\,O\=Shop", "CN=Orders,O=Shop",
        "CN=orders", "CN=orders,O=Shop,C=DE", "CN=оrders,O=Shop", r"CN=orders\00,O=Shop", "CN=orders,OU=Shop",
        r"CN=orders\ ,O=Shop", "CN=orders,CN=orders,O=Shop", "CN=é", "CN=e\u0301",
    ]  # fmt: skip
    ca = Authority()
    forms = [
        subject_of(read_certificate(ca.issue(tmp_path / str(at), text).certificate))
        for at, text in enumerate(texts)
    ]
    assert len(set(forms)) == len(texts), forms


def test_types_of_strings_do_not_make_another_subject(tmp_path: Path) -> None:
    """A renewed certificate may have other ones."""
    from cryptography import x509
    from cryptography.x509.name import _ASN1Type

    ca = Authority()
    for kind in (_ASN1Type.UTF8String, _ASN1Type.PrintableString, _ASN1Type.BMPString):
        part = x509.NameAttribute(x509.NameOID.COMMON_NAME, "orders", kind)
        made = ca.issue(tmp_path / kind.name, x509.Name([part]))
        assert subject_of(read_certificate(made.certificate)) == "CN=orders", kind


def test_what_has_no_subject_proves_none(tmp_path: Path) -> None:
    made = Authority().issue(tmp_path / "empty", "")
    der = read_certificate(made.certificate)
    assert subject_of(der) == ""
    for damaged in (b"", b"x", der[:40], der[:-1], bytes(100)):
        assert subject_of(damaged) == ""


@pytest.mark.parametrize(
    "text",
    [
        "", "orders", "CN", "=orders", "CN=orders, O=Shop", " CN=orders", "CN=orders ", "O = Shop, CN = orders",
        "CN=a,", ",CN=a", "CN=a+CN=a", "CN=", "C=Germany", f"CN={'x' * 65}", "cn=orders", r"CN=\zz", r"CN=\ff",
        "/O=Shop/CN=orders", "emailAddress=a@b",
    ],
    ids=ascii,
)  # fmt: skip
def test_what_is_no_subject_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--certificate"):
        canonical_subject(text)
