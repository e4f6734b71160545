"""A consumer that is late: it takes its time, or is stopped from outside.

    python -m tests.neighbours.consumer_process '{"url", "topic", "subscription", "pause", "wanted"}'

Prints "ready" once it is subscribed, then receives until it has seen `wanted` offsets, with a pause
(seconds) behind each batch of its first second. Its last line is JSON: the offsets seen, and whether
every payload was the one of its offset.
"""

from __future__ import annotations

import json
import sys
import time

import danube_fast

WAIT_SECONDS = 60.0


def main() -> None:
    """Process entry."""
    plan = json.loads(sys.argv[1])
    seen: set[int] = set()
    right = True
    with (
        danube_fast.connect(plan["url"], name=f"late-{plan['subscription']}") as client,
        client.consumer(
            plan["topic"], subscription=plan["subscription"], initial_position="earliest"
        ) as consumer,
    ):
        print("ready", flush=True)
        idle_seconds = 0  # this process may be stopped for ever so long
        while len(seen) < plan["wanted"] and idle_seconds < WAIT_SECONDS:
            batch = consumer.receive_batch(1000, timeout=1)
            idle_seconds = 0 if batch else idle_seconds + 1
            for offset, payload in zip(batch.offsets.tolist(), batch.payloads(), strict=True):
                seen.add(offset)
                right = right and (payload or b"").startswith(b"%d " % offset)
            consumer.ack(batch)
            if plan["pause"] and len(seen) < plan["wanted"] // 4:
                time.sleep(plan["pause"])
    print(json.dumps({"seen": len(seen), "right": right}), flush=True)


if __name__ == "__main__":
    main()
