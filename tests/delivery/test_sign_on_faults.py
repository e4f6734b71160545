"""A process of sign-on that starts again while its files cannot be used: what it does without them, and how it is mended."""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.cli.exposure import records
from danube_fast.cli.host import Verdict
from danube_fast.clock import SystemClock
from danube_fast.errors import DanubeError
from danube_fast.security.api_keys import new_api_key
from danube_fast.security.curve import new_key_pair
from tests.delivery.sign_on_rig import IssuerKey, SignOnServer, issuer_toml
from tests.delivery.test_security import TOPIC
from tests.security.authority import write_pem
from tests.workers.broker import wait_until

BACK_SECONDS = 20.0
"""Five times what is promised behind a good file: the machine may be busy."""
WATCHED_SECONDS = 4.0
"""So long the process is looked at, which a loop of starts would end."""


class Faulty:
    """A broker with sign-on, a token and an API key of its users, and its process of sign-on."""

    def __init__(self, server: SignOnServer, key: IssuerKey) -> None:
        self.server, self.key = server, key
        server.make_ann()
        made = new_api_key()
        with server.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC)
            server.add(ann.admin, "pia", ("producer", TOPIC))
            ann.admin.add_api_key("pia", made.id, made.salt, made.digest)
        self.api_key = made.text

    def status(self) -> dict[str, Any]:
        with self.server.come_in("ann") as ann:
            return dict(ann.admin.cluster_status())

    def status_if_up(self) -> dict[str, Any]:
        """Status, or nothing while the coordinator starts."""
        try:
            return self.status()
        except DanubeError:
            return {}

    def findings(self) -> dict[str, Any]:
        with self.server.come_in("ann") as ann:
            status = ann.admin.cluster_status()
            found = records(ann, status, SystemClock().wall_ns())
            return {each.check: each for each in found}

    def answer(self, bearer: str) -> int:
        """Status of a sign-on with a new key; 0: there is no connection."""
        try:
            return self.server.sign_on(bearer, new_key_pair().public)[0]
        except OSError:
            return 0

    def token(self) -> str:
        return self.key.token(exp=time.time() + 300)

    def kill(self) -> None:
        """Kill the process of sign-on, and wait for the next one."""
        pid = self.server.pids()["sign_on"]
        os.kill(pid, signal.SIGKILL)
        wait_until("another process", lambda: self.server.pids()["sign_on"] not in (0, pid), 60)

    def check_that_it_lives(self) -> None:
        """Fail if it is started over and over."""
        pids, end = set(), time.monotonic() + WATCHED_SECONDS
        wait_until(
            "the end of a look at its pid",
            lambda: pids.add(self.server.pids()["sign_on"]) or time.monotonic() > end,
        )
        assert len(pids) == 1, f"it was started {len(pids)} times"

    def error_text(self) -> str:
        assert self.server.broker is not None
        return self.server.broker.error_text()


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Faulty]:
    key = IssuerKey()
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [key.jwk()]}))
    text = issuer_toml(jwks_file=str(tmp_path / "keys.json"))
    with SignOnServer(tmp_path / "data", tmp_path, text) as server:
        yield Faulty(server, key)


