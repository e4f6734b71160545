"""How small frames a producer makes where its broker keeps a publish rate."""

from __future__ import annotations

from typing import Any

import pytest

from danube_fast.client.link.buffers import Buffers
from danube_fast.client.produce.frame_limits import LONG_WAIT_NS, RELAX_NS, FrameLimits
from danube_fast.client.produce.outgoing import Packer, outgoing_list
from danube_fast.clock import SECOND_NS
from danube_fast.errors import InvalidArgument
from danube_fast.frame.layout import Codec

KIB = 1024


def limits_of(**told: int) -> FrameLimits:
    limits = FrameLimits()
    limits.tell(told)
    return limits


def test_a_rate_never_makes_frames_larger_than_the_broker_takes() -> None:
    limits = limits_of(frame_bytes_max=4_000_000, frame_messages_max=7)
    within = limits.within({"frame_bytes_max": 64 * KIB, "message_bytes_max": 64 * KIB})
    assert within == {
        "frame_bytes_max": 64 * KIB, "message_bytes_max": 64 * KIB, "frame_messages_max": 7,
    }  # fmt: skip
    small = limits_of(frame_bytes_max=9000)
    assert small.within({"frame_bytes_max": 64 * KIB}) == {"frame_bytes_max": 9000}
    assert limits_of().within({"frame_bytes_max": 64 * KIB}) == {"frame_bytes_max": 64 * KIB}


def test_a_long_wait_makes_frames_smaller_until_there_was_none_for_long() -> None:
    limits, now_ns = limits_of(), 5 * SECOND_NS
    assert limits.relax_ns > now_ns + RELAX_NS
    assert limits.wait(10 * LONG_WAIT_NS, 500_000, 500, now_ns)
    assert limits.within({}) == {"frame_bytes_max": 25_000, "frame_messages_max": 25}
    assert limits.wait(10 * LONG_WAIT_NS, 25_000, 25, now_ns)
    assert limits.within({}) == {"frame_bytes_max": 4096, "frame_messages_max": 1}
    times = 0
    while limits.relax_ns <= (now_ns := now_ns + RELAX_NS):
        limits.relax(now_ns)
        times += 1
    assert limits.within({}) == {}, "the rate may be gone"
    assert 10 < times < 40


def test_what_is_told_holds_however_long_no_frame_has_to_wait() -> None:
    limits = limits_of(frame_messages_max=20)
    assert limits.wait(2 * LONG_WAIT_NS, 20_000, 20, 0)
    assert limits.within({})["frame_messages_max"] == 5
    now_ns = 0
    while limits.relax_ns <= (now_ns := now_ns + RELAX_NS):
        limits.relax(now_ns)
    assert limits.within({}) == {"frame_messages_max": 20}
    assert limits.wait(2 * LONG_WAIT_NS, 20_000, 20, 0)
    limits.tell({})
    assert limits.within({}) == {}, "opened anew: the broker knows"


@pytest.mark.parametrize(("wait_ns", "count"), [(LONG_WAIT_NS, 5), (SECOND_NS, 1)])
def test_short_waits_and_messages_alone_change_nothing(wait_ns: int, count: int) -> None:
    limits = limits_of()
    assert not limits.wait(wait_ns, 1000, count, 100 * SECOND_NS)
    assert limits.within({}) == {}


@pytest.mark.parametrize("keys", [None, [b"k%d" % n for n in range(50)]])
def test_a_list_is_cut_into_frames_of_so_many_messages(
    keys: list[bytes | str | None] | None,
) -> None:
    packer = Packer(Buffers().pool(KIB * KIB), Codec.NONE)
    packer.keep_to([{"frame_messages_max": 20}])
    outgoing = outgoing_list([b"%d" % n for n in range(50)], keys, None, None, None, None)
    start, counts = 0, []
    while start < 50:
        _, _, count = packer.pack(outgoing, start)
        counts.append(count)
        start += count
    assert counts == [20, 20, 10]
    packer.keep_to([{}])
    assert packer.pack(outgoing, 0)[2] == 50


@pytest.mark.parametrize("keys", [None, [b"k%d" % n for n in range(50)]])
def test_a_wrong_item_is_named_by_its_place_in_the_whole_list(
    keys: list[bytes | str | None] | None,
) -> None:
    packer = Packer(Buffers().pool(KIB * KIB), Codec.NONE)
    packer.keep_to([{"frame_messages_max": 20}])
    payloads: list[Any] = [b"%d" % n for n in range(50)]
    payloads[33] = 5
    outgoing = outgoing_list(payloads, keys, None, None, None, None)
    assert packer.pack(outgoing, 0)[2] == 20
    with pytest.raises(InvalidArgument, match="33"):
        packer.pack(outgoing, 20)
