"""What one other system must be able to do to be measured beside danube-fast.

    harness                                     two members, each a process of its own
    absence()   what is missing here            open_receiver(options)   connected and subscribed
    start()     a server, or nothing            open_sender(options)     connected
                                                open_responder, open_requester: where requests are measured

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

from danube_fast.bench.load.requests import After, Before
from danube_fast.bench.peers.server import Server
from danube_fast.bench.plan import ONE_BY_ONE
from danube_fast.errors import Internal

__all__ = ["STREAMS", "WINDOW_BYTES", "Adapter", "After", "Before", "Receiver", "Requester"]
__all__ += ["Responder", "Sender", "Take", "Variant"]
__all__ += ["find_program", "has_module", "topic_names", "window_messages"]

WINDOW_BYTES = 16 * 1024 * 1024
"""What a producer may have on its way, where a client lets us say so: a danube-fast producer's window."""

STREAMS = ("throughput", "latency")
"""The workloads that every adapter has."""

Take = Callable[[list[Any]], bool]
"""Hands over payloads in the order in which they came; whether more are wanted."""


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
    workloads: tuple[str, ...] = STREAMS
    """Those that the adapter has, and in which it differs from a variant above it."""
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

    last_topic: int = 0
    """Which of the topics the last payload came from that `take` was given: its place in `topic_names`."""

    @abstractmethod
    def receive(self, take: Take, silence_seconds: float) -> None:
        """Give `take` a `bytes` object of each message; until it wants no more, or nothing comes."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""


class Requester(ABC):
    """The end that asks, in a member; connected to a responder."""

    @abstractmethod
    def request_each(self, payloads: Sequence[bytes], before: Before, after: After) -> None:
        """One request after `before(number)`; its reply goes to `after` before the next one is sent.
        Raises what the client raises if no reply comes."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""


class Responder(ABC):
    """The end that replies, in a member; ready for requests once it is made."""

    @abstractmethod
    def reply_each(self, reply_to: Callable[[bytes], bytes], is_over: Callable[[], bool]) -> None:
        """Reply to each request; until `is_over()`, which is asked every LOOK_SECONDS."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""


class Adapter(ABC):
    """One system."""

    name: ClassVar[str]
    """As it is given to `--peers`."""
    variants: ClassVar[tuple[Variant, ...]]
    sender_kind: ClassVar[Any]
    receiver_kind: ClassVar[Any]
    requester_kind: ClassVar[Any] = None
    responder_kind: ClassVar[Any] = None
    """Classes of its ends; None: there is no adapter for requests."""

    @abstractmethod
    def absence(self) -> str | None:
        """What is missing here and how to get it; None: nothing."""

    @abstractmethod
    def version(self) -> str:
        """Of the system and of its client."""

    def start(self, folder: Path, variant: Variant) -> Server | None:
        """A server of its own with its files in `folder`; None: there is no server."""
        return None

    def sweep(self, topic: str) -> None:  # noqa: B027 - most leave nothing
        """Remove what the members of a run may have left outside the harness's folder."""

    def open_sender(self, options: dict[str, Any]) -> Sender:
        """Connected. `options`: the variant's, `address` (without a server a free one), `folder`, `topic`,
        `topics` (their number), `message_bytes`, `messages`. Message i goes to topic i modulo their number."""
        return self._open(self.sender_kind, options)  # type: ignore[no-any-return]

    def open_receiver(self, options: dict[str, Any]) -> Receiver:
        """Connected, subscribed. It is opened before the sender."""
        return self._open(self.receiver_kind, options)  # type: ignore[no-any-return]

    def open_requester(self, options: dict[str, Any]) -> Requester:
        """Connected, of a system that has the workload `requests`. Raises Internal of another one."""
        return self._open(self.requester_kind, options)  # type: ignore[no-any-return]

    def open_responder(self, options: dict[str, Any]) -> Responder:
        """The other end. It is opened before the requester. Raises Internal like that."""
        return self._open(self.responder_kind, options)  # type: ignore[no-any-return]

    def _open(self, kind: Any, options: dict[str, Any]) -> Any:
        if kind is None:
            raise Internal(f"{self.name} has no adapter for requests")
        return kind(options)


def topic_names(options: dict[str, Any], separator: str) -> list[str]:
    """The topics of a run by name; the one topic of most runs has no number."""
    topic: str = options["topic"]
    if options["topics"] == 1:
        return [topic]
    return [f"{topic}{separator}{index}" for index in range(options["topics"])]


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
