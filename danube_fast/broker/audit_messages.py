"""Messages between the processes of one broker about the audit log.

    worker ----- Denied: refusals, and what was closed, aggregated --> coordinator
           <---- PublishAudit: lines of the log --------------------

A record is a line of JSON (`danube_fast/security/audit.py`).
"""

from __future__ import annotations

from danube_fast.broker.message import Message

__all__ = ["Denied", "PublishAudit"]


class Denied(Message, frozen=True):
    """Record denied actions, and what was closed as rights went; answered when they are taken over."""

    records: list[bytes]
    lost: int = 0
    """Denials that found no room in the process."""


class PublishAudit(Message, frozen=True):
    """Publish lines, a message each, to a partition of the topic of the audit log; answered when they are durable."""

    partition_id: int
    lines: list[bytes]
