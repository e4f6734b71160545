"""How many frames go out together, and what open batches wait for."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

import danube_fast
from danube_fast.client.link import bundler as bundler_module
from danube_fast.client.link.buffers import FRAME_AT
from danube_fast.client.link.bundler import Bundler
from danube_fast.client.values.limits import (
    BUNDLE_BYTES_MAX,
    BUSY_FRAMES,
    FOREVER_NS,
    GATHER_NS_MAX,
    GATHER_NS_PER_FRAME,
)
from danube_fast.frame.bundle import bundle_bytes
from danube_fast.frame.hash import key_hash
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, BUNDLE_HEADER_BYTES, HEADER_BYTES
from tests.client.test_publish import TOPIC, stored

FRAME_BYTES = 60_000


class Channel(SimpleNamespace):
    """A connection that keeps the sizes of what it sends."""

    def next_request(self) -> int:
        return len(self.sizes) + 1

    def beat_soon(self) -> None:
        """Nothing beats."""

    def limit(self, name: str, default: int) -> int:
        return self.limits.get(name, default)

    def send_bundle(self, command: bytes, bundle: memoryview) -> None:
        self.sizes.append(len(bundle))


class Sending(SimpleNamespace):
    """A frame, as itself."""

    __hash__ = object.__hash__


def sending() -> Any:
    """A frame of a lane of its own."""
    frame = bytes(FRAME_BYTES)
    lane = SimpleNamespace(partition_id=7, ack_class="fsync")
    buffer = SimpleNamespace(bundle=lambda _, size: memoryview(bytes(bundle_bytes([size]))))
    return Sending(
        lane=lane, frame_bytes=FRAME_BYTES, request=0, frame=lambda: frame, buffer=buffer, frame_at=FRAME_AT
    )  # fmt: skip


def sizes(limits: dict[str, int], frames: int) -> list[int]:
    """Bytes of the bundles that so many frames go out in."""
    pump = SimpleNamespace(arm=lambda *_: None, clock=SimpleNamespace(monotonic_ns=lambda: 0))
    channel: Any = Channel(pump=pump, limits=limits, sizes=[])
    bundler = Bundler(channel)
    bundler.gather()
    for _ in range(frames):
        bundler.send(sending())
    bundler.release()
    return channel.sizes


@pytest.mark.parametrize("limit", [65_536, bundle_bytes([FRAME_BYTES] * 3), 525_312])
def test_a_bundle_fits_the_brokers_limit_with_its_directory(limit):
    sent = sizes({"bundle_bytes_max": limit}, 40)
    each = (limit - BUNDLE_HEADER_BYTES) // (BUNDLE_ENTRY_BYTES + FRAME_BYTES)
    assert max(sent) <= limit
    assert len(sent) == -(-40 // each), "as few as fit"


def test_without_such_a_limit_a_bundle_has_the_clients_own():
    sent = sizes({}, 40)
    assert max(sent) <= BUNDLE_BYTES_MAX
    assert len(sent) == -(-40 // (BUNDLE_BYTES_MAX // FRAME_BYTES))


MS = 1_000_000
LINGER_NS = 200_000


class Lane(SimpleNamespace):
    """A lane that counts how often it sends what is open."""

    __hash__ = object.__hash__
    can_pack = False  # so that `_send_joint` has nothing to do for it

    @property
    def joins(self) -> bool:
        return self.is_plain

    def push(self) -> None:
        self.pushes += 1

    def acked(self, sending: Any, offset: int) -> None:
        self.bundler.push_acked(self)


class Rig:
    """A bundler, its clock, and lanes."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.armed_ns = FOREVER_NS
        clock = SimpleNamespace(monotonic_ns=lambda: self.now_ns, wall_ns=lambda: 0)
        pump = SimpleNamespace(
            arm=self.arm, disarm=lambda _: self.arm(_, FOREVER_NS), clock=clock, try_drain=lambda: None
        )  # fmt: skip
        channel: Any = Channel(pump=pump, limits={}, sizes=[])
        self.bundler = Bundler(channel)

    def arm(self, _: Any, due_ns: int) -> None:
        self.armed_ns = due_ns

    def lane(self, ack_class: str = "fsync", *, is_plain: bool = False) -> Any:
        return Lane(bundler=self.bundler, ack_class=ack_class, is_plain=is_plain, pushes=0)

    def send(self, frames: int = 1, ack_class: str = "fsync") -> int:
        """Send a bundle; its request."""
        gathers = self.bundler.gather()
        for _ in range(frames):
            one = sending()
            one.lane = self.lane(ack_class)
            one.lane.partition_id, one.frame_bytes = 7, HEADER_BYTES
            one.frame = lambda: bytes(HEADER_BYTES)
            self.bundler.send(one)
        assert gathers
        self.bundler.release()
        return max(self.bundler.on_way)

    def answer(self, *requests: int) -> None:
        entries = [(request, [0, 0] * len(self.bundler.on_way[request])) for request in requests]
        self.bundler.settle(entries, {})


