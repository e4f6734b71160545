"""What a secured broker tells: lists of what may be looked up, and of what is hidden the same as of what is missing.

The questions about hidden things are made of the registry of operations and of the commands of the protocol: a new one is
asked without being entered here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import admin
from danube_fast.clock import MILLISECOND_NS
from danube_fast.errors import NotFound, PermissionDenied
from danube_fast.types import Permission
from danube_fast.workers.coordinator.slices import SLICE_NS, Slices
from tests.delivery.test_security import SecuredServer
from tests.delivery.test_security_matrix import (
    ADMIN,
    ERROR,
    LOOKUP,
    RESULT,
    WATCH,
    KeyedClient,
    Shop,
    code_of,
)
from tests.security.test_command_matrix import OPERATIONS
from tests.workers.broker import wait_until

SEEN = [f"/shop/seen-{number:02}" for number in range(12)]
WAIT_MS = 5000
AT_ONCE_SECONDS = 2.5
"""Far below the wait of a parked request."""
PARTLY: dict[str, Permission] = {
    "lena": Permission.LOOKUP, "pam": Permission.PRODUCE, "cora": Permission.CONSUME, "nina": Permission.MANAGE_NAMESPACE,
    "tom": Permission.MANAGE_TOPIC, "bob": Permission.MANAGE_BROKER,
}  # fmt: skip
"""Users with one permission each, on all of the namespace `shop`; bob on the cluster."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("visibility")
    with SecuredServer(folder / "data", folder) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            made = Shop(server, ann.admin)
            for name in SEEN:
                ann.admin.create_topic(name, durability="memory")
                ann.admin.create_topic(name.replace("seen", "hidden"), durability="memory")
            ann.admin.create_namespace("shelf")
            server.add(ann.admin, "vic", ("viewer", "/shop/seen-*"))
            server.add(ann.admin, "wes", ("viewer", "namespace:shop"), ("viewer", "/secret/plans"))
            for user, permission in PARTLY.items():
                ann.admin.set_role(f"only-{permission}", [permission])
                cluster = permission is Permission.MANAGE_BROKER
                scope = "cluster" if cluster else "namespace:shop"
                server.add(ann.admin, user, (f"only-{permission}", scope))
            for subscription in ("billing", "audit"):
                ann.consumer("/shop/orders", subscription=subscription).close()
            ann.consumer("/secret/plans", subscription="spy").close()
            ann.admin.create_topic("/secret/part", partitions=2)
        yield made
        made.close()


# ---------------------------------------------------------------- lists


def pages(client: KeyedClient, limit: int, **arguments: Any) -> list[str]:
    """All topics that a list tells, page by page, until one is not full."""
    names: list[str] = []
    while True:
        after = names[-1] if names else ""
        rows = client.ask(ADMIN, "list_topics", {"limit": limit, "after": after, **arguments})[2]
        names += [row["topic"] for row in rows]
        if len(rows) < limit:
            return names


@pytest.mark.parametrize("limit", [1, 3, 5, 12, 100])
def test_pages_are_full_until_the_end_whatever_is_hidden_between(shop: Shop, limit: int) -> None:
    """Hidden topics stand before, between and behind those that are seen."""
    assert pages(shop.raw("vic"), limit) == SEEN
    assert pages(shop.raw("vic"), limit, namespace="secret") == []
    assert pages(shop.raw("vic"), limit, pattern="/*/*-0?") == SEEN[:10]
    everything = pages(shop.raw("ann"), limit)
    assert {*SEEN, "/secret/plans"} < set(everything) and everything == sorted(everything)


