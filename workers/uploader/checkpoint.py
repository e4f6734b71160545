"""The checkpoint of an upload: what the next uploader needs to go on with an object that was cut short.

    history-upload     one file in the data directory, for one object at most

    parts 1 and 2 are sent     the parts, the partitions in the object, how far its writer was
    all are sent               what the manifests are to name: written before the object is made

The object keeps its key, which names the uploader that began it: epochs and numbers are used once only, and manifests
are written under the epoch of the uploader that goes on. A checkpoint that is lost or wrong costs the parts again,
never a message: the object is no history before a manifest names it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from danube_fast.durable import replace_file
from danube_fast.frame.crc import crc32c
from danube_fast.history.layout import ObjectHeader
from danube_fast.history.manifest import Section
from danube_fast.history.objects import WriterState
from danube_fast.history.stores.store import Part, Upload
from danube_fast.workers.process.tasks import Do, Task

__all__ = ["CHECKPOINT_NAME", "Checkpoint", "Checkpoints", "Inside", "Progress"]

_log = logging.getLogger(__name__)

CHECKPOINT_NAME = "history-upload"
MAGIC = int.from_bytes(b"DanubeUp", "little")
VERSION = 1
_HEADER = struct.Struct("<QII")


class Inside(msgspec.Struct, frozen=True, array_like=True):
    """A partition that has frames in an object."""

    partition_id: int
    incarnation: int
    start: int
    """Its history ended here before."""
    until: int
    """All from `start` to here is in the object, or was never there."""
    producers: list[int] = []
    """Ids of those who published what is in the object."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One object that is on its way."""

    url: str
    """Of the store."""
    header: ObjectHeader
    key: str
    part_bytes: int
    upload_id: str = ""
    """Empty: the object is created at once."""
    parts: list[Part] = []
    inside: list[Inside] = []
    """Partitions in the order of their frames."""
    state: WriterState | None = None
    """None: the writer has ended."""
    sections: list[Section] = []
    """One of each partition, once the writer has ended."""
    size: int = 0
    """Of the whole object, then."""

    @property
    def upload(self) -> Upload:
        """The upload of its parts."""
        return Upload(self.key, self.upload_id)

    def encode(self) -> bytes:
        """Make the bytes of the file."""
        body = msgspec.msgpack.encode(self)
        return _HEADER.pack(MAGIC, VERSION, crc32c(body)) + body

    @classmethod
    def decode(cls, data: bytes) -> Checkpoint | None:
        """Read them; None if they are damaged, or of another version."""
        if len(data) < _HEADER.size:
            return None
        magic, version, crc = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        if magic != MAGIC or version != VERSION or crc32c(body) != crc:
            return None
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except msgspec.MsgspecError:
            return None


class Checkpoints:
    """Keep the one checkpoint of an uploader, in memory and in its file."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / CHECKPOINT_NAME
        self.current: Checkpoint | None = None
        self._is_writing = False

    def load(self) -> None:
        """Read what an uploader before has left. Runs in a thread."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("history: %s: %s; its upload begins anew", self._path, error.strerror)
            return
        self.current = Checkpoint.decode(data)
        if self.current is None:
            _log.warning("history: %s is damaged; its upload begins anew", self._path)

    def write(self, checkpoint: Checkpoint) -> Task:
        """Take the place of the one before, durably unless the disk is full: the upload must go on then, too.

        Of several at a time the last one counts.
        """
        self.current = checkpoint
        if self._is_writing:
            return  # the call that writes sees that there is a newer one
        self._is_writing = True
        try:
            written: Checkpoint | None = None
            while self.current is not None and self.current is not written:
                written = self.current
                yield Do(partial(self._replace, written.encode()))
        finally:
            self._is_writing = False

    def drop(self) -> Task:
        """Forget it. Not while one is written."""
        self.current = None
        yield Do(self._remove)

    def _replace(self, data: bytes) -> None:
        try:
            replace_file(self._path, data)
        except OSError as error:
            _log.warning(
                "history: %s: %s; parts of this upload are sent again if the broker ends now",
                self._path,
                error.strerror,
            )
            self._remove()  # an older one could lead to an object that is made by then

    def _remove(self) -> None:
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("history: %s: %s", self._path, error.strerror)


class Progress:
    """Note how far one object is, and keep its checkpoint."""

    def __init__(self, checkpoints: Checkpoints | None, checkpoint: Checkpoint) -> None:
        """`checkpoint`: the one to go on from, or one that says only which object it is. `checkpoints` None: keep none."""
        self._checkpoints, self._last = checkpoints, checkpoint
        self._sent = {part.number: part for part in checkpoint.parts}
        self._count = len(checkpoint.parts)
        """Parts from the first one on without a gap."""
        self._states: list[tuple[WriterState, list[Inside]]] = []
        """Of parts that are not all sent yet."""

    @property
    def parts(self) -> list[Part]:
        """List the parts that are sent, from the first one on without a gap."""
        return [self._sent[number] for number in range(1, self._count + 1)]

    @property
    def header(self) -> ObjectHeader:
        """Header of the object."""
        return self._last.header

    @property
    def is_kept(self) -> bool:
        """Whether there is a checkpoint of this object."""
        if self._checkpoints is None or self._checkpoints.current is None:
            return False
        return self._checkpoints.current.key == self._last.key

    @property
    def key(self) -> str:
        """Key of the object."""
        return self._last.key

    def begin(self, upload: Upload) -> None:
        """Note the upload of the parts."""
        self._last = msgspec.structs.replace(self._last, upload_id=upload.upload_id)

    def hold(self, state: WriterState, inside: Sequence[Inside]) -> None:
        """Note how far the writer is, before the parts are sent that it has completed."""
        self._states.append((state, list(inside)))

    def note_sent(self, part: Part) -> Task:
        """Note that a part is sent; write a checkpoint if another writer could go on behind it."""
        self._sent[part.number] = part
        while self._count + 1 in self._sent:
            self._count += 1
        newest: tuple[WriterState, list[Inside]] | None = None
        while self._states and self._states[0][0].part_count <= self._count:
            newest = self._states.pop(0)
        if newest is not None:
            state, inside = newest
            yield from self._write(parts=self.parts[: state.part_count], inside=inside, state=state)

    def seal(self, sections: Sequence[Section], inside: Sequence[Inside], size: int) -> Task:
        """Note what the manifests are to name, before the object is made."""
        yield from self._write(
            parts=self.parts, inside=list(inside), state=None, sections=list(sections), size=size
        )

    def drop(self) -> Task:
        """Forget the checkpoint: manifests name the object, or it is not to be."""
        if self._checkpoints is not None:
            yield from self._checkpoints.drop()

    def _write(self, **changes: object) -> Task:
        self._last = msgspec.structs.replace(self._last, **changes)
        if self._checkpoints is not None:
            yield from self._checkpoints.write(self._last)
