"""Certificates that we make, and what is read of any."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import AlreadyExists, InvalidArgument
from danube_fast.security.certificates import certificate_dates, fingerprint_of, new_certificate
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
