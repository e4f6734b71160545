"""Control block, counters, doorbell and shared memory in one process."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
from collections.abc import Iterator

import pytest

from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.ring.control import ControlBlock, ProcessState, ProcessStatus
from danube_fast.ring.counters import Counter, CounterBlock, CounterKind
from danube_fast.ring.doorbell import Doorbell
from danube_fast.ring.memory import create_eventfd, create_memfd, map_fd, signal_eventfd


@pytest.fixture
def block() -> Iterator[ControlBlock]:
    made = ControlBlock.create(3)
    yield made
    made.close()


def test_processes_see_each_other(block: ControlBlock) -> None:
    other = ControlBlock.attach(os.dup(block.fd))
    try:
        assert other.status(2) == ProcessStatus(ProcessState.NONE, 0, 0)
        block.announce(2, ProcessState.READY, epoch=(1 << 31) - 1, port=65535)
        assert other.status(2) == ProcessStatus(ProcessState.READY, (1 << 31) - 1, 65535)
        assert other.pid(2) == os.getpid()
        block.set_state(2, ProcessState.STOPPING)
        assert (other.state(2), other.port(2)) == (ProcessState.STOPPING, 65535)
        assert other.epoch(2) == (1 << 31) - 1
        block.beat(2, 5)
        block.beat(2, 6)
        assert (other.heartbeat_count(2), other.heartbeat_time_ns(2)) == (2, 6)
        other.set_restarts(2, 9)
        assert block.restarts(2) == 9
        assert other.status(1) == ProcessStatus(ProcessState.NONE, 0, 0)
    finally:
        other.close()


def test_bad_arguments(block: ControlBlock) -> None:
    for process in (-1, 3):
        with pytest.raises(InvalidArgument, match="block of 3"):
            block.status(process)
    for thread in (-1, 8):
        with pytest.raises(InvalidArgument, match="8 heartbeats"):
            block.beat(0, 1, thread)
    with pytest.raises(InvalidArgument):
        block.announce(0, ProcessState.READY, epoch=1, port=65536)
    with pytest.raises(InvalidArgument):
        block.announce(0, ProcessState.READY, epoch=-1)
    with pytest.raises(InvalidArgument):
        ControlBlock.create(0)


def test_other_memory_is_no_block() -> None:
    fd = create_memfd("other", 4096)
    with pytest.raises(FailedPrecondition, match="no control block"):
        ControlBlock.attach(fd)
    with pytest.raises(FailedPrecondition, match="no counter block"):
        CounterBlock.attach(fd)
    with map_fd(fd) as memory:
        memory[0:16] = bytes.fromhex("4446434c 01000000 ff000000 00000000")
    with pytest.raises(FailedPrecondition, match="no control block"):
        ControlBlock.attach(fd)
    os.close(fd)


def test_counters() -> None:
    mine = CounterBlock.create(2, 0)
    reader = CounterBlock.attach(os.dup(mine.fd))
    try:
        mine.add(Counter.MESSAGES_IN)
        mine.add(Counter.MESSAGES_IN, 41)
        mine.set(Counter.SESSIONS, 5)
        mine.add(Counter.SESSIONS, -2)
        assert mine.value(Counter.MESSAGES_IN) == reader.get(0, Counter.MESSAGES_IN) == 42
        assert reader.total(Counter.SESSIONS) == 3
        assert reader.get(1, Counter.MESSAGES_IN) == 0
        assert reader.snapshot(0)[Counter.SESSIONS] == 3
        with pytest.raises(IndexError):
            reader.add(Counter.MESSAGES_IN)
        with pytest.raises(InvalidArgument):
            reader.get(2, Counter.MESSAGES_IN)
        mine.clear()
        assert set(reader.snapshot(0).values()) == {0}
    finally:
        mine.close()
        reader.close()


def test_every_counter_explains_itself() -> None:
    for counter in Counter:
        assert counter.unit and counter.label and isinstance(counter.kind, CounterKind)
    assert Counter.SESSIONS.kind is CounterKind.LEVEL
    assert Counter.BYTES_IN.unit == "bytes"


def test_memory_cannot_be_resized() -> None:
    fd = create_memfd("sealed", 8192)
    try:
        for byte_count in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, byte_count)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(fd)
        with map_fd(fd) as memory:
            assert isinstance(memory, mmap.mmap)
            assert memory[:] == bytes(8192)
        with pytest.raises(InvalidArgument):
            create_memfd("empty", 0)
    finally:
        os.close(fd)


@pytest.fixture
def bell(block: ControlBlock) -> Iterator[Doorbell]:
    fd = create_eventfd()
    yield Doorbell(fd, block.doorbell_address(1))
    os.close(fd)


def signalled(bell: Doorbell) -> bool:
    return bool(select.select([bell.fileno()], [], [], 0)[0])


def test_bell_rings_only_the_sleeper(bell: Doorbell) -> None:
    assert not bell.ring()
    assert not signalled(bell)
    bell.prepare_sleep()
    assert bell.ring()
    assert signalled(bell)
    assert not bell.ring(), "one sleep, one signal"
    bell.cancel_sleep()
    assert bell.drain()
    assert not signalled(bell)
    assert not bell.drain()
    bell.prepare_sleep()
    bell.cancel_sleep()
    assert not bell.ring()
    bell.ring_always()
    assert bell.drain()


def test_slow_producer_does_not_eat_the_next_sleep(
    bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that stops between signal and clearing clears only the sleep that it saw."""

    def signal_then_owner_sleeps_again(fd: int) -> None:
        signal_eventfd(fd)
        bell.cancel_sleep()
        assert bell.drain()
        bell.prepare_sleep()

    bell.prepare_sleep()
    with monkeypatch.context() as patch:
        patch.setattr("danube_fast.ring.doorbell.signal_eventfd", signal_then_owner_sleeps_again)
        assert bell.ring()
    assert not signalled(bell)
    assert bell.ring(), "the second sleep was forgotten: its wake-up is lost"
    assert signalled(bell)


def test_producer_dead_between_signal_and_clear(
    bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word stays set, so the next producer signals again."""

    def die(fd: int) -> None:
        raise KeyboardInterrupt

    bell.prepare_sleep()
    with monkeypatch.context() as patch:
        patch.setattr("danube_fast.ring.doorbell.signal_eventfd", die)
        with pytest.raises(KeyboardInterrupt):
            bell.ring()
    assert bell.ring()
    assert signalled(bell)


def test_full_eventfd_is_awake_already(bell: Doorbell) -> None:
    os.eventfd_write(bell.fileno(), (1 << 64) - 2)
    bell.prepare_sleep()
    assert bell.ring()
    assert bell.drain()
