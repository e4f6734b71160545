"""Addresses whose handshakes fail too often: what is counted, and what the kernel drops."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterator

import pytest

from danube_fast.net.early_ends import COSTLY, SILENT
from danube_fast.net.failed_handshakes import HELD_MAX, FailedHandshakes
from danube_fast.net.listener import Listener

SECOND = 1_000_000_000
SOON, WAIT = 0.3, 20.0


def source(address: str) -> bytes:
    packed = ipaddress.ip_address(address).packed
    return packed if len(packed) == 4 else packed[:8]


class Kernel:
    """What it was told to drop."""

    def __init__(self) -> None:
        self.told: list[set[bytes]] = []

    def drop(self, sources: Collection[bytes]) -> None:
        self.told.append(set(sources))


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def failed(kernel: Kernel) -> Iterator[FailedHandshakes]:
    made = FailedHandshakes(3)
    made.drop = kernel.drop
    made.open()
    yield made
    if made.fd >= 0:
        made.close()


def note(failed: FailedHandshakes, address: str, count: int, now_ns: int) -> None:
    for _ in range(count):
        failed.note(address)
    failed.do_work(now_ns)


def test_an_address_with_too_many_in_a_second_is_held_off_for_one(
    failed: FailedHandshakes, kernel: Kernel
) -> None:
    note(failed, "10.0.0.1", 2, 0)
    note(failed, "10.0.0.2", 2, 0)
    note(failed, "10.0.0.1", 2, SECOND)
    assert not kernel.told and failed.next_ns is None, "these are two in a second"
    note(failed, "10.0.0.1", 1, 2 * SECOND - 1)
    assert kernel.told == [{source("10.0.0.1")}]
    assert failed.next_ns == 3 * SECOND - 1
    note(failed, "10.0.0.1", 9, 2 * SECOND - 1)
    failed.do_work(3 * SECOND - 2)
    assert len(kernel.told) == 1
    failed.do_work(3 * SECOND - 1)
    assert kernel.told[1:] == [set()] and failed.next_ns is None


def test_a_network_of_ipv6_is_one_and_an_address_of_ipv4_is_the_same_in_both(
    failed: FailedHandshakes, kernel: Kernel
) -> None:
    for last in range(3):
        note(failed, f"2001:db8::{last}", 1, 0)
    note(failed, "::ffff:10.0.0.1", 1, 0)
    note(failed, "10.0.0.1", 2, 0)
    assert kernel.told[-1] == {source("2001:db8::"), source("10.0.0.1")}


def test_local_users_are_not_held_off(failed: FailedHandshakes, kernel: Kernel) -> None:
    note(failed, "localhost:1000:100:4711", 100, 0)
    assert not kernel.told


def test_without_a_limit_or_a_socket_nothing_is_noted() -> None:
    unbounded, portless = FailedHandshakes(0), FailedHandshakes(1)
    unbounded.drop = Kernel().drop
    for each in (unbounded, portless):
        each.open()
        note(each, "10.0.0.1", 5, 0)
        assert each.next_ns is None
        each.close()


def test_a_note_that_comes_late_writes_nowhere(failed: FailedHandshakes) -> None:
    failed.close()
    failed.note("10.0.0.1")
    failed.do_work(0)


def test_a_kernel_that_refuses_ends_nothing(
    failed: FailedHandshakes, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[set[bytes]] = []

    def drop(sources: Collection[bytes]) -> None:
        told.append(set(sources))
        if len(sources) > 1:
            raise OSError("no memory for filters")

    failed.drop = drop
    failed._logged_ns = -(1 << 62)
    note(failed, "10.0.0.1", 3, 0)
    assert "10.0.0.1 failed within a second" in caplog.text
    failed._logged_ns = -(1 << 62)
    note(failed, "10.0.0.2", 3, 1)
    assert "cannot be held off: no memory" in caplog.text and "10.0.0.2" not in caplog.text
    assert told[-1] == set(), "the filter before would stay in use"
    assert failed.next_ns is None
    note(failed, "10.0.0.1", 3, 2)
    assert told[-1] == {source("10.0.0.1")}, "it is tried again"


def test_no_address_is_said_to_wait_beyond_those_that_can(
    failed: FailedHandshakes, kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(HELD_MAX):
        note(failed, f"10.0.{number // 200}.{number % 200}", 3, 0)
    failed._logged_ns = -(1 << 62)
    caplog.clear()
    note(failed, "10.9.9.9", 3, 0)
    assert len(kernel.told[-1]) == HELD_MAX and "10.9.9.9" not in caplog.text


class Ends:
    """What the kernel tells while it is asked."""

    def __init__(self) -> None:
        self.is_open = False
        self.waiting: list[tuple[str, int]] = []

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def take(self) -> list[tuple[str, int]]:
        found, self.waiting = self.waiting if self.is_open else [], []
        return found


@pytest.fixture
def ends(failed: FailedHandshakes) -> Ends:
    made = Ends()
    failed.ends = made  # type: ignore[assignment]
    return made


def end(
    failed: FailedHandshakes, ends: Ends, count: int, now_ns: int, *, weight: int = COSTLY
) -> None:
    """Connections of 10.0.0.1 end."""
    for _ in range(count):
        failed.note_end()
        ends.waiting.append(("10.0.0.1", weight))
    failed.do_work(now_ns)


def test_the_kernel_tells_of_ends_while_there_are_many(
    failed: FailedHandshakes, ends: Ends
) -> None:
    for second in range(3):
        end(failed, ends, 1, second * SECOND)
        failed.do_work(second * SECOND + SECOND)
    assert not ends.is_open, "one of three in a second is not many"
    end(failed, ends, 2, 4 * SECOND - 1)
    assert ends.is_open
    failed.do_work(14 * SECOND - 2)
    assert ends.is_open
    failed.do_work(14 * SECOND - 1)
    assert not ends.is_open


def test_the_guard_is_woken_to_end_listening_and_to_let_in(
    failed: FailedHandshakes, ends: Ends
) -> None:
    assert failed.next_ns is None
    end(failed, ends, 2, SECOND)
    assert failed.next_ns == 11 * SECOND
    note(failed, "10.0.0.2", 3, 2 * SECOND)
    assert failed.next_ns == 3 * SECOND
    failed.do_work(3 * SECOND)
    assert failed.next_ns == 11 * SECOND
    failed.do_work(11 * SECOND)
    assert failed.next_ns is None and not ends.is_open


def test_ears_that_cannot_open_wake_no_guard(
    failed: FailedHandshakes, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opens() -> None:
        raise OSError("no netlink")

    monkeypatch.setattr(ends, "open", opens)
    end(failed, ends, 2, SECOND)
    assert failed.next_ns is None


def test_ends_count_with_refused_keys_and_those_without_a_byte_a_tenth(
    failed: FailedHandshakes, ends: Ends, kernel: Kernel
) -> None:
    end(failed, ends, 29, SECOND, weight=SILENT)
    end(failed, ends, 29, 2 * SECOND, weight=SILENT)
    assert ends.is_open and not kernel.told
    end(failed, ends, 1, 3 * SECOND)
    note(failed, "10.0.0.1", 1, 3 * SECOND)
    end(failed, ends, 9, 3 * SECOND, weight=SILENT)
    assert not kernel.told
    end(failed, ends, 1, 3 * SECOND, weight=SILENT)
    assert kernel.told == [{source("10.0.0.1")}]


def test_without_a_limit_the_kernel_is_not_asked_for_ends() -> None:
    unbounded = FailedHandshakes(0)
    ends = Ends()
    unbounded.drop, unbounded.ends = Kernel().drop, ends  # type: ignore[assignment]
    unbounded.open()
    end(unbounded, ends, 5, 0)
    assert not ends.is_open and unbounded.next_ns is None
    unbounded.close()


# ---------------------------------------------------------------- the kernel


def connected(
    port: int, here: str, seconds: float, host: str = "127.0.0.1"
) -> socket.socket | None:
    """A connection from an address; None if there is none in that time."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.settimeout(seconds)
    try:
        made.bind((here, 0))
        made.connect((host, port))
    except TimeoutError:
        made.close()
        return None
    return made


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1", 0, 16)
    yield made
    made.close()


