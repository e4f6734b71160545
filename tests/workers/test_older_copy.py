"""The metadata's memory of uploaders: their epochs, and that a store knows of later ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from danube_fast.broker import messages as m
from danube_fast.metadata.memory import MemoryStore
from danube_fast.testing.virtual_clock import VirtualClock
from danube_fast.workers.coordinator.uploaders import Uploads

URL = "file:///store"


class Coordinator:
    """The part of one that answers uploaders."""

    def __init__(self) -> None:
        self._handlers: dict[Any, Any] = {}
        mailbox = SimpleNamespace(serve=self._handlers.__setitem__)
        boot: Any = SimpleNamespace(settings=SimpleNamespace(store=URL), mailbox=mailbox)
        topics: Any = SimpleNamespace()
        Uploads(boot, MemoryStore(VirtualClock()), topics)

    def answer(self, message: m.Message) -> Any:
        """Answer one message."""
        replies: list[Any] = []
        self._handlers[type(message)](SimpleNamespace(message=message, reply=replies.append))
        (reply,) = replies
        return reply

    def begin(self) -> m.Uploader:
        """Give an uploader its epoch."""
        found = self.answer(m.BeginUploader())
        assert isinstance(found, m.Uploader)
        return found


def test_an_older_copy_is_kept_in_mind() -> None:
    coordinator = Coordinator()
    first = coordinator.begin()
    assert not first.is_older_copy
    coordinator.answer(m.NoteOlderCopy(URL, first.epoch))
    second = coordinator.begin()
    assert second.epoch == first.epoch + 1
    assert second.is_older_copy


def test_an_uploader_that_has_ended_does_not_know() -> None:
    """It has found the epoch of the one behind it, which is of the same data."""
    coordinator = Coordinator()
    first, _ = coordinator.begin(), coordinator.begin()
    coordinator.answer(m.NoteOlderCopy(URL, first.epoch))
    assert not coordinator.begin().is_older_copy
