"""Acks that have to be durable, and what became of those whose session was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danube_fast.checks import check_seconds
from danube_fast.client.link.pump import Steps
from danube_fast.errors import DanubeError, Unavailable

if TYPE_CHECKING:
    from danube_fast.client.consume.inbox import Inbox

__all__ = ["ask_cursors_steps", "flush_steps"]


def flush_steps(inbox: Inbox, timeout: float) -> Steps[None]:
    """Send queued acks and wait until they are durable. Raises Unavailable for acks that were lost."""
    inbox.check_acking()
    check_seconds(timeout, "timeout")
    acks, lock = inbox._acks, inbox.pump.lock
    if acks.has_void:
        yield from ask_cursors_steps(inbox, timeout)
    with lock:
        calls = acks.send(durable=True)
    what = "acks; what is not acked is delivered again"
    try:
        yield from inbox._answered_steps(calls, timeout, what)
    finally:
        with lock:
            acks.raise_void()


def ask_cursors_steps(inbox: Inbox, timeout: float) -> Steps[None]:
    """Acks whose session was lost may have arrived: the subscription's cursor tells."""
    for topic in inbox._acks.topics_in_doubt():
        arguments = {"topic": topic, "subscription": inbox.subscription}
        for may_repeat in (True, False):
            try:
                answer = yield from inbox._core.admin_steps(
                    "describe_subscription", arguments, timeout
                )
            except DanubeError as error:
                if may_repeat and isinstance(error, Unavailable):
                    continue  # the session that answers may have been lost with the other
                return  # then they stay in doubt, and the flush says so
            with inbox.pump.lock:
                inbox._acks.settle_below(answer["cursors"])
            break
