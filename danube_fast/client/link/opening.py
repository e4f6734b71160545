"""What the asynchronous face returns when it opens a resource: a coroutine that can be entered, too.

Both `client = await danube_fast.connect_async(url)` and
`async with danube_fast.connect_async(url) as client:` open it; the second closes it as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

__all__ = ["Opening", "opens"]

T = TypeVar("T", bound=AbstractAsyncContextManager[Any, None])
P = ParamSpec("P")


class Opening(Coroutine[Any, None, T], AbstractAsyncContextManager[T, None]):
    """A coroutine that opens a resource, and the context manager of that resource.

    Tasks, `asyncio.wait_for` and `asyncio.gather` take it like any other coroutine. Leaving the
    context closes the resource.
    """

    __slots__ = ("_coroutine", "_resource")

    def __init__(self, coroutine: Coroutine[Any, None, T]) -> None:
        self._coroutine = coroutine
        self._resource: T | None = None

    def send(self, value: None) -> Any:
        """Go on to the next wait; part of the coroutine protocol."""
        return self._coroutine.send(value)

    def throw(self, *exception: Any) -> Any:
        """Raise an exception where the coroutine waits; part of the coroutine protocol."""
        return self._coroutine.throw(*exception)

    def close(self) -> None:
        """Give up opening; part of the coroutine protocol."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, None, T]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> T:
        self._resource = await self._coroutine
        await self._resource.__aenter__()
        return self._resource

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._resource is not None:
            await self._resource.__aexit__(kind, error, trace)


def opens(function: Callable[P, Coroutine[Any, None, T]]) -> Callable[P, Opening[T]]:
    """Let a coroutine function that opens a resource return an `Opening` of it."""

    @functools.wraps(function)
    def begin(*args: P.args, **kwargs: P.kwargs) -> Opening[T]:
        return Opening(function(*args, **kwargs))

    return begin
