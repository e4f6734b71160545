"""How a frame is divided: who gets how many of its messages, and which of them fit into byte credit. IO-free.

A frame of 5,000 messages may go out ten at a time. Checking and decompressing it again for each ten would
cost more than sending them, so the frames that were cut last are remembered as they were read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from danube_fast.broker.ledger.ledger import Rows
from danube_fast.broker.sparse import places_of
from danube_fast.broker.subscription.consumer import Stored
from danube_fast.errors import DataLoss
from danube_fast.frame.split import Cut
from danube_fast.frame.view import FrameView

__all__ = ["cut_frame", "divide", "view_of"]

VIEWS_MAX = 4
"""Frames of several messages that are remembered; each has a mebibyte or so, compressed ones more."""

_views: dict[Stored, FrameView] = {}


def view_of(stored: Stored) -> FrameView:
    """A frame to be read. Raises DataLoss if not even a header is there."""
    view = _views.pop(stored, None)
    if view is None:
        view = FrameView(stored.memory)
        if stored.message_count == 1:
            return view
        if len(_views) >= VIEWS_MAX:
            del _views[next(iter(_views))]
    _views[stored] = view
    return view


def cut_frame(
    stored: Stored, rows: Rows, attempts: NDArray[Any] | None, byte_count: int | None
) -> Cut | None:
    """The messages of a frame at `rows`, or with a `byte_count` the first of them that make up as much, but
    for the last one. None for a frame that does not decompress."""
    try:
        view = view_of(stored)
        places = places_of(stored, view, rows)
        cut = Cut(view, places, attempts)
    except DataLoss:
        return None
    if byte_count is None or len(cut) <= byte_count or len(rows) == 1:
        return cut

    def cut_of(count: int) -> Cut:
        return Cut(view, places[:count], None if attempts is None else attempts[:count])

    counts = range(1, len(rows))
    return cut_of(1 + bisect_left(counts, byte_count, key=lambda count: len(cut_of(count))))


def divide(count: int, rooms: Sequence[int]) -> list[int]:
    """How many of `count` messages each gets that has room for so many: as if they went round one by one,
    past those who have no room any more. Fewer than `count` in all if there is no room for more."""
    share, odd = divmod(count, len(rooms))
    if min(rooms) > share:
        return [share + (place < odd) for place in range(len(rooms))]
    left, rounds, active = min(count, sum(rooms)), 0, len(rooms)
    for room in sorted(rooms):
        more = min(room - rounds, left // active)
        rounds, left = rounds + more, left - more * active
        if rounds < room:
            break
        active -= 1
    shares = []
    for room in rooms:
        one_more = left > 0 and room > rounds
        left -= one_more
        shares.append(min(room, rounds) + one_more)
    return shares
