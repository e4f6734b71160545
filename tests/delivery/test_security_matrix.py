"""A secured broker over raw sockets: clients that lie about who they are, guess numbers, and name what is not theirs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import zmq

from danube_fast.errors import (
    Internal,
    InvalidArgument,
    NotOwner,
    PermissionDenied,
    Status,
)
from danube_fast.net import protocol
from danube_fast.security.curve import read_key_file
from danube_fast.types import AUDIT_TOPIC
from tests.delivery.test_security import SecuredServer
from tests.workers.broker import wait_until
from tests.workers.shard_rig import RawClient
from tests.workers.test_forward import Wire, port_of

TOPIC, HIDDEN, DEAD = "/shop/orders", "/secret/plans", "/shop/dead"
HELLO, PING, LOOKUP, ADMIN, WATCH = 1, 2, 4, 5, 6
OPEN_PRODUCER, PUBLISH, SUBSCRIBE, SEEK = 10, 11, 20, 24
WELCOME, PONG, ERROR, RESULT = 64, 65, 66, 67
NO_PARTITION = 987_654
FENCED, NOT_OWNER = int(Status.FENCED), int(Status.NOT_OWNER)


class KeyedWire(Wire):
    """A process of the broker, and the key of one user."""

    def __init__(self, shop: Shop, port: int, user: str) -> None:
        super().__init__(port)
        self.server_key = shop.server.server_key
        self.pair = read_key_file(shop.server.folder / f"{user}.key")
        self.sockets: list[zmq.Socket[bytes]] = []

    def close(self) -> None:
        """Close the connections."""
        for sock in self.sockets:
            sock.close(linger=0)
        self.context.term()


class KeyedClient(RawClient):
    """A raw client with a user's key."""

    def _connect(self) -> Any:
        wire: Any = self.rig
        sock = wire.context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, wire.pair.public.encode())
        sock.setsockopt(zmq.CURVE_SECRETKEY, wire.pair.secret.encode())
        sock.setsockopt(zmq.CURVE_SERVERKEY, wire.server_key.encode())
        wire.sockets.append(sock)
        sock.connect(f"tcp://127.0.0.1:{wire.port}")
        return sock

    def hello(self, *fields: Any) -> list[Any]:
        """WELCOME of one more HELLO."""
        welcome: list[Any] = self.ask(HELLO, 1, *fields)
        assert welcome[0] == WELCOME, welcome
        return welcome


class Place(NamedTuple):
    """A partition, and the port of its worker."""

    partition_id: int
    port: int


