"""Calls between the processes of one broker, over one SPSC ring per ordered pair.

      worker 1 --- ring 1->0 --->  coordinator        every process sleeps on its own doorbell
               <-- ring 0->1 ---                       (an eventfd); a sender rings it after a push

A mailbox never blocks and reads and writes rings and doorbells only, so a test drives two mailboxes in
one process. A call ends exactly once: with the answer, or with Unavailable when
its time is up, when the peer restarts (its epoch changes), or when it is known to be down.

A message names the sender's epoch and the epoch of the peer it was meant for. A restarted process
so never acts on a call that was made to its predecessor, whose caller has been told Unavailable,
and never takes an answer that belongs to its predecessor.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from danube_fast.broker.message import Message
from danube_fast.clock import MILLISECOND_NS, NEVER_NS, Clock
from danube_fast.countdown import Done
from danube_fast.errors import (
    DanubeError,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    error_from_code,
)
from danube_fast.ring.memory import signal_eventfd
from danube_fast.workers.process.records import (
    Assembler,
    Envelope,
    Head,
    Kind,
    encode_message,
    fragments,
)

__all__ = ["PAUSE_NS", "Bell", "Link", "Mailbox", "Peers", "Reply", "Request", "Ring"]

_log = logging.getLogger(__name__)

RECORDS_PER_TURN_MAX = 256
"""Ring records taken from one peer in one turn, so that one peer cannot starve the loop."""

QUEUE_BYTES_MAX = 64 * 1024 * 1024
"""Bytes that wait for one peer's full ring; a call beyond fails with ResourceExhausted."""

RETRY_NS = 1_000_000
"""How soon a full ring is tried again, when its reader's wake-up does not come first."""

PAUSE_NS = 1_500_000_000
"""Longer than any sleep of a loop."""

LOOK_NS = 1_000_000
"""How often a busy loop looks whether a peer was restarted; a sleeping one is woken for it."""

M = TypeVar("M", bound=Message)


class Ring(Protocol):
    """The ring of a mailbox (`danube_fast.ring.spsc.SpscRing`)."""

    @property
    def record_bytes_max(self) -> int:
        """Largest record that can be pushed."""

    @property
    def readable(self) -> bool:
        """Whether a pop would give something."""

    def try_push(self, *parts: bytes | memoryview) -> bool:
        """Append one record made of `parts`; False when there is no room."""

    def pop(self) -> bytes | None:
        """The oldest record, or None."""


class Bell(Protocol):
    """The doorbell of a mailbox (`danube_fast.ring.doorbell.Doorbell`)."""

    def ring(self) -> object:
        """Wake the owner if it sleeps."""

    def prepare_sleep(self) -> object:
        """Announce that the owner is about to sleep. The owner must look for work once more after this."""

    def cancel_sleep(self) -> object:
        """Announce that the owner is awake."""

    def drain(self) -> object:
        """Take the signals that have come."""

    def fileno(self) -> int:
        """The eventfd to poll."""


class Peers(Protocol):
    """The other processes of a mailbox, as the control block shows them."""

    def epoch(self, process: int) -> int:
        """Epoch of the process that runs, or ran last, under this index."""

    def is_down(self, process: int) -> bool:
        """Whether the process is known to be gone (and not restarted yet)."""


class Reply(NamedTuple):
    """How a call ended: `value` and `body`, or `error`."""

    value: Any = None
    body: bytes | memoryview = b""
    error: DanubeError | None = None

    def result(self) -> Any:
        """Return the value; raises the error instead if there is one."""
        if self.error is not None:
            raise self.error
        return self.value


