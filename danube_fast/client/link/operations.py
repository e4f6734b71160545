"""Administrative operations over the bootstrap connection, as steps."""

from __future__ import annotations

from typing import Any

from danube_fast.client.link.calls import Call
from danube_fast.client.link.connection import Connection
from danube_fast.client.link.steps import Steps, Wait, deadline_after
from danube_fast.client.values.limits import REQUEST_TIMEOUT_SECONDS
from danube_fast.errors import DeadlineExceeded, InvalidArgument
from danube_fast.net.protocol import Admin, encode

__all__ = ["admin_steps"]


def admin_steps(
    connection: Connection,
    operation: str,
    arguments: dict[str, Any],
    timeout: float = REQUEST_TIMEOUT_SECONDS,
) -> Steps[Any]:
    """Run one operation of the broker's registry; its answer. Raises what the broker refuses it with."""
    pump = connection.pump
    deadline_ns = deadline_after(pump.clock, timeout)
    with pump.lock:
        command = Admin(connection.next_request(), operation, arguments)
        try:
            encode(command)
        except (TypeError, ValueError, OverflowError) as fault:
            raise InvalidArgument(
                f"{operation}: an argument is none that can be sent ({fault}); use text, numbers, "
                f"lists and dicts: {arguments!r:.200}"
            ) from None
        call = connection.call(Call(command))
    try:
        ready = yield Wait(lambda: call.done, deadline_ns)
    finally:
        with pump.lock:
            connection.abandon(call)
    if not ready:
        raise DeadlineExceeded(
            f"no answer to {operation} within {timeout:g} s; it may have happened, look before you "
            "repeat it"
        )
    return call.result()