def test_namespaces_and_subscriptions_are_listed_by_right(shop: Shop) -> None:
    def namespaces(user: str) -> list[str]:
        return [row["namespace"] for row in shop.raw(user).ask(ADMIN, "list_namespaces", {})[2]]

    assert namespaces("vic") == [] == namespaces("eve") == namespaces("bob")
    assert namespaces("wes") == ["shop"] == namespaces("lena")
    assert {"secret", "shelf", "shop"} <= set(namespaces("ann"))

    def subscriptions(user: str) -> list[str]:
        client, topic = shop.raw(user), {"topic": "/shop/orders"}
        rows = client.ask(ADMIN, "list_subscriptions", topic)[2]
        stats = client.ask(ADMIN, "topic_stats", topic)[2]
        names = sorted(row["subscription"] for row in rows)
        assert sorted(row["subscription"] for row in stats["subscriptions"]) == names
        return names

    assert subscriptions("carl") == ["billing"]
    assert subscriptions("wes") == ["audit", "billing"] == subscriptions("ann")
    told = []
    for name in ("audit", "missing"):
        arguments = {"topic": "/shop/orders", "subscription": name}
        reply = shop.raw("carl").ask(ADMIN, "describe_subscription", arguments)
        told.append((code_of(reply), reply[3].replace(name, "S")))
    assert told[0] == told[1] and told[0][0] == PermissionDenied.code


def test_connections_are_listed_without_what_may_not_be_looked_up(shop: Shop) -> None:
    with shop.server.come_in("ann") as ann, shop.server.come_in("pia") as pia:
        consumer = ann.consumer("/secret/plans", subscription="spy")
        producer = pia.producer("/shop/orders", name="seen-by-few")
        producer.publish(b"x")
        for user, seen in (("bob", False), ("ann", True)):
            rows = shop.raw(user).ask(ADMIN, "list_clients", {})[2]["clients"]
            assert ("/secret/plans" in str(rows)) == seen == ("seen-by-few" in str(rows)), rows
            assert sum(row["consumer_count"] for row in rows) >= 2
            assert sum(row["producer_count"] for row in rows) >= 1
        consumer.close()


def test_a_watch_that_waits_tells_of_what_may_be_looked_up(shop: Shop) -> None:
    vic = shop.raw("vic")
    cursor = vic.ask(WATCH, "", ["/shop/*"], 0)[2]["cursor"]
    request = vic.post(WATCH, cursor, ["/shop/*"], 20_000)
    with shop.server.come_in("ann") as ann:
        ann.admin.create_topic("/shop/hidden-new", durability="memory")
        ann.admin.create_topic("/shop/seen-new", durability="memory")
    changes = vic.answer(request)[2]["changes"]
    assert [topic for _, topic in changes] == ["/shop/seen-new"]
    with shop.server.come_in("ann") as ann:
        for name in ("/shop/hidden-new", "/shop/seen-new"):
            ann.admin.delete_topic(name)