class Request(Generic[M]):
    """A call or notification that came in. Answer a call once, now or later, with reply or fail."""

    __slots__ = ("_answered", "_mailbox", "_request", "body", "message", "peer", "peer_epoch")

    message: M
    """Set before it is handled."""

    def __init__(
        self, mailbox: Mailbox, peer: int, head: Head[Any], body: bytes | memoryview
    ) -> None:
        self._mailbox, self._request = mailbox, head.request
        self._answered = head.kind == Kind.NOTIFY
        self.peer, self.peer_epoch, self.body = peer, head.sender_epoch, body

    def reply(self, value: Any = None, body: bytes | memoryview = b"") -> None:
        """Answer with success. Nothing happens for a notification or a second answer."""
        if not self._answered:
            self._answer(Kind.REPLY, value, body, 0)

    def fail(self, error: DanubeError) -> None:
        """Answer with an error. Nothing happens for a notification or a second answer."""
        if not self._answered:
            self._answer(Kind.ERROR, str(error), b"", error.code)

    def when_done(self, value: Any = None) -> Done:
        """Return the callback that replies `value`, or fails the request with an error."""
        return lambda error: self.respond(value, error)

    def respond(self, value: Any, error: DanubeError | None) -> None:
        """Answer with an error if there is one, else with success."""
        if error is not None:
            self.fail(error)
        else:
            self.reply(value)

    def _answer(self, kind: Kind, value: Any, body: bytes | memoryview, code: int) -> None:
        self._answered = True
        self._mailbox.send_answer(
            self.peer, self.peer_epoch, kind, self._request, value, body, code
        )


class Link:
    """One peer: its rings, its doorbell, and what waits for room in its ring."""

    __slots__ = ("assembler", "bell", "calls", "epoch", "inbound", "outbound", "peer", "queue",
                 "queue_bytes")  # fmt: skip

    def __init__(self, peer: int, outbound: Ring, inbound: Ring, bell: Bell) -> None:
        self.peer, self.outbound, self.inbound, self.bell = peer, outbound, inbound, bell
        self.assembler = Assembler()
        self.calls: dict[int, Call] = {}
        self.epoch = 0
        self.queue: deque[bytes] = deque()
        self.queue_bytes = 0

    def send(self, head: bytes, body: bytes | memoryview) -> None:
        """Push a message, or queue what finds no room. Raises ResourceExhausted at the limit."""
        if self.queue_bytes + len(head) + len(body) > QUEUE_BYTES_MAX:
            raise ResourceExhausted(
                f"{self.queue_bytes} bytes already wait for process {self.peer}, which does not "
                "take them; try again when it does"
            )
        for parts in fragments(head, body, self.outbound.record_bytes_max):
            if self.queue or not self.outbound.try_push(*parts):
                self.queue.append(b"".join(parts))
                self.queue_bytes += len(self.queue[-1])
        self.bell.ring()

    def retry(self) -> int:
        """Push what waits, in order; the number of records that went."""
        pushed = 0
        while self.queue and self.outbound.try_push(self.queue[0]):
            self.queue_bytes -= len(self.queue.popleft())
            pushed += 1
        if pushed:
            self.bell.ring()
        return pushed

    def forget(self) -> None:
        """Drop what waits: it was meant for a process that is gone."""
        self.queue.clear()
        self.queue_bytes = 0


class Call(NamedTuple):
    """A call that has not ended."""

    peer: int
    kind: type[Message]
    deadline_ns: int
    on_reply: Callable[[Reply], None]