def test_what_is_held_goes_when_the_newest_bundle_of_then_is_answered():
    rig = Rig()
    first, newest = rig.send(), rig.send()
    held = rig.lane()
    rig.bundler.linger(held, 0, LINGER_NS)
    rig.send(), rig.send()  # threads that publish, say: there is always something unanswered
    rig.answer(first)
    assert held.pushes == 0
    assert rig.armed_ns == 2 * MS, "the timer thread looks for the answer"
    rig.answer(newest)
    assert held.pushes == 1
    assert len(rig.bundler.on_way) == 2


def test_an_ack_class_does_not_wait_for_another():
    rig = Rig()
    for _ in range(3):
        rig.send()
    other = rig.lane("os")
    assert rig.bundler.is_busy("fsync") and not rig.bundler.is_busy("os")
    rig.bundler.linger(other, 0, LINGER_NS)
    assert rig.armed_ns == LINGER_NS
    rig.now_ns = LINGER_NS
    rig.bundler.keep_time(rig.now_ns)
    assert other.pushes == 1


@pytest.mark.parametrize("frames", [BUSY_FRAMES - 1, BUSY_FRAMES])
def test_a_bundle_of_many_frames_is_enough_to_be_held_for(frames):
    rig = Rig()
    request = rig.send(frames)
    lane = rig.lane()
    rig.bundler.linger(lane, 0, LINGER_NS)
    rig.bundler.keep_time(LINGER_NS)
    assert lane.pushes == (1 if frames < BUSY_FRAMES else 0)
    rig.now_ns = frames * GATHER_NS_PER_FRAME
    rig.answer(request)
    assert lane.pushes == 1


def test_batches_are_gathered_the_longer_the_more_frames_are_on_the_way():
    rig = Rig()
    rig.send()  # alone, as `publish()` sends
    request = rig.send(40)
    first, late = rig.lane(), rig.lane()
    rig.bundler.linger(first, 0, LINGER_NS)
    rig.answer(1, request)
    assert rig.bundler.is_busy("fsync") and not rig.bundler.on_way
    rig.bundler.linger(late, 0, LINGER_NS)
    rig.now_ns = 40 * GATHER_NS_PER_FRAME - 1
    rig.bundler.on_time(rig.now_ns)
    assert (first.pushes, late.pushes) == (0, 0)
    assert rig.armed_ns == rig.now_ns + 2 * MS
    rig.now_ns += 1
    rig.bundler.keep_time(rig.now_ns)
    assert (first.pushes, late.pushes) == (1, 1)
    assert not rig.bundler.is_busy("fsync")


def test_no_batch_is_gathered_for_long():
    rig = Rig()
    request = rig.send(10_000)
    lane = rig.lane()
    rig.bundler.linger(lane, 0, LINGER_NS)
    rig.now_ns = GATHER_NS_MAX
    rig.answer(request)
    assert lane.pushes == 1


