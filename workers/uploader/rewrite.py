"""Objects written again: a shared one without the frames of a topic that was deleted, and what the log has of a lost
one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from danube_fast.broker.messages import Backlog
from danube_fast.errors import DanubeError, DataLoss, Unavailable
from danube_fast.history.layout import ObjectHeader
from danube_fast.history.manifest import LOST_PREFIX, Section, lost_section
from danube_fast.history.objects import ObjectWriter, read_blocks
from danube_fast.workers.process.tasks import Do, Task
from danube_fast.workers.uploader.checkpoint import Checkpoint, Progress
from danube_fast.workers.uploader.log_frames import Piece, Unknown, read_piece
from danube_fast.workers.uploader.sender import Sender
from danube_fast.workers.uploader.state import History, UploaderState

__all__ = ["restore_section", "rewrite_object"]

PIECE_BLOCKS = 16
"""Read at a time: 4 MiB or so."""


def rewrite_object(
    state: UploaderState, key: str, partition_ids: list[int], named: dict[str, list[int]]
) -> Task:
    """Write the sections of some partitions into a new object, and name that in their manifests instead.

    `named` gets the new key. Raises DanubeError; then the old object stays named where it was.
    """
    writer, sender = _begin(state)
    histories: list[History] = []
    try:
        for partition_id in partition_ids:
            history: History = yield from state.history(partition_id, -1)
            for section in [each for each in history.manifest.sections if each.key == key]:
                yield from _copy(state, writer, sender, partition_id, section)
                histories.append(history)
        parts, sections = writer.finish()
        yield from sender.finish(parts, sections, [])
        for history, section in zip(histories, sections, strict=True):
            yield Do(partial(_replace, history, key, [section]))
        named[writer.key] = partition_ids
    except DanubeError:
        yield from sender.abort()
        for partition_id in partition_ids:
            state.forget(partition_id)  # the record may have been made
        raise
    finally:
        state.writing.discard(writer.key)


def restore_section(
    state: UploaderState, worker: int, backlog: Backlog, history: History, section: Section
) -> Task:
    """Write the messages of a section whose object is lost into a new one, from the log, and name that instead. Raises
    DanubeError, and Unknown if the log cannot be read just now; then the section stays as it is."""
    writer, sender = _begin(state)
    try:
        yield from _copy_log(state, worker, writer, sender, section, backlog)
        parts, made = writer.finish()
        if made:
            added = _in_place_of(section, made[0], history, backlog.partition_id)
            yield from sender.finish(parts, made, [])
            yield Do(partial(_replace, history, section.key, added))
    except (DanubeError, Unknown) as error:
        yield from sender.abort()
        state.forget(backlog.partition_id)  # the record may have been made
        if isinstance(error, DataLoss):  # of a file that was given back, and is used again
            raise Unknown(error) from None
        raise
    finally:
        state.writing.discard(writer.key)


def _copy_log(
    state: UploaderState,
    worker: int,
    writer: ObjectWriter,
    sender: Sender,
    section: Section,
    backlog: Backlog,
) -> Task:
    """Copy the frames that a log has of a section."""
    at, end, partition_id = section.base_offset, section.end_offset, backlog.partition_id
    writer.begin(partition_id, at)
    while at < end:
        piece: Piece = yield from read_piece(state, worker, partition_id, at, end)
        writer.space(len(piece.frames))[:] = piece.frames
        for part in writer.add(len(piece.frames), f"the log of {backlog.topic}"):
            yield from sender.send(part)
        at = piece.end_offset


def _in_place_of(
    lost: Section, made: Section, history: History, partition_id: int
) -> list[Section]:
    """List the sections of the lost one's key as they are to be. Raises Unavailable if the log has changed meanwhile."""
    found = [each for each in history.manifest.sections if each.key == lost.key and each != lost]
    if not lost.key.startswith(LOST_PREFIX):
        if (made.byte_count, made.message_count) != (lost.byte_count, lost.message_count):
            raise Unavailable(f"{lost.key}: the log has other frames by now")
    elif made.base_offset > lost.base_offset:  # what is before them stays lost
        start, time_ns = lost.base_offset, lost.append_max_ns
        found.append(lost_section(partition_id, start, made.base_offset, time_ns))
    return [*found, made]


def _begin(state: UploaderState) -> tuple[ObjectWriter, Sender]:
    """Begin an object without a checkpoint."""
    store = state.store
    header = ObjectHeader(state.identity, state.epoch, state.next_number(), state.clock.wall_ns())
    part_bytes = max(store.part_bytes_min, state.settings.history_part_bytes)
    writer = ObjectWriter(header, part_bytes)
    checkpoint = Checkpoint(url=store.url, header=header, key=writer.key, part_bytes=part_bytes)
    state.writing.add(writer.key)
    return writer, Sender(store, writer.key, Progress(None, checkpoint))


def _copy(
    state: UploaderState, writer: ObjectWriter, sender: Sender, partition_id: int, section: Section
) -> Task:
    """Copy the frames of a section, each checked."""
    writer.begin(partition_id, section.base_offset)
    at = section.position
    end = section.position + section.byte_count
    rows = yield Do(partial(read_blocks, state.store, section))
    sizes = rows["byte_count"].tolist()
    while at < end:
        size = sum(sizes[:PIECE_BLOCKS])
        sizes = sizes[PIECE_BLOCKS:]
        data: bytes = yield Do(partial(state.store.read, section.key, at, size))
        writer.space(size)[:] = data
        for part in writer.add(size, f"{section.key}, position {at}"):
            yield from sender.send(part)
        at += size
    writer.end()


def _replace(history: History, key: str, sections: Sequence[Section]) -> None:
    manifest = history.manifest
    history.commit(manifest.topic, manifest.incarnation, added=sections, removed=[key])
