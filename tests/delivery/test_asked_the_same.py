"""What another package's authorizer is asked about a name that it hides: the same, in the same order, as about a name that
is missing; for a list it is asked about none. So the time of an answer does not tell which is there.

The questions are made of the registry of operations and of the commands of the protocol, as in test_visibility.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.broker import admin
from danube_fast.errors import FailedPrecondition, NotOwner
from danube_fast.types import Permission
from tests.delivery.test_security import SecuredServer
from tests.delivery.test_security_matrix import (
    ADMIN,
    ERROR,
    LOOKUP,
    OPEN_PRODUCER,
    RESULT,
    SUBSCRIBE,
    KeyedClient,
    Shop,
    code_of,
)
from tests.delivery.test_visibility import QUESTIONS, filled
from tests.security.rules import install, write_rules

DENIED = "/secret/", "namespace:secret", "/-/"
NO_PARTITION = 1_000_000
USERS = ("rosa", "nora", "eve")
"""Roles give rosa everything, nora what is in the namespace that is hidden, eve nothing."""
LISTS = {
    "watch of a pattern",
    *[name for name, each in admin.OPERATIONS.items() if each.is_filtered],
}
"""They name nothing, so their askers are asked about alone."""
NAMED = [*QUESTIONS, ("a partition behind the last one", (LOOKUP, "NAME-part-7", None, 0))]
DEAD = {"failure_policy": {"poison_policy": "dead_letter", "dead_letter_topic": "/shop/dead"}}
OPENS: dict[str, tuple[Any, ...]] = {
    "producer": (OPEN_PRODUCER, "ID", "p", "NAME"),
    "shared": (SUBSCRIBE, 1, 1, "ID", "s", "shared", "latest", "c", {"topic": "NAME"}),
    "reader": (SUBSCRIBE, 1, 1, "ID", "", "reader", "earliest", "c", {"topic": "NAME"}),
    "dead letters": (SUBSCRIBE, 1, 1, "ID", "s", "shared", "latest", "c", {"topic": "NAME", **DEAD}),
    "bad policy": (SUBSCRIBE, 1, 1, "ID", "s", "shared", "latest", "c", {"topic": "NAME", "failure_policy": {"x": 1}}),
    "unknown type": (SUBSCRIBE, 1, 1, "ID", "s", "broadcast", "earliest", "c", {"topic": "NAME"}),
}  # fmt: skip


class Hidden(Shop):
    """A broker whose authorizer hides all that is named secret from everyone but ann."""

    def __init__(self, server: SecuredServer, administrator: Any, asked: Path) -> None:
        super().__init__(server, administrator)
        self._administrator, self._asked, self._count = administrator, asked, 0
        server.add(administrator, "rosa", ("admin", "cluster"))
        server.add(administrator, "nora", ("admin", "namespace:secret"), ("admin", "/secret/*"))

    def names(self, of_namespace: bool) -> tuple[str, str, str]:
        """A name that is there and hidden, and two that are missing; none of them was asked about before."""
        self._count += 1
        hidden, *missing = (f"secret{self._count:03}{letter}" for letter in "hmn")
        if of_namespace:
            self._administrator.create_namespace(hidden)
            return hidden, missing[0], missing[1]
        self._administrator.create_topic(f"/secret/{hidden}", durability="memory", partitions=2)
        return f"/secret/{hidden}", f"/secret/{missing[0]}", f"/secret/{missing[1]}"

    def told(
        self, client: KeyedClient, user: str, command: list[Any], name: str
    ) -> tuple[Any, ...]:
        """The answer to a command, and what the authorizer was asked for it that it denies, with NAME in the name's place."""
        before = len(self._lines(user))
        reply = client.ask(*command)
        answer = (ERROR, reply[2], reply[3]) if reply[0] == ERROR else (RESULT, str(reply[2]))
        asked = [
            line for line in self._lines(user)[before:] if any(each in line for each in DENIED)
        ]
        return tuple(str(each).replace(name, "NAME") for each in (*answer, *asked))

    def count_of(self, line: str) -> int:
        """How often the authorizer was asked that."""
        return self._lines(line.split()[0]).count(line)

    def _lines(self, user: str) -> list[str]:
        lines = [line.split(None, 2) for line in self._asked.read_text().splitlines()]
        return [f"{who} {what}" for _, who, what in lines if who == user]


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hidden]:
    folder = tmp_path_factory.mktemp("asked")
    install(folder / "packages")
    rules = folder / "rules"
    write_rules(
        rules, "".join(f"{user} {each} {place}\n" for user in USERS for each in Permission for place in DENIED)
        + "".join(f"{user} shows namespace:shop\n" for user in USERS)
    )  # fmt: skip
    server = SecuredServer(
        folder / "data", folder, authorizer=f"live:{rules}", packages=str(folder / "packages")
    )
    with server:
        server.make_ann()
        with server.come_in("ann") as ann:
            made = Hidden(server, ann.admin, Path(f"{rules}.asked"))
            yield made
            made.close()