def test_lanes_that_went_in_different_bundles_come_together(monkeypatch):
    rig = Rig()
    together: list[list[Any]] = []
    monkeypatch.setattr(rig.bundler, "_send_joint", lambda lanes: together.append(list(lanes)))
    plain, waited_for = rig.lane(is_plain=True), rig.lane()
    one = rig.send()
    rig.bundler.on_way[one][0].lane = plain
    another = rig.send()
    rig.bundler.on_way[another][0].lane = waited_for
    newest = rig.send(BUSY_FRAMES)
    held = rig.lane(is_plain=True)
    rig.bundler.linger(held, 0, LINGER_NS)
    rig.answer(one)
    assert together == [], "it waits for the others"
    rig.answer(another)
    assert waited_for.pushes == 1, "a call waits for what this lane has open"
    rig.now_ns = BUSY_FRAMES * GATHER_NS_PER_FRAME
    rig.answer(newest)
    assert [sorted(map(id, lanes)) for lanes in together] == [sorted([id(plain), id(held)])]


def test_a_session_that_was_lost_leaves_nothing_behind():
    """Every lane sends anew in the next one, even if an interrupt ended what gathered frames."""
    rig = Rig()
    rig.send(), rig.send()
    held, lingering, acked = rig.lane(), rig.lane("os"), rig.lane()
    rig.bundler.linger(held, 0, LINGER_NS)
    rig.bundler.linger(lingering, 0, LINGER_NS)
    assert rig.bundler.gather()
    rig.bundler.push_acked(acked)
    rig.bundler.clear()
    assert rig.armed_ns == FOREVER_NS
    rig.now_ns = GATHER_NS_MAX
    rig.bundler.on_time(rig.now_ns)
    assert (held.pushes, lingering.pushes, acked.pushes) == (0, 0, 0)
    sent = len(rig.bundler._connection.sizes)
    rig.send()
    assert len(rig.bundler._connection.sizes) == sent + 1


def test_a_lane_for_which_the_window_closes_between_two_bundles_waits_for_it(monkeypatch):
    rig = Rig()
    first, second = rig.lane(is_plain=True), rig.lane(is_plain=True)
    first.can_pack = second.can_pack = True

    def packed(*_: Any) -> None:
        first.can_pack = second.can_pack = False

    def join(lanes: Any, *_: Any) -> list[Any]:
        buffer = SimpleNamespace(view=memoryview(bytes(HEADER_BYTES)))
        return [Sending(lane=lanes[0], frame_bytes=HEADER_BYTES, frame_at=0, buffer=buffer)]

    first.packed = packed
    monkeypatch.setattr(bundler_module, "join", join)
    rig.bundler._send_joint([first, second])
    assert (len(rig.bundler.on_way), second.pushes) == (1, 1)


def fill_window(broker: Any, client: danube_fast.Client) -> danube_fast.Producer:
    """A producer of two partitions: one has filled the window, the other finds no room."""
    producer = client.producer(TOPIC, partitions=2, window_bytes_max=65_536)
    keys = {key_hash(b"%d" % number) % 2: b"%d" % number for number in range(20)}
    broker.hold_acks = True
    producer.send(bytes(65_500), key=keys[0])
    producer.send(b"quiet", key=keys[1])
    broker.wait("what fills the window", lambda: len(stored(broker)) == 1)
    return producer


def test_a_connection_that_has_failed_is_not_looked_at_any_more(
    broker: Any, client: danube_fast.Client
) -> None:
    """Though what one partition gives up lets the other go."""
    producer = fill_window(broker, client)
    pump, connection = client._core.pump, producer._publisher.lanes[0].connection
    with pump.lock:
        connection.fail(danube_fast.PermissionDenied("no"))
        assert not connection.bundler.on_way
        assert connection.bundler not in pump.armed
    with pytest.raises(danube_fast.PermissionDenied):
        producer.close()


def test_a_lane_that_left_is_not_sent_from():
    rig = Rig()
    requests = [rig.send(), rig.send()]
    held, gone = rig.lane(), rig.lane()
    rig.bundler.linger(held, 0, LINGER_NS)
    rig.bundler.linger(gone, 0, LINGER_NS)
    rig.bundler.forget(gone)
    rig.answer(*requests)
    assert (held.pushes, gone.pushes) == (1, 0)


