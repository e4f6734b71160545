"""Logs that go through many segments in a short test, and keep nothing in memory."""

from __future__ import annotations

__all__ = ["SEGMENT_BYTES"]

SEGMENT_BYTES = 256 * 1024
