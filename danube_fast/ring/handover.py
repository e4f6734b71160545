"""How a client gets its rings: a UNIX socket beside the worker's ipc endpoint.

    client                                  worker
      dial(): connect; the listener's user?
                             ------------>  RingServer: SO_PEERCRED: the broker's own user?
      take(): rings mapped   <------------    OFFER, capacity and (SCM_RIGHTS) the memfd, the eventfd
                                            by which the client signals, the pipe by which it is
                                            signalled (OFFER_HUGE: it is to have huge pages)
              or why not     <------------    REFUSAL, a text

Behind that nothing goes through the socket: whatever can be read there is the end of that client.

The memfd's size is sealed, so neither side can be made to fault by the other. Nothing has a name
in a file system: the address is abstract, and memory, bells and socket go with the processes. The
address names the version, as a worker offers before it has heard anything: a client of another one
finds no listener, and uses ZeroMQ.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import select
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from danube_fast.errors import DanubeError, DataLoss, PermissionDenied, Unavailable
from danube_fast.ring.duplex import Duplex, duplex_bytes
from danube_fast.ring.listener import NO_DESCRIPTORS, RingListener, is_alive
from danube_fast.ring.memory import (
    HUGE_PAGE_BYTES,
    create_eventfd,
    create_memfd,
    create_pipe,
    map_fd,
)
from danube_fast.ring.spsc import SpscRing

__all__ = ["Refused", "RingServer", "dial", "knock", "stranger_text", "take"]

_log = logging.getLogger(__name__)

_HEAD = struct.Struct("<4sIQ")
_OFFER, _OFFER_HUGE, _REFUSAL = b"DFsm", b"DFhu", b"DFno"
_VERSION = 2
_SUFFIX = f".shm{_VERSION}".encode()
_GIVEN = 3
"""Descriptors of an offer: memory, bell of the client, pipe to the client."""
_GIVEN_BYTES = socket.CMSG_LEN(_GIVEN * array.array("i").itemsize)
_TAKE_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_NO_DESCRIPTORS_TEXT = "the worker has no file descriptors left; raise `ulimit -n`"
_TEXT_BYTES_MAX = 1024
_CREDENTIALS = struct.Struct("iII")
_SIDES_MIN = 256
_IDENTITY = struct.Struct(">BQ")
_IDENTITY_KIND = 1
"""ROUTER's own identities begin with 0."""
_OVERFLOW = 65534
"""How each user of another user namespace looks; it cannot be registered."""
_PREFIXES = ("ipc://@", "ipc://")


class Refused(Unavailable):
    """The worker does not give this client any rings; the text says why."""


def address_beside(ipc_endpoint: str) -> bytes:
    """Address of the socket that belongs to an ipc endpoint; empty if it can have none."""
    for prefix in _PREFIXES:
        if ipc_endpoint.startswith(prefix):
            return b"\0" + ipc_endpoint.removeprefix(prefix).encode() + _SUFFIX
    return b""


# ---------------------------------------------------------------- client


def dial(ipc_endpoint: str, users: Collection[int] | None = None) -> socket.socket | None:
    """A socket on its way to the worker; None if no worker offers rings there just now.

    Raises PermissionDenied if the process that listens there belongs to none of these users (None: any will do).
    """
    return _connect(address_beside(ipc_endpoint), ipc_endpoint, users)


def knock(ipc_endpoint: str, users: Collection[int]) -> bool:
    """Whether a process listens at an ipc endpoint just now. Raises PermissionDenied if it belongs to none of these
    users."""
    name = ipc_endpoint.removeprefix("ipc://")
    address = b"\0" + name[1:].encode() if name.startswith("@") else name.encode()
    sock = _connect(address, ipc_endpoint, users)
    if sock is None:
        return False
    sock.close()
    return True


def stranger_text(endpoint: str, user: int | None, users: Collection[int]) -> str:
    """Tell that a process of a user who is none of these listens at an endpoint."""
    owner = "a user that the kernel does not name" if user is None else f"user {user}"
    wanted = " or ".join(map(str, sorted(users)))
    return (
        f"the process that listens at {endpoint} belongs to {owner}, not to {wanted}; stop it, or "
        "pass server_uid= if the broker runs as that user"
    )


def _connect(address: bytes, endpoint: str, users: Collection[int] | None) -> socket.socket | None:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:  # no descriptor is left; opening a socket instead will say so
        return None
    try:
        sock.connect(address)
    except OSError:  # no listener, or too many connect at once
        sock.close()
        return None
    _, user, _ = _credentials(sock)
    if users is not None and user not in users:
        sock.close()
        raise PermissionDenied(stranger_text(endpoint, user, users))
    return sock


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as they were when it connected or began to listen."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id, user, group = _CREDENTIALS.unpack(raw)
    return process_id, user, group


