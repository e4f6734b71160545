"""`AsyncClient.admin`: every method of AdminClient, driven by the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from danube_fast.client.admin_client import AdminClient

if TYPE_CHECKING:
    from danube_fast.client.aio import AsyncCore
    from danube_fast.client.link.pump import Steps

__all__ = ["AsyncAdmin"]


class AsyncAdmin:
    """Every method of AdminClient, to be awaited."""

    def __init__(self, core: AsyncCore) -> None:
        self._core = core

    async def call(self, operation: str, **arguments: Any) -> Any:
        """Any operation by name."""
        return await self._core.arun(AdminClient(self._core).steps(operation, **arguments))

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_") or not hasattr(AdminClient, name):
            raise AttributeError(f"there is no administrative operation {name!r}")
        return _admin_method(self._core, name)


def _admin_method(core: AsyncCore, name: str) -> Callable[..., Awaitable[Any]]:
    """The method of AdminClient with its steps driven by the loop."""

    class Recorder(AdminClient):
        def drive(self, steps: Steps[Any]) -> Any:
            return core.arun(steps)

    return cast("Callable[..., Awaitable[Any]]", getattr(Recorder(core), name))