def test_a_long_list_does_not_stop_the_loop() -> None:
    """Its steps are taken in slices, between other work."""
    now = [0]
    clock: Any = SimpleNamespace(monotonic_ns=lambda: now[0])
    slices, taken = Slices(clock), {"a": 0, "b": 0}

    def steps(name: str, count: int) -> Iterator[None]:
        for _ in range(count):
            taken[name] += 1
            now[0] += MILLISECOND_NS // 32
            yield

    slices.add("vic", steps("a", 1000))
    assert 0 < taken["a"] <= 32 * (SLICE_NS // MILLISECOND_NS + 1)
    slices.add("vic", steps("b", 10))
    assert taken["b"] == 10, "a short one waits for no other"
    slices.add("vic", steps("b", 500))
    before = dict(taken)
    while slices.do_work():
        assert sum(taken.values()) - sum(before.values()) <= 32 * (SLICE_NS // MILLISECOND_NS + 1)
        before = dict(taken)
    assert taken == {"a": 1000, "b": 510}


# ---------------------------------------------------------------- hidden and missing


def questions() -> list[tuple[str, tuple[Any, ...]]]:
    """All that names a topic or a namespace, with NAME in its place."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    for name, operation in sorted(admin.OPERATIONS.items()):
        arguments = dict(OPERATIONS[name][2])
        for field in ("topic", "namespace"):
            if field in operation.arguments.__struct_fields__:
                found.append((name, (ADMIN, name, {**arguments, field: "NAME"})))
    dead = {"values": {"poison_policy": "dead_letter", "dead_letter_topic": "NAME"}}
    found.append(
        ("dead letters", (ADMIN, "set_failure_policy", {"topic": "/shop/orders", "subscription": "billing", **dead}))
    )  # fmt: skip
    found += [
        ("lookup", (LOOKUP, "NAME")),
        ("lookup that waits", (LOOKUP, "NAME", None, WAIT_MS)),
        ("lookup that makes", (LOOKUP, "NAME", {}, WAIT_MS)),
        ("lookup of a partition", (LOOKUP, "NAME-part-0", None, WAIT_MS)),
        ("lookup of a padded partition", (LOOKUP, "NAME-part-1", {}, WAIT_MS)),
        ("watch", (WATCH, "", ["NAME"], 0)),
        ("watch of a pattern", (WATCH, "", ["NAME*"], 0)),
    ]
    return found


def filled(value: Any, name: str) -> Any:
    """The same with that name."""
    if isinstance(value, str):
        return value.replace("NAME", name)
    if isinstance(value, dict):
        return {key: filled(each, name) for key, each in value.items()}
    return [filled(each, name) for each in value] if isinstance(value, list) else value


def told(client: KeyedClient, question: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """What a client is told of a name, with NAME in its place; cursors of watches are no news of it."""
    op, *fields = question
    began = time.monotonic()
    reply = client.ask(op, *[filled(each, name) for each in fields])
    assert time.monotonic() - began < AT_ONCE_SECONDS, f"{question} of {name} was parked: {reply}"
    if reply[0] == ERROR:
        return ERROR, reply[2], reply[3].replace(name, "NAME")
    value = dict(reply[2], cursor="") if isinstance(reply[2], dict) else reply[2]
    return RESULT, str(value).replace(name, "NAME")


QUESTIONS = questions()
NOBODY = ("eve", "carl", "pia", *PARTLY)


@pytest.mark.parametrize("question", [q for _, q in QUESTIONS], ids=[name for name, _ in QUESTIONS])
def test_what_is_hidden_is_told_the_same_as_what_is_missing(
    shop: Shop, question: tuple[Any, ...]
) -> None:
    of_namespace = "'namespace': 'NAME'" in str(question)
    hidden = ("secret",) if of_namespace else ("/secret/plans", "/secret/part")
    missing = ("nowhere",) if of_namespace else ("/secret/nothing", "/nowhere/at-all")
    for user in NOBODY:
        client = shop.raw(user)
        answers = {name: told(client, question, name) for name in (*hidden, *missing)}
        assert len(set(answers.values())) == 1, f"{user}: {answers}"


def test_the_names_above_are_there_and_are_not(shop: Shop) -> None:
    ann = shop.raw("ann")
    for name in ("/secret/plans", "/secret/part", "/secret/part-part-1"):
        assert ann.ask(LOOKUP, name)[0] == RESULT
    assert code_of(ann.ask(LOOKUP, "/secret/nothing")) == NotFound.code


# ---------------------------------------------------------------- partitions by name


def test_a_partition_is_looked_up_by_the_right_to_its_topic(shop: Shop) -> None:
    with shop.server.come_in("ann") as ann:
        shop.server.add(ann.admin, "otto", ("viewer", "/secret/part"))
        shop.server.add(ann.admin, "paul", ("viewer", "/secret/part-part-0"))
        shop.server.add(ann.admin, "star", ("viewer", "/secret/part-*"))
    otto = shop.raw("otto")
    for name in ("/secret/part", "/secret/part-part-0", "/secret/part-part-1"):
        assert otto.ask(LOOKUP, name)[0] == RESULT, name
    assert code_of(otto.ask(LOOKUP, "/secret/part-part-2")) == PermissionDenied.code
    for user in ("paul", "star"):
        client = shop.raw(user)
        of_partition = client.ask(LOOKUP, "/secret/part-part-0")
        assert code_of(of_partition) == NotFound.code, "a right to the name is none to the topic"
        if user == "star":
            missing = client.ask(LOOKUP, "/secret/part-nothing")
            assert missing[3].replace("part-nothing", "part-part-0") == of_partition[3]


def test_rights_that_come_open_what_was_hidden(shop: Shop) -> None:
    with shop.server.come_in("ann") as ann:
        shop.server.add(ann.admin, "late")
        late = shop.raw("late")
        assert pages(late, 100) == []
        ann.admin.set_binding("late-0", "user:late", "viewer", "/shop/seen-03")
        wait_until("the topic in the list", lambda: pages(late, 100) == [SEEN[3]])