class Shop:
    """The broker of this module, its topics and its users."""

    def __init__(self, server: SecuredServer, admin: Any) -> None:
        self.server = server
        self.wires: list[KeyedWire] = []
        admin.create_namespace("shop")
        admin.create_namespace("secret")
        admin.create_topic(TOPIC, partitions=2)
        admin.create_topic(HIDDEN, partitions=2)
        server.add(admin, "pia", ("producer", TOPIC))
        server.add(admin, "pete", ("producer", TOPIC))
        server.add(admin, "carl", ("consumer", f"{TOPIC}#billing"))
        server.add(admin, "eve")
        self.topic, self.hidden = self._places(admin, TOPIC), self._places(admin, HIDDEN)

    def _places(self, admin: Any, topic: str) -> list[Place]:
        client = self.raw("ann")
        rows = client.ask(LOOKUP, topic)[2]["partitions"]
        places = [Place(row[0], port_of(row)) for row in rows]
        assert len({place.port for place in places}) == 2, "the partitions are on both workers"
        return places

    def raw(self, user: str, port: int = 0, auth: dict[str, Any] | None = None) -> KeyedClient:
        """A raw client of a user, of the coordinator unless a worker's port is given."""
        wire = KeyedWire(self, port or self.server.port, user)
        self.wires.append(wire)
        return KeyedClient(wire, auth)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close all connections of raw clients."""
        while self.wires:
            self.wires.pop().close()


@pytest.fixture(scope="module")
def whole_shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    with SecuredServer(folder / "data", folder) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            shop = Shop(server, ann.admin)
        yield shop
        shop.close()


@pytest.fixture
def shop(whole_shop: Shop) -> Iterator[Shop]:
    yield whole_shop
    whole_shop.close()


def code_of(reply: list[Any]) -> int:
    """The code of a refusal."""
    assert reply[0] == ERROR, reply
    return int(reply[2])


# ---------------------------------------------------------------- who is who


def test_what_a_client_says_of_itself_proves_nothing(shop: Shop) -> None:
    claims = {"principal": "ann", "user": "ann", "proof": f"curve:{shop.server.keys['ann']}"}
    eve = shop.raw("eve", auth=claims)
    eve.hello("ann", claims, "host", 1)
    for operation, arguments in (
        ("list_security", {"record_kind": "credential"}),
        ("set_binding", {"binding": "x", "subject": "user:eve", "role": "admin", "scope": "cluster"}),
        ("set_credential", {"credential": f"curve:{shop.server.keys['eve']}", "principal": "ann"}),
        ("delete_security", {"record_kind": "binding", "name": "ann"}),
    ):  # fmt: skip
        reply = eve.ask(ADMIN, operation, arguments)
        assert code_of(reply) == PermissionDenied.code
        assert reply[3].startswith("eve may not manage_cluster"), reply
    eve.hello("I am ann", claims)
    rows = shop.raw("ann").ask(ADMIN, "list_clients", {})[2]["clients"]
    assert [row["principal"] for row in rows if row["client"] == "I am ann"] == ["eve"]


@pytest.mark.parametrize("worker", [False, True], ids=["coordinator", "worker"])
def test_a_session_is_resumed_by_its_own_user_only(shop: Shop, worker: bool) -> None:
    port = shop.topic[0].port if worker else 0
    pia, eve = shop.raw("pia", port), shop.raw("eve", port)
    before = eve.session
    stolen = eve.hello("pia", {"principal": "pia"}, "", 0, pia.session, pia.token)
    assert not stolen[7] and stolen[2] not in (pia.session, before), "not resumed"
    assert stolen[3] != pia.token
    guess = eve.hello("pia", {}, "", 0, pia.session, b"\0" * 16)
    assert not guess[7] and guess[2] != pia.session
    assert pia.ask(PING)[0] == PONG, "the owner's session has ended"
    assert eve.ask(PING)[0] == PONG
    mine = pia.hello("pia", {}, "", 0, pia.session, pia.token)
    assert mine[7] and mine[2] == pia.session, "the owner resumes it"


@pytest.mark.parametrize("worker", [False, True], ids=["coordinator", "worker"])
def test_a_revoked_key_resumes_no_session_when_it_is_registered_again(
    shop: Shop, worker: bool
) -> None:
    """Neither where it was open, nor by another connection; what it had open is gone with it."""
    user, place = "rex-worker" if worker else "rex-coordinator", shop.topic[0]
    with shop.server.come_in("ann") as ann:
        shop.server.add(ann.admin, user, ("producer", TOPIC))
        port = place.port if worker else 0
        rex = shop.raw(user, port)
        opened = rex.open_producer(place.partition_id, user) if worker else {}
        before = rex.hello(user, {}, "", 0, rex.session, rex.token)
        assert before[7] and before[2] == rex.session, "it is not resumed before"
        credential = f"curve:{shop.server.keys[user]}"
        ann.admin.delete_security("credential", credential)
        wait_until("the end of the session", lambda: rex.ask(PING)[0] == ERROR, 20)
        assert code_of(rex.ask(HELLO, 1, user, {}, "", 0, rex.session, rex.token)) == PermissionDenied.code  # fmt: skip
        ann.admin.set_credential(credential, user)
    again = (1, user, {}, "", 0, rex.session, rex.token)
    welcomes: list[Any] = []

    def answer_to(op: int, *fields: Any) -> list[Any]:
        """None comes to what was sent over the connection that was cut."""
        request, until = rex.post(op, *fields), time.monotonic() + 2
        while time.monotonic() < until:
            if answer := rex._answer(request):
                return list(answer)
            rex.socket.poll(50)
        return [0]

    def is_back() -> bool:
        welcomes.append(answer_to(HELLO, *again))
        return welcomes[-1][0] == WELCOME and answer_to(PING)[0] == PONG

    wait_until("a session of the key", is_back, 20)
    welcomes.append(shop.raw(user, port).hello(*again[1:]))
    for welcome in (each for each in welcomes if each[0] == WELCOME):
        assert not welcome[7] and welcome[2] != rex.session and welcome[3] != rex.token
    assert rex.ask(PING)[0] == PONG
    if worker:
        assert rex.publish((place.partition_id, rex.frame(opened, 0, [b"late"])))[0] == FENCED


def test_only_who_has_opened_a_producer_publishes_by_it(shop: Shop) -> None:
    place = shop.topic[0]
    pia, eve, pete = (shop.raw(user, place.port) for user in ("pia", "eve", "pete"))
    opened = pia.open_producer(place.partition_id, "pias")
    for thief in (eve, pete):
        thief.hello("pia", {}, "", 0, pia.session, pia.token)
        stolen = thief.frame(opened, opened["next_sequence"], [b"stolen"])
        assert thief.publish((place.partition_id, stolen))[0] == FENCED
        thief.ask(12, place.partition_id, opened["producer_id"])  # CLOSE_PRODUCER, not its own
    reply = pete.ask(OPEN_PRODUCER, place.partition_id, "pias")
    assert code_of(reply) == PermissionDenied.code and "another user" in reply[3], reply
    frame = pia.frame(opened, opened["next_sequence"], [b"mine"])
    assert pia.publish((place.partition_id, frame))[0] == 0
    again = shop.raw("pia", place.port)
    assert again.open_producer(place.partition_id, "pias")["producer_epoch"] > opened["producer_epoch"]  # fmt: skip


def test_a_name_is_free_when_its_user_has_gone(shop: Shop) -> None:
    place = shop.topic[0]
    pia, pete = shop.raw("pia", place.port), shop.raw("pete", place.port)
    pia.open_producer(place.partition_id, "left")
    assert pia.ask(3)[0] == RESULT  # BYE
    pete.open_producer(place.partition_id, "left")


def test_nothing_is_published_through_a_worker_that_does_not_own_the_partition(shop: Shop) -> None:
    here, there = shop.topic
    pia, eve = shop.raw("pia", here.port), shop.raw("eve", here.port)
    assert code_of(pia.ask(OPEN_PRODUCER, there.partition_id, "far")) == NotOwner.code
    opened = shop.raw("pia", there.port).open_producer(there.partition_id, "far")
    for client in (pia, eve):
        frame = client.frame(opened, opened["next_sequence"], [b"far"])
        assert client.publish((there.partition_id, frame))[0] == NOT_OWNER


# ---------------------------------------------------------------- guessed numbers

GUESSES: dict[str, tuple[Any, ...]] = {
    "producer": (OPEN_PRODUCER, "p"),
    "producer without a name": (OPEN_PRODUCER, ""),
    "shared": (SUBSCRIBE, "s", "shared", "latest", "c", {}),
    "reader": (SUBSCRIBE, "", "reader", "earliest", "c", {}),
    "unknown type": (SUBSCRIBE, "s", "broadcast", "earliest", "c", {}),
    "bad position": (SUBSCRIBE, "s", "shared", {"nonsense": 1}, "c", {}),
    "bad policy": (SUBSCRIBE, "s", "shared", "latest", "c", {"failure_policy": {"nonsense": 1}}),
    "dead letters": (
        SUBSCRIBE, "s", "shared", "latest", "c",
        {"failure_policy": {"poison_policy": "dead_letter", "dead_letter_topic": "/secret/dead"}},
    ),
}  # fmt: skip


def guess(client: KeyedClient, partition_id: int, fields: tuple[Any, ...]) -> tuple[int, int, str]:
    """What a client is told that opens something on a partition of which it has only a number."""
    op, *others = fields
    before = [partition_id] if op == OPEN_PRODUCER else [1, 1, partition_id]
    kind, _, code, text, *_ = client.ask(op, *before, *others)
    return kind, code, str(text).replace(str(partition_id), "N")


@pytest.mark.parametrize("what", GUESSES)
def test_a_hidden_partition_is_refused_as_one_that_does_not_exist(shop: Shop, what: str) -> None:
    for user in ("eve", "carl", "pia"):
        for place in shop.hidden:
            client = shop.raw(user, place.port)
            missing = guess(client, NO_PARTITION, GUESSES[what])
            assert missing[0] == ERROR and missing[1] == NotOwner.code, missing
            for each in shop.hidden:  # on this worker, and on the other one
                assert guess(client, each.partition_id, GUESSES[what]) == missing, user


# ---------------------------------------------------------------- one subscription


@pytest.mark.parametrize(
    ("subscription", "kind"),
    [
        ("other", "shared"), ("other", "exclusive"), ("", "reader"), ("billing", "reader"),
        ("billing#x", "shared"), ("billing/../other", "shared"), ("billing\n", "shared"), ("BILLING", "shared"),
        ("*", "shared"), ("", "shared"),
    ],
)  # fmt: skip
def test_a_consumer_of_one_subscription_gets_no_other(
    shop: Shop, subscription: str, kind: str
) -> None:
    place = shop.topic[0]
    carl = shop.raw("carl", place.port)
    reply = carl.subscribe(place.partition_id, subscription, kind=kind, credit=0)
    assert code_of(reply) == PermissionDenied.code, reply
    assert carl.subscribe(place.partition_id, "billing", kind="shared", credit=0)[0] == RESULT
    assert carl.ask(SEEK, 1, "earliest")[0] == RESULT
    assert code_of(carl.ask(SEEK, 2, "earliest")) != Internal.code, "no consumer of that number"


# ---------------------------------------------------------------- names

ODD_NAMES = (
    "", "/", "//", "shop/orders", "/shop", "/shop/", "/shop/orders/", "/shop/../secret/plans", "/shop/orders/../plans",
    "/../secret", "/shop/orders\n", "/shop/orders\0", "/shop/%2e%2e", "/shop/orders#billing", "/shop/*", "/*/*",
    "namespace:shop", "cluster", "session", "/shop/orders'; DROP", "/shop/" + "x" * 129, "/secret/plans",
    "/secret/plans-part-0", "/shop/ordеrs", "/system/audit",
)  # fmt: skip
"""Traversal, injection, other forms of what scopes are; one has a Cyrillic letter."""
REFUSALS = {InvalidArgument.code, PermissionDenied.code}
ON_TOPICS = (
    ("describe_topic", {}), ("topic_stats", {}), ("delete_topic", {}), ("create_topic", {}), ("purge_topic", {}),
    ("topic_policy", {}), ("list_subscriptions", {}), ("flush_history", {}), ("set_topic", {"partitions": 9}),
    ("delete_subscription", {"subscription": "billing"}), ("move_topic", {"worker": 0}),
)  # fmt: skip


@pytest.mark.parametrize("user", ["eve", "carl", "pia"])
def test_odd_names_lead_nowhere(shop: Shop, user: str) -> None:
    client = shop.raw(user)
    commands: list[tuple[Any, ...]] = []
    for name in ODD_NAMES:
        commands += [(LOOKUP, name), (LOOKUP, name, {})]
        commands += [(ADMIN, operation, {"topic": name, **more}) for operation, more in ON_TOPICS]
    asked = [(command, client.post(*command)) for command in commands]
    for command, request in asked:
        reply = client.answer(request)
        assert code_of(reply) in REFUSALS, (command, reply)


def test_the_right_to_manage_one_namespace_is_for_none_that_looks_like_it(shop: Shop) -> None:
    with shop.server.come_in("ann") as ann:
        ann.admin.set_role("keeper", ["manage_namespace"])
        shop.server.add(
            ann.admin, "kate", ("keeper", "namespace:kate"), ("keeper", "namespace:k-*")
        )
    kate = shop.raw("kate")
    for name in (
        "shop",
        "system",
        "kate/../system",
        "k-/../system",
        "kate\n",
        "k-\0",
        "*",
        "",
        "/kate",
        "namespace:kate",
    ):
        for operation in ("create_namespace", "delete_namespace"):
            reply = kate.ask(ADMIN, operation, {"namespace": name})
            assert code_of(reply) in REFUSALS, (operation, name, reply)
    for name in ("kate", "k-1"):
        assert kate.ask(ADMIN, "create_namespace", {"namespace": name})[0] == RESULT
        assert kate.ask(ADMIN, "delete_namespace", {"namespace": name})[0] == RESULT


def test_a_topic_that_is_hidden_is_not_told_from_one_that_is_missing(shop: Shop) -> None:
    for user in ("eve", "carl", "pia"):
        client = shop.raw(user)
        for command in ((LOOKUP,), (LOOKUP, None, 1)):
            told = []
            for topic in (HIDDEN, "/secret/other", "/nowhere/at-all"):
                op, *others = command
                reply = client.ask(op, topic, *others)
                told.append((code_of(reply), reply[3].replace(topic, "T")))
            assert told[0] == told[1] == told[2], told


def test_a_watch_and_a_list_tell_of_what_may_be_looked_up(shop: Shop) -> None:
    """Of reply topics to no one."""
    patterns = ["/shop/*", "/secret/*", "/system/*"]
    with shop.server.come_in("ann") as ann:
        reply_topic = f"/system/reply-{'0' * 32}"
        shop.raw("eve").ask(LOOKUP, reply_topic, {"dispatch": "non_reliable"})
        assert ann.admin.describe_topic(reply_topic)["topic"] == reply_topic
        assert [row["topic"] for row in ann.admin.list_topics("shop")][-1:] == [TOPIC]
        assert ann.admin.list_topics(pattern="/system/reply-*") == []
    for user, seen in (("eve", []), ("pia", [TOPIC]), ("carl", [TOPIC]), ("ann", [HIDDEN, TOPIC])):
        value = shop.raw(user).ask(WATCH, "", patterns, 0)[2]
        passed_over = {DEAD, AUDIT_TOPIC} if user == "ann" else {DEAD}
        assert [t for t in sorted(value["topics"]) if t not in passed_over] == seen, user


# ---------------------------------------------------------------- the broker itself


def test_dead_letters_reach_partitions_of_every_worker(shop: Shop) -> None:
    """The broker publishes them itself, from worker to worker."""
    policy = {"max_redelivery_count": 0, "poison_policy": "dead_letter", "dead_letter_topic": DEAD}
    with shop.server.come_in("ann") as ann:
        ann.admin.create_topic(DEAD, partitions=2)
        shop.server.add(ann.admin, "dora", ("producer", "/shop/*"), ("consumer", "/shop/*"))
    with shop.server.come_in("dora") as dora:
        consumer = dora.consumer(
            TOPIC, subscription="poison", initial_position="latest", failure_policy=policy
        )
        letters = dora.consumer(DEAD, subscription="all", initial_position="earliest")
        producer = dora.producer(TOPIC)
        sent = {b"%d" % number for number in range(20)}
        for payload in sent:
            producer.publish(payload)
        for _ in sent:
            consumer.nack(consumer.receive(timeout=20))
        found: set[bytes] = set()

        def all_there() -> bool:
            letter = letters.receive(timeout=0.2)
            if letter is not None:
                found.add(letter.payload)
            return found == sent

        wait_until("all dead letters", all_there, 20)
        producer.close()


def test_the_ops_above_are_those_of_the_protocol() -> None:
    for op, command in (
        (HELLO, protocol.Hello), (PING, protocol.Ping), (LOOKUP, protocol.Lookup), (ADMIN, protocol.Admin),
        (WATCH, protocol.Watch), (OPEN_PRODUCER, protocol.OpenProducer), (PUBLISH, protocol.Publish),
        (SUBSCRIBE, protocol.Subscribe), (SEEK, protocol.Seek), (WELCOME, protocol.Welcome),
        (PONG, protocol.Pong), (ERROR, protocol.Error), (RESULT, protocol.Result),
    ):  # fmt: skip
        assert protocol.op_code(command) == op
