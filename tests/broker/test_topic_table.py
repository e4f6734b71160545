"""Topics in the order of their names: lists that go on while topics come and go, and cost what they show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from danube_fast.broker.topics.table import TopicTable
from danube_fast.types import namespace_front

NAMES = ["/a-b/x", "/a/x", "/a/y", "/a0/x", "/b/x"]


def record_of(name: str) -> Any:
    return SimpleNamespace(topic=name)


def table_of(*names: str) -> TopicTable:
    table = TopicTable()
    for name in names:
        table[name] = record_of(name)
    return table


def names(table: TopicTable, after: str = "", namespace: str = "") -> list[str]:
    return [record.topic for record in table.behind(after, (namespace_front(namespace),))]


def test_topics_come_in_the_order_of_their_names() -> None:
    table = table_of(*reversed(NAMES))
    table["/a/x"] = record_of("/a/x")  # another record of the same topic
    assert names(table) == sorted(NAMES) and len(table) == len(NAMES)
    assert names(table, namespace="a") == ["/a/x", "/a/y"]
    assert names(table, "/a/x", "a") == ["/a/y"] and names(table, "/b/x", "a") == []
    assert names(table, "/a/y") == ["/a0/x", "/b/x"]
    assert [table.count(name) for name in ("a", "a-b", "a0", "b", "c")] == [2, 1, 1, 1, 0]
    del table["/a/x"]
    assert names(table, namespace="a") == ["/a/y"] and table.count("a") == 1


def test_a_list_goes_on_while_topics_come_and_go() -> None:
    table = table_of(*NAMES)
    steps = table.behind("")
    assert next(steps).topic == "/a-b/x"
    del table["/a-b/x"], table["/a/x"]
    table["/a/z"] = record_of("/a/z")
    assert [record.topic for record in steps] == ["/a/y", "/a/z", "/a0/x", "/b/x"]


def test_one_topic_of_many_is_found_without_a_look_at_the_others() -> None:
    """Any client may ask for lists, again and again."""
    looks = 0

    class Counted(str):
        def startswith(self, *arguments: Any) -> bool:
            nonlocal looks
            looks += 1
            return super().startswith(*arguments)

    table = table_of(*[Counted(f"/a/{number:05}") for number in range(10_000)])
    assert next(table.behind("/a/05000", ("/a/",))).topic == "/a/05001" and looks == 1


def test_a_list_goes_by_fronts_alone() -> None:
    table = table_of(*NAMES, "/a/x1", "/a/xx")
    for after, fronts, expected in (
        ("", ("/a/x",), ["/a/x", "/a/x1", "/a/xx"]),
        ("/a/x", ("/a/x",), ["/a/x1", "/a/xx"]),
        ("/a/x1", ("/a-b/", "/a/x", "/b/x"), ["/a/xx", "/b/x"]),
        ("", (), []),
        ("", ("/a/nothing", "/c/"), []),
        ("/b/x", ("",), []),
    ):
        assert [each.topic for each in table.behind(after, fronts)] == expected
