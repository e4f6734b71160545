"""Whether the host name in an endpoint is known here: errors say so, for ZeroMQ asks for it again and again and tells no one."""

from __future__ import annotations

import ipaddress
import socket
import threading

from danube_fast.errors import DeadlineExceeded

__all__ = ["no_answer", "unknown_host"]

_WAIT_SECONDS = 1.0


def no_answer(topic: str, endpoint: str, why: str = "") -> DeadlineExceeded:
    """Make the error of a worker that did not answer. Blocks for 1 s at most, so it is not made under a lock."""
    late = f"{topic}: its worker at {endpoint} did not answer in time{why}"
    if reason := unknown_host(endpoint):
        return DeadlineExceeded(
            f"{late}, for {reason}; start the broker with `--advertise` and a name that its clients know"
        )
    return DeadlineExceeded(f"{late}; look at `danube-fast status`")


def unknown_host(endpoint: str) -> str:
    """Say that the host of an endpoint of tcp has no address here; an empty text if it has one or no one says so in 1 s.

    >>> unknown_host("tcp://127.0.0.1:6650")
    ''
    """
    scheme, _, rest = endpoint.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or _is_address(host):
        return ""
    found: list[str] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            found.append(getattr(error, "strerror", None) or str(error))

    thread = threading.Thread(target=ask, name="danube-names", daemon=True)
    thread.start()
    thread.join(_WAIT_SECONDS)
    return f"the host {host!r} is unknown here ({found[0]})" if found else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
