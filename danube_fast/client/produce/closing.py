"""How a lane gives its producer up at the broker, which knows a producer by its name alone.

So the name may stand for another lane of this client by now, one that took over: then nothing is to be
closed. And a lane may end before the broker has said that its producer is open: it is closed then.

All functions are called under the pump's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube_fast.client.link.calls import Call, OnLoss
from danube_fast.net.protocol import CloseProducer

if TYPE_CHECKING:
    from danube_fast.client.produce.lane import Lane

__all__ = ["close_at_broker", "close_when_opened"]


def close_at_broker(lane: Lane, producer_id: int) -> Call | None:
    """Close a lane's producer; the call to wait for, None if another lane has the name."""
    connection = lane.connection
    if any(user is not lane and _is_of_same_name(user, lane) for user in connection.users):
        return None
    command = CloseProducer(connection.next_request(), lane.partition_id, producer_id)
    return connection.call(Call(command, OnLoss.FORGET))


def close_when_opened(lane: Lane, opening: Call) -> None:
    """Close what `opening`, an OPEN_PRODUCER on its way, will have opened."""

    def opened(call: Call) -> None:
        if call.error is None and lane.connection.is_open:
            close_at_broker(lane, call.value["producer_id"])

    opening.on_done = opened


def _is_of_same_name(user: object, lane: Lane) -> bool:
    return (
        isinstance(user, type(lane))
        and user.partition_id == lane.partition_id
        and user.outbox.name == lane.outbox.name
    )
