"""The audit log of a broker. The coordinator writes it, and refuses changes that it cannot write down.

    ADMIN, a LOOKUP that makes a topic --begin--> one write, one sync for all that wait --> the changes --end--> line
    denials of this process, of workers  ------> budget of bytes per second ----------> lines

The line that a change begins with is durable before the change is made; meanwhile the loop goes on, for syncs are made in a
thread. The end of a change and denials are written at once, and durable about a second later. Lines that cannot be written
wait, within bounds, and go first when the disk takes them. Denials are never a reason to refuse anything.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS, Clock
from danube_fast.config import Settings
from danube_fast.errors import DanubeError, ResourceExhausted, Unavailable
from danube_fast.roles import Processes
from danube_fast.security.audit import (
    NAME_CHARACTERS_MAX,
    AuditRecord,
    decode_record,
    encode_record,
    fingerprint,
    shown_text,
    shown_time,
)
from danube_fast.security.audit_files import (
    AuditFile,
    chosen,
    last_seq,
    read_page,
    read_published,
    since_text,
    start_at,
)
from danube_fast.workers.process.boot import Boot
from danube_fast.workers.process.denials import Denials
from danube_fast.workers.process.layout import AUDIT
from danube_fast.workers.process.mailbox import Request

__all__ = ["AuditLog"]

_log = logging.getLogger(__name__)

DENIED_BYTES_PER_SECOND = 2048
"""Most that denials of the whole broker write, on the average; a flood takes days to push older records out."""
DENIED_BYTES_MAX = 64 * 1024
"""The same at once, after a quiet time."""
LOST_NS = 10 * SECOND_NS
"""How often a line tells of denials that were not recorded."""
SYNC_NS = SECOND_NS
RETRY_NS = SECOND_NS
WAITING_BYTES_MAX = 256 * 1024
"""Lines that wait for a disk."""
LOOK_NS = SECOND_NS // 4
CLOSE_SECONDS = 5.0
BEGUN_MAX = 10_000
"""Changes that wait to be written down."""
_SEQ_BYTES = 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
GoOn = Callable[[DanubeError | None], None]


class _Begun(NamedTuple):
    """A change that waits for its line."""

    record: AuditRecord
    go_on: GoOn


class _Sync:
    """A sync beside the loop."""

    def __init__(self, fd: int, begun: list[_Begun], count: int) -> None:
        """`fd`: closed at the end; `begun`: changes that wait for it; `count`: other lines that it makes durable."""
        self.begun, self.count = begun, count
        self.fault: OSError | None = None
        self._thread = threading.Thread(
            target=self._run, args=(fd,), name="audit-sync", daemon=True
        )
        self._thread.start()

    def _run(self, fd: int) -> None:
        """Sync; in the thread."""
        try:
            os.fdatasync(fd)
        except OSError as error:
            self.fault = error
        finally:
            os.close(fd)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for its end, so long at most."""
        self._thread.join(seconds)


def _begin_sync(fd: int, begun: list[_Begun], count: int) -> _Sync:
    """Begin a sync of a file that stays open. Raises OSError."""
    own = os.dup(fd)
    try:
        return _Sync(own, begun, count)
    except RuntimeError:
        os.close(own)
        raise OSError(errno.EAGAIN, "no thread can be started") from None


