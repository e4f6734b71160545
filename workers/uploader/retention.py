"""Retention of history: sections that the topic's policy or a purge has given up.

Whole sections go, the oldest first; so a little more stays than the policy asks for. Their objects are deleted
by sweep.py.
"""

from __future__ import annotations

from danube_fast.broker.messages import Backlog
from danube_fast.clock import SECOND_NS
from danube_fast.history.manifest import Manifest

__all__ = ["first_kept", "keys_below"]


def first_kept(manifest: Manifest, backlog: Backlog, wall_ns: int) -> int:
    """Offset of the first message that is kept. `wall_ns`: now, Unix time."""
    first = max(manifest.first_offset, backlog.first_offset)
    old_ns = wall_ns - backlog.retention_seconds * SECOND_NS
    total = manifest.byte_count
    if manifest.end_offset <= backlog.uploaded_until:  # else some of it would count twice
        total += backlog.bytes_in_log
    for section in manifest.sections:
        total -= section.byte_count
        is_old = backlog.retention_seconds and section.append_max_ns < old_ns
        is_much = backlog.retention_bytes and total >= backlog.retention_bytes
        if section.end_offset > first and not is_old and not is_much:
            break
        first = max(first, section.end_offset)
    return first


def keys_below(manifest: Manifest, first_offset: int) -> list[str]:
    """Keys of the objects whose sections lie below an offset."""
    return [each.key for each in manifest.sections if each.end_offset <= first_offset]
