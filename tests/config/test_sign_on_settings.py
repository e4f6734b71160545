"""Settings of sign-on that could not be are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danube_fast.config import load_settings
from danube_fast.errors import InvalidArgument
from danube_fast.security.certificates import new_certificate
from danube_fast.workers.supervisor.spawn import processes_of
from tests.delivery.sign_on_rig import issuer_toml
from tests.workers.broker import Broker

GOOD = {"auth": "required", "sign_on": "127.0.0.1:0", "tls_certificate": "c", "tls_key": "k"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auth": "none"}, "set auth to required"),
        ({"tls_certificate": "", "tls_key": ""}, "only by HTTPS"),
        ({"sign_on": "6649"}, "HOST:PORT"),
        ({"sign_on": "", "tokens": "issuers.toml"}, "set sign_on"),
    ],
    ids=["no-auth", "no-tls", "no-port", "tokens-alone"],
)
def test_it_is_refused_with_what_to_do(changes: dict[str, Any], reason: str) -> None:
    assert load_settings(GOOD).settings.sign_on == "127.0.0.1:0"
    with pytest.raises(InvalidArgument, match=reason):
        load_settings({**GOOD, **changes})


def test_it_has_a_process_of_its_own_behind_the_others() -> None:
    settings = load_settings({**GOOD, "store": "file:///unused", "workers": 2}).settings
    processes = processes_of(settings)
    names = [processes.name(process) for process in range(len(processes))]
    assert names == ["coordinator", "worker-0", "worker-1", "uploader", "sign_on"]
    assert processes.uploader == 3 and processes.serving == [0, 1, 2]
    assert processes.starting == [0, 1, 2, 4], "not the uploader"
    alone = processes_of(load_settings({**GOOD, "workers": 1}).settings)
    assert alone.uploader is None and len(alone) == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [(issuer_toml(), "give one of jwks_url"), (None, "no file of trusted issuers")],
    ids=["wrong", "missing"],
)
def test_a_broker_with_a_wrong_file_of_issuers_does_not_start(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    made = new_certificate(tmp_path / "tls", ["127.0.0.1"])
    path = tmp_path / "issuers.toml"
    if text is not None:
        path.write_text(text)
        path.chmod(0o600)
    with Broker(
        tmp_path / "data", auth="required", sign_on="127.0.0.1:0", tokens=str(path),
        tls_certificate=str(made.certificate), tls_key=str(made.key),
    ) as broker:  # fmt: skip
        assert broker.process.wait(120) == 1
        assert reason in broker.error_text()
