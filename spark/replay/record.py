"""The record of a replay, from which it goes on: what it reads, where to, and how far it was.

    DIR/ID.json        written whole, by a rename; read again by a run with the same id

The target counts: its producer `replay-ID` knows how many messages it has taken on each partition. The record says which
rows those are, as their order depends on what is read alone. So it is written before the first message goes out, and
every few seconds with a place that all acks have passed: a run goes on from there, and passes over what was acked since.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from danube_fast.durable import replace_file
from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.frame.crc import crc32c

__all__ = ["Place", "Record", "default_folder", "default_id", "load", "path_of", "save"]


class Place(msgspec.Struct, frozen=True):
    """How far one partition of the source was."""

    name: str
    """Of its extent."""
    low: int
    high: int
    next_position: int
    time_us: int
    """Of the row before."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One replay."""

    source: str
    start: str
    end: str
    by: str
    """The column whose times give the order."""
    target: str
    partition_ids: list[int]
    """Of the target."""
    incarnation: int
    places: list[Place]
    sent: list[int]
    """Messages for each partition of the target that lie before the places."""
    is_done: bool = False
    is_broken: bool = False
    """A message was refused, and the target may have some of those behind it."""

    def check_same(self, other: Record, replay_id: str) -> None:
        """Raise InvalidArgument if another one was given the same id."""
        for name in ("source", "start", "end", "by", "target", "partition_ids", "incarnation"):
            known, given = getattr(self, name), getattr(other, name)
            if known != given:
                what = "the target" if name in ("partition_ids", "incarnation") else name
                change = (
                    "was made again, or has more partitions"
                    if what != name
                    else f"is {given}, and was {known}"
                )
                raise InvalidArgument(
                    f"the replay {replay_id} was another one: {what} {change}; give another --id to begin anew"
                )


def default_id(source: str, start: str, end: str, by: str, target: str, url: str) -> str:
    """Make an id that the same command gets again."""
    return f"{crc32c(repr((source, start, end, by, target, url)).encode()):08x}"


def default_folder() -> Path:
    """Where records are kept, unless --checkpoint names another folder."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "danube-fast" / "replays"


def path_of(folder: Path, replay_id: str) -> Path:
    """The file of a record. Raises InvalidArgument for an id that is no name."""
    if not replay_id.replace("-", "").replace("_", "").isalnum() or len(replay_id) > 64:
        raise InvalidArgument(
            f"{replay_id!r:.80} is no id of a replay; give up to 64 letters, digits, - or _"
        )
    return folder / f"{replay_id}.json"


def load(path: Path) -> Record | None:
    """Read a record; None if there is none. Raises FailedPrecondition if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise FailedPrecondition(
            f"{path}, the record of this replay, cannot be read: {error}; give another --id to begin anew"
        ) from None


def save(path: Path, record: Record) -> None:
    """Write a record, durably. Raises FailedPrecondition if that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(record))
    except OSError as error:
        raise FailedPrecondition(
            f"{path} cannot be written ({error.strerror}), and without it the replay could not be gone on with; "
            "name a folder with --checkpoint"
        ) from None