def without_cursor(told: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same without the cursor of a WATCH, which says how much has changed."""
    return tuple(each.partition("'cursor'")[0] for each in told)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(("name", "question"), NAMED, ids=[name for name, _ in NAMED])
def test_a_hidden_name_is_asked_about_as_a_missing_one(
    hidden: Hidden, name: str, question: tuple[Any, ...], user: str
) -> None:
    (op, *fields), is_list = question, name in LISTS
    client, told = hidden.raw(user), {}
    for name in hidden.names("'namespace': 'NAME'" in str(question)):
        command = [op, *[filled(each, name) for each in fields]]
        told[name] = without_cursor(hidden.told(client, user, command, name))
    assert len(set(told.values())) == 1, told
    if is_list:
        assert not any(f"{user} lookup" in each for lines in told.values() for each in lines), told


def test_a_list_asks_which_names_its_asker_is_shown(hidden: Hidden) -> None:
    """Else the test above would compare nothing."""
    hidden.names(False)
    before = hidden.count_of("rosa shows -")
    found = hidden.raw("rosa").ask(ADMIN, "list_topics", {})
    assert [each["topic"] for each in found[2]] == ["/shop/orders"]
    assert hidden.count_of("rosa shows -") <= before + 1


def test_rosa_is_asked_about(hidden: Hidden) -> None:
    """Else the test above would compare nothing."""
    name = hidden.names(False)[0]
    told = hidden.told(hidden.raw("rosa"), "rosa", [LOOKUP, f"{name}-part-0"], name)
    assert told[3:] == ("rosa lookup NAME", "rosa lookup NAME-part-0")


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("what", OPENS)
def test_the_number_of_a_partition_tells_nothing(hidden: Hidden, what: str, user: str) -> None:
    """The right one and a missing one, with the right name and with missing ones."""
    name, *missing = hidden.names(False)
    rows = hidden.raw("ann").ask(LOOKUP, name)[2]["partitions"]
    told = []
    for row in rows:
        client = hidden.raw(user, int(row[3].rpartition(":")[2]))
        # questions of one name are answered from memory the second time, so each name is used once
        for number, named in ((row[0], missing[0]), (NO_PARTITION, missing[1]), (row[0], name)):
            asked = f"{named}{row[0]}" if named != name else name
            fields = [number if each == "ID" else filled(each, asked) for each in OPENS[what]]
            answer = hidden.told(client, user, fields, asked)
            told.append(tuple(each.replace(str(number), "N") for each in answer))
    own, other = told[:3], told[3:]
    assert len(set(own)) == 1, own
    assert len(set(other)) == 1, other
    assert own[0][1] == str(NotOwner.code), own


def test_what_is_opened_without_its_name_is_refused_whatever_it_is(hidden: Hidden) -> None:
    place, (secret, _) = hidden.topic[0], hidden.hidden
    rosa = hidden.raw("rosa", place.port)
    for number in (place.partition_id, secret.partition_id, NO_PARTITION):
        for command in ((OPEN_PRODUCER, number, "p"), (SUBSCRIBE, 1, 1, number, "s", "shared")):
            assert code_of(rosa.ask(*command)) == FailedPrecondition.code
    opened = rosa.ask(OPEN_PRODUCER, place.partition_id, "p", "/shop/orders")
    assert opened[0] == RESULT, opened
