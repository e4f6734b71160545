"""How small frames a producer makes where its broker keeps a publish rate."""

from __future__ import annotations

import pytest

from danube_fast.client.link.buffers import Buffers
from danube_fast.client.produce.frame_limits import LONG_WAIT_NS, FrameLimits
from danube_fast.client.produce.outgoing import Packer, outgoing_list
from danube_fast.clock import SECOND_NS
from danube_fast.frame.layout import Codec

KIB = 1024


def limits_of(**known: int) -> FrameLimits:
    limits = FrameLimits()
    limits.heard(known, 0)
    return limits


def test_a_rate_never_makes_frames_larger_than_the_broker_takes() -> None:
    limits = limits_of(frame_bytes_max=4_000_000, frame_messages_max=7)
    within = limits.within({"frame_bytes_max": 64 * KIB, "message_bytes_max": 64 * KIB})
    assert within == {
        "frame_bytes_max": 64 * KIB,
        "message_bytes_max": 64 * KIB,
        "frame_messages_max": 7,
    }
    assert limits_of(frame_bytes_max=9000).within({"frame_bytes_max": 64 * KIB}) == {
        "frame_bytes_max": 9000
    }
    assert limits_of().within({"frame_bytes_max": 64 * KIB}) == {"frame_bytes_max": 64 * KIB}


def test_they_are_asked_for_again_ever_more_rarely_while_they_stay_the_same() -> None:
    limits, now_ns, asked_at = limits_of(frame_messages_max=5), 0, []
    while now_ns < 3600 * SECOND_NS:
        now_ns += SECOND_NS
        limits.throttled(LONG_WAIT_NS + 1, 5, now_ns)
        if limits.is_asked:
            asked_at.append(now_ns)
            limits.heard({"frame_messages_max": 5}, now_ns)
    assert asked_at[0] <= 5 * SECOND_NS
    assert len(asked_at) < 15
    limits.heard({"frame_messages_max": 2}, now_ns)  # another answer: more changes may come
    limits.throttled(LONG_WAIT_NS + 1, 2, now_ns + 5 * SECOND_NS)
    assert limits.is_asked
    limits.refused(now_ns + 5 * SECOND_NS)
    assert not limits.is_asked


@pytest.mark.parametrize(("wait_ns", "count"), [(LONG_WAIT_NS, 5), (SECOND_NS, 1)])
def test_short_waits_and_messages_alone_ask_for_nothing(wait_ns: int, count: int) -> None:
    limits = limits_of()
    limits.throttled(wait_ns, count, 100 * SECOND_NS)
    assert not limits.is_asked


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
