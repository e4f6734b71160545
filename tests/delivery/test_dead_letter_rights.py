"""Dead letters go to a topic by the right of the principal that set the failure policy, as long as it has that right."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube_fast.broker.records import PolicySet
from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.errors import DanubeError
from tests.delivery.test_security import FELT_SECONDS, SecuredServer, refused
from tests.workers.broker import wait_until

SECONDS = 5 * FELT_SECONDS
NO_RIGHT = "dora, who set the failure policy, may not publish to "


class Letters:
    """A topic whose messages fail, and the topic for them; dora consumes there and sets the policy."""

    def __init__(self, server: SecuredServer, ann: Any, number: int) -> None:
        self.server, self.ann = server, ann
        self.topic, self.dead = f"/shop/orders-{number}", f"/shop/dead-{number}"
        self.policy = {
            "max_redelivery_count": 0, "poison_policy": "dead_letter", "dead_letter_topic": self.dead,
        }  # fmt: skip
        ann.admin.create_topic(self.topic)
        ann.admin.create_topic(self.dead)
        ann.admin.set_binding("dora-topic", "user:dora", "consumer", self.topic)
        self.grant()

    def grant(self) -> None:
        """Let dora publish to the dead-letter topic."""
        self.ann.admin.set_binding("dora-dead", "user:dora", "producer", self.dead)

    def revoke(self) -> None:
        """Take that away."""
        self.ann.admin.delete_security("binding", "dora-dead")

    def subscribe(self, dora: Any) -> Any:
        """A consumer with the policy."""
        return dora.consumer(
            self.topic, subscription="s", initial_position="earliest", failure_policy=self.policy
        )

    def fail(self, consumer: Any, payload: bytes) -> None:
        """Publish a message, and give it back for good."""
        self.ann.producer(self.topic).publish(payload)

        def is_given_back() -> bool:
            message = consumer.receive(timeout=1)
            if message is not None:
                consumer.nack(message)
            return bool(message is not None and message.payload == payload)

        wait_until(f"{payload!r} to be given back", is_given_back, SECONDS)

    def state(self) -> str:
        """The state of the subscription, in words."""
        return str(self.ann.admin.describe_subscription(self.topic, "s")["state"])

    def wait_state(self, text: str) -> None:
        """Wait until the state names that."""

        def is_named() -> bool:
            try:
                return text in self.state()
            except DanubeError:  # a worker is down
                return False

        wait_until(f"a state with {text!r}", is_named, SECONDS)

    def wait_dead(self, *payloads: bytes) -> None:
        """Wait until these are in the dead-letter topic, and nothing else."""
        found: set[bytes] = set()
        letters = self.ann.consumer(self.dead, subscription="read", initial_position="earliest")

        def are_there() -> bool:
            letter = letters.receive(timeout=0.2)
            if letter is not None:
                found.add(letter.payload)
            return found == {*payloads}

        wait_until(f"{payloads} in {self.dead}", are_there, SECONDS)
        letters.close()
        self.ann.admin.delete_subscription(self.dead, "read")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SecuredServer, Any]]:
    folder = tmp_path_factory.mktemp("letters")
    with SecuredServer(folder / "data", folder) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.set_role("keeper", ["lookup", "manage_topic", "consume", "produce"])
            server.add(ann.admin, "dora")
            server.add(ann.admin, "kim", ("keeper", "namespace:shop"))
            yield server, ann


_numbers = iter(range(1000))


@pytest.fixture
def letters(place: tuple[SecuredServer, Any]) -> Letters:
    return Letters(*place, next(_numbers))


def test_dead_letters_wait_while_their_setter_may_not_publish_them(letters: Letters) -> None:
    with letters.server.come_in("dora") as dora:
        consumer = letters.subscribe(dora)
        letters.fail(consumer, b"one")
        letters.wait_dead(b"one")
        assert (
            letters.ann.admin.describe_subscription(letters.topic, "s")["policy_setter"] == "dora"
        )
        letters.revoke()
        letters.fail(consumer, b"two")
        letters.wait_state(f"{NO_RIGHT}{letters.dead}")
        assert "1 dead letters have to wait" in letters.state()
        letters.ann.admin.delete_topic(letters.dead)
        letters.ann.admin.create_topic(letters.dead)  # another one, of the same name
        letters.fail(consumer, b"three")
        letters.wait_state("2 dead letters have to wait")
        letters.grant()
        letters.wait_dead(b"two", b"three")
        consumer.close()


def test_what_waits_goes_on_under_the_policy_of_another_principal(letters: Letters) -> None:
    with letters.server.come_in("dora") as dora:
        consumer = letters.subscribe(dora)
        letters.revoke()
        letters.fail(consumer, b"one")
        letters.wait_state(NO_RIGHT)
        with letters.server.come_in("kim") as kim:
            kim.admin.set_failure_policy(letters.topic, "s", letters.policy)
        letters.fail(consumer, b"one")  # it was given another chance
        letters.wait_dead(b"one")
        assert letters.ann.admin.describe_subscription(letters.topic, "s")["policy_setter"] == "kim"
        consumer.close()


@pytest.mark.parametrize("how", ["killed", "grown", "moved"])
def test_the_setter_is_kept(letters: Letters, how: str) -> None:
    admin, server = letters.ann.admin, letters.server
    if how == "grown":
        admin.delete_topic(letters.topic)
        admin.create_topic(letters.topic, partitions=1)
    with server.come_in("dora") as dora:
        letters.subscribe(dora).close()
    if how == "killed":
        assert server.broker is not None
        for pid in server.broker.pids[1:]:
            os.kill(pid, signal.SIGKILL)
    elif how == "grown":
        admin.set_topic(letters.topic, partitions=4)
    else:
        here = admin.describe_topic(letters.topic)["placement"][0]["worker"]
        admin.move_topic(letters.topic, 1 - here)

    def setter() -> str:
        try:
            found = admin.describe_subscription(letters.topic, "s")
        except DanubeError:
            return ""
        return str(found["policy_setter"])

    wait_until("the setter", lambda: setter() == "dora", SECONDS)
    letters.revoke()
    consumer = letters.ann.consumer(letters.topic, subscription="s")
    for number in range(4):
        letters.fail(consumer, b"%d" % number)
    letters.wait_state(NO_RIGHT)
    letters.grant()
    letters.wait_dead(*[b"%d" % number for number in range(4)])
    consumer.close()


def test_a_principal_that_is_gone_sends_no_dead_letters(letters: Letters) -> None:
    with letters.server.come_in("dora") as dora:
        letters.subscribe(dora).close()
    letters.ann.admin.set_principal("dora", disabled=True)
    consumer = letters.ann.consumer(letters.topic, subscription="s")
    letters.fail(consumer, b"one")
    letters.wait_state(NO_RIGHT)
    letters.ann.admin.set_principal("dora", disabled=False)
    letters.wait_dead(b"one")
    consumer.close()


def test_a_missing_dead_letter_topic_needs_the_right_to_make_it(letters: Letters) -> None:
    admin, missing = letters.ann.admin, f"{letters.dead}-new"
    policy = {**letters.policy, "dead_letter_topic": missing}
    admin.set_binding("dora-dead", "user:dora", "producer", missing)
    with letters.server.come_in("dora") as dora:

        def subscribe() -> Any:
            return dora.consumer(letters.topic, subscription="s", failure_policy=policy)

        assert "produce on its namespace" in refused(subscribe)
        assert admin.list_subscriptions(letters.topic) == []
        assert not [row for row in admin.list_topics("shop") if row["topic"] == missing]
        admin.set_role("maker", ["manage_topic"])
        admin.set_binding("dora-make", "user:dora", "maker", missing)
        consumer = subscribe()
        admin.delete_security("binding", "dora-make")
        letters.fail(consumer, b"one")
        letters.wait_state("making it needs manage_topic on it")
        admin.create_topic(missing)
        letters.dead = missing
        letters.wait_dead(b"one")
        consumer.close()
    with letters.server.come_in("kim") as kim:
        admin.set_role("tuner", ["lookup", "manage_topic"])
        letters.server.add(admin, "tina", ("tuner", letters.topic), ("producer", "/shop/dead-*"))
        kim.admin.set_failure_policy(letters.topic, "s", {**policy, "dead_letter_topic": f"{missing}-1"})  # fmt: skip
        admin.set_failure_policy(letters.topic, "s", {"max_redelivery_count": 7})
        described = admin.describe_subscription(letters.topic, "s")
        assert described["policy_setter"] == "kim", "an administrator lent a right in passing"
        with letters.server.come_in("tina") as tina:
            values = {**policy, "dead_letter_topic": f"{missing}-2"}
            assert "does not exist" in refused(
                lambda: tina.admin.set_failure_policy(letters.topic, "s", values)
            )
            admin.set_binding("tina-all", "user:tina", "producer", "namespace:shop")
            tina.admin.set_failure_policy(letters.topic, "s", values)
        admin.delete_security("principal", "tina")


def test_redrive_needs_the_rights_to_both_topics(letters: Letters) -> None:
    admin, server = letters.ann.admin, letters.server
    with server.come_in("dora") as dora:
        consumer = letters.subscribe(dora)
        letters.fail(consumer, b"one")
        letters.wait_dead(b"one")
        consumer.close()
    server.add(admin, "rita", ("viewer", "/shop/*"))

    def redrive() -> int:
        with server.come_in("rita") as rita:
            return int(rita.admin.redrive(letters.topic, "s"))

    both = (("consumer", letters.dead, "consume"), ("producer", letters.topic, "produce"))
    for role, scope, _ in both:
        admin.set_binding("rita-one", "user:rita", role, scope)
        missing = next(each for each in both if each[0] != role)
        assert f"rita may not {missing[2]} {missing[1]}" in refused(redrive)
        admin.delete_security("binding", "rita-one")
    for role, scope, _ in both:
        admin.set_binding(f"rita-{role}", "user:rita", role, scope)
    assert redrive() == 1, "those that were refused took the letter"
    admin.delete_security("principal", "rita")


def test_a_policy_of_the_time_when_no_one_was_asked_waits_until_it_is_set_again(
    tmp_path: Path,
) -> None:
    """Without auth, over restarts, its letters are sent; with auth none is, and the state says what to do, before the
    first letter too."""
    server = SecuredServer(tmp_path / "data", tmp_path)
    server.changes["auth"] = "none"
    topic, dead = "/default/orders", "/default/dead"
    policy = {
        "max_redelivery_count": 0, "poison_policy": "dead_letter", "dead_letter_topic": dead,
    }  # fmt: skip

    def letters(client: Any) -> int:
        rows = client.admin.topic_stats(dead)["partition_stats"]
        return sum(int(row["end_offset"]) for row in rows)

    def state(client: Any) -> str:
        return str(client.admin.describe_subscription(topic, "s")["state"])

    def fail(client: Any, payload: bytes) -> None:
        client.producer(topic).publish(payload)
        give_back(client, payload)

    def give_back(client: Any, payload: bytes) -> None:
        with client.consumer(topic, subscription="s", failure_policy=policy) as consumer:
            message = consumer.receive(timeout=SECONDS)
            assert message is not None and message.payload == payload
            consumer.nack(message)

    with server:
        for start in (1, 2):
            if start == 2:
                server.stop()
                server.start()
            with server.client() as client:
                if start == 1:
                    client.admin.create_topic(topic)
                    client.admin.create_topic(dead)
                    client.consumer(topic, subscription="s", failure_policy=policy).close()
                fail(client, b"%d" % start)
                wait_until(
                    "a letter", lambda now=client, count=start: letters(now) == count, SECONDS
                )
                assert "have to wait" not in state(client)
        server.stop()
        server.changes["auth"] = "required"
        server.start()
        server.make_ann()
        with server.come_in("ann") as ann:
            again = f"set-failure-policy TOPIC SUBSCRIPTION --dead-letter-topic {dead}"
            assert state(ann).startswith("caught up; dead letters would have to wait: ")
            assert again in state(ann)
            fail(ann, b"three")  # names the topic; but the subscription is there already
            wait_until("a letter that waits", lambda: again in state(ann), SECONDS)
            assert letters(ann) == 2
            ann.admin.set_failure_policy(topic, "s", {"dead_letter_topic": dead})
            give_back(ann, b"three")  # it was given another chance
            wait_until("the letter", lambda: letters(ann) == 3, SECONDS)
            assert state(ann) == "caught up"


def test_a_record_of_a_policy_that_no_one_is_known_to_have_set_can_be_read() -> None:
    known = PolicySet(7, "s", FailurePolicy(max_redelivery_count=1), "dora")
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(known))
    assert fields[-1] == "dora"
    old = msgspec.msgpack.encode(fields[:-1])
    assert msgspec.msgpack.decode(old, type=PolicySet) == msgspec.structs.replace(known, setter="")
