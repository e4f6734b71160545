"""Jobs that write frames again: what follows when one fails, and what all of them may cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from danube_fast.errors import Unavailable
from danube_fast.wal.index import Run
from tests.workers.shard_rig import Rig
from tests.workers.test_compaction import Topic
from tests.workers.test_policies import later


def test_a_pass_that_failed_is_made_again_without_any_publisher(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that is refused because the log is full waits for nothing else."""
    topic = Topic(start())
    log = topic.rig.worker.state.logs[0]
    read_run, failed = log.read_run, []

    def read(run: Run) -> bytearray:
        if not failed:
            failed.append(run)
            raise Unavailable("the disk of the log has failed meanwhile")
        return read_run(run)

    monkeypatch.setattr(log, "read_run", read)
    topic.publish_some(100)
    topic.rig.turn(lambda: later(topic.rig, 0.1) or failed, "a pass that fails")
    assert topic.clean_until == 0
    topic.rig.turn(lambda: later(topic.rig, 0.1) or topic.clean_until, "another pass")
    topic.check(topic.read())
