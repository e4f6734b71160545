"""The requesting end of the workload `requests`, the same for danube-fast and for other systems.

    at a pace      one request at each due time
    back to back   the next request as soon as the reply to the one before is there

Both have as many requests, each with a payload of its own. The reply to a request is its bytes backwards, so
neither a request nor a reply to another one is taken for it. Replies are compared when the clock has stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.pacer import Pacer
from danube_fast.bench.load.payloads import Payloads

__all__ = [
    "LOOK_SECONDS",
    "REPLY_SECONDS",
    "After",
    "Before",
    "RequestEach",
    "ask_twice",
    "reply_to",
]

Before = Callable[[int], None]
"""Waits until message `number` is due and notes the time; the send follows at once."""
After = Callable[[Any], None]
"""Notes the time and keeps the payload of a reply."""
RequestEach = Callable[[Sequence[bytes], Before, After], None]
"""Sends each payload after `before(number)`, and calls `after(reply)` before it sends the next one."""
REPLY_SECONDS = 10.0
"""A request without a reply ends the run."""
LOOK_SECONDS = 0.1
"""How often a responder looks whether the run is over."""
WARM_UP_REQUESTS = 20
"""The first one makes what replies come over."""


def reply_to(payload: bytes) -> bytes:
    """The payload of the reply to a request."""
    return payload[::-1]


def ask_twice(link: Link, options: dict[str, Any], request_each: RequestEach) -> None:
    """Half of the prepared messages at a pace, the other half back to back; reports times and faults."""
    prepared = Payloads(options["fd"], options["message_bytes"]).cut()
    half = len(prepared) // 2
    pacer = Pacer(options["rate"])
    request_each(prepared[:WARM_UP_REQUESTS], lambda _: None, lambda _: None)
    link.ready()
    cpu = time.process_time()
    pacer.start()
    paced = _ask(prepared[:half], request_each, pacer.wait)
    back_to_back = _ask(prepared[half:], request_each, lambda _: time.monotonic_ns())
    cpu = time.process_time() - cpu
    link.say({"paced": paced, "back_to_back": back_to_back, "cpu": cpu})
    link.hear()


def _ask(
    payloads: Sequence[bytes], request_each: RequestEach, wait: Callable[[int], int]
) -> dict[str, Any]:
    """When each request was due, when it was sent, when its reply came; how many replies are wrong or missing."""
    times = np.zeros((3, len(payloads)), np.int64)
    replies: list[Any] = []

    def before(number: int) -> None:
        times[0, number] = wait(number)
        times[1, number] = time.monotonic_ns()

    def after(reply: Any) -> None:
        times[2, len(replies)] = time.monotonic_ns()
        replies.append(reply)

    request_each(payloads, before, after)
    pairs = zip(payloads, replies, strict=False)
    wrong = sum(reply != reply_to(payload) for payload, reply in pairs)
    return {"times": times, "wrong": wrong, "missing": len(payloads) - len(replies)}
