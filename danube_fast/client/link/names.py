"""Whether the host name in an endpoint is known here: errors say so, for ZeroMQ asks for it again and again and tells no one."""

from __future__ import annotations

import ipaddress
import socket
import threading

from danube_fast.client.link.pump import Pump
from danube_fast.client.link.steps import Steps, Wait
from danube_fast.clock import SECOND_NS
from danube_fast.errors import DeadlineExceeded

__all__ = ["no_answer_steps", "unknown_host_steps"]


def no_answer_steps(
    pump: Pump, topic: str, endpoint: str, why: str = ""
) -> Steps[DeadlineExceeded]:
    """Make the error of a worker that did not answer; it takes 1 s at most to find out more."""
    late = f"{topic}: its worker at {endpoint} did not answer in time{why}"
    reason = yield from unknown_host_steps(pump, endpoint)
    if reason:
        return DeadlineExceeded(
            f"{late}, for {reason}; start the broker with `--advertise` and a name that its clients know"
        )
    return DeadlineExceeded(f"{late}; look at `danube-fast status`")


def unknown_host_steps(pump: Pump, endpoint: str) -> Steps[str]:
    """Say that the host of an endpoint of tcp has no address here; an empty text if it has one, or if that takes longer
    than 1 s to find out."""
    scheme, _, rest = endpoint.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or _is_address(host):
        return ""
    said: list[str] = []

    def ask() -> None:
        reason = _reason_of(host)
        with pump.lock:
            said.append(reason)
            pump.notify()

    try:
        threading.Thread(target=ask, name="danube-names", daemon=True).start()
    except RuntimeError:  # there is no thread for it
        return ""
    yield Wait(lambda: bool(said), pump.clock.monotonic_ns() + SECOND_NS)
    return f"the host {host!r} is unknown here ({said[0]})" if said and said[0] else ""


def _reason_of(host: str) -> str:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
