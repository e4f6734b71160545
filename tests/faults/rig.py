"""A broker whose disk obeys the test, and a producer that hears every single answer.

The disk is a library, disk.c, that is preloaded into all processes of the broker. Its orders stand in
a small file that they map; a test gives them with the methods of `Disk` while the broker runs.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

import zmq

from danube_fast.frame.bundle import sealed_bundle
from danube_fast.frame.pack import encode_frame
from danube_fast.net import protocol as p
from tests.crash.payloads import payload_of
from tests.crash.rig import Server
from tests.workers.broker import Broker, wait_until

__all__ = [
    "Answer", "Disk", "FaultyServer", "RawProducer", "Word", "fill_up", "mount_small", "read_all",
]  # fmt: skip

CONTROL_BYTES = 4096
FILTER_AT = 2048
_WORD = struct.Struct("<q")
SEGMENTS = ".seg"
"""Only the syncs of segments: not those of spares in the making, snapshots and folders."""


class Word(IntEnum):
    """Words of the control file, as in disk.c."""

    SYNC_DELAY_US = 0
    SYNC_HELD = 1
    SYNC_ERRNO = 2
    SYNC_FAILURES = 3
    FULL = 4
    WRITE_ERRNO = 5
    TORN = 6
    SYNCS = 7
    SYNCS_FAILED = 8
    SYNCS_WAITING = 9
    WRITES_FAILED = 10
    WRITES_SHORT = 11
    WRITES_DURABLE = 12


class Disk:
    """Orders to the preloaded library."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.library = library
        self.control = folder / "disk-control"
        self.journal: Path | None = None
        self.boot_id: Path | None = None
        self.control.write_bytes(bytes(CONTROL_BYTES))
        with self.control.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), CONTROL_BYTES)

    def __getitem__(self, word: Word) -> int:
        return int(_WORD.unpack_from(self._memory, word * _WORD.size)[0])

    def __setitem__(self, word: Word, value: int) -> None:
        _WORD.pack_into(self._memory, word * _WORD.size, value)

    def choose(self, text: str) -> None:
        """Orders about syncs hold for files with `text` in their path."""
        self._memory[FILTER_AT : FILTER_AT + len(text) + 1] = text.encode() + b"\0"

    def delay_syncs(self, seconds: float) -> None:
        """Every sync takes so much longer."""
        self[Word.SYNC_DELAY_US] = int(seconds * 1e6)

    def hold_syncs(self) -> None:
        """The next syncs stand still."""
        self[Word.SYNC_HELD] = 1

    def release_syncs(self, *, failures: int = 0, code: int = errno.EIO) -> None:
        """They go on, and the first `failures` of them fail."""
        self.fail_syncs(failures, code)
        self[Word.SYNC_HELD] = 0

    def fail_syncs(self, count: int, code: int = errno.EIO) -> None:
        """The next `count` syncs fail; -1: all."""
        self[Word.SYNC_ERRNO] = code
        self[Word.SYNC_FAILURES] = count

    def wait_held(self) -> None:
        """Until a sync stands still."""
        wait_until("a sync that stands still", lambda: self[Word.SYNCS_WAITING])

    def wait_failed(self, count: int) -> None:
        """Until `count` syncs have failed in all."""
        wait_until(f"failure {count} of a sync", lambda: self[Word.SYNCS_FAILED] >= count)

    def fill(self, *, everything: bool = False, torn: bool = False) -> None:
        """No room for anything new; with `everything` what has its room cannot be written either."""
        self[Word.WRITE_ERRNO] = errno.ENOSPC
        self[Word.TORN] = int(torn)
        self[Word.FULL] = 2 if everything else 1

    def shorten(self) -> None:
        """There is room, but every other write of a thread stops after a thirty-second."""
        self[Word.FULL] = 3

    def empty(self) -> None:
        """There is room again."""
        self[Word.FULL] = 0

    def close(self) -> None:
        """Let go of the control file."""
        self._memory.close()

    @contextmanager
    def preloaded(self, root: Path) -> Iterator[None]:
        """Processes that are started meanwhile have this disk below `root`."""
        changes = {
            "LD_PRELOAD": str(self.library),
            "FAULT_DISK_ROOT": os.path.realpath(root),
            "FAULT_DISK_CONTROL": str(self.control),
        }
        if self.journal is not None:
            changes["FAULT_DISK_JOURNAL"] = str(self.journal)
        if self.boot_id is not None:
            changes["FAULT_DISK_BOOT_ID"] = str(self.boot_id)
        os.environ.update(changes)
        try:
            yield
        finally:
            for name in changes:
                del os.environ[name]