def take(sock: socket.socket, message_bytes_max: int) -> Duplex | None:
    """The rings, once the worker has sent them; None before.

    Raises Refused, DataLoss for an answer that makes no sense, and Unavailable if the worker ended.
    """
    try:
        # recv_fds of Python 3.11 forgets its flags
        answer, given, flags, _ = sock.recvmsg(_HEAD.size, _GIVEN_BYTES, _TAKE_FLAGS)
    except BlockingIOError:
        return None
    except OSError as error:
        raise Unavailable(f"the worker ended before it gave its rings ({error})") from error
    fds = array.array("i", b"".join(data for _, _, data in given)).tolist()
    try:
        if len(answer) != _HEAD.size:
            raise Unavailable("the worker ended before it gave its rings")
        kind, version, capacity = _HEAD.unpack(answer)
        if kind == _REFUSAL:
            text = b"the worker refuses shared memory"
            with contextlib.suppress(OSError):
                text = sock.recv(min(capacity, _TEXT_BYTES_MAX), socket.MSG_DONTWAIT)
            raise Refused(text.decode(errors="replace"))
        if version != _VERSION:
            raise Refused(f"the worker offers rings of version {version}, not {_VERSION}")
        if len(fds) < _GIVEN and flags & socket.MSG_CTRUNC:
            raise Refused("this process has no file descriptors left for rings; raise `ulimit -n`")
        if kind not in (_OFFER, _OFFER_HUGE) or len(fds) != _GIVEN:
            raise DataLoss(f"{answer!r} with {len(fds)} descriptors offers no rings")
        try:
            memory = map_fd(fds[0], huge=kind == _OFFER_HUGE)
        except OSError as error:
            raise Refused(f"rings cannot be mapped ({error}); raise `ulimit -n`") from error
        if len(memory) != duplex_bytes(capacity):
            raise DataLoss(f"{len(memory)} bytes of memory are no two rings of {capacity}")
        # behind this neither side's call on them blocks, unless the other one is hostile
        for bell in fds[1:]:
            os.set_blocking(bell, False)
        duplex = Duplex(
            memory, sock, (fds[1], fds[2]), capacity,
            serves=False, message_bytes_max=message_bytes_max,
        )  # fmt: skip
        del fds[1:]
        return duplex
    finally:
        for fd in fds:
            os.close(fd)


# ---------------------------------------------------------------- worker


