"""The current frame: parts of it, and the credit that goes back for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.client.consume.credit import Credit
from danube_fast.client.consume.frames import Frames


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
    attachment = SimpleNamespace()
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
    frames = Frames()
    begun = frame(10, credit(window_bytes, window_messages))
    frames.open(begun, 0)
    frames.begin_part(1)
    assert list(frames) == list(range(part)), "in order"
    assert begun.returned == 0
    frames.return_credit()
    assert begun.returned == part


def test_what_is_taken_in_a_batch_is_not_taken_again():
    frames = Frames()
    frames.open(frame(10, credit(1_000, 10)), 0)
    frames.begin_part(1)
    frames.skip(2)
    assert frames.here is not None and frames.here[1] == 2
    assert list(frames) == [2]
    frames.skip(7)
    frames.begin_part(1)
    assert list(frames) == [7, 8, 9]
    assert frames.here is None


def test_of_a_frame_that_is_void_nothing_more_is_taken_and_its_credit_goes_back():
    frames = Frames()
    left, begun = frames.left, frame(10, credit(1_000, 10))
    frames.open(begun, 0)
    frames.begin_part(1)
    frames.drop(frame(1, begun.credit).attachment)
    assert left, "it came through another attachment"
    frames.drop(begun.attachment)
    assert not left and frames.here is None and begun.returned == 10
    frames.begin_part(1)
    assert not list(frames)
