"""The frame in hand: parts of it, and the credit that goes back for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.client.consume.credit import Credit
from danube_fast.client.consume.hand import Hand


class Frame(SimpleNamespace):
    """A delivery of whole messages, numbered."""

    is_again = False

    def messages(self, start: int, stop: int) -> range:
        return range(start, stop)

    def give_credit_back(self, taken: int) -> None:
        self.returned = max(self.returned, taken)


def credit(window_bytes: int, window_messages: int) -> Credit:
    connection: Any = SimpleNamespace(users={}, next_request=lambda: 1)
    return Credit(connection, window_bytes, window_messages)


def frame(count: int, window: Credit) -> Any:
    attachment = SimpleNamespace(took=lambda _: None)
    return Frame(
        count=count, frame_bytes=100 * count, returned=0, credit=window, attachment=attachment
    )


@pytest.mark.parametrize(
    ("window_bytes", "window_messages", "part"),
    [(16_000, 160, 10), (15_999, 160, 3), (16_000, 159, 3)],
)
def test_only_frames_that_are_a_small_part_of_the_window_are_taken_whole(
    window_bytes, window_messages, part
):
    hand = Hand()
    held = frame(10, credit(window_bytes, window_messages))
    hand.hold(held, 0)
    hand.begin_part(1)
    assert list(hand) == list(range(part)), "in order"
    assert held.returned == 0
    hand.return_credit()
    assert held.returned == part


def test_what_is_taken_in_a_batch_is_not_taken_again():
    hand = Hand()
    hand.hold(frame(10, credit(1_000, 10)), 0)
    hand.begin_part(1)
    hand.skip(2)
    assert hand.here is not None and hand.here[1] == 2
    assert list(hand) == [2]
    hand.skip(7)
    hand.begin_part(1)
    assert list(hand) == [7, 8, 9]
    assert hand.here is None


def test_of_a_frame_that_is_void_nothing_more_is_taken_and_its_credit_goes_back():
    hand = Hand()
    left, held = hand.left, frame(10, credit(1_000, 10))
    hand.hold(held, 0)
    hand.begin_part(1)
    hand.drop(frame(1, held.credit).attachment)
    assert left, "it came through another attachment"
    hand.drop(held.attachment)
    assert not left and hand.here is None and held.returned == 10
    hand.begin_part(1)
    assert not list(hand)
