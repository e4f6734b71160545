"""Uploads that earlier uploaders have left in the store: dropped after a while, for their parts cost room."""

from __future__ import annotations

import logging
from functools import partial

from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError
from danube_fast.history.layout import OBJECTS_PREFIX
from danube_fast.history.stores.store import ObjectStore, Upload
from danube_fast.workers.process.tasks import Do, Pause, Task
from danube_fast.workers.uploader.checkpoint import Checkpoints
from danube_fast.workers.uploader.state import UploaderState

__all__ = ["GRACE_NS", "abandoned", "sweep"]

_log = logging.getLogger(__name__)

GRACE_NS = 24 * 3600 * SECOND_NS
"""So long after its begin an upload may still be gone on with: by a copy of the data that is put back, for one."""
LOOK_NS = 3600 * SECOND_NS


def abandoned(store: ObjectStore, epoch: int, now_ns: int) -> list[Upload]:
    """List the uploads of uploaders before `epoch` that began more than GRACE_NS ago. Runs in a thread. Raises what
    the store raises."""
    return [
        upload
        for upload, began_ns in store.uploads(OBJECTS_PREFIX)
        if now_ns - began_ns > GRACE_NS and _epoch_of(upload.key) < epoch
    ]


def sweep(state: UploaderState, checkpoints: Checkpoints) -> Task:
    """Drop them now and then, but never the one that the checkpoint names."""
    while True:
        try:
            found: list[Upload] = yield Do(
                partial(abandoned, state.store, state.epoch, state.clock.wall_ns())
            )
            for upload in found:
                current = checkpoints.current
                if current is None or current.upload_id != upload.upload_id:
                    yield Do(partial(state.store.abort, upload))
                    _log.info("history: dropped the parts of %s, which was cut short", upload.key)
        except DanubeError as error:
            _log.info("history: uploads that were cut short could not be looked for: %s", error)
        yield Pause(LOOK_NS)


def _epoch_of(key: str) -> int:
    """Tell the epoch of the uploader that began an object; -1 if its key says nothing of one."""
    epoch = key.removeprefix(OBJECTS_PREFIX).partition("/")[0]
    return int(epoch) if epoch.isdigit() else -1
