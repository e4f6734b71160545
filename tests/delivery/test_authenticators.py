"""A secured broker with an authenticator of another package, over real processes: who signs on by it, and its faults."""

from __future__ import annotations

import http.client
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import danube_fast
from danube_fast.errors import PermissionDenied
from danube_fast.security.api_keys import new_api_key
from danube_fast.security.curve import new_key_pair
from danube_fast.security.question_threads import ANSWER_SECONDS, THREADS_OF_ONE_MAX
from danube_fast.security.tls import client_context
from tests.delivery.sign_on_rig import SignOnServer
from tests.delivery.test_security import FELT_SECONDS, TOPIC, refused
from tests.security.rules import install_logins
from tests.workers.broker import Broker, wait_until

STOP_SECONDS = 10.0
"""A stop takes a second; the supervisor kills what has not stopped behind 21 s."""


class LoginServer(SignOnServer):
    """A broker with the authenticator `logins`, and users of it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        install_logins(folder / "packages")
        self.asked = folder / "asked"
        super().__init__(
            folder / "data", folder, authenticator=f"logins:{self.asked}", packages=str(folder / "packages"),
            **changes,
        )  # fmt: skip

    def __enter__(self) -> Any:
        super().__enter__()
        self.make_ann()
        with self.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC)
            self.add(ann.admin, "pia", ("producer", TOPIC))
            ann.admin.set_principal("disabled", disabled=True)
            ann.admin.set_binding("auditors", "group:auditors", "consumer", TOPIC)
            ann.admin.set_binding("guests", "group:ldap.guests", "producer", TOPIC)
        return self

    def signed_on(self, token: Any, **options: Any) -> Any:
        """A client that signs on with a secret."""
        return danube_fast.connect(
            self.url, token=token, sign_on=self.sign_on_url, tls=self.certificate.fingerprint, transport="zmq",
            timeout=20.0, **options,
        )  # fmt: skip

    def status_of(self, secret: str) -> int:
        """Status of a sign-on with a new key."""
        return self.sign_on(secret, new_key_pair().public)[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LoginServer]:
    with LoginServer(tmp_path) as made:
        yield made
        assert made.broker is not None
        made.broker.check_errors()


def check_ready(url: str, tls: str) -> None:
    """Fail unless /readyz says that the broker is up."""
    parts = urlsplit(url)
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port, timeout=30, context=client_context(tls)
    )
    try:
        connection.request("GET", "/readyz")
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def denied_sign_ons(server: LoginServer, count: int) -> list[dict[str, Any]]:
    """Records of the audit log, once there are so many."""
    with server.come_in("ann") as ann:

        def found() -> list[dict[str, Any]]:
            rows = [row for row in ann.admin.list_audit() if row["action"] == "sign_on"]
            return rows if len(rows) >= count else []

        return wait_until(f"{count} records of refused sign-ons", found, 30)


def test_a_client_signs_on_by_it(server: LoginServer) -> None:
    with server.come_in("ann") as ann:
        status = ann.admin.cluster_status()
    (row,) = (each for each in status["processes"] if each["process"] == "sign_on")
    assert status["sign_on"] == urlsplit(server.sign_on_url).netloc
    assert row["port"] == urlsplit(server.sign_on_url).port
    with server.signed_on("user:pia") as plain, server.signed_on("user:pia+auditors") as grouped:
        assert plain.producer(TOPIC).publish(b"in").offset == 0
        consumer = grouped.consumer(TOPIC, subscription="s", initial_position="earliest")
        assert consumer.receive(timeout=20).payload == b"in"
        refused(lambda: plain.consumer(TOPIC, subscription="s"))  # same user, other secret
        with server.come_in("ann") as ann:
            rows = ann.admin.list_sign_ons()
            assert {(row["principal"], row["source"]) for row in rows} == {
                ("pia", "authenticator:logins")
            }
            assert ann.admin.end_sign_ons(source="authenticator:logins") == {"ended": 2}
            ann.admin.set_principal("pia", disabled=True)

            def is_out() -> bool:
                try:
                    plain.producer(TOPIC).publish(b"out")
                except PermissionDenied:
                    return True
                return False

            wait_until("the end of a disabled user's session", is_out, FELT_SECONDS)
    assert server.status_of("user:pia") == 403


def test_who_may_not_come_in_is_refused_and_audited_without_secrets(server: LoginServer) -> None:
    secrets = {
        "user:nick": 403, "user:disabled": 403, "user:bootstrap-admin": 401, "user:a/b": 401,
        "no:geheim": 401, "strange:geheim": 401, "odd:past": 401, "odd:many": 401,
    }  # fmt: skip
    for secret, status in secrets.items():
        assert server.status_of(secret) == status, secret
    with pytest.raises(PermissionDenied, match="not accepted"):
        server.signed_on("strange:geheim")
    rows = denied_sign_ons(server, len(secrets))
    assert {row["address"] for row in rows} == {"127.0.0.1"}
    seen = {row["resource"] for row in rows}
    assert {
        "authenticator logins: it knows no such secret",
        "authenticator logins: ... is locked out",
        "authenticator logins: it names a reserved user",
        "authenticator logins: it claims more than 256 groups",
    } < seen
    assert {"nick", "disabled"} <= {row.get("principal") for row in rows}
    assert server.broker is not None
    assert "geheim" not in f"{rows}{server.broker.error_text()}"


def test_a_user_without_a_record_needs_the_setting(tmp_path: Path) -> None:
    with LoginServer(
        tmp_path, authenticator_prefix="ldap.", authenticator_unregistered=True
    ) as server:
        with server.signed_on("user:guest+guests") as client:
            assert client.producer(TOPIC).publish(b"in").offset == 0
        with server.come_in("ann") as ann:
            names = {row["principal"] for row in ann.admin.list_sign_ons()}
            assert names == {"ldap.guest"}
            ann.admin.set_principal("ldap.guest", disabled=True)
        assert server.status_of("user:guest+guests") == 403
        with server.signed_on("user:pia") as other:  # not the user of that name
            refused(lambda: other.producer(TOPIC).publish(b"no"))


def test_faults_and_hanging_answers_leave_the_others_alone(server: LoginServer) -> None:
    made = new_api_key()
    with server.come_in("ann") as ann:
        ann.admin.add_api_key("pia", made.id, made.salt, made.digest)
    pid = server.pids()["sign_on"]
    for secret in ("fault:geheim", "leave:geheim", "down:geheim", "garbage:list"):
        status, answer = server.sign_on(secret, new_key_pair().public)
        assert (status, answer["code"]) == (503, "Unavailable"), secret
        assert "geheim" not in str(answer)
    with ThreadPoolExecutor(THREADS_OF_ONE_MAX) as pool:
        hanging = [pool.submit(server.status_of, "hang:pia") for _ in range(THREADS_OF_ONE_MAX)]
        wait_until(
            "all threads of an address at it",
            lambda: server.asked.read_text().count("hang") == THREADS_OF_ONE_MAX,
            20,
        )
        began = time.monotonic()
        assert server.status_of(made.text) == 200, "an API key waits for an authenticator"
        assert time.monotonic() - began < ANSWER_SECONDS, "an API key has waited for it"
        assert {each.result(60) for each in hanging} == {503}
    assert server.status_of("user:pia") == 503, "no thread is free for this address"
    assert server.status_of(made.text) == 200
    assert server.pids()["sign_on"] == pid, "the process was killed"
    with server.come_in("ann") as ann:

        def lost(count: int) -> bool:
            status = ann.admin.cluster_status()
            (row,) = (each for each in status["processes"] if each["process"] == "sign_on")
            assert not row["fault"] or "authenticator" in row["fault"]
            told = row["fault"].startswith(f"{count} threads") if count else not row["fault"]
            return told and status["counters"]["threads_lost"] == count

        wait_until("the threads in the status", lambda: lost(THREADS_OF_ONE_MAX), 20)
        Path(f"{server.asked}.go").touch()
        wait_until("free threads", lambda: server.status_of("user:pia") == 200, 30)
        wait_until("a status without them", lambda: lost(0), 20)
    assert server.broker is not None
    log = server.broker.error_text()
    assert "the authenticator logins failed: ZeroDivisionError at house_logins.py" in log
    assert "geheim" not in log


def test_threads_that_hang_for_ever_do_not_hold_up_the_stop(server: LoginServer) -> None:
    assert server.status_of("hang:pia") == 503
    began = time.monotonic()
    broker = server.broker
    assert broker is not None
    assert broker.stop() == 0
    assert time.monotonic() - began < STOP_SECONDS
    assert "did not stop" not in broker.error_text()


def test_renewals_faults_and_a_kill_leave_a_client_in(server: LoginServer) -> None:
    drawn = []

    def token() -> str:
        drawn.append(1)
        return "fault:geheim" if len(drawn) == 2 else "ends:12+pia"

    with server.signed_on(token) as client:
        producer = client.producer(TOPIC, name="p")
        producer.publish(b"before")

        def is_tried_again() -> bool:
            producer.publish(b"on")
            return len(drawn) >= 3

        wait_until("a renewal behind one that failed", is_tried_again, 60)
        pid = server.pids()["sign_on"]
        os.kill(pid, signal.SIGKILL)
        wait_until("another process of sign-on", lambda: server.pids()["sign_on"] != pid)
        count = len(drawn)

        def is_renewed() -> bool:
            producer.publish(b"on")
            return len(drawn) >= count + 2

        wait_until("two renewals", is_renewed, 60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unknown", "no installed package has an authenticator 'unknown'"),
        (
            "broken:ldap://user:geheim@host",
            "house_logins:broken of another package, which cannot be loaded: OSError: no directory for ...@...; repair it",
        ),
        ("gone", "which cannot be loaded: ModuleNotFoundError: No module named 'house_logins_gone'"),
        ("leaving:geheim", "which cannot be loaded: SystemExit: ...; repair it"),
        ("nothing:", "gives no object with authenticate(secret, address)"),
        ("hanging:geheim", "house_logins:hanging of the package house-logins, which has not been made within 6 s"),
    ],
)  # fmt: skip
def test_one_that_cannot_be_had_refuses_the_start(tmp_path: Path, text: str, words: str) -> None:
    server = LoginServer(tmp_path)
    server.changes |= {"authenticator": text, "worker_start_timeout_ms": 12_000}
    with server._broker() as broker:
        assert broker.process.wait(120) == 1
        said = broker.error_text()
    assert words in said
    assert "geheim" not in said and "Traceback" not in said
    if text != "unknown":
        assert "sign_on ended with 1 before it was ready" in said


def test_one_that_fails_later_is_reported_and_harms_no_registered_key(tmp_path: Path) -> None:
    server = LoginServer(tmp_path)
    server.changes["authenticator"] = f"kept:{server.asked}"
    bad = Path(f"{server.asked}.broken")
    with server:
        broker: Broker | None = server.broker
        assert broker is not None
        assert server.status_of("user:pia") == 200

        def status() -> dict[str, Any]:
            with server.come_in("ann") as ann:
                return dict(ann.admin.cluster_status())

        def delays() -> list[int]:
            found = re.findall(
                r"sign_on ended with 1; it starts again in (\d+) ms", broker.error_text()
            )
            return [int(each) for each in found]

        assert status()["sign_on_fault"] == ""
        bad.touch()
        os.kill(server.pids()["sign_on"], signal.SIGKILL)
        fault = wait_until("a report", lambda: status()["sign_on_fault"], 60)
        assert (
            "authenticator kept" in fault and "ConnectionError: no directory behind ...;" in fault
        )
        (row,) = [row for row in status()["processes"] if row["process"] == "sign_on"]
        assert row["state"] != "ready"
        wait_until("three restarts", lambda: len(delays()) >= 3, 60)
        assert delays()[0] < delays()[1] < delays()[2], "each waits longer"
        with server.come_in("pia") as pia:
            pia.producer(TOPIC).publish(b"in")
        check_ready(broker.ready["admin"], server.certificate.fingerprint)
        bad.unlink()
        wait_until("its return", lambda: status()["sign_on_fault"] == "", 60)
        assert server.status_of("user:pia") == 200
        broker.check_errors()
