"""Reply topics of a secured broker: each belongs to the principal that made it, and a name is the right to reply, no more."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from danube_fast.errors import (
    DanubeError,
    InvalidArgument,
    NotOwner,
    PermissionDenied,
)
from danube_fast.types import REPLY_TOPICS
from tests.delivery.test_security import FELT_SECONDS, SecuredServer, refused
from tests.delivery.test_security_matrix import (
    ADMIN,
    ERROR,
    LOOKUP,
    NO_PARTITION,
    OPEN_PRODUCER,
    RESULT,
    SUBSCRIBE,
    KeyedClient,
    Place,
    Shop,
    code_of,
    guess,
)
from tests.workers.broker import wait_until
from tests.workers.test_forward import port_of

TOPIC = "/shop/orders"
OTHERS = ("carl", "eve", "mona", "ann")
"""Who learns the name: the replier, a stranger, who manages topics, and an administrator."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("replies")
    with SecuredServer(folder / "data", folder) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            made = Shop(server, ann.admin)
            ann.admin.set_role("manager", ["lookup", "produce", "consume", "manage_topic", "manage_broker"])  # fmt: skip
            server.add(ann.admin, "mona", ("manager", "cluster"))
        yield made
        made.close()


def new_name() -> str:
    return REPLY_TOPICS + secrets.token_hex(16)


def make(client: KeyedClient, name: str) -> Place:
    """A reply topic of a raw client, and where it is."""
    reply = client.ask(ADMIN, "create_topic", {"topic": name, "dispatch": "non_reliable"})
    assert reply[0] == RESULT, reply
    row = client.ask(LOOKUP, name)[2]["partitions"][0]
    return Place(row[0], port_of(row))


OPERATIONS: dict[str, dict[str, Any]] = {
    "describe_topic": {}, "topic_stats": {}, "topic_policy": {}, "list_subscriptions": {},
    "describe_subscription": {"subscription": "s"}, "purge_topic": {}, "flush_history": {},
    "set_topic": {"partitions": 2}, "set_topic_policy": {"values": {}}, "skip_messages": {"subscription": "s"},
    "delete_subscription": {"subscription": "s"}, "set_failure_policy": {"subscription": "s", "values": {}},
    "delete_topic": {},
}  # fmt: skip


def test_a_request_is_replied_to_by_users_without_rights_to_reply_topics(shop: Shop) -> None:
    with shop.server.come_in("pia") as pia, shop.server.come_in("carl") as carl:
        worker = carl.consumer(TOPIC, subscription="billing", initial_position="latest")
        heard: list[Any] = []

        def answer() -> None:
            message = worker.receive(timeout=20)
            heard.append(message.reply_topic)
            carl.reply(message, b"pong")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert pia.request(TOPIC, b"ping", timeout=20).payload == b"pong"
        thread.join(20)
        (name,) = heard
        rows = pia.admin.list_topics(pattern=f"{REPLY_TOPICS}*")
        assert [row["topic"] for row in rows] == [name], "pia's own is listed for pia"
        assert carl.admin.list_topics(pattern=f"{REPLY_TOPICS}*") == []
        with shop.server.come_in("mona") as mona:
            listed = mona.admin.list_clients()
            assert mona.admin.list_topics(pattern=f"{REPLY_TOPICS}*") == []
        assert [row for row in listed if row["principal"] == "pia" and row["consumer_count"]]
        assert name not in str(listed)
        refused(lambda: carl.admin.delete_topic(name))
        refused(lambda: carl.admin.describe_topic(name))
        with pytest.raises(DanubeError):
            carl.consumer(name, subscription="s", timeout=2.0)
        worker.close()
    with shop.server.come_in("ann") as ann:
        assert shop.raw("ann").ask(LOOKUP, name)[0] == ERROR, "the closed client has deleted it"
        assert ann.admin.list_topics(pattern=f"{REPLY_TOPICS}*") == []


@pytest.mark.parametrize("user", OTHERS)
def test_only_its_maker_reads_a_reply_topic(shop: Shop, user: str) -> None:
    name = new_name()
    place = make(shop.raw("pia"), name)
    other = shop.raw(user, place.port)
    for kind, subscription in (("exclusive", "s"), ("shared", "s"), ("reader", "")):
        reply = other.ask(SUBSCRIBE, 1, 1, place.partition_id, subscription, kind, "earliest", "c", {})  # fmt: skip
        assert code_of(reply) in (NotOwner.code, PermissionDenied.code), reply
        missing = other.ask(SUBSCRIBE, 1, 1, NO_PARTITION, subscription, kind, "earliest", "c", {})
        if user in ("carl", "eve"):
            assert reply[2] == missing[2]
    pia = shop.raw("pia", place.port)
    assert pia.ask(SUBSCRIBE, 1, 1, place.partition_id, "", "reader", "latest", "c", {})[0] == RESULT  # fmt: skip
    assert shop.raw("pia").ask(ADMIN, "delete_topic", {"topic": name})[0] == RESULT


