"""A secured broker over real processes: who comes in, who may do what, and how soon a change is felt."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import (
    DanubeError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from danube_fast.security.curve import new_key_pair, read_key_file, write_key_file
from tests.crash.rig import Server
from tests.workers.broker import wait_until

FELT_SECONDS = 10.0
"""Five times what is promised: the machine may be busy."""
TOPIC = "/shop/orders"


class SecuredServer(Server):
    """A broker that asks, with an administrator `ann`."""

    def __init__(self, data_dir: Path, folder: Path, **changes: Any) -> None:
        super().__init__(data_dir, auth="required", **changes)
        self.folder = folder
        self.keys: dict[str, str] = {}
        """Public keys by user."""

    @property
    def server_key(self) -> str:
        assert self.broker is not None
        return str(self.broker.ready["server_key"])

    def new_key(self, user: str) -> str:
        """A key file for a user; the public key."""
        pair = new_key_pair()
        write_key_file(self.folder / f"{user}.key", pair)
        self.keys[user] = pair.public
        return pair.public

    def come_in(self, user: str, **options: Any) -> Any:
        """A client with a user's key, over tcp unless told otherwise."""
        options = {"transport": "tcp", "timeout": 20.0, **options}
        path = self.folder / f"{user}.key"
        return danube_fast.connect(
            self.url, server_key=self.server_key, key_file=path, name=user, **options
        )

    def make_ann(self) -> None:
        """Make ann an administrator by the key that the broker begins with."""
        public = self.new_key("ann")
        first = self.data_dir / "bootstrap-admin.key"
        with danube_fast.connect(
            self.url, server_key=self.server_key, key_file=first, transport="zmq"
        ) as client:
            client.admin.set_principal("ann")
            client.admin.set_credential(f"curve:{public}", "ann")
            client.admin.set_binding("ann", "user:ann", "admin", "cluster")

    def add(self, admin: Any, user: str, *grants: tuple[str, str]) -> None:
        """Make a user with a key and (role, scope) bindings."""
        public = self.new_key(user)
        admin.set_principal(user)
        admin.set_credential(f"curve:{public}", user)
        for number, (role, scope) in enumerate(grants):
            admin.set_binding(f"{user}-{number}", f"user:{user}", role, scope)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecuredServer]:
    secured = SecuredServer(tmp_path / "data", tmp_path)
    with secured:
        secured.make_ann()
        yield secured


def refused(call: Any) -> str:
    """The text of a refusal."""
    with pytest.raises(PermissionDenied) as caught:
        call()
    return str(caught.value)


def test_the_first_key_is_good_for_one_connection(server: SecuredServer) -> None:
    assert not (server.data_dir / "bootstrap-admin.key").exists()
    mode = stat.S_IMODE((server.data_dir / "server.key").stat().st_mode)
    assert mode == 0o600
    assert read_key_file(server.data_dir / "server.key").public == server.server_key
    with server.come_in("ann") as client:
        names = [row["name"] for row in client.admin.list_security("principal")]
        assert names == ["ann", "bootstrap-admin"]
        credentials = client.admin.list_security("credential")
        assert [row["principal"] for row in credentials] == ["ann"]
        assert "secret" not in str(credentials)


def test_an_unregistered_key_and_no_key_get_nowhere(server: SecuredServer) -> None:
    server.new_key("eve")
    text = refused(lambda: server.come_in("eve", timeout=5.0))
    assert "registered" in text
    with pytest.raises(DanubeError):
        danube_fast.connect(server.url, timeout=3.0, transport="zmq")
    pair = new_key_pair()
    with pytest.raises(PermissionDenied):
        danube_fast.connect(
            server.url, server_key=pair.public, key_file=server.folder / "ann.key", timeout=5.0
        )


