"""Publications that are likely to come together: clients that publish one by one, and wait for their acks.

A group that is written for the first of them alone would delay all others by its sync (decision 17).
"""

from __future__ import annotations

from danube_fast.workers.shard.publish.group import Group

__all__ = [
    "QUICK_SYNC_NS",
    "SIBLINGS_BYTES_MAX",
    "SIBLINGS_MAX",
    "SIBLINGS_MIN",
    "SIBLINGS_WAIT_NS",
    "Siblings",
]

SIBLINGS_MIN = 4
"""From so many publications in the last group on, more are likely to come: their clients wait for acks."""
QUICK_SYNC_NS = 500_000
"""Where syncs are quicker than that, kernels wait for half as many: those behind come in a group of their own meanwhile.
Behind slow ones two halves in turn would make each publication wait for two syncs."""
SIBLINGS_MAX = 32
"""A group of so many publications waits no longer."""
SIBLINGS_WAIT_NS = 1_000_000
"""How long an open group waits for them."""
SIBLINGS_BYTES_MAX = 16 * 1024
"""A group of this size waits no longer: its PAD frame is small beside it."""


class Siblings:
    """The publications of one log that waited together for the last sync."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def gather(self) -> bool:
        """Whether no group is to be written for the first of them alone."""
        return self.count >= SIBLINGS_MIN

    def note(self, group: Group) -> None:
        """Take over how many a group has that is written."""
        self.count = len(group.on_synced)

    def forget(self) -> None:
        """Expect none with the next group."""
        self.count = 0

    def hold_open(self, group: Group, now_ns: int) -> bool:
        """Whether a group is left open, as more publications than it has are likely to come soon."""
        if (
            not self.gather
            or group.on_written
            or group.byte_count >= SIBLINGS_BYTES_MAX
            or len(group.on_synced) >= min(self.count, SIBLINGS_MAX)
        ):
            return False
        group.waits_since_ns = group.waits_since_ns or now_ns
        return now_ns - group.waits_since_ns < SIBLINGS_WAIT_NS