def test_a_long_linger_does_not_put_off_the_look_for_answers():
    rig = Rig()
    rig.send(), rig.send()
    rig.bundler.linger(rig.lane(), 0, LINGER_NS)
    assert rig.armed_ns == 2 * MS
    rig.bundler.linger(rig.lane("os"), 0, 1000 * MS)
    assert rig.armed_ns <= 2 * MS


def test_what_an_interrupt_left_unarmed_is_armed_by_the_next():
    rig = Rig()
    requests = [rig.send(), rig.send()]
    rig.armed_ns = FOREVER_NS
    arm = rig.bundler._pump.arm

    def struck(*_: Any) -> None:
        raise KeyboardInterrupt

    rig.bundler._pump.arm = struck
    with pytest.raises(KeyboardInterrupt):
        rig.bundler.linger(rig.lane(), 0, LINGER_NS)
    rig.bundler._pump.arm = arm
    other = rig.lane()
    rig.bundler.linger(other, 0, LINGER_NS)
    assert rig.armed_ns == 2 * MS
    rig.answer(*requests)
    assert other.pushes == 1


def test_a_long_queue_of_another_class_is_not_looked_through():
    rig = Rig()
    first = rig.send(BUSY_FRAMES)
    for _ in range(100):
        rig.send(ack_class="os")
    looked: list[int] = []
    rig.bundler.on_way = CountedDict(rig.bundler.on_way, looked)
    assert not rig.bundler.is_busy("fsync") and first in rig.bundler.on_way
    assert len(looked) <= 65


class CountedDict(dict[int, Any]):
    """A dict that counts the items that are looked at, from its end on."""

    def __init__(self, items: dict[int, Any], looked: list[int]) -> None:
        super().__init__(items)
        self.looked = looked

    def items(self) -> Any:
        return CountedItems(self)


class CountedItems:
    """Its items."""

    def __init__(self, owner: CountedDict) -> None:
        self.owner = owner

    def __reversed__(self) -> Any:
        for request in reversed(self.owner):
            self.owner.looked.append(request)
            yield request, self.owner[request]


def test_a_partition_for_which_the_window_had_no_room_goes_on_with_the_acks_of_others(
    broker: Any, client: danube_fast.Client
) -> None:
    """Nothing of its own is unacked, so no ack of its own lets it go."""
    fill_window(broker, client)
    broker.hold_acks = False
    broker.release_acks()
    broker.wait("the other partition", lambda: len(stored(broker)) == 2, seconds=20)


@pytest.mark.parametrize("name", ["_hold", "_newest"])
def test_what_an_interrupt_left_open_goes_with_the_next_message(
    broker: Any, client: danube_fast.Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It strikes as the open batch is to wait for answers of others."""
    producer, other = client.producer(TOPIC), client.producer("/default/other")
    strikes, original = [1], getattr(Bundler, name)

    def struck(*arguments: Any) -> Any:
        if strikes and threading.current_thread() is threading.main_thread():
            strikes.pop()
            raise KeyboardInterrupt
        return original(*arguments)

    broker.hold_acks = True
    other.send(b"unanswered")
    broker.wait("what is unanswered", lambda: len(stored(broker, "/default/other")) == 1)
    monkeypatch.setattr(Bundler, "is_busy", lambda *_: True)
    monkeypatch.setattr(Bundler, name, struck)
    with pytest.raises(KeyboardInterrupt):
        producer.send(b"first")
    producer.send(b"second")
    broker.hold_acks = False
    broker.release_acks()
    broker.wait("both messages", lambda: stored(broker) == [b"first", b"second"], seconds=20)


def test_a_producer_that_is_closed_unacked_gives_its_window_back(
    broker: Any, client: danube_fast.Client
) -> None:
    producer = client.producer(TOPIC)
    broker.hold_acks = True
    producer.send(bytes(1000))
    pump = client._core.pump
    assert pump.unacked_bytes > 1000
    with pytest.raises(danube_fast.DeadlineExceeded):
        producer.close(timeout=0.1)
    assert pump.unacked_bytes == 0
    broker.hold_acks = False
    broker.release_acks()
    client.producer(TOPIC).publish(b"next")
    assert pump.unacked_bytes == 0
