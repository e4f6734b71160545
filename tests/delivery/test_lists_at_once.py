"""An authorizer of another package that answers about all names of a list at once is asked the same, in number and order,
whether a list or a pattern would name something that it hides, or nothing: only how many names are asked about differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.types import Permission
from tests.delivery.test_security import SecuredServer
from tests.delivery.test_security_matrix import ADMIN, WATCH, KeyedClient, Shop
from tests.delivery.test_visibility import filled
from tests.security.rules import install, write_rules
from tests.workers.broker import wait_until

WAIT_SECONDS = 20.0
DENIED = "/secret/", "namespace:secret"
USERS = "rosa", "nora"
"""Roles give rosa everything, and nora what is in the namespace that is hidden."""
LISTS: dict[str, tuple[Any, ...]] = {
    "topics": (ADMIN, "list_topics", {"pattern": "NAME*"}),
    "topics, one": (ADMIN, "list_topics", {"pattern": "NAME", "limit": 1}),
    "watch": (WATCH, "", ["NAME"], 0),
    "watch of a pattern": (WATCH, "", ["NAME*"], 0),
    "watch of several": (WATCH, "", ["NAME*", "/shop/*", "/nowhere/at-all"], 0),
}


class House(Shop):
    def __init__(self, server: SecuredServer, administrator: Any, asked: Path) -> None:
        super().__init__(server, administrator)
        self._asked = asked

    def asked(self, user: str, since: int) -> tuple[list[str], int]:
        """Questions about a user behind that line, without the numbers of names; how many lines there are."""
        lines = [line.split(None, 2) for line in self._asked.read_text().splitlines()]
        found = [
            re.sub(r" of \d+$", " of some", what) for _, who, what in lines[since:] if who == user
        ]
        return found, len(lines)

    def ask(self, client: KeyedClient, user: str, question: tuple[Any, ...], name: str) -> Any:
        """The answer, and what was asked for it."""
        op, *fields = question
        before = self.asked(user, 0)[1]
        reply = client.ask(op, *[filled(each, name) for each in fields])
        value = dict(reply[2], cursor="") if isinstance(reply[2], dict) else reply[2]
        return str((reply[0], value)).replace(name, "NAME"), self.asked(user, before)[0]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    install(folder / "packages")
    rules = folder / "rules"
    write_rules(
        rules, "".join(f"{user} {each} {place}\n" for user in USERS for each in Permission for place in DENIED)
    )  # fmt: skip
    server = SecuredServer(
        folder / "data", folder, authorizer=f"atonce:{rules}", packages=str(folder / "packages")
    )
    with server:
        server.make_ann()
        with server.come_in("ann") as ann:
            made = House(server, ann.admin, Path(f"{rules}.asked"))
            ann.admin.create_namespace("elsewhere")
            for number in range(40):
                ann.admin.create_topic(f"/secret/many{number}", durability="memory")
            for number in range(3):
                ann.admin.create_topic(f"/shop/seen{number}", durability="memory")
            server.add(ann.admin, "rosa", ("admin", "cluster"))
            server.add(ann.admin, "nora", ("admin", "namespace:secret"), ("admin", "/secret/*"))
            ann.consumer("/shop/seen0", subscription="s").close()
            yield made
            made.close()


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("question", LISTS.values(), ids=LISTS)
def test_what_is_hidden_is_asked_about_as_what_is_missing(
    house: House, question: tuple[Any, ...], user: str
) -> None:
    told = {}
    for name in ("/secret/many1", "/secret/missing", "/secret/many", "/secret/m0"):
        told[name] = house.ask(house.raw(user), user, question, name)
    if "at-all" not in str(question):  # answers about /shop are kept for a moment
        assert len({str(each) for each in told.values()}) == 1, told
    assert all("of some" in str(asked) for _, asked in told.values()), told


def test_a_list_is_one_question_and_names_what_is_permitted(house: House) -> None:
    client = house.raw("rosa")
    house.ask(client, "rosa", (ADMIN, "check_permission", {}), "")
    before = house.asked("rosa", 0)[1]
    rows = client.ask(ADMIN, "list_topics", {})[2]
    names = {row["topic"] for row in rows}
    assert {f"/shop/seen{number}" for number in range(3)} <= names
    assert not [name for name in names if name.startswith("/secret/")]
    assert house.asked("rosa", before)[0] == ["lookup of some"]
    spaces = [row["namespace"] for row in client.ask(ADMIN, "list_namespaces", {})[2]]
    assert "shop" in spaces and "secret" not in spaces
    for operation in ("topic_stats", "list_subscriptions"):
        found = client.ask(ADMIN, operation, {"topic": "/shop/seen0"})[2]
        assert "'s'" in str(found), found
    connections = client.ask(ADMIN, "list_clients", {})[2]["clients"]
    assert len(connections) >= 2


def test_a_watch_with_a_cursor_asks_the_same_about_news_that_are_hidden(house: House) -> None:
    rosa = house.raw("rosa")
    asked = []
    with house.server.come_in("ann") as ann:
        for place in ("/secret/new", "/elsewhere/new"):
            cursor = rosa.ask(WATCH, "", ["/secret/*"], 0)[2]["cursor"]
            ann.admin.create_topic(place, durability="memory")
            _, before = house.asked("rosa", 0)
            reply = rosa.ask(WATCH, cursor, ["/secret/*"], 0)
            assert reply[2]["changes"] == []
            asked.append(house.asked("rosa", before)[0])
    assert [each for each in asked[0] if "of some" not in each] == []
    assert len(asked[0]) <= 1 and len(asked[1]) <= 1


def test_rights_of_the_authorizer_count_in_lists_when_they_change(house: House) -> None:
    rosa, rules = house.raw("rosa"), Path(str(house._asked).removesuffix(".asked"))
    before = rules.read_text()
    write_rules(rules, before.replace("rosa lookup /secret/\n", ""))
    try:

        def names() -> set[str]:
            return {
                row["topic"] for row in rosa.ask(ADMIN, "list_topics", {"namespace": "secret"})[2]
            }

        wait_until("the names", lambda: "/secret/many7" in names(), WAIT_SECONDS)
    finally:
        write_rules(rules, before)
    wait_until("their end", lambda: not names(), WAIT_SECONDS)