class RingServer:
    """All clients of one worker that have rings. Used by its loop only."""

    def __init__(
        self, ipc_endpoint: str, *, ring_bytes: int, links_max: int, message_bytes_max: int,
        huge: bool = False, admits: Callable[[int], bool] | None = None,
    ) -> None:  # fmt: skip
        """Listen beside `ipc_endpoint`, and refuse all clients if `ring_bytes` is 0.

        `huge`: rings of a huge page or more ask for such pages. `admits`: which local users may have rings, by default
        the broker's own alone. Raises Unavailable if it cannot listen there.
        """
        self._admits = admits
        self._ring_bytes = ring_bytes
        self._huge = huge and ring_bytes >= HUGE_PAGE_BYTES
        self._links_max = links_max
        self._message_bytes_max = message_bytes_max
        self._number = 0
        self._links: dict[bytes, Duplex] = {}
        self._owners: dict[bytes, tuple[int, int]] = {}
        """User and process of each client."""
        self._by_bell: dict[int, bytes] = {}
        self._by_end: dict[int, bytes] = {}
        self._by_side: dict[int, bytes] = {}
        self._grow_sides(_SIDES_MIN)
        self._awake: dict[bytes, None] = {}
        """Links that are not armed: something may be in their rings."""
        self._ended: set[bytes] = set()
        """Those whose client is gone; what it sent before still counts."""
        self._kept: set[bytes] = set()
        """Awake ones whose messages are for kernels."""
        self._silent: dict[bytes, bool] = {}
        """Links that have never sent a message, and whether that was so at the last look."""
        self.gone: list[tuple[bytes, bool]] = []
        """Identities of links that are closed, until the owner empties this."""
        self._endpoint = ipc_endpoint
        self._listener = RingListener(address_beside(ipc_endpoint))
        self._epoll = select.epoll()
        try:
            self._open()
        except Unavailable:
            self.close()
            raise
        if self.is_taken:
            _log.warning(
                "another process listens beside %s: there is no shared memory until it ends",
                ipc_endpoint,
            )

    def listen(self) -> None:
        """Listen, unless that is done or another process has the address: any user of the host may take it while the
        worker is down. Call it often."""
        if not self._listener.is_open:
            with contextlib.suppress(Unavailable):  # said at the start
                self._open()

    def _open(self) -> None:
        try:
            if self._listener.open():
                self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        except OSError as error:
            raise Unavailable(f"cannot listen beside {self._endpoint}: {error}") from error

    @property
    def is_taken(self) -> bool:
        """Whether another process has the address; it is taken again once it is free."""
        return not self._listener.is_open

    def __len__(self) -> int:
        return len(self._links)

    def fileno(self) -> int:
        """Readable when a client knocks, signals or ends."""
        return self._epoll.fileno()

    @property
    def awake(self) -> bool:
        """Whether `receive` has to look again before the process sleeps."""
        return bool(self._awake)

    @property
    def drained(self) -> bool:
        """Whether nothing is left for `receive`."""
        return self._kept.issuperset(self._awake)

    def awake_links(self) -> list[tuple[bytes, Duplex]]:
        """List the links to look at, in their order: identity and rings."""
        return [(identity, self._links[identity]) for identity in self._awake]

    def _grow_sides(self, count: int) -> None:
        """Make room for sides whose bells are below `count`."""
        sides = np.zeros(count, np.int64)
        for link in self._links.values():
            sides[link.fileno()] = link.row
        self._sides = sides
        self.sides = int(sides.ctypes.data), count
        """Address of the table of `Duplex.row` by bell, 0 for every other descriptor; how many rows it has."""

    def left(self, sides: Iterable[tuple[int, tuple[bool, bool]]]) -> list[bytes | None]:
        """Note how rings, each named by its `Duplex.row`, were left: empty and armed, so that the link rests (one that
        has ended is left to `receive`); or perhaps with something in it, which `receive` leaves to kernels until the
        next `look`. Their clients; None: no link has that row."""
        awake, clients = self._awake, list[bytes | None]()
        for side, (is_armed, is_kept) in sides:
            clients.append(identity := self._by_side.get(side))
            if identity is None:
                continue
            if not is_armed:
                awake.setdefault(identity)
            elif identity not in self._ended:
                awake.pop(identity, None)
            if is_kept and identity not in self._ended:
                self._kept.add(identity)
        return clients

    def took(self, identities: Iterable[bytes]) -> None:
        """Note that the caller has taken messages of these links, which are the last in turn now."""
        for identity in identities:
            if identity in self._awake:
                del self._awake[identity]
                self._awake[identity] = None
            if self._silent:
                self._silent.pop(identity, None)

    def link(self, identity: bytes) -> Duplex | None:
        """Find the rings of a client."""
        return self._links.get(identity)

    # ------------------------------------------------------------ links

    def look(self) -> None:
        """Take new clients, signals and ends. Epoll tells of a signal once, so each wakes its link."""
        self._kept.clear()
        for fd, _ in self._epoll.poll(0):
            if fd in self._by_bell:
                self._awake[self._by_bell[fd]] = None
            elif fd in self._by_end:
                identity = self._by_end[fd]
                self._awake[identity] = None
                self._ended.add(identity)
                self._epoll.unregister(fd)
            elif fd == self._listener.fileno():
                for sock in self._listener.accept_all(_refuse):
                    self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        process_id, user, _ = _credentials(sock)
        if self._admits is not None:
            if not self._admits(user):
                way = f" (danube-fast security keys add USER --uid {user})"
                text = f"local user {user} is not registered with this broker"
                _refuse(sock, text if user == _OVERFLOW else text + way)
                return
        elif user != os.geteuid():
            _refuse(sock, f"shared memory is for the broker's user {os.geteuid()}, not for {user}")
            return
        if not self._ring_bytes:
            _refuse(sock, "shared memory is switched off here (shm_ring_bytes is 0)")
            return
        if len(self._links) >= self._links_max:
            limit = self._links_max
            _refuse(sock, f"{limit} clients have shared memory; raise shm_clients_max")
            return
        try:
            link = self._offer(sock)
        except (OSError, DanubeError) as error:
            none_left = isinstance(error, OSError) and error.errno in NO_DESCRIPTORS
            text = f"no memory for rings ({error}); lower shm_ring_bytes"
            _refuse(sock, _NO_DESCRIPTORS_TEXT if none_left else text)
            return
        self._number += 1
        identity = _IDENTITY.pack(_IDENTITY_KIND, self._number)
        bell, end = link.fileno(), link.end_fileno
        self._links[identity] = link
        self._owners[identity] = user, process_id
        self._by_bell[bell] = self._by_end[end] = identity
        self._by_side[link.row] = identity
        if bell >= len(self._sides):
            self._grow_sides(2 * bell)
        self._sides[bell] = link.row
        # without edges the bell would have to be read, and the client may make that block
        self._epoll.register(bell, select.EPOLLIN | select.EPOLLET)
        self._epoll.register(end, select.EPOLLIN)
        self._awake[identity] = None
        self._silent[identity] = False

    def user_of(self, identity: bytes) -> int:
        """The local user of a client, as the kernel knows it."""
        return self._owners[identity][0]

    def address_of(self, identity: bytes) -> str:
        """User and process of a client, as the kernel knows them."""
        user, process_id = self._owners[identity]
        return f"uid:{user} pid:{process_id}"

    def end(self, identity: bytes) -> None:
        """Close a link, if there is one of that identity: its client sees the end of the worker."""
        if identity in self._links:
            self._close(identity)

    def close_silent(self) -> None:
        """Close links that had sent nothing when this was called the last time, and have not since."""
        for identity, again in list(self._silent.items()):
            if again:
                self._close(identity)
            else:
                self._silent[identity] = True

    def _offer(self, sock: socket.socket) -> Duplex:
        """Make rings and bells, and pass them on."""
        capacity = self._ring_bytes
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
            fd = create_memfd("danube-rings", duplex_bytes(capacity))
            given.callback(os.close, fd)
            bell = create_eventfd()
            kept.callback(os.close, bell)
            reader, writer = create_pipe()
            given.callback(os.close, reader)
            kept.callback(os.close, writer)
            memory = map_fd(fd, huge=self._huge)
            half = len(memory) // 2
            for view in (memoryview(memory)[:half], memoryview(memory)[half:]):
                SpscRing.create(view, capacity)
            link = Duplex(
                memory, sock, (writer, bell), capacity,
                serves=True, message_bytes_max=self._message_bytes_max,
            )  # fmt: skip
            kind = _OFFER_HUGE if self._huge else _OFFER
            socket.send_fds(sock, [_HEAD.pack(kind, _VERSION, capacity)], [fd, bell, reader])
            kept.pop_all()
            return link

    def _close(self, identity: bytes) -> None:
        link = self._links.pop(identity)
        bell, end = link.fileno(), link.end_fileno
        del self._by_bell[bell], self._by_end[end], self._by_side[link.row]
        self._sides[bell] = 0
        self._epoll.unregister(bell)  # to close it is not enough: the client has it open too
        if identity not in self._ended:
            self._epoll.unregister(end)
        self._ended.discard(identity)
        self._awake.pop(identity, None)
        self._silent.pop(identity, None)
        link.close()
        self.gone.append((identity, is_alive(self._owners.pop(identity)[1])))

    def close(self) -> None:
        """End all links."""
        for identity in list(self._links):
            self._close(identity)
        self._epoll.close()
        self._listener.close()

    # ------------------------------------------------------------ messages

    def receive(self, limit: int) -> Iterator[tuple[bytes, Any, list[Any]]]:
        """Up to `limit` waiting messages, of all clients in turn: sender, first part, parts behind. Call `look` before."""
        left, kept = limit, self._kept
        while left > 0 and (links := [each for each in self._awake if each not in kept]):
            for identity in links:
                if identity not in self._awake:
                    continue  # what came from another one has ended it
                try:
                    parts = self._next(identity)
                except DanubeError:  # it wrote nonsense into its own rings
                    self._close(identity)
                    continue
                if parts is not None:
                    if self._silent:
                        self._silent.pop(identity, None)
                    left -= 1
                    yield identity, parts[0], parts[1:]
                    if left == 0:
                        return

    def _next(self, identity: bytes) -> list[Any] | None:
        """The link's next message; without one it is armed, or closed if its client is gone."""
        link = self._links[identity]
        # the last in turn goes first the next time
        del self._awake[identity]
        self._awake[identity] = None
        parts = link.receive()
        if parts is not None:
            return parts
        if identity in self._ended:
            self._close(identity)
            return None
        if link.flush():
            link.wait_no_more()
        if link.arm():
            del self._awake[identity]
        return None

    def send(self, identity: bytes, parts: Sequence[Any]) -> bool | None:
        """Send one message: True; False if there is no room just now; None if the link is closed."""
        link = self._links.get(identity)
        if link is None:
            return None
        try:
            return link.send(parts)
        except DanubeError:
            self._close(identity)
            return None


def _refuse(sock: socket.socket, text: str = _NO_DESCRIPTORS_TEXT) -> None:
    data = text.encode()[:_TEXT_BYTES_MAX]
    with sock, contextlib.suppress(OSError):
        head = _HEAD.pack(_REFUSAL, _VERSION, len(data))
        sock.send(head + data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
