"""The one Settings struct: what a user may tune. Components are passed in, never configured here.

Every field has its unit in its name. tuning.md explains each; `danube-fast config show` prints the
values in force and where they came from.
"""

from __future__ import annotations

import msgspec

__all__ = ["Settings"]

MIB = 1024 * 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a broker. Defaults are right for one host."""

    # where
    data_dir: str = "danube-data"
    listen: str = "127.0.0.1:6650"
    advertise: str = ""
    admin: str = ""
    workers: int = 2
    log_format: str = "text"

    # log
    segment_bytes: int = 128 * MIB
    spare_segments: int = 2
    wal_bytes_max: int = 0
    """0 = the smaller of 100 GiB and half the free disk."""
    group_bytes_max: int = 4 * MIB
    idle_marker_ms: int = 100
    retention_seconds_min: int = 24 * 3600
    snapshot_bytes_max: int = 1024 * MIB
    index_flush_entries: int = 4096
    index_map_bytes: int = 64 * MIB

    # messages
    message_bytes_max: int = 16 * MIB
    auto_create_topics: bool = True
    partitions_per_topic_max: int = 4096

    # sessions
    handshake_timeout_ms: int = 5000
    heartbeat_ms: int = 500
    heartbeat_idle_ms: int = 5000
    session_timeout_ms: int = 2500
    sessions_max: int = 20_000
    send_queue_messages_max: int = 1000

    # dedup
    dedup_batches_max: int = 64
    producers_max: int = 100_000
    producer_expiry_seconds: int = 7 * 24 * 3600

    # delivery
    tail_bytes_max: int = 64 * MIB
    """Recent frames that a worker keeps in memory for consumers near the tail."""
    memory_topic_bytes_max: int = 256 * MIB
    ack_commit_ms: int = 100
    delivery_bytes_max: int = 1 * MIB
    """Largest DELIVER, unless one frame alone is larger."""

    # processes
    mailbox_bytes: int = 1 * MIB
    stop_timeout_ms: int = 10_000
    worker_start_timeout_ms: int = 60_000
    heartbeat_timeout_ms: int = 10_000
    """A ready process that shows no life for this long is killed and started again."""
    restart_delay_ms: int = 100
