"""A secured broker whose authorizer waits, hangs or changes its mind, over real processes: only who it is asked about waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import PermissionDenied, Unavailable
from tests.delivery.test_security import TOPIC, SecuredServer, refused
from tests.delivery.test_security_matrix import (
    ERROR,
    LOOKUP,
    OPEN_PRODUCER,
    PING,
    PONG,
    RESULT,
    SUBSCRIBE,
    KeyedClient,
    KeyedWire,
)
from tests.security.rules import install, write_rules
from tests.workers.broker import is_running, wait_until

FLOOD = 3000
WAIT_SECONDS = 120


class Stage:
    """A broker, its rules, and the users pia and paul, who may use all of a namespace by their roles."""

    def __init__(self, server: SecuredServer, rules: Path) -> None:
        self.server, self.rules = server, rules
        self.changes = 0
        self.wires: list[KeyedWire] = []
        self.pool = ThreadPoolExecutor(4)
        server.make_ann()
        with server.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC, durability="memory")
            for user in ("pia", "paul"):
                scope = "namespace:shop"
                server.add(ann.admin, user, ("producer", scope), ("consumer", scope))

    def raw(self, user: str, port: int = 0) -> KeyedClient:
        """A raw client of a user, of the coordinator unless a worker's port is given."""
        wire = KeyedWire(self, port or self.server.port, user)  # type: ignore[arg-type]
        self.wires.append(wire)
        return KeyedClient(wire)  # type: ignore[arg-type]

    def place(self) -> tuple[int, int]:
        """Partition of the topic, and the port of its worker."""
        (row,) = self.raw("ann").ask(LOOKUP, TOPIC)[2]["partitions"]
        return row[0], int(row[3].rpartition(":")[2])

    def change(self, admin: Any, text: str) -> None:
        """Give the rules another text, and wait until the coordinator goes by it."""
        self.changes += 1
        question = "ann", "produce", f"/change/n{self.changes}"

        def is_known() -> bool:
            return not admin.check_permission(*question)["allowed"]

        assert not is_known()  # an answer of the old rules, which counts until the version is read
        write_rules(self.rules, f"{text}\n{' '.join(question)}\n")
        wait_until("the new rules", is_known, WAIT_SECONDS)

    def let_go(self) -> None:
        """Let the rules answer that hang."""
        Path(f"{self.rules}.go").touch()

    def is_asked(self, question: str) -> bool:
        """Whether the rules were asked that."""
        asked = Path(f"{self.rules}.asked")
        return asked.exists() and question in asked.read_text()

    def open_late(self, user: str) -> Future[None]:
        """Let a user publish one message, however long that waits."""

        def publish() -> None:
            with self.server.come_in(user, timeout=float(WAIT_SECONDS)) as client:
                client.producer(TOPIC).publish(b"late")

        return self.pool.submit(publish)

    def exchange(self, user: str, subscription: str) -> None:
        """Open a producer and a consumer, and send what they are for."""
        with self.server.come_in(user) as client:
            consumer = client.consumer(TOPIC, subscription=subscription)
            producer = client.producer(TOPIC)
            for number in range(50):
                producer.publish(b"%d" % number)
            found = [consumer.receive(timeout=20) for _ in range(50)]
            assert [each.payload for each in found] == [b"%d" % number for number in range(50)]
            consumer.ack(found)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    install(tmp_path / "packages")
    rules = tmp_path / "rules"
    write_rules(rules, "")
    server = SecuredServer(
        tmp_path / "data", tmp_path, authorizer=f"live:{rules}", packages=str(tmp_path / "packages")
    )
    with server:
        made = Stage(server, rules)
        yield made
        made.let_go()
        made.pool.shutdown()
        while made.wires:
            made.wires.pop().close()


def answers(client: KeyedClient, requests: list[int]) -> list[Any]:
    """Answers of all these requests."""
    return [client.answer(request) for request in requests]


