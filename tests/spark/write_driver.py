"""A driver that kills itself at a step: python -m tests.spark.write_driver '[url, store, topic, id, start, count, step]'."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import danube_fast
from danube_fast.spark.write import publishing, rows
from tests.spark.write_rig import numbers, write


def main() -> None:
    url, store, topic, write_id, start, count, step = json.loads(sys.argv[1])
    with danube_fast.connect(url) as client:

        def reached(at: str) -> None:
            if at != step:
                return
            deadline = time.monotonic() + 30
            while at == "half" and not client.admin.topic_stats(topic)["messages_in"]:
                assert time.monotonic() < deadline, "no frame has arrived"
            os.kill(os.getpid(), signal.SIGKILL)

        publishing.reached = reached
        rows.CHUNK_BYTES = 1  # many frames in an object
        # rows that no later driver proposes: those of the commit count
        write(url, store, topic, write_id, numbers(int(start), int(count)), run="killed")


if __name__ == "__main__":
    main()