def test_a_number_is_not_the_right_to_publish_to_a_reply_topic(shop: Shop) -> None:
    name = new_name()
    place = make(shop.raw("pia"), name)
    for user in (*OTHERS, "pia"):
        client = shop.raw(user, place.port)
        for guessed in ("", new_name(), name[:-1], name + "0", TOPIC):
            fields = (OPEN_PRODUCER, "p", guessed)
            missing = guess(client, NO_PARTITION, fields)
            assert missing[1] == NotOwner.code
            assert guess(client, place.partition_id, fields) == missing, (user, guessed)
        assert client.ask(OPEN_PRODUCER, place.partition_id, f"p-{user}", name)[0] == RESULT
    shop.raw("pia").ask(ADMIN, "delete_topic", {"topic": name})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_on_a_reply_topic_is_for_who_only_knows_its_name(
    shop: Shop, operation: str
) -> None:
    """Missing ones are refused in the same words, so that nothing tells a good guess."""
    name, missing = new_name(), new_name()
    pia = shop.raw("pia")
    place = make(pia, name)
    worker = shop.raw("pia", place.port)
    assert worker.ask(SUBSCRIBE, 1, 1, place.partition_id, "s", "shared", "latest", "c", {})[0] == RESULT  # fmt: skip
    for user in ("carl", "eve"):
        client, told = shop.raw(user), []
        for each in (name, missing):
            reply = client.ask(ADMIN, operation, {"topic": each, **OPERATIONS[operation]})
            assert code_of(reply) == PermissionDenied.code, reply
            told.append(reply[3].replace(each, "T"))
        assert told[0] == told[1], told
    if operation == "flush_history":  # it reads
        reply = shop.raw("ann").ask(ADMIN, operation, {"topic": name})
        assert code_of(reply) == PermissionDenied.code, reply
    assert pia.ask(ADMIN, "delete_topic", {"topic": name})[0] == RESULT


def test_who_manages_topics_deletes_a_reply_topic(shop: Shop) -> None:
    name = new_name()
    make(shop.raw("pia"), name)
    assert shop.raw("mona").ask(ADMIN, "delete_topic", {"topic": name})[0] == RESULT


def test_reply_topics_keep_nothing_and_take_no_dead_letters(shop: Shop) -> None:
    eve, carl = shop.raw("eve"), shop.raw("carl", shop.topic[0].port)
    for how in ({}, {"dispatch": "reliable"}, {"dispatch": "non_reliable", "partitions": 2}):
        assert code_of(eve.ask(ADMIN, "create_topic", {"topic": new_name(), **how})) == InvalidArgument.code  # fmt: skip
        assert code_of(eve.ask(LOOKUP, new_name(), how)) == InvalidArgument.code
    policy = {"poison_policy": "dead_letter", "dead_letter_topic": new_name()}
    reply = carl.ask(SUBSCRIBE, 1, 1, shop.topic[0].partition_id, "billing", "shared", "latest", "c", {"failure_policy": policy})  # fmt: skip
    assert code_of(reply) == InvalidArgument.code


def test_a_reply_topic_has_its_owner_behind_every_kill(shop: Shop) -> None:
    name = new_name()
    make(shop.raw("pia"), name)
    assert shop.server.broker is not None
    for pid in list(shop.server.broker.pids):
        os.kill(pid, signal.SIGKILL)
        shop.close()

        place: list[Place] = []

        def settled(place: list[Place] = place) -> bool:
            """Whether its maker can read it again."""
            try:
                row = shop.raw("pia").ask(LOOKUP, name)[2]["partitions"][0]
                pia = shop.raw("pia", port_of(row))
                reply = pia.ask(SUBSCRIBE, 1, 1, row[0], "", "reader", "latest", "c", {})
            except (AssertionError, TypeError):
                return False
            place[:] = [Place(row[0], port_of(row))]
            return bool(reply[0] == RESULT)

        wait_until("a reader of its maker", settled, 6 * FELT_SECONDS)
        for user in OTHERS:
            reply = shop.raw(user, place[0].port).ask(
                SUBSCRIBE, 1, 1, place[0].partition_id, "", "reader", "latest", "c", {}
            )
            assert code_of(reply) in (NotOwner.code, PermissionDenied.code), (pid, user)
        assert code_of(shop.raw("eve").ask(ADMIN, "delete_topic", {"topic": name})) == PermissionDenied.code  # fmt: skip
    assert shop.raw("pia").ask(ADMIN, "delete_topic", {"topic": name})[0] == RESULT


def test_one_principal_has_a_bounded_number_of_reply_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from danube_fast.broker.topics import reply_topics
    from danube_fast.broker.topics.directory import TopicDirectory
    from danube_fast.broker.topics.records import TopicOptions
    from danube_fast.clock import SystemClock
    from danube_fast.errors import ResourceExhausted
    from danube_fast.metadata.memory import MemoryStore

    monkeypatch.setattr(reply_topics, "OWNED_MAX", 2)
    store = MemoryStore(SystemClock())
    topics = TopicDirectory(store, log_count=1, partitions_per_topic_max=1)
    options = TopicOptions(dispatch="non_reliable")

    def create(principal: str, topics: TopicDirectory = topics) -> str:
        name = new_name()
        owner = reply_topics.owner_of_new(topics, name, options, principal)
        topics.create(name, options, 1, owner)
        assert not topics.commit()
        return name

    first = create("pia")
    create("pia")
    with pytest.raises(ResourceExhausted, match="pia has 2 reply topics"):
        create("pia")
    create("eve")
    again = TopicDirectory(store, log_count=1, partitions_per_topic_max=1)
    assert again.owned["pia"] == 2
    topics.delete(first)
    create("pia")