def test_who_is_asked_about_waits_and_others_do_not(stage: Stage) -> None:
    partition, port = stage.place()
    pia = stage.raw("pia", port)
    with stage.server.come_in("ann") as ann:
        stage.change(ann.admin, "hang pia")
    open_first = pia.post(OPEN_PRODUCER, partition, "first", TOPIC)
    subscribe = pia.post(
        SUBSCRIBE, 1, 1, partition, "s", "exclusive", "latest", "", {"topic": TOPIC}
    )
    wait_until("a question", lambda: stage.is_asked("pia produce /shop/orders"), WAIT_SECONDS)
    flood = [pia.post(OPEN_PRODUCER, partition, f"p{number}", TOPIC) for number in range(FLOOD)]
    assert pia.ask(PING)[0] == PONG, "a command that needs no right overtakes them"
    late = stage.open_late("pia")
    wait_until("a question", lambda: stage.is_asked("pia lookup /shop/orders"), WAIT_SECONDS)
    stage.exchange("paul", "others")
    with stage.server.come_in("ann") as ann:
        assert ann.admin.cluster_status()["auth"] == "required"
        assert not late.done()
        # nothing is opened without an answer: those that waited too long are told to try again
        pia.pump()
        for reply in pia.waiting:
            assert (reply[0], reply[2]) == (ERROR, Unavailable.code), reply
        names = [each["subscription"] for each in ann.admin.list_subscriptions(TOPIC)]
        assert names == ["others"]
    stage.let_go()
    for reply in answers(pia, [open_first, subscribe, *flood]):
        assert reply[0] == RESULT or reply[2] == Unavailable.code, reply

    def opens() -> bool:
        reply = pia.ask(OPEN_PRODUCER, partition, "last", TOPIC)
        assert reply[0] == RESULT or reply[2] == Unavailable.code, reply
        return bool(reply[0] == RESULT)

    wait_until("an open producer", opens, WAIT_SECONDS)
    late.result(WAIT_SECONDS)


def test_what_is_open_is_closed_when_the_answer_changes_or_does_not_come(stage: Stage) -> None:
    server, rules = stage.server, stage.rules
    with (
        server.come_in("pia") as pia, server.come_in("paul") as paul, server.come_in("ann") as ann,
    ):  # fmt: skip
        producer = paul.producer(TOPIC)
        theirs = pia.consumer(TOPIC, subscription="theirs")
        ours = paul.consumer(TOPIC, subscription="ours")

        def consumers(subscription: str) -> int:
            subs = {each["subscription"]: each for each in ann.admin.list_subscriptions(TOPIC)}
            return len(subs[subscription]["consumers"])

        assert consumers("theirs") == consumers("ours") == 1
        write_rules(rules, "hang pia\n")

        def is_closed() -> bool:
            producer.publish(b"on")
            assert ours.receive(timeout=20).payload == b"on", "others wait with it"
            return not consumers("theirs")

        wait_until("the end of what cannot be decided", is_closed, WAIT_SECONDS)
        stage.let_go()  # the client has tried ever since
        wait_until("the consumer, open again", lambda: consumers("theirs") == 1, WAIT_SECONDS)
        write_rules(rules, "pia consume /shop/\n")

        def is_refused() -> bool:
            producer.publish(b"denied")
            try:
                theirs.receive(timeout=0.1)
            except PermissionDenied:
                return True
            return False

        wait_until("the refusal", is_refused, WAIT_SECONDS)
        assert consumers("theirs") == 0 and consumers("ours") == 1


def test_a_restart_asks_again_and_keeps_no_answer(stage: Stage) -> None:
    server, rules = stage.server, stage.rules
    stage.exchange("pia", "s")
    with server.come_in("ann") as ann:
        stage.change(ann.admin, "hang pia")
        before = Path(f"{rules}.asked").read_text().count("pia lookup")
        (place,) = ann.admin.describe_topic(TOPIC)["placement"]
        late = stage.open_late("pia")

        def is_asked() -> bool:
            return Path(f"{rules}.asked").read_text().count("pia lookup") > before

        wait_until("a question", is_asked, WAIT_SECONDS)
        rows = ann.admin.cluster_status()["processes"]
        names = "coordinator", f"worker-{place['worker']}"
        pids = [int(row["pid"]) for row in rows if row["process"] in names]
        assert len(pids) == 2, rows
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until("the end of both", lambda: not any(map(is_running, pids)), WAIT_SECONDS)
    stage.exchange("paul", "others")
    assert not late.done()
    stage.let_go()
    late.result(WAIT_SECONDS)
    write_rules(rules, "pia produce /shop/\n")
    server.stop()
    server.start()
    with server.come_in("pia") as pia:
        assert "a rule of the house" in refused(lambda: pia.producer(TOPIC).publish(b"no"))


