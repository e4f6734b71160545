"""Open payloads of many lanes in one bundle: the bytes of frames that are packed one by one, and each message once."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

import danube_fast
from danube_fast.client.link import bundler
from danube_fast.client.link.buffers import BufferPool, Sending
from danube_fast.client.link.connection import Connection
from danube_fast.client.link.joint import join
from danube_fast.client.produce.lane import Lane
from danube_fast.client.produce.state import ProducerState
from danube_fast.frame.bundle import bundle_bytes, sealed_bundle
from danube_fast.frame.kernel import address_of
from danube_fast.frame.pack import pack_into
from danube_fast.frame.stamp import seal
from tests.client.test_publish import stored

TIME_NS = 1_700_000_000_123_456_789
POOL = BufferPool(1 << 20)


class OneLane(SimpleNamespace):
    """A lane with payloads."""

    def row(self) -> tuple[int, ...]:
        return (
            id(self.plain), self.partition_id, self.producer_id, self.epoch, self.next_sequence, self.room,
        )  # fmt: skip

    def take_buffer(self, byte_count: int) -> Any:
        return POOL.take(byte_count)

    def frame(self) -> tuple[bytearray, int]:
        """The frame of the first payloads, by the kernels for one."""
        memory = bytearray(self.room)
        if not self.plain:
            return memory, 0
        size, count = pack_into(address_of(memory), self.room, self.plain)
        if not count:
            return memory, 0
        seal(address_of(memory), self.producer_id, self.next_sequence, TIME_NS, self.epoch, 0, 0)
        return memory[:size], count


def random_lane(rng: random.Random) -> Any:
    """One with anything in it that may be: little room, no payloads, a null."""
    sizes = [rng.choice((0, 1, 7, 8, 100, rng.randrange(3000))) for _ in range(rng.randrange(40))]
    plain: list[bytes | None] = [rng.randbytes(size) for size in sizes]
    if rng.random() < 0.02:
        plain.append(None)
    return OneLane(
        plain=plain or ([b"x"] if rng.random() < 0.9 else []), partition_id=rng.randrange(1 << 32), producer_id=rng.randrange(1 << 62),
        epoch=rng.randrange(1 << 31), next_sequence=rng.randrange(1 << 60), room=rng.choice((200, 1000, 65_536)),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_frames_are_those_of_the_packer_for_one_lane(seed: int) -> None:
    rng = random.Random(seed)
    lanes = [random_lane(rng) for _ in range(rng.randrange(1, 60))]
    room = rng.choice((1 << 20, 20_000, 3000))
    frames: list[tuple[int, bytearray]] = []
    for lane in lanes:
        frame, count = lane.frame()
        sizes = [len(each) for _, each in frames] + [len(frame)]
        if not count or None in lane.plain[:count] or bundle_bytes(sizes) > room:
            break
        frames.append((lane.partition_id, frame))
    sendings = join(lanes, room, TIME_NS)
    assert len(sendings) == len(frames)
    if not frames:
        return
    buffer = sendings[0].buffer
    assert all(each.buffer is buffer for each in sendings) and buffer.frames_left == len(frames)
    end = sendings[-1].frame_at + sendings[-1].frame_bytes
    assert buffer.view[:end] == sealed_bundle(frames)
    for sending, lane, (_, frame) in zip(sendings, lanes, frames, strict=False):
        assert sending.frame() == frame and sending.lane is lane
        assert sending.message_count == lane.frame()[1]


def test_a_frame_that_stays_leaves_the_buffer_of_the_others() -> None:
    lanes = [OneLane(plain=[b"%d" % i], partition_id=i, producer_id=1, epoch=1, next_sequence=0, room=4096) for i in range(3)]  # fmt: skip
    first, second, third = join(lanes, 1 << 20, TIME_NS)
    before, shared = bytes(second.frame()), first.buffer
    second.stand_alone(POOL)
    assert second.frame() == before and second.buffer is not shared
    POOL.give_back(first.buffer)
    assert shared.frames_left == 1
    POOL.give_back(third.buffer)
    assert POOL.take(100) is shared and shared.frames_left == 1


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many frames were packed together, by bundle."""
    counts: list[int] = []

    def counted(*arguments: Any) -> list[Sending]:
        sendings = join(*arguments)
        counts.append(len(sendings))
        return sendings

    monkeypatch.setattr(bundler, "join", counted)
    return counts