@pytest.mark.parametrize("also_killed", [False, True])
def test_without_a_file_of_issuers_api_keys_are_good_and_no_sign_on_ends(
    faulty: Faulty, also_killed: bool
) -> None:
    """With `also_killed` the coordinator is another one afterwards, which knows the sign-ons by what others tell."""
    server, path = faulty.server, faulty.server.folder / "issuers.toml"
    assert server.sign_on(faulty.token(), server.new_key("mine"))[0] == 200
    with server.come_in("mine") as client:
        producer = client.producer(TOPIC)
        sound = path.read_bytes()
        write_pem(path, b"[[issuer]\n")
        faulty.kill()
        wait_until("an API key that counts", lambda: faulty.answer(faulty.api_key) == 200, 60)
        if also_killed:
            os.kill(server.pids()["coordinator"], signal.SIGKILL)
            wait_until("another coordinator", lambda: faulty.answer(faulty.api_key) == 200, 60)
        assert faulty.answer(faulty.token()) == 503, "not refused for good: it may be a sound token"
        fault = wait_until("a report", lambda: faulty.status_if_up().get("issuers_fault"), 60)
        assert str(path) in fault and "no token counts until" in fault
        assert faulty.status()["sign_on_fault"] == ""
        found = faulty.findings()["trusted issuers"]
        assert found.verdict is Verdict.FAILURE and str(path) in found.seen
        faulty.check_that_it_lives()
        assert producer.publish(b"in still").offset >= 0
        with server.come_in("ann") as ann:
            assert "jwt:corp" in {row["source"] for row in ann.admin.list_sign_ons()}
        assert faulty.error_text().count("the file of trusted issuers is waited for") == 1
        write_pem(path, sound).chmod(0o644)
        began = time.monotonic()
        wait_until("a token that counts", lambda: faulty.answer(faulty.token()) == 200, 60)
        assert time.monotonic() - began < BACK_SECONDS
        wait_until("a report", lambda: faulty.status()["issuers_fault"] == "", BACK_SECONDS)
        assert producer.publish(b"in still").offset >= 1


def test_an_issuer_that_is_gone_from_the_first_good_file_ends_its_sign_ons(faulty: Faulty) -> None:
    server, path = faulty.server, faulty.server.folder / "issuers.toml"
    assert server.sign_on(faulty.token(), server.new_key("mine"))[0] == 200
    write_pem(path, b"[[issuer]\n")
    faulty.kill()
    wait_until("a report", lambda: faulty.status()["issuers_fault"], 60)
    write_pem(path, b"issuer = []\n").chmod(0o644)

    def sources() -> set[str]:
        with server.come_in("ann") as ann:
            return {row["source"] for row in ann.admin.list_sign_ons()}

    wait_until("the end of its sign-ons", lambda: "jwt:corp" not in sources(), BACK_SECONDS)


def test_without_a_tls_pair_its_port_waits_for_one(faulty: Faulty) -> None:
    path = faulty.server.certificate.key
    sound = path.read_bytes()
    write_pem(path, b"damaged").chmod(0o600)
    faulty.kill()
    fault = wait_until("a report", lambda: faulty.status()["sign_on_fault"], 60)
    assert str(path) in fault and "its port waits for a TLS pair" in fault
    with pytest.raises((ConnectionError, ssl.SSLEOFError)):  # what clients take for a pause
        faulty.server.sign_on(faulty.api_key, new_key_pair().public)
    found = faulty.findings()["sign-on"]
    assert found.verdict is Verdict.FAILURE and str(path) in found.seen
    with faulty.server.come_in("pia") as pia:
        assert pia.producer(TOPIC).publish(b"registered keys come in").offset == 0
    faulty.check_that_it_lives()
    assert faulty.error_text().count("the TLS pair is waited for") == 1
    write_pem(path, sound).chmod(0o600)
    began = time.monotonic()
    wait_until("its return", lambda: faulty.answer(faulty.api_key) == 200, 60)
    assert time.monotonic() - began < BACK_SECONDS
    wait_until("a report", lambda: faulty.status()["sign_on_fault"] == "", BACK_SECONDS)


@pytest.mark.parametrize("name", ["issuers.toml", "tls/tls.key"])
def test_a_first_start_with_such_a_file_is_refused(tmp_path: Path, name: str) -> None:
    server = SignOnServer(tmp_path / "data", tmp_path, issuer_toml(jwks_file="keys.json"))
    path = write_pem(tmp_path / name, b"[[issuer]\n")
    path.chmod(0o600)
    with server._broker() as broker:
        assert broker.process.wait(120) == 1
        assert str(path) in broker.error_text()