def mount_small(folder: Path, byte_count: int, stack: ExitStack) -> bool:
    """Mount a file system of so many bytes on a folder, until the stack ends; False where this user may not."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={byte_count},mode=0750", "tmpfs", str(folder)]
    try:
        if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode:
            return False
    except OSError:
        return False
    unmount = ["umount", "--lazy", str(folder)]
    stack.callback(subprocess.run, unmount, check=True, timeout=60)
    return True


def fill_up(ballast: Path) -> None:
    """Take all room of a file system with one file."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


class FaultyServer(Server):
    """A broker on such a disk."""

    def __init__(self, data_dir: Path, disk: Disk, **changes: Any) -> None:
        super().__init__(data_dir, **changes)
        self.disk = disk

    def _broker(self) -> Broker:
        with self.disk.preloaded(self.data_dir):
            return super()._broker()

    def rss_bytes(self, process: int = 1) -> int:
        """Anonymous memory of a process."""
        text = Path(f"/proc/{self.pid_of(process)}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024


class Answer:
    """What became of one frame. `status` is None until the broker says."""

    def __init__(self, sequence: int, count: int) -> None:
        self.sequence = sequence
        self.count = count
        self.status: int | None = None
        self.offset = -1
        self.text = ""
        self.sent_ns = time.monotonic_ns()
        self.answered_ns = 0
        self.journal_bytes = 0
        """How long the disk's journal was when the answer came."""


class RawProducer:
    """One named producer on a topic of one partition; nothing is ever sent again by itself.

    Message numbers are sequences, payloads are those of tests/crash/payloads.py. Used by one thread.
    """

    def __init__(self, server: Server, topic: str, index: int, **create: Any) -> None:
        self.topic = topic
        self.index = index
        self.name = f"raw-{index}"
        self.next_sequence = 0
        self.on_way: dict[int, Answer] = {}
        self.answers: list[Answer] = []
        self.journal: Path | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._request = 0
        self._socket = self._connect("tcp://" + server.url.removeprefix("danube://"))
        found = self._ask(p.Lookup, topic, create, 10_000)
        self.partition_id, _, _, endpoint, _ = found.value["partitions"][0]
        self._socket.close(0)
        self._socket = self._connect(endpoint)
        opened = self._ask(p.OpenProducer, self.partition_id, self.name)
        self._opened: dict[str, int] = opened.value
        self.next_sequence = self._opened["next_sequence"]

    def _connect(self, endpoint: str) -> zmq.Socket[Any]:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._ask(p.Hello, p.PROTOCOL_VERSION, self.name)
        return self._socket

    def open(self, name: str) -> Any:
        """Open another producer on the partition; the broker's answer, whatever it is."""
        return self._answer(p.OpenProducer, self.partition_id, name)

    def _send(self, kind: Any, *fields: Any, part: bytes | None = None) -> int:
        self._request += 1
        command = p.encode(kind(self._request, *fields))
        self._socket.send_multipart([command] if part is None else [command, part])
        return self._request

    def _ask(self, kind: Any, *fields: Any) -> Any:
        answer = self._answer(kind, *fields)
        assert not isinstance(answer, p.Error), answer
        return answer

    def _answer(self, kind: Any, *fields: Any) -> Any:
        request = self._send(kind, *fields)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for command in self._receive(1.0):
                if getattr(command, "request", None) == request:
                    return command
        raise AssertionError(f"{self.name}: no answer to {kind.__name__}")

    def _receive(self, seconds: float) -> list[Any]:
        commands = []
        while self._socket.poll(int(seconds * 1000)):
            commands.append(p.decode_server_command(self._socket.recv_multipart()[0]))
            seconds = 0
        return commands

    def send(self, count: int = 1, sequence: int | None = None, size: int = 0) -> Answer:
        """One frame of `count` messages; `size`: with payloads of so many bytes that mean nothing."""
        if sequence is None:
            sequence, self.next_sequence = self.next_sequence, self.next_sequence + count
        numbers = range(sequence, sequence + count)
        frame = encode_frame(
            [bytes(size) if size else payload_of(self.index, n) for n in numbers],
            producer_id=self._opened["producer_id"], base_sequence=sequence,
            producer_epoch=self._opened["producer_epoch"], publish_time_ns=1,
        )  # fmt: skip
        answer = Answer(sequence, count)
        request = self._send(p.Publish, part=sealed_bundle([(self.partition_id, frame)]))
        self.on_way[request] = answer
        return answer

    def take(self, seconds: float = 0.0) -> int:
        """Take the answers that came, waiting so long for the first; how many."""
        taken = 0
        for command in self._receive(seconds):
            if not isinstance(command, p.Published):
                continue
            for request, statuses in command.entries:
                answer = self.on_way.pop(request)
                answer.status, answer.offset = statuses[0], statuses[1]
                answer.text = command.texts.get(answer.status, "")
                answer.answered_ns = time.monotonic_ns()
                if self.journal is not None:
                    answer.journal_bytes = self.journal.stat().st_size
                self.answers.append(answer)
                taken += 1
        return taken

    def settle(self, seconds: float = 60.0) -> None:
        """Until every frame is answered."""
        deadline = time.monotonic() + seconds
        while self.on_way:
            left = deadline - time.monotonic()
            assert left > 0, f"{self.name}: {len(self.on_way)} frames have no answer in {seconds} s"
            self.take(left)

    def publish(self, count: int = 1, sequence: int | None = None, size: int = 0) -> Answer:
        """One frame, and wait for what becomes of it."""
        answer = self.send(count, sequence, size)
        self.settle()
        return answer

    def publish_until_taken(self, seconds: float = 60.0, **frame: Any) -> Answer:
        """One frame, sent again until the broker takes it."""
        deadline = time.monotonic() + seconds
        sequence = self.next_sequence
        while True:
            answer = self.publish(sequence=sequence, **frame)
            if answer.status == p.Status.OK:
                self.next_sequence = sequence + answer.count
                return answer
            assert time.monotonic() < deadline, f"refused for {seconds} s: {answer.text}"
            time.sleep(0.02)

    @property
    def acked(self) -> dict[int, int]:
        """Offset -> number of every message that was acked."""
        return {
            answer.offset + i: answer.sequence + i
            for answer in self.answers
            if answer.status is not None and answer.status <= p.Status.DUPLICATE
            for i in range(answer.count)
        }

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)
        self._context.term()

    def __enter__(self) -> RawProducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_all(client: Any, topic: str) -> list[Any]:
    """Everything that a reader finds in a topic now."""
    with client.reader(topic) as reader:
        return list(reader)


class Background:
    """Runs a function in a thread until `stop`; its error is raised there."""

    def __init__(self, work: Any) -> None:
        self.stopping = threading.Event()
        self._error: BaseException | None = None

        def run() -> None:
            try:
                work(self.stopping)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def stop(self, seconds: float = 60.0) -> None:
        """End it."""
        self.stopping.set()
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "a thread of the test hangs"
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.stopping.set()
