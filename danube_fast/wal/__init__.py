"""The write-ahead log: see log.py for how it is used, layout.py for what stands on disk."""

from __future__ import annotations

from danube_fast.wal.index import Run
from danube_fast.wal.layout import REPLAY_DTYPE, RUN_DTYPE
from danube_fast.wal.log import Log
from danube_fast.wal.walk import ReplayBlock

__all__ = ["REPLAY_DTYPE", "RUN_DTYPE", "Log", "ReplayBlock", "Run"]
