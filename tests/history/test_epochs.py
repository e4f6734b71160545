"""Epochs of uploaders in a store: what a broker finds there whose data are an older copy."""

from __future__ import annotations

from danube_fast.history.epochs import EPOCHS_PREFIX, claim_epoch
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.testing.virtual_clock import VirtualClock


def test_an_epoch_is_of_one_uploader() -> None:
    store = MemoryStore(VirtualClock())
    assert claim_epoch(store, 1, b"one")
    assert claim_epoch(store, 1, b"one"), "the answer was lost"
    assert not claim_epoch(store, 1, b"another one")
    assert claim_epoch(store, 9, b"one")
    assert claim_epoch(store, 10, b"one")
    store.create(f"{EPOCHS_PREFIX}something-else", b"")
    assert claim_epoch(store, 11, b"one")


def test_one_that_no_uploader_had_is_older_than_a_later_one() -> None:
    """The life behind the copy has lost it: its uploader ended before it had reached the store."""
    store = MemoryStore(VirtualClock())
    assert claim_epoch(store, 1, b"one")
    assert claim_epoch(store, 3, b"one")
    assert not claim_epoch(store, 2, b"of the copy")
    assert not claim_epoch(store, 2, b"of the copy")
    assert claim_epoch(store, 4, b"one")