class Mailbox:
    """Call the other processes, and answer theirs. Use from one thread; drive with `do_work`."""

    def __init__(
        self, process_index: int, epoch: int, links: Sequence[Link], bell: Bell, peers: Peers,
        clock: Clock,
    ) -> None:  # fmt: skip
        self.process_index = process_index
        self._served: dict[str, tuple[Callable[[Any], Any], Callable[[Request[Any]], None]]] = {}
        """By operation: decodes it, and handles it."""
        self.epoch_watchers: list[Callable[[int, int], None]] = []
        """Called as (peer, new epoch) in `do_work` when a peer was restarted."""
        self._epoch = epoch
        self._links = {link.peer: link for link in links}
        self._bell, self._peers, self._clock = bell, peers, clock
        self._deadlines: list[tuple[int, int, Link]] = []
        self._ended: list[tuple[Call, Reply]] = []
        self._handed: deque[Callable[[], None]] = deque()
        """What other threads of the process want to be done."""
        self._next_request = 1
        self._now_ns = clock.monotonic_ns()
        self.pauses = 0
        """How often nothing was read for so long that the process was stopped, or held up."""
        self._look_ns, self._asleep = 0, False
        self.silent = False
        """Whether no peer rang during this sleep; set by the loop, which polled the doorbell."""
        for link in links:
            link.epoch = peers.epoch(link.peer)

    def serve(self, kind: type[M], handler: Callable[[Request[M]], None]) -> None:
        """Let `handler` answer the messages of a kind. A DanubeError that it raises becomes the answer."""
        self._served[kind.__name__] = msgspec.msgpack.Decoder(kind).decode, handler

    # ---------------------------------------------------------------- sending

    @property
    def peers(self) -> list[int]:
        """Process indices that can be called."""
        return list(self._links)

    def peer_epoch(self, peer: int) -> int:
        """Epoch of a peer as of the last turn."""
        return self._links[peer].epoch

    def call(
        self, peer: int, message: Message, body: bytes | memoryview = b"", *,
        on_reply: Callable[[Reply], None], timeout_ms: int = 5000,
    ) -> None:  # fmt: skip
        """Ask a peer. `on_reply` is called exactly once, from a later `do_work`, never from here."""
        link = self._links[peer]
        request = self._next_request
        self._next_request += 1
        deadline_ns = self._clock.monotonic_ns() + timeout_ms * MILLISECOND_NS
        call = Call(peer, type(message), deadline_ns, on_reply)
        if self._peers.is_down(peer):
            self._ended.append((call, Reply(error=_down(peer))))
            return
        name = type(message).__name__
        head = Head(Kind.CALL, self._epoch, link.epoch, request, name, message)
        try:
            link.send(*encode_message(head, body))
        except DanubeError as error:
            self._ended.append((call, Reply(error=error)))
            return
        link.calls[request] = call
        heapq.heappush(self._deadlines, (call.deadline_ns, request, link))

    def notify(self, peer: int, message: Message, body: bytes | memoryview = b"") -> None:
        """Tell a peer; no answer comes. Raises InvalidArgument or ResourceExhausted if too much."""
        link = self._links[peer]
        name = type(message).__name__
        head = Head(Kind.NOTIFY, self._epoch, link.epoch, 0, name, message)
        link.send(*encode_message(head, body))

    def send_answer(
        self, peer: int, peer_epoch: int, kind: Kind, request: int, value: Any,
        body: bytes | memoryview, code: int,
    ) -> None:  # fmt: skip
        """Answer a call (used by `Request`). An answer that cannot be sent becomes an error."""
        link = self._links[peer]
        if link.epoch != peer_epoch:
            return
        head = Head(kind, self._epoch, peer_epoch, request, "", value, code)
        try:
            link.send(*encode_message(head, body))
        except InvalidArgument as error:
            head = Head(Kind.ERROR, self._epoch, peer_epoch, request, "", str(error), error.code)
            link.send(*encode_message(head, b""))
        except ResourceExhausted:
            _log.warning("an answer to process %d was dropped: its ring does not drain", peer)

    # ---------------------------------------------------------------- the turn

    def do_work(self, now_ns: int) -> int:
        """Do one bounded turn: wake, notice restarts, retry, read, expire; the number of things done."""
        if now_ns - self._now_ns > PAUSE_NS:
            self.pauses += 1
        self._now_ns = now_ns
        looks = self._asleep or now_ns >= self._look_ns
        if self._asleep:
            self._asleep = False
            self._bell.cancel_sleep()
            silent, self.silent = self.silent, False
            if silent and not [link for link in self._links.values() if link.calls or link.queue]:
                return self._run_handed()  # a peer that pushes rings
            self._bell.drain()
        if looks:
            self._look_ns = now_ns + LOOK_NS
        done = self._run_handed()
        for link in self._links.values():
            if looks:
                self._look(link)
            if link.queue:
                done += link.retry()
            done += self._receive(link)
        if self._deadlines and self._deadlines[0][0] <= now_ns:
            self._expire(now_ns)
        return done + (self._finish() if self._ended else 0)

    @property
    def turn_ns(self) -> int:
        """When the turn began in which messages were read last."""
        return self._now_ns

    def next_deadline_ns(self) -> int:
        """When `do_work` must run again at the latest (monotonic ns), though nothing came in."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in deadlines[0][2].calls:
            heapq.heappop(deadlines)  # that call has ended
        deadline_ns = deadlines[0][0] if deadlines else NEVER_NS
        if any(link.queue for link in self._links.values()):
            deadline_ns = min(deadline_ns, self._now_ns + RETRY_NS)
        return deadline_ns

    def fileno(self) -> int:
        """The own doorbell, to poll for reading."""
        return self._bell.fileno()

    def wake(self) -> None:
        """End the sleep of the own process; any of its threads may call it."""
        signal_eventfd(self._bell.fileno())

    def run_soon(self, work: Callable[[], None]) -> None:
        """Let the loop do something in its next turn; any thread of the process may call it."""
        self._handed.append(work)
        self.wake()

    def _run_handed(self) -> int:
        count = len(self._handed)
        for _ in range(count):
            try:
                self._handed.popleft()()
            except Exception:  # the loop goes on
                _log.exception("what another thread wanted to be done has failed")
        return count

    def prepare_sleep(self) -> bool:
        """Announce sleep. False (and no announcement) if there is something to do already."""
        self._bell.prepare_sleep()
        self._asleep = not self._ended and not self._handed
        for link in self._links.values():
            self._asleep = self._asleep and not link.inbound.readable
        if not self._asleep:
            self._bell.cancel_sleep()
        return self._asleep

    def _look(self, link: Link) -> None:
        """Notice that a peer was restarted, or is down while calls to it are open."""
        epoch = self._peers.epoch(link.peer)
        if epoch > link.epoch:
            self._restarted(link, epoch)
        elif (link.calls or link.queue) and self._peers.is_down(link.peer):
            self._fail_calls(link)

    def _restarted(self, link: Link, epoch: int) -> None:
        link.epoch = epoch
        self._fail_calls(link)
        for watcher in self.epoch_watchers:
            watcher(link.peer, epoch)

    def _fail_calls(self, link: Link) -> None:
        """Fail all calls to a process that is gone."""
        link.forget()
        calls, link.calls = link.calls, {}
        self._ended += [(call, Reply(error=_down(link.peer))) for call in calls.values()]

    def _receive(self, link: Link) -> int:
        taken, message = 0, None
        for _ in range(RECORDS_PER_TURN_MAX):
            record = link.inbound.pop()
            if record is None:
                break
            taken += 1
            message = link.assembler.feed(record)
            if message is not None:
                self._dispatch(link, message)
        if taken > 1 or (taken and message is None):
            link.bell.ring()  # its sender may be waiting for room
        return taken

    def _dispatch(self, link: Link, envelope: Envelope) -> None:
        head = envelope.head
        if head.sender_epoch > link.epoch:
            self._restarted(link, head.sender_epoch)
        if head.target_epoch != self._epoch or head.sender_epoch < link.epoch:
            return
        if head.kind in (Kind.CALL, Kind.NOTIFY):
            self._handle(link.peer, envelope)
            return
        call = link.calls.pop(head.request, None)
        if call is None:
            return
        if head.kind == Kind.ERROR:
            text = str(msgspec.msgpack.decode(head.value))
            reply = Reply(error=error_from_code(head.code, text))
        else:
            reply = _answer_of(call, envelope)
        self._ended.append((call, reply))

    def _handle(self, peer: int, envelope: Envelope) -> None:
        head = envelope.head
        request: Request[Any] = Request(self, peer, head, envelope.body)
        served = self._served.get(head.operation)
        if served is None:
            text = f"process {self.process_index} has no operation {head.operation!r}"
            request.fail(InvalidArgument(text))
            return
        decode, handler = served
        try:
            request.message = decode(head.value)
            handler(request)
        except DanubeError as error:
            request.fail(error)
        except Exception as error:
            _log.exception("operation %s failed", head.operation)
            request.fail(Internal(f"{head.operation} failed: {error!r}; see the broker's log"))

    def _expire(self, now_ns: int) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, request, link = heapq.heappop(self._deadlines)
            call = link.calls.pop(request, None)
            if call is not None:
                text = f"process {call.peer} did not answer {call.kind.__name__} in time; try again"
                self._ended.append((call, Reply(error=Unavailable(text))))

    def _finish(self) -> int:
        ended, self._ended = self._ended, []
        for call, reply in ended:
            call.on_reply(reply)
        return len(ended)


def _answer_of(call: Call, envelope: Envelope) -> Reply:
    """Convert a reply to the type that the operation promises."""
    kind = call.kind.answer
    if kind is None:
        return Reply(None, envelope.body)
    try:
        return Reply(msgspec.msgpack.decode(envelope.head.value, type=kind), envelope.body)
    except msgspec.MsgspecError as fault:
        text = f"process {call.peer} answered {call.kind.__name__} with something else: {fault}"
        return Reply(error=Internal(text))


def _down(peer: int) -> Unavailable:
    return Unavailable(f"process {peer} of the broker is down or was restarted; try again")