class AuditLog:
    """Record changes and denials. Used by the coordinator's loop only."""

    def __init__(self, booted: Boot, denials: Denials) -> None:
        """`denials`: those of the coordinator itself."""
        settings: Settings = booted.settings
        self.folder = Path(booted.config.data_dir) / AUDIT
        self.denials = denials
        self._clock: Clock = booted.clock
        self._processes: Processes = booted.config.processes
        self._own_name = self._processes.name(booted.process_index)
        self._file = AuditFile(
            self.folder, file_bytes=settings.audit_file_bytes, files=settings.audit_files
        )
        self._begun: list[_Begun] = []
        self._waiting: deque[bytes] = deque()
        """Lines that are not written yet."""
        self._waiting_bytes = 0
        self._room = DENIED_BYTES_MAX * SECOND_NS
        """Budget of denials, in bytes times nanoseconds."""
        self._filled_ns = self._lost_ns = self._synced_ns = self._retry_ns = 0
        self._looked_ns = 0
        self._lost_count = self._unsynced = 0
        self._sync: _Sync | None = None
        self.moves = 0
        """How often the files were found to be moved away or removed."""
        self.fault = ""
        """Why nothing can be written; empty: it can."""
        self.seq = self._find_seq()
        """Number of the newest record."""
        booted.mailbox.serve(m.Denied, self._take_over)
        self.record("start")

    def _find_seq(self) -> int:
        try:
            published = read_published(self.folder)
            return max(last_seq(self.folder), published.seq if published is not None else 0)
        except OSError as error:
            self._note_fault(error)
            return 0

    # ---------------------------------------------------------------- what is recorded

    def record(
        self, action: str, *, principal: str = "", proof: str = "", resource: str = ""
    ) -> None:
        """Record what the broker has done by itself."""
        self._put(
            AuditRecord(
                event="note",
                principal=principal,
                proof=fingerprint(proof),
                action=action,
                resource=shown_text(resource, NAME_CHARACTERS_MAX),
                outcome="ok",
                process=self._own_name,
            )
        )

    def begin(self, record: AuditRecord, go_on: GoOn) -> None:
        """Write down that a change is wanted; `go_on` once that is durable, in a later turn, or with why it cannot be."""
        if len(self._begun) >= BEGUN_MAX:
            text = f"{BEGUN_MAX} changes wait for the disk of the audit log; try again when it is faster"
            go_on(ResourceExhausted(text))
            return
        record = msgspec.structs.replace(record, event="begin", process=self._own_name)
        self._begun.append(_Begun(record, go_on))

    def end(self, record: AuditRecord, error: DanubeError | None) -> None:
        """Write down the outcome of a change that was begun."""
        self._put(
            msgspec.structs.replace(
                record,
                event="end",
                process=self._own_name,
                arguments={},
                outcome="ok" if error is None else type(error).__name__,
            )
        )

    def _take_over(self, request: Request[m.Denied]) -> None:
        process = self._processes.name(request.peer)
        for line in request.message.records:
            record = decode_record(line)
            if record is not None:
                self._put_denied(msgspec.structs.replace(record, process=process))
        self._lost_count += request.message.lost
        request.reply()

    # ---------------------------------------------------------------- the loop

    def do_work(self, now_ns: int) -> int:
        """Write what has come, and let changes go on whose beginning is durable; how many."""
        if now_ns - self._looked_ns >= LOOK_NS:
            self._looked_ns = now_ns
            self._look_for_moves()
            self._take_denials(now_ns)
            if self._waiting and now_ns >= self._retry_ns:
                self._write(b"")
        work = self._end_sync()
        if self._sync is None:
            self._start_sync(now_ns)
        return work

    def _look_for_moves(self) -> None:
        """Begin a new file where the one in use was moved away or removed: no one looks for records elsewhere."""
        try:
            if not self._file.is_moved:
                return
        except OSError as error:
            self._note_fault(error)
            return
        _log.error(
            "the audit log was moved out of %s, or removed: it begins anew there", self.folder
        )
        self._write(b"", sync=True)  # what was moved is to be whole
        self._file.close()
        self.moves += 1
        self.record("audit_log_moved", resource=str(self.folder))

    @property
    def is_waiting(self) -> bool:
        """Whether changes wait for the disk."""
        return bool(self._begun) or (self._sync is not None and bool(self._sync.begun))

    def _take_denials(self, now_ns: int) -> None:
        records, lost = self.denials.take(now_ns)
        self._lost_count += lost
        self._fill(now_ns)
        for record in records:
            self._put_denied(msgspec.structs.replace(record, process=self._own_name))
        if self._lost_count and now_ns - self._lost_ns >= LOST_NS:
            self._lost_ns, lost = now_ns, self._lost_count
            self._lost_count = 0
            self._put(AuditRecord(event="lost", count=lost, process=self._own_name))

    def _refusal(self, error: OSError) -> DanubeError:
        is_full = error.errno in _FULL
        remedy = f"free space on the disk of {self.folder}" if is_full else f"look at {self.folder}"
        text = (
            f"this change is refused, as it cannot be written to the audit log ({error.strerror}); {remedy}, or start the "
            "broker with audit = off"
        )
        return ResourceExhausted(text) if is_full else Unavailable(text)

    def close(self) -> None:
        """Write and sync what there is. A change that waits for its line is not made."""
        if self._sync is not None:
            self._sync.wait(CLOSE_SECONDS)
        self._write(b"", sync=True)
        self._file.close()

    # ---------------------------------------------------------------- lines

    def _line(self, record: AuditRecord) -> bytes:
        self.seq += 1
        time = record.time or shown_time(self._clock.wall_ns())
        return encode_record(msgspec.structs.replace(record, seq=self.seq, time=time))

    def _put(self, record: AuditRecord) -> None:
        """Write a line, or let it wait for the disk."""
        line = self._line(record)
        if self._waiting_bytes + len(line) > WAITING_BYTES_MAX:
            self._lost_count += record.count
            return
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        if not self.fault:
            self._write(b"")

    def _put_denied(self, record: AuditRecord) -> None:
        """Write a denial if the budget has room for it."""
        size = (len(encode_record(record)) + _SEQ_BYTES) * SECOND_NS
        if size > self._room:
            self._lost_count += record.count
            return
        self._room -= size
        self._put(record)

    def _fill(self, now_ns: int) -> None:
        elapsed_ns = now_ns - self._filled_ns if self._filled_ns else 0
        self._filled_ns = now_ns
        more = elapsed_ns * DENIED_BYTES_PER_SECOND
        self._room = min(self._room + more, DENIED_BYTES_MAX * SECOND_NS)

    def _write(self, lines: bytes, *, sync: bool = False) -> OSError | None:
        """Write lines that wait, then these. What prevents it, if something does: then those wait on, and these do not."""
        count = len(self._waiting)
        data = b"".join(self._waiting) + lines
        try:
            if data:
                self._file.append(data, sync=sync)
            elif sync and self._file.fd >= 0:
                self._file.sync()
        except OSError as error:
            self._note_fault(error)
            return error
        self._waiting.clear()
        self._waiting_bytes = 0
        self._unsynced = 0 if sync else self._unsynced + count
        if self.fault:
            _log.warning("the audit log in %s can be written again", self.folder)
            self.fault = ""
        return None

    def _note_fault(self, error: OSError) -> None:
        text = error.strerror or str(error)
        if text != self.fault:
            _log.error(
                "the audit log in %s cannot be written, administrative changes are refused until it can: %s",
                self.folder, text,
            )  # fmt: skip
        self.fault = text
        self._retry_ns = self._clock.monotonic_ns() + RETRY_NS

    # ---------------------------------------------------------------- syncs beside the loop

    def _start_sync(self, now_ns: int) -> None:
        """Begin to make lines durable: at once if changes wait for theirs, else when it is time."""
        begun, self._begun = self._begun, []
        if begun:
            error = self._write(b"".join(self._line(each.record) for each in begun))
            if error is not None:
                self._refuse(begun, error)
                return
        elif not self._unsynced or now_ns - self._synced_ns < SYNC_NS:
            return
        self._synced_ns = now_ns
        if self._file.fd < 0:
            return
        try:
            self._sync = _begin_sync(self._file.fd, begun, self._unsynced)
            self._unsynced = 0
        except OSError as error:  # no descriptor, or no thread, is left
            self._note_fault(error)
            self._refuse(begun, error)

    def _end_sync(self) -> int:
        """Let changes go on whose lines are durable now; how many."""
        sync = self._sync
        if sync is None or sync.is_running:
            return 0
        self._sync = None
        if sync.fault is not None:
            self._file.distrust()
            self._lost_count += sync.count
            self._note_fault(sync.fault)
            self._refuse(sync.begun, sync.fault)
            return len(sync.begun)
        for each in sync.begun:
            each.go_on(None)
        return len(sync.begun)

    def _refuse(self, begun: list[_Begun], error: OSError) -> None:
        for each in begun:
            refusal = self._refusal(error)
            self.end(each.record, refusal)
            each.go_on(refusal)

    # ---------------------------------------------------------------- reading

    def read(
        self, cursor: str, *, since_seconds: int, principal: str, denied: bool
    ) -> dict[str, Any]:
        """Read a page; see the operation. Raises InvalidArgument, Unavailable."""
        since = since_text(self._clock.wall_ns(), since_seconds)
        try:
            if not cursor and since:
                cursor = start_at(self.folder, since)
            page = read_page(self.folder, cursor)
        except OSError as error:
            raise Unavailable(
                f"the audit log cannot be read ({error.strerror}); look at {self.folder}"
            ) from error
        return {
            "records": chosen(page.records, since=since, principal=principal, denied=denied),
            "after": page.cursor,
            "is_last": page.is_last,
        }
