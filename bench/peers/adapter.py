"""What one other system must be able to do to be measured beside danube-fast.

    harness                                     two members, each a process of its own
    absence()   what is missing here            open_receiver(options)   connected and subscribed
    start()     a server, or nothing            open_sender(options)     connected

A file in this folder holds one system: an `Adapter`, its `Sender` and its `Receiver`. Clients of other
systems are imported inside functions, so that a program without them can still look at this list.

Everything that is counted or timed is in roles.py and is the same for all.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from danube_fast.bench.peers.server import Server
from danube_fast.bench.plan import ONE_BY_ONE

__all__ = ["WINDOW_BYTES", "Adapter", "Before", "Receiver", "Sender", "Take", "Variant"]
__all__ += ["find_program", "has_module", "window_messages"]

WINDOW_BYTES = 16 * 1024 * 1024
"""What a producer may have on its way, where a client lets us say so: a danube-fast producer's window."""

Take = Callable[[list[Any]], bool]
"""Hands over payloads in the order in which they came; whether more are wanted."""
Before = Callable[[int], None]
"""Waits until message `number` is due and notes the time; the send follows at once."""


class Variant(NamedTuple):
    """One way to run a system: a row of the table."""

    system: str
    durability: str
    """What has happened to a message when the system says that it has it; printed in the row."""
    transport: str
    is_lossy: bool
    """Whether the system may drop messages by its own rules."""
    options: dict[str, Any] = {}
    """For `start`, and for both members."""
    workloads: tuple[str, ...] = ("throughput", "latency")
    """Those in which it differs from a variant above it."""
    client: str = ONE_BY_ONE
    """Whether its client takes lists, or one message at a time."""


class Sender(ABC):
    """The producing end, in a member."""

    @abstractmethod
    def send_lists(self, lists: Sequence[list[bytes]]) -> None:
        """Closed loop, the best batching the client has; returns once the system has everything."""

    @abstractmethod
    def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
        """One message after `before(number)`, each until the system has it."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""


class Receiver(ABC):
    """The consuming end, in a member; subscribed once it is made."""

    @abstractmethod
    def receive(self, take: Take, silence_seconds: float) -> None:
        """Give `take` a `bytes` object of each message; until it wants no more, or nothing comes."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""


class Adapter(ABC):
    """One system."""

    name: ClassVar[str]
    """As it is given to `--peers`."""
    variants: ClassVar[tuple[Variant, ...]]

    @abstractmethod
    def absence(self) -> str | None:
        """What is missing here and how to get it; None: nothing."""

    @abstractmethod
    def version(self) -> str:
        """Of the system and of its client."""

    @abstractmethod
    def start(self, folder: Path, variant: Variant) -> Server | None:
        """A server of its own with its files in `folder`; None: there is no server."""

    def sweep(self, topic: str) -> None:  # noqa: B027 - most leave nothing
        """Remove what the members of a run may have left outside the harness's folder."""

    @abstractmethod
    def open_sender(self, options: dict[str, Any]) -> Sender:
        """Connected. `options`: the variant's, `address` (without a server a free one), `folder`, `topic`,
        `message_bytes`, `messages`."""

    @abstractmethod
    def open_receiver(self, options: dict[str, Any]) -> Receiver:
        """Connected, subscribed. It is opened before the sender."""


def window_messages(message_bytes: int) -> int:
    """How many messages of a size make a window."""
    return max(1, WINDOW_BYTES // message_bytes)


def has_module(name: str) -> bool:
    """Whether a client can be imported; it is not."""
    return importlib.util.find_spec(name) is not None


def find_program(names: Sequence[str], package: str = "", variable: str = "") -> str | None:
    """The path of a server: in an environment variable, on PATH, or in an installed package."""
    named = os.environ.get(variable, "") if variable else ""
    if named and os.access(named, os.X_OK):
        return named
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    if not package:
        return None
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = str(file.locate())
        if file.name in names and os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return None
