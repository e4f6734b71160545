"""The other process of the ring tests: `python peer.py ROLE ARGUMENT...`, descriptors inherited.

A role runs to its own end (every loop is bounded), prints one JSON value and exits 0. What it may
wait for has a deadline, after which it exits with a text on stderr.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import select
import signal
import sys
import time
import zlib
from collections.abc import Callable

from danube_fast.frame.kernel import kernel
from danube_fast.frame.memory import load_i64, store_u64
from danube_fast.ring.atomics import (
    fence,
    load_acquire,
    load_relaxed,
    pause,
    store_relaxed,
    store_release,
    store_seq_cst,
)
from danube_fast.ring.control import ControlBlock
from danube_fast.ring.doorbell import Doorbell
from danube_fast.ring.memory import address_of_memory, map_fd
from danube_fast.ring.spsc import SpscRing
from tests.ring.records import pop_all

WAIT_SECONDS = 150.0
LINE = 128
ROLES: dict[str, Callable[..., object]] = {}


_maps: list[object] = []


def mapped(fd: str) -> int:
    """Address of the memory behind `fd`, mapped until this process ends."""
    _maps.append(map_fd(int(fd)))
    return address_of_memory(_maps[-1])


def role(function: Callable[..., object]) -> Callable[..., object]:
    ROLES[function.__name__] = function
    return function


# ---------------------------------------------------------------- litmus kernels

MEET_SPINS_MAX = 3_000
"""How long a side waits for the other in one round before it goes on alone: some 100 us."""


@kernel("int64(int64,int64,int64,int64)", nogil=True)
def _write_then_flag(flag, data, words, count):  # type: ignore[no-untyped-def]
    """For 1..count: the value into each data word with plain stores, then into the flag."""
    for value in range(1, count + 1):
        for index in range(words):
            store_u64(data + index * 8, value)
        store_release(flag, value)
    return count


@kernel("int64(int64,int64,int64,int64)", nogil=True)
def _flag_then_write(flag, data, words, count):  # type: ignore[no-untyped-def]
    """The same with the flag first: wrong, so that the check is seen to work."""
    for value in range(1, count + 1):
        store_release(flag, value)
        for index in range(words):
            store_release(data + index * 8, value)
    return count


@kernel("int64(int64,int64,int64,int64)", nogil=True)
def _flag_then_read(flag, data, words, count):  # type: ignore[no-untyped-def]
    """Read flag, then data, until the flag is `count`. How many reads saw data before its flag.

    Negative: the flag stood still for a billion reads.
    """
    stale = 0
    value = 0
    reads = 0
    while value < count:
        value = load_acquire(flag)
        for index in range(words - 1, -1, -1):
            if load_i64(data + index * 8) < value:
                stale += 1
        reads += 1
        if reads > 1_000_000_000:
            return -1
    return stale


@kernel("int64(int64,int64,int64,int64,int64)", nogil=True)
def _store_then_look(mine, theirs, seen, count, fenced):  # type: ignore[no-untyped-def]
    """Store buffering: in round i store i to `mine`, then note whether `theirs` is i already.

    The sides meet before each round at the words beside. Notes 1 byte-word per round at `seen`:
    1 = saw the other's store. Returns the rounds in which the two really met.
    """
    met = 0
    for i in range(1, count + 1):
        store_release(mine + 64, i)
        spins = 0
        while load_acquire(theirs + 64) < i and spins < MEET_SPINS_MAX:
            pause()
            spins += 1
        if spins < MEET_SPINS_MAX:
            met += 1
        if fenced == 1:
            store_seq_cst(mine, i)
            fence()
        else:
            store_relaxed(mine, i)
        if load_relaxed(theirs) >= i:
            store_u64(seen + i * 8, 1)
    return met


@role
def message_writer(fd: str, words: str, count: str, order: str) -> object:
    base = mapped(fd)
    write = _write_then_flag if order == "right" else _flag_then_write
    return write(base, base + LINE, int(words), int(count))


@role
def message_reader(fd: str, words: str, count: str) -> object:
    base = mapped(fd)
    return _flag_then_read(base, base + LINE, int(words), int(count))


@role
def store_buffer(fd: str, side: str, count: str, fenced: str) -> object:
    base = mapped(fd)
    mine, theirs = (base, base + LINE) if side == "0" else (base + LINE, base)
    seen = base + 2 * LINE + int(side) * (int(count) + 1) * 8
    return _store_then_look(mine, theirs, seen, int(count), int(fenced))


# ---------------------------------------------------------------- records in order


def record_lists(seed: int) -> list[list[bytes]]:
    """16 lists of 1021 records, 0 to 300 bytes, the same in every process."""
    generator = random.Random(seed)
    return [[generator.randbytes(generator.randrange(301)) for _ in range(1021)] for _ in range(16)]


def _deadline() -> Callable[[], None]:
    end = time.monotonic() + WAIT_SECONDS

    def check() -> None:
        if time.monotonic() > end:
            sys.exit(f"not done after {WAIT_SECONDS} s")

    return check


@role
def stream_producer(fd: str, seed: str, rounds: str) -> object:
    """Push the lists one after the other, `rounds` times around."""
    ring, lists, check = SpscRing.attach(map_fd(int(fd))), record_lists(int(seed)), _deadline()
    pushed = 0
    for number in range(int(rounds) * len(lists)):
        records = lists[number % len(lists)]
        while records:
            done = sum(1 for _ in itertools.takewhile(ring.try_push, records))
            pushed += done
            records = records[done:]
            if records:
                check()
                os.sched_yield()
    return pushed


@role
def stream_consumer(fd: str, seed: str, rounds: str, by_one: str) -> object:
    """Take everything and compare it with what must come: [records right, first wrong or -1]."""
    ring, check = SpscRing.attach(map_fd(int(fd))), _deadline()
    expected = [record for records in record_lists(int(seed)) for record in records]
    period, total, taken = len(expected), int(rounds) * len(expected), 0
    expected += expected[:2000]
    while taken < total:
        if by_one == "1":
            record = ring.pop()
            records = [] if record is None else [record]
        else:
            records = pop_all(ring, 1000)
        start = taken % period
        if records != expected[start : start + len(records)]:
            return [taken, start]
        taken += len(records)
        if not records:
            check()
            os.sched_yield()
    return [taken, -1 if not ring.readable else taken]


# ---------------------------------------------------------------- doorbell


def _bells(control_fd: str, bell_0: str, bell_1: str) -> list[Doorbell]:
    control = ControlBlock.attach(int(control_fd))
    _maps.append(control)
    return [
        Doorbell(int(fd), control.doorbell_address(index))
        for index, fd in enumerate((bell_0, bell_1))
    ]


@role
def ping_pong(
    side: str, ring_in: str, ring_out: str, control: str, bell_0: str, bell_1: str, count: str
) -> object:
    """Send and await a number in turns, asleep in between: [numbers right, sleeps, wake-ups lost].

    A wake-up is lost when poll ends by time although a record lies in the ring.
    """
    incoming, outgoing = (
        SpscRing.attach(map_fd(int(ring_in))),
        SpscRing.attach(map_fd(int(ring_out))),
    )
    bells = _bells(control, bell_0, bell_1)
    mine, theirs = bells[int(side)], bells[1 - int(side)]
    poller = select.poll()
    poller.register(mine.fileno(), select.POLLIN)
    generator, sleeps, check = random.Random(int(side)), 0, _deadline()
    if side == "0":
        outgoing.try_push(b"0")
        theirs.ring()
    for number in range(int(count)):
        for _ in range(generator.randrange(8)):  # vary the instant at which sleep begins
            incoming.readable
        while not incoming.readable:
            mine.prepare_sleep()
            if not incoming.readable:
                sleeps += 1
                if not poller.poll(60_000) and incoming.readable:
                    return [number, sleeps, 1]
                check()
            mine.cancel_sleep()
            mine.drain()
        if incoming.pop() != b"%d" % number:
            return [number, sleeps, 0]
        outgoing.try_push(b"%d" % (number + (side == "0")))
        theirs.ring()
    return [int(count), sleeps, 0]


# ---------------------------------------------------------------- death


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _killed(work: Callable[[int], None], rounds: int, seed: int) -> object:
    """Run `work(life)` in child after child and SIGKILL each after up to 4 ms of its life."""
    generator = random.Random(seed)
    for life in range(rounds):
        ready, started = os.pipe()
        pid = os.fork()
        if pid == 0:
            _die_with_parent()
            os.write(started, b"1")
            work(life)
            os._exit(1)
        os.read(ready, 1)
        os.close(ready)
        os.close(started)
        time.sleep(generator.random() * 0.004)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(f"life {life} ended by itself: status {status}")
    return rounds


def life_record(life: int, index: int) -> bytes:
    """A record that proves itself: life, index, filling of 0 to 400 bytes, crc of all."""
    head = life.to_bytes(4, "little") + index.to_bytes(4, "little")
    body = head + bytes([index & 0xFF]) * (index * 37 % 401)
    return body + zlib.crc32(body).to_bytes(4, "little")


@role
def killed_producer(fd: str, control: str, bell_0: str, bell_1: str, rounds: str) -> object:
    """Producers that are killed while they push: by try_push and in place."""
    memory = map_fd(int(fd))
    bell = _bells(control, bell_0, bell_1)[0]

    def work(life: int) -> None:
        ring, index = SpscRing.attach(memory), 0
        while True:
            if life % 2 == 0:
                record = life_record(life, index)
                index += ring.try_push(record[:5], record[5:])
            else:
                record = life_record(life, index)
                room = ring.reserve(len(record) + 50)
                if room is not None:
                    room[: len(record)] = record
                    ring.publish(len(record))
                    index += 1
            bell.ring()

    return _killed(work, int(rounds), 1)


@role
def killed_consumer(ring_in: str, ring_out: str, rounds: str) -> object:
    """Consumers that are killed while they copy records from one ring to another, then release."""
    memory_in, memory_out = map_fd(int(ring_in)), map_fd(int(ring_out))

    def work(life: int) -> None:
        incoming, outgoing = SpscRing.attach(memory_in), SpscRing.attach(memory_out)
        while True:
            record = incoming.peek()
            if record is not None and outgoing.try_push(record):
                incoming.release()

    return _killed(work, int(rounds), 2)


if __name__ == "__main__":
    print(json.dumps(ROLES[sys.argv[1]](*sys.argv[2:])))
