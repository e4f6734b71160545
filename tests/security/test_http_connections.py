"""Which connection gives way when there are too many."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from danube_fast.admin.http_connections import _Waiting, source_of


class Connection:
    """Closes itself as real ones do."""

    def __init__(self, waiting: _Waiting, source: str) -> None:
        self._waiting, self.source = waiting, source
        self.is_open = True

    def give_up(self) -> None:
        self._waiting.discard(self)
        self.is_open = False


def test_the_oldest_of_the_busiest_address_gives_way() -> None:
    async def run() -> None:
        waiting = _Waiting(4)

        def arrive(source: str) -> Connection:
            made = Connection(waiting, source)
            waiting.add(made)
            return made

        honest = arrive("a")
        crowd = [arrive("b") for _ in range(10)]
        assert honest.is_open
        assert [each.is_open for each in crowd] == [False] * 7 + [True] * 3
        second = arrive("c")
        assert second.is_open and not crowd[7].is_open and honest.is_open
        waiting.add(honest)  # waits anew: it is still one
        waiting.discard(second)
        waiting.discard(second)
        third, fourth = arrive("a"), arrive("a")
        assert not honest.is_open, "three of one address now"
        assert third.is_open and fourth.is_open and crowd[8].is_open and crowd[9].is_open
        for each in (third, fourth, *crowd[8:]):
            waiting.discard(each)
        assert not waiting._timers and not waiting._counts

    asyncio.run(run())


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::9", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("", "x", False),
    ],
)
def test_a_source_is_an_address_or_a_network(one: str, other: str, is_same: bool) -> None:
    class Transport:
        def __init__(self, address: str) -> None:
            self._address = address

        def get_extra_info(self, name: str) -> Any:
            return (self._address, 1) if self._address else None

    assert (source_of(Transport(one)) == source_of(Transport(other))) is is_same
