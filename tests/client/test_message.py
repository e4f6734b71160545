"""Message, MessageId, ranges: what needs no broker."""

from __future__ import annotations

import itertools
import pickle
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import danube_fast
from danube_fast.client.consume.ranges import FEW, merged, merged_ranges, subtracted, to_wire


def test_message_is_constructible() -> None:
    message = danube_fast.Message(
        b"p", key="k", attributes={"a": "b"}, offset=7, topic="/n/t", event_time=5, sequence=3
    )
    assert (message.payload, message.key, message.attributes) == (b"p", b"k", {"a": "b"})
    assert str(message.message_id) == "/n/t@7"
    assert message == danube_fast.Message(
        b"p", key=b"k", attributes={"a": "b"}, offset=7, topic="/n/t", event_time=5, sequence=3
    )
    assert message != danube_fast.Message(b"p", offset=7, topic="/n/t")
    assert pickle.loads(pickle.dumps(message)) == message
    assert "/n/t@7" in repr(message)
    assert danube_fast.Message(None).payload is None


def test_message_id_text() -> None:
    parsed = danube_fast.MessageId.parse("/default/flights-part-0@123")
    assert parsed == ("/default/flights-part-0", 123)
    for bad in ("", "x@1", "/a/b", "/a/b@", "/a/b@-1", "/a/b@x"):
        with pytest.raises(danube_fast.InvalidArgument, match="@offset"):
            danube_fast.MessageId.parse(bad)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=40))
def test_merged_ranges_hold_exactly_the_same_offsets(ranges: list[tuple[int, int]]) -> None:
    flat = [value for start, length in ranges for value in (start, start + length)]
    out = merged(flat)
    wanted = {o for start, length in ranges for o in range(start, start + length)}
    pairs = list(zip(out[::2], out[1::2], strict=True))
    assert {o for start, end in pairs for o in range(start, end)} == wanted
    assert all(a[1] < b[0] for a, b in itertools.pairwise(pairs))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 9)), min_size=1, max_size=90))
def test_many_ranges_are_merged_like_few(ranges: list[tuple[int, int]]) -> None:
    flat = [value for start, length in ranges for value in (start, start + length)]
    out = merged_ranges(array("q", flat))
    rising = all(low < high for low, high in itertools.pairwise(flat))
    assert out.tolist() == (flat if rising else merged(flat))
    sent = to_wire(out)
    assert isinstance(sent, bytes) == (len(out) > FEW)
    assert array("q", sent) == out


RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=12)


@given(RANGES, RANGES)
def test_subtracted_ranges(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def offsets(flat: list[int]) -> set[int]:
        return {o for s, e in zip(flat[::2], flat[1::2], strict=True) for o in range(s, e)}

    a, b = (merged([v for s, n in side for v in (s, s + n)]) for side in (left, right))
    out = subtracted(a, b)
    assert offsets(out) == offsets(a) - offsets(b)
    assert out == sorted(out)


def test_public_names() -> None:
    assert danube_fast.__all__ == sorted(danube_fast.__all__)
    for name in danube_fast.__all__:
        assert getattr(danube_fast, name) is not None
    with pytest.raises(AttributeError):
        danube_fast.nothing_like_this  # type: ignore[attr-defined]
