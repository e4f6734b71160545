"""The audit log of a secured broker over real processes: who did what, from where, with which outcome."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import danube_fast
from danube_fast.errors import (
    DanubeError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from danube_fast.security.audit import fingerprint
from danube_fast.security.curve import new_key_pair
from danube_fast.types import AUDIT_TOPIC
from tests.crash.rig import Server
from tests.delivery.audit_rig import AuditedServer
from tests.delivery.test_security import TOPIC, SecuredServer, refused
from tests.workers.broker import wait_until

SECRET = "a-free-text-that-may-hold-anything"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AuditedServer]:
    with AuditedServer(tmp_path / "data", tmp_path) as audited:
        audited.make_ann()
        yield audited


def test_each_change_is_recorded_before_and_after(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC, partitions=2)
        ann.admin.set_topic_policy(TOPIC, {"message_ttl_ms": 60_000})
        server.add(ann.admin, "pia", ("producer", "namespace:shop"))
        public = server.keys["pia"]
        ann.admin.set_credential(f"curve:{public}", "pia", 60, SECRET)
        with pytest.raises(DanubeError):
            ann.admin.delete_topic("/shop/missing")
        ann.admin.list_topics()
        ann.admin.delete_security("credential", f"curve:{public}")
    proof = fingerprint(f"curve:{server.keys['ann']}")
    for action, place, outcome in (
        ("create_namespace", "namespace:shop", "ok"),
        ("create_topic", TOPIC, "ok"),
        ("set_topic_policy", TOPIC, "ok"),
        ("set_principal", "cluster", "ok"),
        ("set_binding", "cluster", "ok"),
        ("delete_topic", "/shop/missing", "NotFound"),
        ("delete_security", "cluster", "ok"),
    ):
        what = {"principal": "ann", "action": action, "resource": place}
        begun = server.records(**what, event="begin")[-1]
        ended = server.records(**what, event="end")[-1]
        assert ended["outcome"] == outcome
        for record in (begun, ended):
            assert (record["proof"], record["address"]) == (proof, "127.0.0.1")
            assert record["process"] == "coordinator"
            assert record["time"].endswith("Z") and "T" in record["time"]
        assert begun["request"] == ended["request"] and begun["seq"] < ended["seq"]
    created = server.records(action="create_topic", event="begin")[0]
    assert created["arguments"] == {"topic": TOPIC, "partitions": 2}
    policy = server.records(action="set_topic_policy", event="begin")[0]
    assert policy["arguments"]["values"] == {"message_ttl_ms": 60_000}
    key = server.records(action="set_credential", event="begin")[-1]["arguments"]
    assert key["credential"] == fingerprint(f"curve:{public}")
    assert key["not_shown"] == ["label"]
    assert not server.records(action="list_topics"), "reads are not recorded"
    numbers = [each["seq"] for each in server.records()]
    assert numbers == sorted(set(numbers))
    text = server.log.read_text()
    for secret in (SECRET, public, server.keys["ann"]):
        assert secret not in text
    assert stat.S_IMODE(server.log.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.log.parent.stat().st_mode) == 0o700


def test_each_denial_is_recorded(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", TOPIC))
        server.add(ann.admin, "carl", ("consumer", f"{TOPIC}#billing"))
        with server.come_in("pia") as pia, server.come_in("carl") as carl:
            pia.producer(TOPIC).publish(b"one")
            refused(lambda: pia.consumer(TOPIC, subscription="billing"))
            refused(lambda: carl.producer(TOPIC).publish(b"no"))
            refused(lambda: pia.producer("/shop/other").publish(b"no"))
            refused(lambda: pia.admin.delete_topic(TOPIC))
            refused(lambda: pia.admin.describe_topic("/shop/hidden"))
    server.new_key("eve")
    refused(lambda: server.come_in("eve", timeout=5.0))
    expected = [
        ("pia", "subscribe", f"{TOPIC}#billing"),
        ("carl", "open_producer", TOPIC),
        ("pia", "lookup", "/shop/other"),
        ("pia", "delete_topic", TOPIC),
        ("pia", "describe_topic", "/shop/hidden"),
    ]
    for who, action, place in expected:
        record = server.wait_for(event="denied", principal=who, action=action)
        assert (record["resource"], record["outcome"]) == (place, "PermissionDenied")
        assert record["proof"] == fingerprint(f"curve:{server.keys[who]}")
        assert record["address"] == "127.0.0.1"
        assert "." in record["request"]
        assert record["process"].startswith(
            "worker" if action in ("subscribe", "open_producer") else "coordinator"
        )
    record = server.wait_for(event="denied", action="connect")
    assert record["proof"] == fingerprint(f"curve:{server.keys['eve']}")
    assert record["address"] == "127.0.0.1" and "principal" not in record


def test_a_header_does_not_say_whence_a_request_comes(server: AuditedServer) -> None:
    """Any program of this host can send one."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port + 1, timeout=60)
    with contextlib.closing(connection):
        connection.request(
            "GET",
            "/metrics",
            headers={"X-Forwarded-For": "192.0.2.1", "Authorization": "Bearer dfk_x"},
        )
        assert connection.getresponse().status in (401, 403)
    record = server.wait_for(event="denied", resource="/metrics")
    assert record["address"] == "127.0.0.1"


