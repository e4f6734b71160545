"""How the faces of a client open and close, and how asynchronous methods are made of synchronous ones.

The body of a synchronous method ends with `return self._run(steps)`, or returns None at once. What `_run` returns
in an asynchronous face is awaited by its twin, which has the same parameters and documentation. A method that opens a resource
returns an `Opening`: both `client = await danube_fast.connect_async(url)` and
`async with danube_fast.connect_async(url) as client:` open it; the second closes it as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from danube_fast.errors import DanubeError

__all__ = ["AsyncClosing", "Closing", "Opening", "Run", "opening", "opens", "twin"]

T = TypeVar("T")
A = TypeVar("A", bound=AbstractAsyncContextManager[Any, None])
P = ParamSpec("P")


class Run(Protocol):
    """Drives steps to their end, as `Pump.run` does; in an asynchronous face what it returns is awaited."""

    def __call__(self, steps: Generator[Any, Any, T], /) -> T:
        """Drive an operation."""


class Closing:
    """Closed at the end of a `with` block; an error of the block matters more than one of closing."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()  # type: ignore[attr-defined]
        except DanubeError:
            if kind is None:
                raise


class AsyncClosing:
    """Closed at the end of an `async with` block; an error of the block matters more than one of closing."""

    __slots__ = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        try:
            await self.close()  # type: ignore[attr-defined]
        except DanubeError:
            if kind is None:
                raise


class Opening(Coroutine[Any, None, A], AbstractAsyncContextManager[A, None]):
    """A coroutine that opens a resource, and the context manager of that resource.

    Tasks, `asyncio.wait_for` and `asyncio.gather` take it like any other coroutine. Leaving the
    context closes the resource.
    """

    __slots__ = ("_coroutine", "_resource")

    def __init__(self, coroutine: Coroutine[Any, None, A]) -> None:
        self._coroutine = coroutine
        self._resource: A | None = None

    def send(self, value: None) -> Any:
        """Go on to the next wait; part of the coroutine protocol."""
        return self._coroutine.send(value)

    def throw(self, *exception: Any) -> Any:
        """Raise an exception where the coroutine waits; part of the coroutine protocol."""
        return self._coroutine.throw(*exception)

    def close(self) -> None:
        """Give up opening; part of the coroutine protocol."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, None, A]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> A:
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


def opens(function: Callable[P, Coroutine[Any, None, A]]) -> Callable[P, Opening[A]]:
    """Let a coroutine function that opens a resource return an `Opening` of it."""

    @functools.wraps(function)
    def begin(*args: P.args, **kwargs: P.kwargs) -> Opening[A]:
        return Opening(function(*args, **kwargs))

    return begin


def twin(
    sync: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Make a method to be awaited of a synchronous one that ends with `return self._run(steps)`, or returns
    None at once when there is nothing to wait for."""

    @functools.wraps(sync)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        done: Any = sync(self, *args, **kwargs)
        if done is not None:
            done = await done
        return done  # type: ignore[no-any-return]

    return method


def opening(
    sync: Callable[Concatenate[Any, P], Any], _kind: type[A]
) -> Callable[Concatenate[Any, P], Opening[A]]:
    """Make a method that opens an asynchronous resource of a synchronous one, which ends with
    `return self._open(steps, ...)`."""

    @functools.wraps(sync)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> A:
        return await sync(self, *args, **kwargs)  # type: ignore[no-any-return]

    return opens(method)