def test_roles_decide_what_is_opened(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", TOPIC))
        server.add(ann.admin, "carl", ("consumer", f"{TOPIC}#billing"))
        server.add(ann.admin, "nick")
        ann.admin.set_role("keeper", ["lookup", "manage_topic"])
        server.add(ann.admin, "kim", ("keeper", TOPIC))
    with (
        server.come_in("pia") as pia,
        server.come_in("carl") as carl,
        server.come_in("nick") as nick,
    ):
        pia.producer(TOPIC).publish(b"one")
        consumer = carl.consumer(TOPIC, subscription="billing", initial_position="earliest")
        assert consumer.receive(timeout=20).payload == b"one"
        refused(lambda: pia.consumer(TOPIC, subscription="billing"))
        refused(lambda: carl.consumer(TOPIC, subscription="other"))
        refused(lambda: carl.producer(TOPIC).publish(b"no"))
        refused(lambda: pia.producer("/shop/other").publish(b"no"))
        refused(lambda: nick.producer(TOPIC).publish(b"no"))
        missing = refused(lambda: nick.admin.describe_topic("/shop/missing"))
        there = refused(lambda: nick.admin.describe_topic(TOPIC))
        assert missing.replace("/shop/missing", TOPIC) == there, "tells whether a topic exists"
        for call in (
            lambda: nick.admin.list_security("principal"),
            lambda: pia.admin.delete_topic(TOPIC),
            lambda: carl.admin.create_namespace("mine"),
            lambda: nick.admin.cluster_status(),
            lambda: pia.admin.set_binding("pia-9", "user:pia", "admin", "cluster"),
            lambda: carl.consumer(
                TOPIC, subscription="billing", failure_policy={"dead_letter_topic": "/shop/dead"}
            ),
        ):
            refused(call)
        with server.come_in("kim") as kim:
            kim.admin.set_failure_policy(TOPIC, "billing", {"max_redelivery_count": 3})
            values = {"poison_policy": "dead_letter", "dead_letter_topic": "/shop/dead"}
            refused(lambda: kim.admin.set_failure_policy(TOPIC, "billing", values))
        consumer.close()


def test_a_live_producers_name_belongs_to_its_user(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", TOPIC))
        server.add(ann.admin, "paul", ("producer", TOPIC))
        with server.come_in("pia") as pia, server.come_in("paul") as paul:
            producer = pia.producer(TOPIC, name="cash-desk")
            assert producer.publish(b"one").offset == 0
            assert "in use" in refused(lambda: paul.producer(TOPIC, name="cash-desk"))
            assert producer.publish(b"two").offset == 1, "fenced by another user"
            ann.producer(TOPIC, name="cash-desk").close()  # who manages the topic may


def test_a_revoked_right_is_felt_soon_and_nothing_acked_is_lost(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", TOPIC))
        server.add(ann.admin, "carl", ("consumer", TOPIC))
        with server.come_in("pia") as pia, server.come_in("carl") as carl:
            producer = pia.producer(TOPIC, name="p")
            consumer = carl.consumer(TOPIC, subscription="s", initial_position="earliest")
            acked = [producer.publish(b"%d" % number).offset for number in range(50)]
            assert len(consumer.receive_batch(timeout=20)) > 0
            began = time.monotonic()
            ann.admin.delete_security("binding", "pia-0")
            ann.admin.delete_security("binding", "carl-0")

            def is_refused() -> bool:
                try:
                    acked.append(producer.publish(b"late").offset)
                except PermissionDenied:
                    return True
                return False

            wait_until("the producer's refusal", is_refused, FELT_SECONDS)

            def is_closed() -> bool:
                try:
                    consumer.receive_batch(timeout=0.2)
                except PermissionDenied:
                    return True
                return False

            wait_until("the consumer's end", is_closed, FELT_SECONDS)
            assert time.monotonic() - began < FELT_SECONDS
        server.add(ann.admin, "read", ("consumer", TOPIC))
        with server.come_in("read") as client:
            consumer = client.consumer(TOPIC, subscription="all", initial_position="earliest")
            found = [consumer.receive(timeout=20).offset for _ in acked]
        assert found == acked


def test_a_revoked_key_ends_its_sessions(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", TOPIC))
        with server.come_in("pia") as pia:
            producer = pia.producer(TOPIC)
            producer.publish(b"in")
            ann.admin.delete_security("credential", f"curve:{server.keys['pia']}")

            def is_out() -> bool:
                try:
                    producer.publish(b"out")
                except DanubeError as error:
                    return isinstance(error, PermissionDenied)
                return False

            wait_until("the end of the session", is_out, 2 * FELT_SECONDS)
        refused(lambda: server.come_in("pia", timeout=5.0))


def test_rights_outlive_every_process(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", TOPIC))
        server.add(ann.admin, "nick")
    assert server.broker is not None
    for pid in server.broker.pids:
        os.kill(pid, signal.SIGKILL)
        with server.come_in("pia") as pia, server.come_in("nick") as nick:

            def publishes(client: Any = pia) -> bool:
                try:
                    client.producer(TOPIC).publish(b"again")
                except (Unavailable, DeadlineExceeded):
                    return False
                return True

            wait_until("a publish behind the kill", publishes)
            refused(lambda client=nick: client.producer(TOPIC).publish(b"no"))


@pytest.mark.parametrize("transport", ["shm"])
def test_a_local_user_comes_in_by_shared_memory(server: SecuredServer, transport: str) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", TOPIC), ("consumer", TOPIC))
        with server.come_in("pia", transport="auto") as pia:  # no uid: by tcp
            assert pia.producer(TOPIC).publish(b"by tcp").offset == 0
        ann.admin.set_credential(f"uid:{os.geteuid()}", "pia")
        with server.come_in("pia", transport=transport) as pia:
            producer = pia.producer(TOPIC)
            assert producer.publish(b"by rings").offset == 1
            refused(lambda: pia.producer("/shop/other").publish(b"no"))
            ann.admin.delete_security("credential", f"uid:{os.geteuid()}")

            def is_out() -> bool:
                try:
                    producer.publish(b"out")
                except DanubeError:
                    return True
                return False

            wait_until("the end of the rings", is_out, FELT_SECONDS)


def test_a_key_is_not_replaced_by_the_local_user(server: SecuredServer) -> None:
    """On the broker's host the kernel would prove another principal over rings than the key does over tcp."""
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "zoe", ("producer", TOPIC))
        server.add(ann.admin, "vic", ("viewer", TOPIC))
        ann.admin.set_credential(f"uid:{os.geteuid()}", "zoe")
        with server.come_in("vic", transport="auto") as vic:
            refused(lambda: vic.producer(TOPIC).publish(b"no"))
        with server.come_in("ann", transport="auto") as own:
            assert own.producer(TOPIC).publish(b"by tcp").offset == 0
            assert not any(each.has_rings for each in own._core.routes.workers.values())
        with server.come_in("ann", transport="shm") as own:
            assert "local user" in refused(lambda: own.producer(TOPIC).publish(b"no"))
        with server.come_in("zoe", transport="auto") as zoe:
            assert zoe.producer(TOPIC).publish(b"by rings").offset == 1
            assert all(each.has_rings for each in zoe._core.routes.workers.values())


def test_a_broker_that_lets_no_administrator_in_makes_a_new_first_key(tmp_path: Path) -> None:
    secured = SecuredServer(tmp_path / "data", tmp_path)
    first = secured.data_dir / "bootstrap-admin.key"
    with secured:
        with danube_fast.connect(
            secured.url, server_key=secured.server_key, key_file=first, transport="tcp"
        ) as client:
            client.admin.set_principal("ann")  # and no key for it
        assert not first.exists()
        secured.stop()
        secured.start()
        secured.make_ann()
        with secured.come_in("ann") as ann:
            assert ann.admin.cluster_status()["auth"] == "required"
            ann.admin.delete_security("credential", f"curve:{secured.keys['ann']}", force=True)
        secured.stop()
        secured.start()
        assert first.exists()


def test_no_rights_are_given_while_no_one_is_asked(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "data") as server,
        danube_fast.connect(server.url, timeout=20.0) as client,
    ):
        for call in (
            lambda: client.admin.set_principal("eve"),
            lambda: client.admin.set_binding("eve", "user:eve", "admin", "cluster"),
        ):
            with pytest.raises(FailedPrecondition, match="--auth required"):
                call()
        assert client.admin.list_security("principal") == []


def test_dead_letters_reach_a_topic_of_another_worker(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        for number in range(4):  # some of them live on the other worker
            dead = f"/shop/dead-{number}"
            ann.admin.create_topic(dead)
            policy = {
                "max_redelivery_count": 1, "poison_policy": "dead_letter", "dead_letter_topic": dead,
            }  # fmt: skip
            consumer = ann.consumer(TOPIC, subscription=f"s-{number}", failure_policy=policy)
            ann.producer(TOPIC).publish(b"bad")
            letters = ann.consumer(dead, subscription="read", initial_position="earliest")

            def give_back(consumer: Any = consumer) -> None:
                message = consumer.receive(timeout=0.5)
                if message is not None:
                    consumer.nack(message)

            def is_there(letters: Any = letters, give_back: Any = give_back) -> bool:
                give_back()
                return letters.receive(timeout=0.2) is not None

            wait_until(f"a dead letter in {dead}", is_there)
            consumer.close()


def test_a_binding_needs_its_role_and_its_user(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        with pytest.raises(NotFound, match="security roles list"):
            ann.admin.set_binding("b", "group:g", "nosuchrole", "cluster")
        with pytest.raises(NotFound, match="users add zoe"):
            ann.admin.set_binding("b", "user:zoe", "viewer", "cluster")
        assert "b" not in [row["binding"] for row in ann.admin.list_security("binding")]
        ann.admin.set_binding("b", "group:g", "viewer", "cluster")


def test_the_key_of_the_broker_is_no_users_key(server: SecuredServer) -> None:
    with server.come_in("ann") as ann, pytest.raises(InvalidArgument, match="broker itself"):
        ann.admin.set_credential(f"curve:{server.server_key}", "ann")
