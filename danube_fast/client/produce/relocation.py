"""What a producer does when its topic was looked up again: workers may have changed, partitions come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube_fast.client.produce.lane import Lane
from danube_fast.client.topics.routes import made_again

if TYPE_CHECKING:
    from danube_fast.client.produce.outbox import Outbox
    from danube_fast.client.topics.routes import Topic

__all__ = ["relocate"]


def relocate(outbox: Outbox, route: Topic) -> None:
    """A producer's topic was looked up again: follow partitions to their workers, open lanes to new
    ones. What is on its way keeps its partition."""
    lanes = [*outbox.lanes, *outbox.joining]
    known = list(zip(lanes, route.partitions, strict=False))
    if any(lane.partition_id != partition.partition_id for lane, partition in known):
        outbox.topic_gone(route, made_again(route))
        return
    for lane, partition in known:
        lane.move(partition.connection)
    for partition in route.partitions[len(lanes) :]:
        lane = Lane(outbox, partition.connection, partition.topic, partition.partition_id)
        outbox.joining.append(lane)
