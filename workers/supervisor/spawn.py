"""Memory and descriptors that all children of the supervisor share, and the start of a child.

                    supervisor keeps every descriptor, so a restarted child finds
                    the same memory as its predecessor
      control, counters        memfd        all children
      ring p -> q              memfd        p writes, q reads: (N+1) * N of them
      doorbell i               eventfd      child i sleeps on it, all others ring it
      liveness                 pipe         write end only here: its EOF is our death
      admin socket             listening    coordinator
      sign-on socket           listening    sign_on

All are started from the main thread: PR_SET_PDEATHSIG fires when the starting thread ends. Nothing has a
name in a file system.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from danube_fast.config import PORT_MAX, Settings, join_address, split_address
from danube_fast.descriptors import IPC_DESCRIPTORS_MIN, descriptor_limit
from danube_fast.errors import DataLoss, InvalidArgument, Unavailable
from danube_fast.net.host import host_id
from danube_fast.ring.control import ControlBlock, ProcessState
from danube_fast.ring.counters import CounterBlock
from danube_fast.ring.layout import BUCKET_TABLE_BYTES, ring_bytes
from danube_fast.ring.memory import create_eventfd, create_memfd, format_ring, map_fd
from danube_fast.ring.repair import apply_plan, plan_consumer, plan_producer, plan_stopped
from danube_fast.roles import COORDINATOR, Owner, Processes, Role
from danube_fast.workers.process.boot import BootConfig
from danube_fast.workers.supervisor.datadir import DataDirectory
from danube_fast.workers.supervisor.forks import ForkServer, Starting

__all__ = ["Addresses", "Shared", "processes_of"]

ALL_INTERFACES = ("0.0.0.0", "::", "*")  # noqa: S104 - recognised, not bound
HTTP_BACKLOG = 128
MODULES = {
    Role.COORDINATOR: "danube_fast.workers.coordinator.coordinator",
    Role.WORKER: "danube_fast.workers.shard.worker",
    Role.UPLOADER: "danube_fast.workers.uploader.uploader",
    Role.SIGN_ON: "danube_fast.workers.sign_on.sign_on",
}
"""Role -> module that runs it; tests put others in."""


def processes_of(settings: Settings) -> Processes:
    """Processes of a broker with these settings."""
    return Processes.with_workers(
        settings.workers, uploader=bool(settings.store), sign_on=bool(settings.sign_on)
    )


class Addresses:
    """Choose hosts and ports. Listen P: bootstrap P, admin P + 1, worker i P + 2 + i; 0: the system chooses.

    The admin port is on loopback unless the settings say otherwise. Raises InvalidArgument if other hosts would get in
    unasked, or secrets would pass unencrypted to it, and the settings are not `insecure`.
    """

    def __init__(self, settings: Settings) -> None:
        self.host, port = split_address(settings.listen, "--listen")
        last = port + 1 + settings.workers
        if port and last > PORT_MAX:
            raise InvalidArgument(
                f"--listen {settings.listen} with {settings.workers} workers needs ports up to "
                f"{last}; the highest is {PORT_MAX}"
            )
        self.ports = [port, *((port + 2 + i) if port else 0 for i in range(settings.workers))]
        self.ports += [0] * (bool(settings.store) + bool(settings.sign_on))
        """By process index; 0 until the system has chosen one, and for those that have none."""
        self.admin_host, self.admin_port = _loopback_of(self.host), port + 1 if port else 0
        if settings.admin:
            self.admin_host, self.admin_port = split_address(settings.admin, "--admin")
        self.is_tls = bool(settings.tls_certificate)
        """Whether the admin port speaks HTTPS."""
        self._given = {}
        if settings.auth == "none":
            self._given = {"--admin": settings.admin, "--listen": settings.listen}
        elif not self.is_tls:
            self._given = {"--admin": settings.admin}
        if self._open_to_others() and not settings.insecure:
            option = self._open_to_others()[0]
            remedy = "--auth required"
            if option == "--admin":
                remedy += " with tls_certificate and tls_key"
            raise InvalidArgument(
                f"{option} {self._given[option]} would let other hosts in, who could do everything: give {remedy}, or an "
                f"address of this host, {option} 127.0.0.1:PORT; in a network that you trust, --insecure"
            )
        self.advertise = settings.advertise or _reachable(self.host)
        self.admin_socket = _listen(
            self.admin_host, self.admin_port, "the admin port", "--admin or --listen"
        )
        self.admin_port = self.admin_socket.getsockname()[1]
        self.sign_on_socket: socket.socket | None = None
        self._sign_on_host, self.sign_on_port = "", 0
        if settings.sign_on:
            self._sign_on_host, sign_on_port = split_address(settings.sign_on, "--sign-on")
            try:
                self.sign_on_socket = _listen(
                    self._sign_on_host, sign_on_port, "sign-on", "--sign-on"
                )
            except Unavailable:
                self.admin_socket.close()
                raise
            self.sign_on_port = self.sign_on_socket.getsockname()[1]

    def close(self) -> None:
        """Close the listening sockets."""
        self.admin_socket.close()
        if self.sign_on_socket is not None:
            self.sign_on_socket.close()

    def warnings(self) -> list[str]:
        """Write one sentence for each address that other hosts reach unasked."""
        return [
            f"warning: {option} {self._given[option]} lets other hosts in, who may do everything (--insecure): keep it in "
            "a network that you trust, or use 127.0.0.1"
            for option in self._open_to_others()
        ]

    def _open_to_others(self) -> list[str]:
        """List the options whose address other hosts reach, and are asked nothing there."""
        return [
            option
            for option, text in self._given.items()
            if text and not is_loopback(split_address(text, option)[0])
        ]

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"danube://{join_address(self.advertise, self.ports[COORDINATOR])}"

    @property
    def admin_url(self) -> str:
        """URL of the admin port."""
        scheme = "https" if self.is_tls else "http"
        return f"{scheme}://{join_address(_reachable(self.admin_host), self.admin_port)}"

    @property
    def sign_on_url(self) -> str:
        """URL where clients sign on; empty: there is no sign-on."""
        if not self.sign_on_port:
            return ""
        return f"https://{join_address(_reachable(self._sign_on_host), self.sign_on_port)}"

    @property
    def sign_on_address(self) -> str:
        """HOST:PORT where clients sign on; empty: there is no sign-on."""
        return join_address(self._sign_on_host, self.sign_on_port) if self.sign_on_port else ""


def _listen(host: str, port: int, what: str, options: str) -> socket.socket:
    """Listen for HTTP; a process inherits the socket, and the next one if it dies. Raises Unavailable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(HTTP_BACKLOG)
    except OSError as error:
        listener.close()
        raise Unavailable(
            f"cannot listen on {host}:{port} for {what}: {error.strerror}; choose another address with {options}"
        ) from error
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this host can reach that address, as far as the text tells."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _loopback_of(host: str) -> str:
    if is_loopback(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def _fingerprint(settings: Settings) -> str:
    """Check the files of TLS; the fingerprint. Raises FailedPrecondition, InvalidArgument."""
    if not settings.tls_certificate:
        return ""
    from danube_fast.security.tls import ServerTls

    return ServerTls.of(settings).fingerprint


def _reachable(host: str) -> str:
    """Find an address that others can use for a host that may mean "all interfaces"."""
    if host not in ALL_INTERFACES:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: it only picks the outgoing interface
        return str(probe.getsockname()[0])
    return socket.gethostname()


class Shared:
    """Own what outlives a child. Made once per server."""

    def __init__(
        self, settings: Settings, directory: DataDirectory, *, accept_rollback: bool = False
    ) -> None:
        self.settings, self.accept_rollback, self.directory = settings, accept_rollback, directory
        if settings.tokens:
            from danube_fast.security.issuers import read_issuers
            from danube_fast.security.tokens import TokenVerifier

            TokenVerifier(read_issuers(Path(settings.tokens)))  # what is wrong with it is said now
        self.certificate = _fingerprint(settings)
        """Fingerprint of the certificate of the HTTPS ports as they start; empty: there is none."""
        self.addresses = Addresses(settings)
        self.server_key, self.server_keys = "", list[str]()
        """Public key of the broker; empty: it has none. And all that its clients should pin, the newest first."""
        if settings.auth != "none":
            from danube_fast.security.server_keys import ServerKeys  # it loads ZeroMQ

            keys = ServerKeys(directory.path).open()
            self.server_key, self.server_keys = keys.active, keys.keys
        self.logs = directory.logs(settings.workers)
        self.processes = processes_of(settings)
        self.process_count = len(self.processes)
        self.control = ControlBlock.create(self.process_count)
        self.counters = CounterBlock.create(self.process_count)
        self.bucket_fd = create_memfd("danube-fast-buckets", BUCKET_TABLE_BYTES)
        self.doorbells = [create_eventfd() for _ in range(self.process_count)]
        self.liveness, self._liveness_end = os.pipe()
        beside = descriptor_limit() >= IPC_DESCRIPTORS_MIN
        self.ipc_endpoints = [
            f"ipc://@danube-{directory.token}-{self.processes.name(i).replace('-', '')}"
            if beside
            else ""
            for i in range(self.process_count)
        ]
        self._rings: dict[tuple[int, int], int] = {}
        for sender in range(self.process_count):
            for receiver in range(self.process_count):
                if sender != receiver:
                    self._rings[sender, receiver] = self._make_ring(sender, receiver)
            # before any child exists: a peer that looks must find the epoch that is to come
            self.control.announce(sender, ProcessState.STARTING, epoch=1)

    def _make_ring(self, sender: int, receiver: int) -> int:
        capacity_bytes = 1 << (self.settings.mailbox_bytes - 1).bit_length()
        fd = create_memfd(f"danube-fast-ring-{sender}-{receiver}", ring_bytes(capacity_bytes))
        with map_fd(fd) as memory:
            format_ring(memory, capacity_bytes)
        return fd

    def close(self) -> None:
        """Close all memory and descriptors. All children are gone."""
        self.control.close()
        self.counters.close()
        single = self.bucket_fd, self.liveness, self._liveness_end
        for fd in (*self.doorbells, *self._rings.values(), *single):
            os.close(fd)
        self.addresses.close()

    def repair_rings(self, process: int, is_alive: Callable[[int], bool]) -> list[int]:
        """Repair the rings of a process that was reaped and is about to be started again.

        Returns the living peers whose ring with it cannot be repaired while they live.
        """
        stuck = []
        for (sender, receiver), fd in self._rings.items():
            if process not in (sender, receiver):
                continue
            peer = receiver if process == sender else sender
            with map_fd(fd) as memory:
                try:
                    plan = plan_producer(memory) if process == sender else plan_consumer(memory)
                except DataLoss:
                    if is_alive(peer):
                        stuck.append(peer)
                        continue
                    plan = plan_stopped(memory)
                apply_plan(memory, plan)
        return stuck

    def start_fork_server(self) -> ForkServer:
        """Start the fork server for all processes. Call from the main thread, once the kernels are compiled."""
        roles = dict.fromkeys(self.processes.roles)
        return ForkServer([MODULES[role] for role in roles])

    def spawn(self, forks: ForkServer, process: int, epoch: int) -> Starting:
        """Order the process of an index. Raises OSError."""
        config = self._config(process, epoch)
        boot_fd = os.memfd_create("danube-fast-boot", os.MFD_CLOEXEC)
        try:
            os.write(boot_fd, msgspec.json.encode(config))
            passed = [boot_fd, config.control_fd, config.counter_fd, config.liveness_fd]
            passed += [config.bucket_fd, *config.doorbell_fds]
            for _, outbound, inbound in config.mailbox_fds:
                passed += [outbound, inbound]
            passed += [fd for fd in (config.admin_fd, config.sign_on_fd) if fd >= 0]
            title = f"danube-fast {self.processes.name(process)}"
            return forks.order(MODULES[config.role], title, ["--boot-fd", str(boot_fd)], passed)
        finally:
            os.close(boot_fd)

    def _sign_on_fd(self) -> int:
        listener = self.addresses.sign_on_socket
        return -1 if listener is None else listener.fileno()

    def _config(self, process: int, epoch: int) -> BootConfig:
        host, processes = host_id(), self.processes
        owners = [Owner(host, log_id % self.settings.workers) for log_id, _ in self.logs]
        return BootConfig(
            processes=processes,
            process_index=process,
            epoch=epoch,
            supervisor_pid=os.getpid(),
            settings=self.settings,
            data_dir=str(self.directory.path),
            host_id=host,
            control_fd=self.control.fd,
            counter_fd=self.counters.fd,
            bucket_fd=self.bucket_fd,
            mailbox_fds=[
                (peer, self._rings[process, peer], self._rings[peer, process])
                for peer in range(self.process_count)
                if peer != process
            ],
            doorbell_fds=self.doorbells,
            liveness_fd=self.liveness,
            tcp_host=self.addresses.host,
            tcp_port=self.addresses.ports[process],
            admin_fd=self.addresses.admin_socket.fileno() if process == COORDINATOR else -1,
            sign_on_fd=self._sign_on_fd() if processes.roles[process] is Role.SIGN_ON else -1,
            sign_on_address=self.addresses.sign_on_address,
            advertise=self.addresses.advertise,
            ipc_endpoints=self.ipc_endpoints,
            logs=[log for log in self.logs if processes.workers[owners[log[0]].worker] == process],
            accept_rollback=self.accept_rollback,
            owners=owners,
        )
