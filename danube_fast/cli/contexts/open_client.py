"""How a command opens a client: with the values that the environment or the context in use gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from danube_fast.cli.contexts.context_file import WAY_IN, Value, chosen_name
from danube_fast.client.values.access import Access

__all__ = ["access_of", "open_client"]

CLIENT_NAME = "danube-fast"


def open_client(url: str, access: Access, seconds: float, **options: Any) -> Any:
    """Return a client of the broker at `url`. Raises as `danube_fast.connect`."""
    # Imported here: it loads the kernels, and `--help` must not wait for them.
    import danube_fast

    return danube_fast.connect(
        url, name=CLIENT_NAME, timeout=seconds, **access.arguments(), **options
    )


def access_of(found: Mapping[str, Value], context: str = "") -> Access:
    """Return the way in that these values of a command line say, or all of them of that context. Raises InvalidArgument
    that names the variable, or the field of the context, to change."""
    is_kept = any(found[field].source == "context" for field in WAY_IN)

    def named(field: str) -> str:
        source = found[field].source
        if context or source == "context" or (source == "default" and is_kept):
            return f"{field} of the context {context or chosen_name()}"
        return f"DANUBE_{field.upper()}"

    return Access.of({name: value.text for name, value in found.items()}, named)
