"""The model of one broker: its partitions and subscriptions, and what is still owed to these.

It uses nothing of the engine: the wire format, sets and dictionaries. See `publishing_model.py` and
`subscription_model.py` for the promises, and `worker_tap.py` for what feeds it.
"""

from __future__ import annotations

from danube_fast.clock import MILLISECOND_NS
from danube_fast.config import Settings
from danube_fast.testing.attached_model import Attached
from danube_fast.testing.publishing_model import PartitionModel, Violation
from danube_fast.testing.subscription_model import SubscriptionModel
from danube_fast.testing.virtual_clock import Trace, VirtualClock

__all__ = ["Model"]


class Model:
    """Everything that is known of one broker."""

    def __init__(self, clock: VirtualClock, trace: Trace, settings: Settings) -> None:
        self.clock = clock
        self.silence_ns = settings.session_timeout_ms * MILLISECOND_NS
        self.idle_silence_ns = 3 * settings.heartbeat_idle_ms * MILLISECOND_NS
        self.trace = trace
        self.partitions: dict[int, PartitionModel] = {}
        self.subscriptions: dict[tuple[int, str], SubscriptionModel] = {}
        self.letters: dict[int, str] = {}
        """Partitions that take dead letters."""
        self.letters_unread = 0
        """Dead letters that expired before the first subscription; of which messages cannot be known."""
        self.application_acks: dict[str, set[tuple[int, int]]] = {}
        """What each application of a shipped client has acked: partition and offset."""
        self._by_topic: dict[str, PartitionModel] = {}
        self.messages_accepted = self.messages_delivered = self.messages_acked = 0

    def add_partition(self, partition_id: int, durability: str, topic: str, index: int) -> None:
        """There is such a partition."""
        place = (topic, str(index))
        made = self.partitions[partition_id] = PartitionModel(partition_id, durability, place)
        self._by_topic[f"{topic}-part-{index}"] = made
        if index == 0:
            self._by_topic.setdefault(topic, made)

    def partition_of(self, topic: str) -> PartitionModel:
        """The partition whose own topic that is."""
        return self._by_topic[topic]

    def check_owner(self, sub: SubscriptionModel, consumer: Attached, acked: list[int]) -> None:
        """The broker hears no ack that an application did not give."""
        given = self.application_acks.get(consumer.owner)
        if given is None:
            return
        for offset in acked:
            if (sub.partition_id, offset) not in given:
                raise Violation(f"{sub.label}: {consumer.owner} never acked {offset}")

    def moved(self, partition_id: int) -> None:
        """A partition went to another worker; those with consumers have heard of it already."""
        for (place, _), sub in self.subscriptions.items():
            if place == partition_id and not sub.consumers:
                sub.moved()

    def lost_power(self) -> None:
        """Allow what was not synced to be lost."""
        for partition in self.partitions.values():
            if partition.durability == "os":
                partition.may_have_lost()

    # ------------------------------------------------------------ what is owed

    def owed(self) -> list[str]:
        """Name what subscriptions still have to get."""
        found, unread = [], self.letters_unread
        for sub in self.subscriptions.values():
            sub.overdue()
            partition = self.partitions[sub.partition_id]
            missing = sorted(
                offset
                for offset in partition.accepted
                if sub.is_owed(offset) and sub.wants(partition.by_offset[offset][1])
            )
            excused = [offset for offset in missing if offset in sub.poisoned][:unread]
            unread -= len(excused)
            missing = [offset for offset in missing if offset not in excused]
            if missing:
                found.append(f"{sub.label} waits for {len(missing)}: {missing[:10]}")
        return found
