"""The messages between the demo and its members: JSON, one object a line.

demo --argv---> member     its Task
demo --stdin--> member     "go", then "stop"
demo <-stdout-- member     Ready, Progress ..., Done; or Failed
"""

from __future__ import annotations

import msgspec

from danube_fast.client.values.arguments import SubscriptionType, Transport

__all__ = ["ConsumeTask", "Done", "Event", "Failed", "ProduceTask", "Progress", "Ready", "Task"]

GO = "go"
STOP = "stop"


class ProduceTask(msgspec.Struct, frozen=True, tag_field="word", tag="produce", kw_only=True):
    """Publish every `shares`-th row, beginning with row `share`."""

    url: str
    topic: str
    name: str
    data_path: str
    messages: int
    """Rows of the data set that all producers publish together."""
    share: int
    shares: int
    messages_per_s: float
    """Pace of this producer; 0: as fast as it goes."""


class ConsumeTask(msgspec.Struct, frozen=True, tag_field="word", tag="consume", kw_only=True):
    """Receive until told to stop; write what came to `record_path`."""

    url: str
    topic: str
    name: str
    subscription: str
    transport: Transport
    type: SubscriptionType
    record_path: str


Task = ProduceTask | ConsumeTask


class Ready(msgspec.Struct, frozen=True, tag_field="word", tag="ready"):
    """Connected; waits for the go."""


class Progress(msgspec.Struct, frozen=True, tag_field="word", tag="progress"):
    """How far it is."""

    messages: int
    """Handed to the client, or received; repeated deliveries count."""
    ranges: list[tuple[int, int, int]] = []
    """Received since the last report: (partition, first offset, one past the last)."""


class Done(msgspec.Struct, frozen=True, tag_field="word", tag="done"):
    """Everything is acked (and, of a consumer, on record)."""

    messages: int
    first_ns: int = 0
    last_ns: int = 0
    """Wall clock at the first send or receive, and at the last ack or receive."""


class Failed(msgspec.Struct, frozen=True, tag_field="word", tag="failed"):
    """A member could not go on."""

    text: str


Event = Ready | Progress | Done | Failed
