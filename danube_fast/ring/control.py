"""ControlBlock: how the processes of one broker see each other, without a message.

One slot of four lines per process, one writer per line (drawing in `layout.py`):

    process i  -- status word, pid, heartbeats --> slot i      read by the supervisor, by tools
    supervisor -- restarts                     --> slot i      read by tools
    process i  -- sleeping word                --> slot i      read, cleared by its peers

State, epoch and port stand in one word, so a reader never sees the state of one life with the port
of another. Liveness is a heartbeat that advances, not a pid that exists. No kernels, no numba: the
supervisor uses this.
"""

from __future__ import annotations

import enum
import os
from typing import NamedTuple

from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.ring import layout
from danube_fast.ring.memory import address_of_memory, create_memfd, map_fd, words_of

__all__ = ["ControlBlock", "ProcessState", "ProcessStatus"]

_WORD = layout.WORD_BYTES
_HEADER_WORDS = layout.CONTROL_HEADER_BYTES // _WORD
_SLOT_WORDS = layout.CONTROL_SLOT_BYTES // _WORD
_STATUS = layout.AT_STATUS // _WORD
_PID = layout.AT_PID // _WORD
_HEARTBEAT = layout.AT_HEARTBEAT // _WORD
_HEARTBEAT_WORDS = layout.HEARTBEAT_BYTES // _WORD
_RESTARTS = layout.AT_RESTARTS // _WORD


class ProcessState(enum.IntEnum):
    """Where a process is in its life."""

    NONE = 0
    """Never started."""
    STARTING = 1
    READY = 2
    STOPPING = 3
    STOPPED = 4
    """Ended in order; all that it had to save is saved."""
    FAILED = 5
    """Gave up and says so; the supervisor decides."""


class ProcessStatus(NamedTuple):
    """One status word, taken apart."""

    state: ProcessState
    epoch: int
    port: int


class ControlBlock:
    """The words of all processes of one broker. Made by `create` or `attach`.

    `fd` is the memfd to hand on with `pass_fds`. `close` unmaps and closes it.
    """

    __slots__ = ("_address", "_map", "_words", "fd", "process_count")

    def __init__(self, fd: int) -> None:
        """Map the block in `fd`; owns `fd` from here. Raises FailedPrecondition if it is none."""
        self._map = map_fd(fd)
        self._words = words_of(self._map)
        version, count = self._words[0], self._words[layout.AT_PROCESS_COUNT // _WORD]
        fits = count > 0 and len(self._map) >= layout.control_bytes(count)
        if version != layout.CONTROL_VERSION_WORD or not fits:
            self._words.release()
            self._map.close()
            raise FailedPrecondition(
                f"descriptor {fd} holds no control block of version {layout.CONTROL_VERSION}; all "
                "processes of a broker must run the same danube-fast"
            )
        self._address = address_of_memory(self._map)
        self.fd = fd
        self.process_count = count

    @classmethod
    def create(cls, process_count: int) -> ControlBlock:
        """A new block, all zero: every process NONE with epoch 0."""
        if process_count < 1:
            raise InvalidArgument(f"a control block needs at least 1 process, not {process_count}")
        fd = create_memfd("danube-fast-control", layout.control_bytes(process_count))
        with map_fd(fd) as memory, words_of(memory) as words:
            words[layout.AT_PROCESS_COUNT // _WORD] = process_count
            words[0] = layout.CONTROL_VERSION_WORD
        return cls(fd)

    @classmethod
    def attach(cls, fd: int) -> ControlBlock:
        """Map the block behind an inherited descriptor, and own the descriptor."""
        return cls(fd)

    def close(self) -> None:
        """Unmap and close. Doorbells on this block's words must be gone."""
        self._words.release()
        self._map.close()
        os.close(self.fd)

    def _at(self, process: int, word: int) -> int:
        if not 0 <= process < self.process_count:
            raise InvalidArgument(
                f"process {process} is not in this control block of {self.process_count}"
            )
        return _HEADER_WORDS + process * _SLOT_WORDS + word

    def _heartbeat_at(self, process: int, thread: int) -> int:
        if not 0 <= thread < layout.HEARTBEATS_PER_PROCESS:
            raise InvalidArgument(
                f"thread {thread} is not among a process's {layout.HEARTBEATS_PER_PROCESS} heartbeats"
            )
        return self._at(process, _HEARTBEAT + thread * _HEARTBEAT_WORDS)

    # ------------------------------------------------------------ written by the process

    def announce(self, process: int, state: ProcessState, *, epoch: int, port: int = 0) -> None:
        """Say state, epoch and port (0 = none) of this process at once, and its pid."""
        if not 0 <= port <= layout.STATUS_PORT_MASK or not 0 <= epoch <= layout.STATUS_EPOCH_MAX:
            raise InvalidArgument(f"port {port} or epoch {epoch} is out of range")
        self._words[self._at(process, _PID)] = os.getpid()
        word = epoch << layout.STATUS_EPOCH_SHIFT | port << layout.STATUS_PORT_SHIFT | state
        self._words[self._at(process, _STATUS)] = word

    def set_state(self, process: int, state: ProcessState) -> None:
        """Change this process's state; epoch and port stay."""
        at = self._at(process, _STATUS)
        self._words[at] = self._words[at] & ~layout.STATUS_STATE_MASK | state

    def beat(self, process: int, time_ns: int, thread: int = 0) -> None:
        """Advance heartbeat `thread` (0 = the main loop) at monotonic `time_ns`."""
        at = self._heartbeat_at(process, thread)
        words = self._words
        words[at + 1] = time_ns
        words[at] += 1

    # ------------------------------------------------------------ written by the supervisor

    def set_restarts(self, process: int, count: int) -> None:
        """Say how often `process` was started again."""
        self._words[self._at(process, _RESTARTS)] = count

    # ------------------------------------------------------------ read by anyone

    def status(self, process: int) -> ProcessStatus:
        """State, epoch and port of `process`, all of the same instant."""
        word = self._words[self._at(process, _STATUS)]
        return ProcessStatus(
            ProcessState(word & layout.STATUS_STATE_MASK),
            word >> layout.STATUS_EPOCH_SHIFT,
            word >> layout.STATUS_PORT_SHIFT & layout.STATUS_PORT_MASK,
        )

    def state(self, process: int) -> ProcessState:
        """State of `process`."""
        return self.status(process).state

    def epoch(self, process: int) -> int:
        """How often `process` was started, as it says itself."""
        return self._words[self._at(process, _STATUS)] >> layout.STATUS_EPOCH_SHIFT

    def port(self, process: int) -> int:
        """TCP port of `process`, 0 if it has none yet."""
        return self.status(process).port

    def pid(self, process: int) -> int:
        """Process id, 0 before the first start."""
        return self._words[self._at(process, _PID)]

    def heartbeat_count(self, process: int, thread: int = 0) -> int:
        """How often `beat` was called; the process is alive while this advances."""
        return self._words[self._heartbeat_at(process, thread)]

    def heartbeat_time_ns(self, process: int, thread: int = 0) -> int:
        """Monotonic nanoseconds of the last beat (one clock for all processes of a host)."""
        return self._words[self._heartbeat_at(process, thread) + 1]

    def restarts(self, process: int) -> int:
        """How often the supervisor started `process` again."""
        return self._words[self._at(process, _RESTARTS)]

    def doorbell_address(self, process: int) -> int:
        """Address of the sleeping word of `process`, for its `Doorbell`. Valid until `close`."""
        return self._address + self._at(process, 0) * _WORD + layout.AT_SLEEPING
