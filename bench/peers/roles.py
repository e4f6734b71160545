"""The two members of a run, the same for every other system: what is timed, what is compared.

    throughput   lists cut before the clock starts; the rate counts from the first send to the last receive
    topics       the same over many topics in turn; each in order, and the last message of what has come on its topic
    latency      one message at each due time, until the system has it; arrival: a `bytes` object is there
    requests     one request at each due time and back to back (bench/load/requests.py)

Every byte of every message is compared by the verifier that danube-fast is measured with.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np

from danube_fast.bench.load.member import Link
from danube_fast.bench.load.pacer import Pacer
from danube_fast.bench.load.payloads import NUMBER_BYTES, Payloads
from danube_fast.bench.load.requests import ask_twice, reply_to
from danube_fast.bench.load.verify import Verifier
from danube_fast.bench.peers.adapter import Adapter, Receiver
from danube_fast.bench.peers.catalog import find
from danube_fast.errors import DanubeError, Unavailable

__all__ = ["ask", "consume", "consume_paced", "produce", "produce_paced", "reply"]

SILENCE_SECONDS = {True: 5.0, False: 30.0}
"""May lose or not -> a consumer ends after hearing nothing for so long."""
AFTER_SECONDS = 0.1
"""After the last message a consumer listens on for what should not come."""


def _payloads(options: dict[str, Any]) -> Payloads:
    return Payloads(options["fd"], options["message_bytes"])


def _guarded(
    role: Callable[[Link, dict[str, Any], Adapter], None],
) -> Callable[[Link, dict[str, Any]], None]:
    """A client's own errors go to the harness as one of ours: it may not have that client."""

    @functools.wraps(role)
    def guarded(link: Link, options: dict[str, Any]) -> None:
        try:
            role(link, options, find(options["peer"]))
        except (DanubeError, EOFError):
            raise
        except Exception as error:  # whatever a client of another system raises
            raise Unavailable(f"{type(error).__name__}: {error}") from error

    return guarded


@_guarded
def ask(link: Link, options: dict[str, Any], adapter: Adapter) -> None:
    """Requests at a pace and back to back."""
    with closing(adapter.open_requester(options)) as requester:
        ask_twice(link, options, requester.request_each)


@_guarded
def reply(link: Link, options: dict[str, Any], adapter: Adapter) -> None:
    """A reply to each request, until told to stop."""
    with closing(adapter.open_responder(options)) as responder:
        link.ready()
        cpu = time.process_time()
        responder.reply_each(reply_to, link.has_order)
        link.hear()
        link.say({"cpu": time.process_time() - cpu})
        link.hear()


@_guarded
def produce(link: Link, options: dict[str, Any], adapter: Adapter) -> None:
    """Everything, as fast as it is taken."""
    lists = _payloads(options).lists()
    with closing(adapter.open_sender(options)) as sender:
        link.ready()
        cpu, began = time.process_time(), time.monotonic_ns()
        sender.send_lists(lists)
        acked = time.monotonic_ns()
        link.say({"began_ns": began, "acked_ns": acked, "cpu": time.process_time() - cpu})
        link.hear()


@_guarded
def produce_paced(link: Link, options: dict[str, Any], adapter: Adapter) -> None:
    """One message at each due time; reports when each was due and sent."""
    prepared = _payloads(options).cut()
    times = np.zeros((2, len(prepared)), np.int64)
    with closing(adapter.open_sender(options)) as sender:
        pacer = Pacer(options["rate"])

        def before(number: int) -> None:
            times[0, number] = pacer.wait(number)
            times[1, number] = time.monotonic_ns()

        link.ready()
        cpu = time.process_time()
        pacer.start()
        sender.send_each(prepared, before)
        link.say({"times": times, "cpu": time.process_time() - cpu})
        link.hear()


def _after(receiver: Receiver, verifier: Verifier) -> None:
    """Count what comes although everything has come."""

    def more(received: list[Any]) -> bool:
        verifier.take(received)
        return True

    receiver.receive(more, AFTER_SECONDS)


def _number(payload: Any) -> int:
    """Which message a payload opens with."""
    return int.from_bytes((payload or b"")[:NUMBER_BYTES], "little")


def _faults(verifier: Verifier) -> dict[str, int]:
    return {name: getattr(verifier, name) for name in ("lost", "duplicated", "corrupted")}


@_guarded
def consume(link: Link, options: dict[str, Any], adapter: Adapter) -> None:
    """Everything, as fast as it comes."""
    topics, wanted = options["topics"], options["messages"]
    verifier = Verifier(_payloads(options), topics)
    last_ns = misplaced = 0
    with closing(adapter.open_receiver(options)) as receiver:

        def take(received: list[Any]) -> bool:
            nonlocal last_ns, misplaced
            verifier.take(received)
            last_ns = time.monotonic_ns()
            misplaced += receiver.last_topic != _number(received[-1]) % topics
            return bool(verifier.received < wanted)

        link.ready()
        cpu = time.process_time()
        receiver.receive(take, SILENCE_SECONDS[options["is_lossy"]])
        cpu = time.process_time() - cpu
        received = verifier.received
        _after(receiver, verifier)
        faults = _faults(verifier)
        faults["corrupted"] += misplaced
        link.say({"ended_ns": last_ns, "cpu": cpu, "received": received} | faults)
        link.hear()


@_guarded
def consume_paced(link: Link, options: dict[str, Any], adapter: Adapter) -> None:
    """One message after the other; reports when each number came."""
    payloads = _payloads(options)
    received: list[Any] = []
    arrived: list[int] = []
    with closing(adapter.open_receiver(options)) as receiver:

        def take(some: list[Any]) -> bool:
            now_ns = time.monotonic_ns()
            received.extend(some)
            arrived.extend([now_ns] * len(some))
            return len(received) < payloads.count

        link.ready()
        cpu = time.process_time()
        receiver.receive(take, SILENCE_SECONDS[options["is_lossy"]])
        cpu = time.process_time() - cpu
        verifier = Verifier(payloads, 1)
        verifier.take(received)
        _after(receiver, verifier)
        times = np.zeros(payloads.count, np.int64)
        for payload, arrived_ns in zip(received, arrived, strict=True):
            number = _number(payload)
            if number < payloads.count:
                times[number] = arrived_ns
        link.say({"arrived": times, "cpu": cpu, "faults": _faults(verifier)})
        link.hear()
