"""Topics of a pattern that may not be looked up: one that has not joined is passed over, one that has joined ends the
consumer with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.client.link.calls import Call
from danube_fast.client.topics.members import Members
from danube_fast.errors import PermissionDenied

DENIED = PermissionDenied("a rule of the house")


class Rig:
    """A consumer of `/shop/*`, and lookups that a test answers."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.joined: list[str] = []
        self.parted: list[str] = []
        self.refusals: list[Exception] = []
        bootstrap = SimpleNamespace(
            next_request=lambda: 1, call=self.calls.append, abandon=lambda call: None
        )
        routes: Any = SimpleNamespace(
            bootstrap=bootstrap, pump=SimpleNamespace(notify=lambda: None),
            topic_of=lambda topic, answer: SimpleNamespace(name=topic, partitions=[]),
        )  # fmt: skip
        joins: Any = SimpleNamespace(
            join=lambda route, position: self.joined.append(route.name),
            part=lambda route: self.parted.append(route.name),
            refuse=self.refusals.append,
        )
        self.members = Members(routes, joins, "/shop/*", "earliest")

    def answer(self, error: Exception | None = None) -> None:
        """Answer the lookup that waits."""
        self.calls.pop().finish({}, error)  # type: ignore[arg-type]


def test_a_topic_that_has_not_joined_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.members.on_topics(["/shop/secret"])
    rig.answer(DENIED)
    assert rig.members.is_complete and rig.members.failure is None and not rig.refusals
    assert "passes over /shop/secret" in caplog.text and "a rule of the house" in caplog.text
    rig.members.on_change("created", "/shop/orders")
    rig.answer()
    assert rig.joined == ["/shop/orders"]


def test_a_topic_that_has_joined_is_not_left_without_a_word() -> None:
    rig = Rig()
    rig.members.on_topics(["/shop/orders"])
    rig.answer()
    rig.members.on_topics(["/shop/orders"])  # as behind a restart of the coordinator
    rig.answer(DENIED)
    assert rig.refusals == [DENIED] and rig.members.failure is DENIED and not rig.parted
