"""How commands reach a broker: one connection, one operation, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danube_fast.client.arguments import Transport

__all__ = ["connect", "operation"]

CLIENT_NAME = "danube-fast"
CONNECT_SECONDS = 5.0
"""A person at a terminal waits for an answer, shorter than a program would."""


def connect(url: str, transport: Transport = "auto") -> Any:
    """A client of the broker at `url`; a context manager. Raises Unavailable."""
    # Imported here: it loads the kernels, and `--help` must not wait for them.
    import danube_fast

    return danube_fast.connect(url, name=CLIENT_NAME, timeout=CONNECT_SECONDS, transport=transport)


def operation(url: str, name: str, **arguments: Any) -> Any:
    """Run an administrative operation by name; returns its answer."""
    with connect(url) as client:
        return getattr(client.admin, name)(**arguments)
