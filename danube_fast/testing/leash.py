"""Serves so that the broker cannot outlive the process that wants it for its tests:
`python -m danube_fast.testing.leash PID FOLDER SETTINGS`

    the test's process --pidfd--> a thread here: SIGTERM to ourselves when that process has ended,
                                  an orderly stop, the folder removed; SIGKILL if that takes long

The kernel's own signal for this (PR_SET_PDEATHSIG) comes when the *thread* ends that started us, and
tests start brokers in threads.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
from types import FrameType

__all__ = ["main"]

STOP_SECONDS = 12.0
"""An orderly stop takes 10 s at most."""


def _remove(folder: str) -> None:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(pidfd: int, is_orphan: threading.Event, folder: str) -> None:
    select.select([pidfd], [], [])
    is_orphan.set()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(STOP_SECONDS)
    _remove(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> None:
    """Serve until told to stop, or until the parent ends: then FOLDER is removed, unless it is empty."""
    parent, folder, settings = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    signal.signal(signal.SIGTERM, _leave)  # until the broker has a handler of its own
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        pidfd = -1
    if pidfd < 0 or os.getppid() != parent:
        _remove(folder)
        return
    is_orphan = threading.Event()
    threading.Thread(target=_watch, args=(pidfd, is_orphan, folder), daemon=True).start()
    try:
        import msgspec

        from danube_fast.config import Settings
        from danube_fast.workers.supervisor.supervisor import serve

        sys.exit(serve(msgspec.json.decode(settings, type=Settings), output="json"))
    finally:
        if is_orphan.is_set():
            _remove(folder)


if __name__ == "__main__":
    main()
