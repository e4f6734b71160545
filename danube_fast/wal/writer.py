"""Writing groups: one gathering write each, closed by a PAD frame.

    position (multiple of 4096)                                        next multiple of 4096
    | frame | frame | frame | ............ | PAD header |     (zeros)     |

The PAD frame's body is never read, and may be anything; the log is frames back to back and a scan is
strict. A write that fails counts as not made: the caller's position stays where it was.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from danube_fast.errors import DanubeError, Internal, InvalidArgument, ResourceExhausted
from danube_fast.frame.kernel import address_of, direct, kernel
from danube_fast.frame.layout import FLAG_CONTROL, FLAG_PAD, HEADER_BYTES, At
from danube_fast.frame.memory import store_u16
from danube_fast.frame.stamp import stamp, write_pad

__all__ = ["PadStamper", "WriteFault", "signed", "stamp_pad", "write_all"]

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SIGN_BIT = 1 << 63


def signed(value: int) -> int:
    """A u64 as the int64 with the same bits, which is what kernels take."""
    return value - (1 << 64) if value & _SIGN_BIT else value


@kernel("void(int64,int64,int64,int64,int64,int64,int64)")
def stamp_pad(
    address: int,
    frame_bytes: int,
    log_id: int,
    position: int,
    epoch: int,
    synced: int,
    time_ns: int,
) -> None:
    """Write the whole header of a PAD frame."""
    write_pad(address, frame_bytes)
    store_u16(address + At.FLAGS, FLAG_PAD | FLAG_CONTROL)
    stamp(address, log_id, position, 0, time_ns, synced, 0, epoch, 0)


_call_stamp_pad = direct(stamp_pad)


class PadStamper:
    """One reusable PAD header of one log."""

    def __init__(self, log_id: int) -> None:
        self._log_id = signed(log_id)
        self._header = bytearray(HEADER_BYTES)
        self._address = address_of(self._header)

    def make(self, frame_bytes: int, position: int, epoch: int, synced_position: int) -> bytearray:
        """The 128 bytes of a PAD frame; valid until the next call."""
        _call_stamp_pad(
            self._address, frame_bytes, self._log_id, position, epoch, synced_position, 0
        )
        return self._header


class WriteFault(Exception):
    """A write failed. `error` is what to raise; `touched` whether some bytes reached the file."""

    def __init__(self, error: DanubeError, *, touched: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.touched = touched


def write_all(
    fd: int, buffers: Sequence[Any], byte_count: int, file_offset: int, path: str
) -> None:
    """Write all buffers, `byte_count` bytes together, back to back at `file_offset`.

    Splits at IOV_MAX buffers and carries on after a short write (Python repeats an interrupted
    call). Raises WriteFault; its error is InvalidArgument if the buffers are not `byte_count` bytes.
    """
    pending = buffers
    written = 0
    try:
        while written < byte_count and pending:
            chunk = pending if len(pending) <= _IOV_MAX else pending[:_IOV_MAX]
            done = os.pwritev(fd, chunk, file_offset + written)
            written += done
            if written == byte_count and len(chunk) == len(pending):
                return
            if done <= 0 and any(memoryview(buffer).nbytes for buffer in chunk):
                raise OSError(errno.EIO, "nothing was written")
            pending = [*_rest(chunk, done), *pending[len(chunk) :]]
    except OSError as fault:
        raise WriteFault(_error_for(fault, path), touched=written > 0) from fault
    if written != byte_count or any(memoryview(buffer).nbytes for buffer in pending):
        wrong = InvalidArgument(f"the buffers of a group are not the {byte_count} bytes announced")
        raise WriteFault(wrong, touched=written > 0)


def _rest(chunk: Sequence[Any], done: int) -> list[memoryview]:
    """Cut off the first `done` bytes of `chunk`."""
    rest: list[memoryview] = []
    for buffer in chunk:
        view = memoryview(buffer).cast("B")
        if done >= view.nbytes:
            done -= view.nbytes
            continue
        rest.append(view[done:])
        done = 0
    return rest


def _error_for(fault: OSError, path: str) -> DanubeError:
    reason = os.strerror(fault.errno) if fault.errno else str(fault)
    if fault.errno in _FULL:
        return ResourceExhausted(f"{path} cannot be written: {reason}; free space on its disk")
    return Internal(f"{path} cannot be written: {reason}; check the disk and the kernel's log")
