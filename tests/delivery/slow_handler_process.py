"""A subscription with a handler that is slow, in a process of its own.

argv[1]: {"url", "topic", "type", "concurrency"}. Prints "ready"; then a line for each message that its handler
begins, which ends only after a line on standard input has said "go".
"""

from __future__ import annotations

import json
import sys
import threading

import danube_fast


def main() -> None:
    plan = json.loads(sys.argv[1])
    may_go = threading.Event()

    def handle(message: danube_fast.Message) -> None:
        print(message.offset, flush=True)
        may_go.wait()

    with (
        danube_fast.connect(plan["url"]) as client,
        client.subscribe(
            plan["topic"], "s", handle, type=plan["type"], concurrency=plan["concurrency"]
        ),
    ):
        print("ready", flush=True)
        sys.stdin.readline()
        may_go.set()
        sys.stdin.readline()


if __name__ == "__main__":
    main()