TOPICS = 40


def send_to_all(producers: list[Any], numbers: range) -> None:
    for number in numbers:
        for producer in producers:
            producer.send(b"%d" % number)


@pytest.mark.parametrize("forget", ["forget_sessions", "forget_connections"])
def test_joint_frames_are_sent_again_after_a_lost_session(
    broker: Any, client: danube_fast.Client, joint: list[int], forget: str
) -> None:
    names = [f"/default/joint{number}" for number in range(TOPICS)]
    producers = [client.producer(name) for name in names]
    for turn in range(4):
        broker.hold_acks = True
        send_to_all(producers, range(10 * turn, 10 * turn + 5))
        broker.drop_publishes = 1  # what the first answers let go vanishes
        broker.hold_acks = False
        broker.release_acks()
        send_to_all(producers, range(10 * turn + 5, 10 * turn + 10))
        broker.wait("what vanishes", lambda: not broker.drop_publishes)
        getattr(broker, forget)()
    for producer in producers:
        producer.flush(timeout=60)
    for name in names:
        assert stored(broker, name) == [b"%d" % number for number in range(40)]
    assert max(joint) > TOPICS // 2, joint
    assert client._core.pump.unacked_bytes == 0


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (bundler, "join"), (Lane, "packed"), (ProducerState, "sent"), (bundler.Bundler, "_publish"),
        (Connection, "send_bundle"), (Lane, "acked"), (ProducerState, "completed"), (bundler.Bundler, "answered"),
    ],
)  # fmt: skip
def test_an_interrupt_while_many_lanes_are_packed(
    broker: Any, client: danube_fast.Client, monkeypatch: pytest.MonkeyPatch,
    joint: list[int], owner: Any, name: str, is_done: bool,
) -> None:  # fmt: skip
    """Whichever frames were taken out of their lanes: each message goes once, in order."""
    names = [f"/default/struck{number}" for number in range(TOPICS)]
    producers = [client.producer(each) for each in names]
    main, original, strikes = threading.get_ident(), getattr(owner, name), [1]

    def struck(*arguments: Any) -> Any:
        is_struck = bool(strikes) and threading.get_ident() == main
        result = original(*arguments) if is_done or not is_struck else None
        if is_struck:
            strikes.pop()
            raise KeyboardInterrupt
        return result

    broker.hold_acks = True
    send_to_all(producers, range(5))
    pump, end = client._core.pump, time.monotonic() + 60
    with pump.lock:  # no other thread reads the answers
        monkeypatch.setattr(owner, name, struck)
        broker.hold_acks = False
        broker.release_acks()
        while strikes and time.monotonic() < end:
            with contextlib.suppress(KeyboardInterrupt):
                pump.drain()
    assert not strikes
    send_to_all(producers, range(5, 10))
    for producer in producers:
        producer.flush(timeout=60)
    for each in names:
        assert stored(broker, each) == [b"%d" % number for number in range(10)]
    assert max(joint, default=0) > TOPICS // 2 or name in ("join", "acked", "answered", "completed")


def test_threads_that_send_without_the_lock_lose_nothing(
    broker: Any, client: danube_fast.Client, joint: list[int]
) -> None:
    """Two producers, three threads that send to both, while frames are packed and acked all the time."""
    producers = [client.producer(f"/default/threads{number}") for number in range(2)]

    def send(thread: int) -> None:
        for number in range(4000):
            producers[number % 2].send(b"%d-%d" % (thread, number))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for producer in producers:
        producer.flush(timeout=60)
    for number in range(2):
        got = [
            (payload or b"").split(b"-") for payload in stored(broker, f"/default/threads{number}")
        ]
        for thread in range(3):
            mine = [int(each) for owner, each in got if int(owner) == thread]
            assert mine == list(range(number, 4000, 2))