def test_the_kernel_drops_new_connections_of_an_address_and_nothing_else(
    listener: Listener,
) -> None:
    port = int(listener.endpoint.rsplit(":", 1)[1])
    accepting = listener._socket
    before = connected(port, "127.0.0.2", WAIT)
    assert before is not None
    there, _ = accepting.accept()
    listener.drop([source("127.0.0.2"), source("2001:db8::")])
    assert connected(port, "127.0.0.2", SOON) is None
    other = connected(port, "127.0.0.3", WAIT)
    assert other is not None
    inherited, _ = accepting.accept()  # it has the filter of the listening socket
    for here, peer in ((before, there), (other, inherited)):
        peer.settimeout(WAIT)
        here.sendall(b"up")
        assert peer.recv(2) == b"up"
        peer.sendall(b"down")
        assert here.recv(4) == b"down"
    listener.drop([])
    listener.drop([])
    again = connected(port, "127.0.0.2", WAIT)
    assert again is not None, "it is let in again"
    for each in (before, there, other, inherited, again):
        each.close()


def test_a_filter_has_room_for_all_that_are_held_off(listener: Listener) -> None:
    port = int(listener.endpoint.rsplit(":", 1)[1])
    fours = [source(f"10.0.{number // 200}.{number % 200}") for number in range(HELD_MAX - 1)]
    listener.drop([*fours, source("127.0.0.2")])
    assert connected(port, "127.0.0.2", SOON) is None
    listener.drop([source(f"2001:db8:0:{number:x}::") for number in range(HELD_MAX)])
    made = connected(port, "127.0.0.2", WAIT)
    assert made is not None
    made.close()


def test_the_kernel_drops_a_network_of_ipv6() -> None:
    try:
        listener = Listener("::1", 0, 16)
    except OSError:
        pytest.skip("this host has no IPv6")
    port = int(listener.endpoint.rsplit(":", 1)[1])
    listener.drop([source("127.0.0.1"), source("2001:db8::")])
    made = connected(port, "::1", WAIT, "::1")
    assert made is not None
    listener.drop([source("127.0.0.1"), source("2001:db8::"), source("::1")])
    assert connected(port, "::1", SOON, "::1") is None
    made.close()
    listener.close()