def test_a_revoked_key_and_a_local_user_are_recorded(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        server.add(ann.admin, "pia", ("viewer", "cluster"))
        server.come_in("pia").close()
        ann.admin.delete_security("credential", f"curve:{server.keys['pia']}")
        refused(lambda: server.come_in("pia", timeout=5.0))
        ann.admin.create_topic("/default/t")
    own = os.getuid()
    with server.come_in(
        "ann", transport="auto"
    ) as ann:  # tries shared memory, where no one knows this user
        ann.producer("/default/t").publish(b"one")
    proof = fingerprint(f"curve:{server.keys['pia']}")
    assert server.wait_for(event="denied", action="connect", proof=proof)["address"] == "127.0.0.1"
    record = server.wait_for(event="denied", action="connect", proof=f"uid:{own}")
    assert record["address"].startswith(f"uid:{own}")
    assert record["process"].startswith("worker")


def test_a_topic_that_a_publish_makes_is_recorded(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        server.add(ann.admin, "pia", ("producer", "namespace:shop"))
        with server.come_in("pia") as pia:
            pia.producer("/shop/new").publish(b"payload-that-is-in-no-record")
    begun = server.wait_for(event="begin", principal="pia", action="create_topic")
    ended = server.wait_for(event="end", principal="pia", action="create_topic")
    assert (begun["resource"], ended["outcome"]) == ("/shop/new", "ok")
    assert begun["request"] == ended["request"]
    assert "payload-that-is-in-no-record" not in server.log.read_text()


def numbers_in(client: Any, count: int, name: str = "auditor") -> list[int]:
    """Numbers of the records in the topic."""
    found: list[int] = []
    with client.consumer(AUDIT_TOPIC, subscription=name, initial_position="earliest") as consumer:
        while len(found) < count:
            batch = consumer.receive_batch(timeout=30)
            assert len(batch), f"{len(found)} of {count} records came"
            for message in batch:
                record = json.loads(message.payload)
                found.append(record["seq"])
            consumer.ack(batch)
    return found


def test_the_topic_has_what_the_file_has(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        server.add(ann.admin, "pia", ("producer", "namespace:*"), ("admin", "namespace:system"))
        ann.admin.set_binding("pia-a", "user:pia", "admin", AUDIT_TOPIC)
        server.add(ann.admin, "olga", ("operator", "cluster"), ("consumer", "cluster"))
        expected = [each["seq"] for each in server.records()]
        assert numbers_in(ann, len(expected))[: len(expected)] == expected
        with server.come_in("pia") as pia, server.come_in("olga") as olga:
            for who in (ann, pia, olga):
                refused(lambda who=who: who.producer(AUDIT_TOPIC).publish(b"forged"))
                refused(lambda who=who: who.admin.delete_topic(AUDIT_TOPIC))
                refused(lambda who=who: who.admin.purge_topic(AUDIT_TOPIC))
                refused(lambda who=who: who.admin.set_topic(AUDIT_TOPIC, partitions=3))
                refused(
                    lambda who=who: who.admin.set_topic_policy(AUDIT_TOPIC, {"message_ttl_ms": 1})
                )
                refused(lambda who=who: who.admin.skip_messages(AUDIT_TOPIC, "auditor"))
                refused(lambda who=who: who.admin.delete_subscription(AUDIT_TOPIC, "auditor"))
                refused(lambda who=who: who.admin.set_failure_policy(AUDIT_TOPIC, "auditor", {}))
            for who in (pia, olga):
                refused(lambda who=who: who.consumer(AUDIT_TOPIC, subscription="auditor"))
                refused(lambda who=who: who.consumer(AUDIT_TOPIC, subscription="own"))
                refused(lambda who=who: who.admin.list_audit())
        server.wait_for(event="denied", principal="pia", action="delete_topic")
        expected = [each["seq"] for each in server.records()]
        assert numbers_in(ann, len(expected), "again")[: len(expected)] == expected


def test_the_topic_goes_on_behind_a_restart(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        count = len(server.records())
        numbers_in(ann, count)
    server.kill_all()
    server.start()
    with server.come_in("ann") as ann:
        ann.admin.delete_topic(TOPIC)
        expected = [each["seq"] for each in server.records()]
        found = numbers_in(ann, len(expected), "again")
        assert sorted(set(found)) == sorted(set(expected))[: len(set(found))]
        assert set(found) >= set(expected[: count + 2]), "records are missing"


def test_a_flood_of_denials_is_bounded(server: AuditedServer) -> None:
    """As fast as a connection goes, on the coordinator; the honest administrator is served meanwhile."""
    with server.come_in("ann") as ann:
        server.add(ann.admin, "pia")
        began = server.log.stat().st_size
        with server.come_in("pia") as pia:
            for number in range(3000):
                with pytest.raises(PermissionDenied):
                    pia.admin.describe_topic(f"/shop/t{number}")
        ann.admin.create_namespace("shop")
        text = "all of them are counted"
        wait_until(
            text,
            lambda: sum(each.get("count", 1) for each in server.records(principal="pia")) == 3000,
            30,
        )
        assert len(server.records(principal="pia")) < 10
        assert server.log.stat().st_size - began < 10_000


def test_the_log_is_read_by_the_broker_and_from_its_files(
    server: AuditedServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        server.add(ann.admin, "pia", ("producer", "namespace:shop"))
        with server.come_in("pia") as pia:
            refused(lambda: pia.admin.delete_namespace("shop"))
        server.wait_for(event="denied", principal="pia")
        everything = ann.admin.list_audit()
        assert everything == server.records()
        assert ann.admin.list_audit(since_seconds=3600) == everything
        assert ann.admin.list_audit(limit=2) == everything[-2:]
        (denied,) = ann.admin.list_audit(denied=True)
        assert (denied["principal"], denied["action"]) == ("pia", "delete_namespace")
        assert ann.admin.list_audit(principal="pia") == [denied]
        assert ann.admin.call("list_audit", after="1:0")["is_last"] is False
    monkeypatch.setenv("DANUBE_SERVER_KEY", server.server_key)
    monkeypatch.setenv("DANUBE_KEY_FILE", str(server.folder / "ann.key"))

    def said(*words: str) -> str:
        command = [sys.executable, "-m", "danube_fast.cli.main", "security", "audit", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    asked = said("--url", server.url, "-o", "json", "--denied")
    offline = said("--data-dir", str(server.data_dir), "-o", "json", "--denied")
    assert json.loads(asked) == json.loads(offline) == [denied]
    table = said("--data-dir", str(server.data_dir))
    assert "delete_namespace namespace:shop" in table and "PermissionDenied" in table
    assert "create_namespace namespace:shop" in table and "127.0.0.1" in table
    assert table.count("create_namespace") == 1, "a change is one line of the table"


@pytest.mark.parametrize("audit", ["on", "off", "auto"])
def test_without_security_it_is_a_setting(tmp_path: Path, audit: str) -> None:
    with Server(tmp_path / "data", audit=audit) as server, server.client() as client:
        client.admin.create_namespace("shop")
        client.producer("/shop/orders").publish(b"one")
        folder = server.data_dir / "audit"
        if audit != "on":
            assert not folder.exists()
            with pytest.raises(FailedPrecondition, match="no audit log"):
                client.admin.list_audit()
            return
        found = client.admin.list_audit()
        who = {"principal": "anonymous", "address": "127.0.0.1"}
        actions = [
            (each["action"], each["event"])
            for each in found
            if who.items() <= each.items() and "proof" not in each
        ]
        assert actions == [
            ("create_namespace", "begin"), ("create_namespace", "end"),
            ("create_topic", "begin"), ("create_topic", "end"),
        ]  # fmt: skip
        assert AUDIT_TOPIC not in [row["topic"] for row in client.admin.list_topics()]


def test_a_secured_broker_may_keep_none(tmp_path: Path) -> None:
    with SecuredServer(tmp_path / "data", tmp_path, audit="off") as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            server.add(ann.admin, "pia")
            with server.come_in("pia") as pia:
                refused(lambda: pia.admin.list_security("principal"))
            assert ann.admin.cluster_status()["audit"] == "off"
        assert not (server.data_dir / "audit").exists()


def test_many_strangers_from_one_address_are_one_kind(server: AuditedServer) -> None:
    """Each with a key of its own, as who wants to fill the log would do."""
    count = 50
    with zmq.Context() as context:
        sockets = []
        for _ in range(count):
            pair = new_key_pair()
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.CURVE_SERVERKEY, server.server_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
            socket.connect(f"tcp://127.0.0.1:{server.port}")
            sockets.append(socket)

        def refused_count() -> int:
            found = server.records(event="denied", action="connect")
            return sum(each.get("count", 1) for each in found)

        wait_until("all are counted", lambda: refused_count() >= count, 60)
        for socket in sockets:
            socket.close(0)
    found = server.records(event="denied", action="connect")
    assert len(found) <= 10
    assert {each["address"] for each in found} == {"127.0.0.1"}


@pytest.mark.parametrize("is_asked", [True, False], ids=["broker", "files"])
def test_the_log_can_be_followed(
    server: AuditedServer, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    monkeypatch.setenv("DANUBE_SERVER_KEY", server.server_key)
    monkeypatch.setenv("DANUBE_KEY_FILE", str(server.folder / "ann.key"))
    place = ["--url", server.url] if is_asked else ["--data-dir", str(server.data_dir)]
    command = [
        sys.executable,
        "-m",
        "danube_fast.cli.main",
        "security",
        "audit",
        "--follow",
        *place,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        watchdog = threading.Timer(60, follower.kill)
        watchdog.start()
        try:
            assert follower.stdout is not None
            first = follower.stdout.readline()
            assert "start" in first, f"the log begins with {first!r}"
            with server.come_in("ann") as ann:
                ann.admin.create_namespace("followed")
            lines = iter(follower.stdout.readline, "")
            assert any("namespace:followed" in line and "ok" in line for line in lines)
        finally:
            watchdog.cancel()
            follower.kill()


def test_what_could_not_be_made_is_not_recorded(server: AuditedServer) -> None:
    """A client that may publish would push older records out, by topics that it makes in vain."""
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        ann.admin.set_namespace_quota("shop", {"namespace_topics_max": 1})
        server.add(ann.admin, "pia", ("producer", "namespace:shop"))
        with server.come_in("pia") as pia:
            with pytest.raises(ResourceExhausted):
                pia.producer("/shop/one-more")
            ann.admin.set_namespace_quota("shop", {"namespace_topics_max": 2})
            pia.producer("/shop/one-more").publish(b"x")
    made = server.records(principal="pia", action="create_topic")
    assert [each["event"] for each in made] == ["begin", "end"] and made[1]["outcome"] == "ok"


def test_a_topic_of_the_log_that_a_client_made_meanwhile_is_made_anew(tmp_path: Path) -> None:
    """While no one was asked who they are; a partitioned one would end the coordinator again and again."""
    with AuditedServer(tmp_path / "data", tmp_path) as audited:
        audited.make_ann()
        with audited.come_in("ann") as ann:
            wait_until("the topic", lambda: bool(ann.admin.list_topics(namespace="system")), 20)
            reader = ann.consumer(AUDIT_TOPIC, subscription="s", initial_position="earliest")
            assert reader.receive(timeout=20) is not None
    with (
        Server(tmp_path / "data", auth="none", insecure=True) as unsecured,
        danube_fast.connect(unsecured.url) as eve,
    ):
        eve.admin.delete_topic(AUDIT_TOPIC)
        eve.admin.create_topic(AUDIT_TOPIC, partitions=2)
    again = AuditedServer(tmp_path / "data", tmp_path)
    with again, again.come_in("ann") as ann:
        ann.admin.create_namespace("shop")

        def is_made_anew() -> bool:
            try:
                return not ann.admin.describe_topic(AUDIT_TOPIC)["partitioned"]
            except NotFound:  # the other one is deleted by then
                return False

        wait_until("the topic to be made anew", is_made_anew, 20)


def test_who_manages_the_namespace_has_no_power_over_the_topic(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        server.add(ann.admin, "olga", ("operator", "cluster"))
        with server.come_in("olga") as olga:
            with pytest.raises(InvalidArgument, match="is the broker's own"):
                olga.admin.set_namespace_policy("system", {"message_ttl_ms": 1})
            olga.admin.set_namespace_policy("system", {"message_ttl_ms": "default"})
        with pytest.raises(InvalidArgument, match="hold up its audit log"):
            ann.admin.set_namespace_quota("system", {"namespace_storage_bytes_max": 1})
        ann.admin.set_namespace_quota("system", {"namespace_storage_bytes_max": 0})
        expected = [each["seq"] for each in server.records()]
        assert numbers_in(ann, len(expected))[: len(expected)] == expected
        assert ann.admin.topic_policy(AUDIT_TOPIC)["message_ttl_ms"] == 0
