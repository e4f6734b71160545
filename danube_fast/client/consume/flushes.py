"""Acks that have to be durable, and what became of those whose session was lost."""

from __future__ import annotations

from danube_fast.checks import check_seconds
from danube_fast.client.consume.acks import AckQueue
from danube_fast.client.link.calls import Call
from danube_fast.client.link.connection import Connection
from danube_fast.client.link.operations import admin_steps
from danube_fast.client.link.pump import Pump
from danube_fast.client.link.steps import Steps, Wait, deadline_after
from danube_fast.errors import DanubeError, DeadlineExceeded, Unavailable

__all__ = ["answered_steps", "ask_cursors_steps", "flush_steps"]


def answered_steps(pump: Pump, calls: list[Call], timeout: float, what: str) -> Steps[None]:
    """Wait for all replies and raise the first error."""
    open_calls = list(calls)

    def are_answered() -> bool:
        while open_calls and open_calls[-1].done:
            open_calls.pop()
        return not open_calls

    ready = yield Wait(are_answered, deadline_after(pump.clock, timeout))
    for call in calls:
        if call.done:
            call.result()
    if not ready:
        raise DeadlineExceeded(
            f"no answer within {timeout:g} s to {what}, look at `danube-fast status`"
        )


def flush_steps(
    acks: AckQueue, bootstrap: Connection, subscription: str, timeout: float
) -> Steps[None]:
    """Send queued acks and wait until they are durable. Raises Unavailable for acks that were lost."""
    check_seconds(timeout, "timeout")
    pump = bootstrap.pump
    if acks.has_void:
        yield from ask_cursors_steps(acks, bootstrap, subscription, timeout)
    with pump.lock:
        calls = acks.send(durable=True)
    what = "acks; what is not acked is delivered again"
    try:
        yield from answered_steps(pump, calls, timeout, what)
    finally:
        with pump.lock:
            acks.raise_void()


def ask_cursors_steps(
    acks: AckQueue, bootstrap: Connection, subscription: str, timeout: float
) -> Steps[None]:
    """Ask for the subscription's cursors: acks whose session was lost may have arrived."""
    for topic in acks.topics_in_doubt():
        arguments = {"topic": topic, "subscription": subscription}
        for may_repeat in (True, False):
            try:
                answer = yield from admin_steps(
                    bootstrap, "describe_subscription", arguments, timeout
                )
            except DanubeError as error:
                if may_repeat and isinstance(error, Unavailable):
                    continue  # the session that answers may have been lost with the other
                return  # then they stay in doubt, and the flush says so
            with bootstrap.pump.lock:
                acks.confirm_below(answer["cursors"])
            break
