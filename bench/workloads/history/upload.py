"""The workloads `history-upload` and `history-upload-s3`: how fast history goes into a store.

    published, all in the log | bare loop | the topic gets history: uploaded | bare loop
                                            first object begun ... all is there

`vs_bare` is the rate of the upload divided by that of a bare loop over the same frames (bare.py), the
harmonic mean of one before and one after. Every message is compared as the store has it.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from danube_fast.bench.load.payloads import Payloads
from danube_fast.bench.load.processes import HEAR_SECONDS, Broker, Crew
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.history import topics
from danube_fast.bench.workloads.history.bare import frames_in_log, hold_log
from danube_fast.bench.workloads.history.stores import Store, local, seaweed
from danube_fast.config import Settings
from danube_fast.errors import DataLoss
from danube_fast.history.layout import OBJECT_HEADER_BYTES, ObjectHeader

__all__ = ["run_upload", "run_upload_s3"]

_BARE = "danube_fast.bench.workloads.history.bare"


def run_upload(rig: Rig, plan: Plan) -> Figures:
    """Upload to a folder, beside bare writes with fdatasync."""
    with local(rig) as store:
        return _run(rig, plan, store, "write_frames")


def run_upload_s3(rig: Rig, plan: Plan) -> Figures:
    """Upload to SeaweedFS, beside boto3 alone. Raises FailedPrecondition if that is not installed."""
    with seaweed(rig) as store:
        return _run(rig, plan, store, "send_frames")


def _run(rig: Rig, plan: Plan, store: Store, role: str) -> Figures:
    figures = blank(plan)
    settings = topics.HISTORY | {"store": store.url}
    with rig.own_broker(plan.workload, settings=settings) as broker, rig.crew() as crew:
        (topic,) = rig.topics(1)
        topics.create(broker, plan, topic)
        options = topics.options_of(rig, plan, broker, topic)
        topics.publish(crew, options)
        broker.rest()
        held = store.folder / "log"
        hold_log(broker.data_dir, held)
        partition_id, ranges = frames_in_log(held, plan.messages)
        size = sum(each[2] for each in ranges)
        bare = {
            "ranges": ranges, "partition_id": partition_id, "path": str(store.folder / "bare"),
            "endpoint": store.endpoint, "part_bytes": Settings().history_part_bytes,
            "object_bytes": Settings().history_object_bytes,
        }  # fmt: skip
        rates = [_bare(crew, bare, role, plan)]
        seconds = _upload(broker, store, topic, size, plan.messages)
        rates.append(_bare(crew, bare, role, plan))
        topics.compare(figures, store, topic, Payloads(options["fd"], plan.message_bytes))
    figures.messages_per_s = plan.messages / seconds
    figures.mb_per_s = figures.messages_per_s * plan.message_bytes / 1e6
    bare_per_s = statistics.harmonic_mean(rates)
    figures.extra |= {
        "upload_mb_per_s": size / seconds / 1e6,
        "bare_mb_per_s": bare_per_s / 1e6,
        "vs_bare": size / seconds / bare_per_s,
    }
    return figures


def _bare(crew: Crew, options: dict[str, Any], role: str, plan: Plan) -> float:
    """Bytes a second of the bare loop."""
    member = crew.start("bare", f"{_BARE}:{role}", options)
    member.hear(HEAR_SECONDS)
    member.tell("go")
    report = member.hear(HEAR_SECONDS)
    member.tell("bye")
    if report["messages"] != plan.messages:
        raise DataLoss(f"the bare loop met {report['messages']} of {plan.messages} messages")
    return float(report["bytes_per_s"])


def _upload(broker: Broker, store: Store, topic: str, size: int, messages: int) -> float:
    """Give the topic history; seconds from the begin of its first object until all of it is there."""
    topics.keep_forever(broker, topic)
    topics.wait_until("the upload", lambda: topics.counters(broker)["history_bytes"] >= size)
    ended_ns = time.time_ns()
    topics.wait_until("its manifest", lambda: topics.uploaded_messages(store, topic) >= messages)
    opened = store.open()
    try:
        _, _, manifest = topics.history_of(opened, topic)
        headers = [
            ObjectHeader.decode(opened.read(section.key, 0, OBJECT_HEADER_BYTES), section.key)
            for section in manifest.sections
        ]
    finally:
        opened.close()
    return (ended_ns - min(header.created_ns for header in headers)) / 1e9
