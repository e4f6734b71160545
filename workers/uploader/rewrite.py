"""A shared object written again, without the frames of a topic that was deleted."""

from __future__ import annotations

from functools import partial

from danube_fast.errors import DanubeError
from danube_fast.history.layout import ObjectHeader
from danube_fast.history.manifest import Section
from danube_fast.history.objects import ObjectWriter, read_blocks
from danube_fast.workers.process.tasks import Do, Task
from danube_fast.workers.uploader.checkpoint import Checkpoint, Progress
from danube_fast.workers.uploader.sender import Sender
from danube_fast.workers.uploader.state import History, UploaderState

__all__ = ["rewrite_object"]

PIECE_BLOCKS = 16
"""Read at a time: 4 MiB or so."""


def rewrite_object(
    state: UploaderState, key: str, partition_ids: list[int], named: dict[str, list[int]]
) -> Task:
    """Write the sections of some partitions into a new object, and name that in their manifests instead.

    `named` gets the new key. Raises DanubeError; then the old object stays named where it was.
    """
    store = state.store
    header = ObjectHeader(state.identity, state.epoch, state.next_number(), state.clock.wall_ns())
    part_bytes = max(store.part_bytes_min, state.settings.history_part_bytes)
    writer = ObjectWriter(header, part_bytes)
    checkpoint = Checkpoint(url=store.url, header=header, key=writer.key, part_bytes=part_bytes)
    sender = Sender(store, writer.key, Progress(None, checkpoint))
    state.writing.add(writer.key)
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
            yield Do(partial(_replace, history, key, section))
        named[writer.key] = partition_ids
    except DanubeError:
        yield from sender.abort()
        raise
    finally:
        state.writing.discard(writer.key)


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


def _replace(history: History, key: str, section: Section) -> None:
    manifest = history.manifest
    history.commit(manifest.topic, manifest.incarnation, added=[section], removed=[key])