def test_lists_wait_for_answers_and_tell_what_they_permit(stage: Stage) -> None:
    with stage.server.come_in("ann") as ann, stage.server.come_in("pia") as pia:
        topics = [f"/shop/t{number:03}" for number in range(100)]
        for topic in topics:
            ann.admin.create_topic(topic, durability="memory")
        stage.change(ann.admin, "pia shows /shop/orders\npia shows /shop/t05*\nslow")

        def listed() -> list[str]:
            return [each["topic"] for each in pia.admin.list_topics("shop")]

        assert listed() == [TOPIC, *topics[50:60]]
        consumer = pia.consumer(pattern="/shop/t*", subscription="all", initial_position="earliest")
        for number in (1, 55):
            ann.producer(topics[number]).publish(b"%d" % number)
        assert consumer.receive(timeout=WAIT_SECONDS).payload == b"55"


def test_a_pattern_passes_over_what_lists_show_and_may_not_be_looked_up(stage: Stage) -> None:
    """Scopes are wider than rules may be; a topic that is denied ends no consumer of the others."""
    with stage.server.come_in("ann") as ann, stage.server.come_in("pia") as pia:
        for number in range(3):
            ann.admin.create_topic(f"/shop/t{number}", durability="memory")
        stage.change(ann.admin, "pia lookup /shop/t0\npia lookup /shop/secret")
        assert "/shop/t0" in [each["topic"] for each in pia.admin.list_topics("shop")]
        consumer = pia.consumer(pattern="/shop/*", subscription="all", initial_position="earliest")
        for topic in ("/shop/t0", "/shop/t1"):
            ann.producer(topic).publish(topic.encode())
        assert consumer.receive(timeout=WAIT_SECONDS).payload == b"/shop/t1"
        ann.admin.create_topic("/shop/secret", durability="memory")
        for topic in ("/shop/secret", "/shop/t2"):
            ann.producer(topic).publish(topic.encode())
        assert consumer.receive(timeout=WAIT_SECONDS).payload == b"/shop/t2"


def test_a_pattern_waits_for_an_authorizer_that_is_repaired(stage: Stage) -> None:
    with stage.server.come_in("ann") as ann, stage.server.come_in("pia") as pia:
        ann.admin.create_topic("/shop/t0", durability="memory")
        consumer = pia.consumer(pattern="/shop/t*", subscription="all", initial_position="earliest")
        stage.change(ann.admin, "pia shows no-scope")
        with pytest.raises(Unavailable, match="could not decide which names"):
            pia.admin.list_topics("shop")
        ann.admin.create_topic("/shop/t1", durability="memory")
        ann.producer("/shop/t1").publish(b"1")
        assert consumer.receive(timeout=1.0) is None, "it is told of no topic, and goes on"
        stage.change(ann.admin, "")
        assert consumer.receive(timeout=WAIT_SECONDS).payload == b"1"


def test_an_administrator_disables_users_whose_questions_hang(stage: Stage) -> None:
    users = [f"u{number}" for number in range(6)]
    with stage.server.come_in("ann") as ann:
        for user in users:
            stage.server.add(ann.admin, user, ("producer", "namespace:shop"))
        stage.change(ann.admin, "\n".join(f"hang {user}" for user in users))
    raw = [stage.raw(user) for user in users]
    for user, client in zip(users, raw, strict=True):
        for number in range(FLOOD // 10):
            client.post(LOOKUP, f"/shop/{user}-{number}")
    for user in users[:4]:
        wait_until("a question", lambda user=user: stage.is_asked(f"{user} lookup"), WAIT_SECONDS)  # type: ignore[misc]
    with stage.server.come_in("ann") as ann, stage.server.come_in("paul") as paul:
        for user in users:
            assert ann.admin.list_security(record_kind="principal")
            ann.admin.set_principal(user, disabled=True)
            assert paul.admin.list_subscriptions(TOPIC) == []

        def told() -> str:
            rows = ann.admin.cluster_status()["processes"]
            return str(next(row["fault"] for row in rows if row["process"] == "coordinator"))

        fault = wait_until("the lost threads in the status", told, WAIT_SECONDS)
        assert "waited for the authorizer for more than 5 s" in fault
