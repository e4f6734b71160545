"""The promises about the messages of one partition. Independent of the engine.

Each message carries in its payload who it is, so that a message that was mixed up with another, came
twice, or was never sent can be told. An offset stands for one message for ever; a message that was
accepted durably has one offset for ever.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["PROBE", "Frame", "PartitionModel", "Violation", "due_of"]

PROBE = b"probe"  # payloads that begin so must never be accepted
_DUE = re.compile(rb"@(\d+):")

WINDOW_BATCHES = 64
"""So many of the last frames of a producer are remembered, FEATURES says."""


class Violation(Exception):
    """A promise was broken; the text says which, and where."""


def due_of(payload: bytes) -> int:
    """When a message is due as its payload says, wall clock, ns; 0: at once."""
    found = _DUE.search(payload)
    return int(found[1]) if found else 0


@dataclass
class Frame:
    """One frame of a PUBLISH, as it came."""

    partition_id: int
    producer_id: int
    base_sequence: int
    messages: list[tuple[bytes, bytes | None]]
    """Payload and key of each."""
    session: tuple[int, int]
    """Worker and number: a number is another session at another worker."""
    is_probe: bool
    """It must not be accepted: a message before it is missing."""
    is_fenced: bool = False
    """It must not be accepted: another session opened the producer before it came."""


Name = tuple[int, int]
"""Who a message is: producer, sequence."""


@dataclass
class PartitionModel:
    """One partition."""

    partition_id: int
    durability: str
    place: tuple[str, str] = ("", "")
    """Topic, and which of its partitions."""
    by_offset: dict[int, tuple[bytes, bytes | None]] = field(default_factory=dict)
    """Payload and key, of all that was shown or acked."""
    names: dict[int, Name] = field(default_factory=dict)
    by_name: dict[Name, int] = field(default_factory=dict)
    accepted: set[int] = field(default_factory=set)
    """Offsets that publishers were told, and that nothing may have taken away since."""
    doubtful: set[Name] = field(default_factory=set)
    """What may have been lost: it may stand at another offset, too."""
    tried: dict[Name, set[bytes]] = field(default_factory=dict)
    """Payloads that were sent under a name."""
    batches: dict[int, int] = field(default_factory=dict)
    """How many frames of a producer were accepted."""
    numbers: dict[Name, int] = field(default_factory=dict)
    """Which frame of its producer brought a message."""
    fenced: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Producer -> the session that opened it last: worker and number."""
    epochs: dict[int, list[int]] = field(default_factory=dict)
    """Producer -> the epochs that clients were told, in that order."""

    def _fault(self, text: str) -> Violation:
        return Violation(f"partition {self.partition_id}: {text}")

    def open(
        self, producer_id: int, epoch: int, session: tuple[int, int], known: list[int]
    ) -> None:
        """A producer is open; sessions that opened it before are fenced. `known`: the epochs of it that a client had
        been told when this was asked for. What was asked at two workers at once is answered
        in either order, as one of them passes it on."""
        epochs = self.epochs.setdefault(producer_id, [])
        if epoch in epochs or epoch <= max(known, default=0):
            raise self._fault(f"producer {producer_id} got epoch {epoch} after {max(epochs)}")
        if epoch > max(epochs, default=0):
            self.fenced[producer_id] = session
        epochs.append(epoch)

    def try_frame(self, frame: Frame) -> None:
        """PUBLISH was read."""
        opener = self.fenced.get(frame.producer_id, frame.session)
        frame.is_fenced = opener != frame.session
        for place, (payload, _) in enumerate(frame.messages):
            name = (frame.producer_id, frame.base_sequence + place)
            self.tried.setdefault(name, set()).add(payload)

    def accept(self, frame: Frame, offset: int, *, is_duplicate: bool) -> None:
        """A publisher was told that a frame has its place."""
        if frame.is_probe and not is_duplicate:
            raise self._fault(
                f"sequence {frame.base_sequence} was accepted though one before it is missing"
            )
        if not is_duplicate:
            if frame.is_fenced:
                raise self._fault("a frame of a fenced producer was accepted")
            self.batches[frame.producer_id] = self.batches.get(frame.producer_id, 0) + 1
        for place, (payload, key) in enumerate(frame.messages):
            name = (frame.producer_id, frame.base_sequence + place)
            at = offset + place
            known = self.by_name.get(name)
            if known is not None and known != at and name not in self.doubtful:
                raise self._fault(f"message {name} stands at {known} and at {at}")
            stands = self.by_offset.get(at)
            if stands is not None and stands[0] != payload and is_duplicate:
                payload, key = stands  # an older content of that sequence was accepted
                if payload not in self.tried[name]:
                    raise self._fault(f"{at} is not what producer {name} sent")
            is_there = name not in self.doubtful or not is_duplicate
            self.show(at, payload, key, name)
            if is_there:  # what a memory topic has lost may still be known as sent
                self.accepted.add(at)
            self.numbers.setdefault(name, self.batches.get(frame.producer_id, 0))

    def refuse_as_old(self, frame: Frame) -> None:
        """A publisher was told that it comes too late to be looked up."""
        name = (frame.producer_id, frame.base_sequence)
        number = self.numbers.get(name)
        newest = self.batches.get(frame.producer_id, 0)
        if number is not None and name not in self.doubtful and newest - number < WINDOW_BATCHES:
            raise self._fault(f"the offset of {name} was forgotten after {newest - number} frames")

    def show(self, offset: int, payload: bytes, key: bytes | None, name: Name) -> None:
        """A message stands at an offset."""
        stands = self.by_offset.setdefault(offset, (payload, key))
        if stands != (payload, key) or self.names.setdefault(offset, name) != name:
            raise self._fault(f"offset {offset} stands for {stands[0]!r} and {payload!r}")
        if payload not in self.tried.get(name, ()):
            raise self._fault(f"offset {offset} has {payload!r}, which {name} never sent")
        known = self.by_name.get(name)
        if known is not None and known != offset and name not in self.doubtful:
            raise self._fault(f"message {name} stands at {known} and at {offset}")
        if known != offset:
            self.by_name[name] = offset
            self.doubtful.discard(name)

    def may_have_lost(self) -> None:
        """All that was accepted may be gone, also what no client was told of: a duplicate of that may be
        nowhere."""
        self.doubtful.update(self.by_name, self.tried)
        self.accepted.clear()
        self.numbers.clear()
