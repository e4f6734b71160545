"""Two workers and a coordinator in one process, and the messages between them one at a time.

    net.step()   the oldest message is delivered, and every worker turns until it has nothing to do
    crash(who)   a party dies: what it was sent is lost, calls to it fail, a successor starts and asks

The workers are the shipped ones over real logs; of the coordinator it is `Mover`, `Placement` and the
topic directory, over a store that lives on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from danube_fast.broker.messages import Message
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import TopicOptions
from danube_fast.clock import SystemClock
from danube_fast.errors import DanubeError, Unavailable
from danube_fast.metadata.memory import MemoryStore
from danube_fast.roles import COORDINATOR, Processes
from danube_fast.workers.coordinator.mover import Mover
from danube_fast.workers.coordinator.placement import Placement
from danube_fast.workers.process.mailbox import Reply, Request
from tests.workers.shard_rig import FakeMailbox, Rig

TOPIC = "/default/t"
TURNS_MAX = 100_000


class Net:
    """Messages on their way; delivered in order, one a step."""

    def __init__(self) -> None:
        self.queue: deque[tuple[int, Callable[[], Any]]] = deque()
        """Whose message it is, and what delivers it."""
        self.boxes: dict[int, Box] = {}
        self.delivered: list[str] = []

    def step(self) -> bool:
        """Deliver the oldest message; False if there is none."""
        if not self.queue:
            return False
        self.queue.popleft()[1]()
        return True

    def hear(self, index: int) -> None:
        """Everything that one party has said is delivered."""
        mine = [deliver for sender, deliver in self.queue if sender == index]
        self.queue = deque(entry for entry in self.queue if entry[0] != index)
        for deliver in mine:
            deliver()


class _Request:
    """What a handler gets."""

    def __init__(self, net: Net, sender: Box, target: Box, message: Any, body: Any,
                 on_reply: Any) -> None:  # fmt: skip
        self.message, self.body, self.peer = message, body, sender.index
        self._net, self._sender, self._target, self._on_reply = net, sender, target, on_reply

    def reply(self, value: Any = None, body: Any = b"") -> None:
        self._answer(Reply(value, bytes(body)))

    def fail(self, error: DanubeError) -> None:
        self._answer(Reply(error=error))

    def _answer(self, reply: Reply) -> None:
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            self._sender.answer(self._target, on_reply, reply)

    when_done, respond = Request.when_done, Request.respond


class Box(FakeMailbox):
    """A mailbox of one life of one party."""

    def __init__(self, net: Net, index: int) -> None:
        super().__init__()
        self.net, self.index = net, index
        self.is_alive = True
        self.open_calls: dict[int, tuple[Box, Any]] = {}
        net.boxes[index] = self

    def call(self, peer: int, message: Message, body: Any = b"", *, on_reply: Any,
             **_: Any) -> None:  # fmt: skip
        target = self.net.boxes[peer]
        number = len(self.open_calls) + 1
        while number in self.open_calls:
            number += 1
        self.open_calls[number] = (target, on_reply)

        def answered(reply: Reply) -> None:
            if self.open_calls.pop(number, None) is not None and self.is_alive:
                on_reply(reply)

        self._post(target, _Request(self.net, self, target, message, body, answered))

    def notify(self, peer: int, message: Message, body: Any = b"") -> None:
        target = self.net.boxes[peer]
        self._post(target, _Request(self.net, self, target, message, body, None))

    def _post(self, target: Box, request: _Request) -> None:
        kind = type(request.message)

        def deliver() -> None:
            if not (self.is_alive and target.is_alive) or kind not in target.handlers:
                return
            self.net.delivered.append(kind.__name__)
            try:
                target.handlers[kind](request)
            except DanubeError as error:
                request.fail(error)

        self.net.queue.append((self.index, deliver))

    def answer(self, source: Box, on_reply: Any, reply: Reply) -> None:
        def deliver() -> None:
            if self.is_alive and source.is_alive:
                self.net.delivered.append("reply")
                on_reply(reply)

        self.net.queue.append((source.index, deliver))

    def die(self) -> None:
        """Nothing that was said to it or by it arrives; who waits for it hears so."""
        self.is_alive = False
        for box in self.net.boxes.values():
            for target, on_reply in list(box.open_calls.values()):
                if box.is_alive and target is self:
                    number = next(n for n, call in box.open_calls.items() if call[1] is on_reply)
                    del box.open_calls[number]
                    self.net.queue.append((self.index, partial(_hear_of_death, box, on_reply)))


def _hear_of_death(box: Box, on_reply: Any) -> None:
    if box.is_alive:
        on_reply(Reply(error=Unavailable("a process is down or was restarted; try again")))


class Coordinator:
    """The parts of one that have to do with moves."""

    def __init__(self, broker: MoveRig) -> None:
        self.broker = broker
        self.clock = SystemClock()
        self.box = Box(broker.net, COORDINATOR)
        self.topics = TopicDirectory(
            broker.store, log_count=broker.log_count, partitions_per_topic_max=10
        )
        self.placement = Placement(self.box, self.topics, self)  # type: ignore[arg-type]
        self.mover = Mover(self.box, self.topics, self.placement, self)  # type: ignore[arg-type]

    def ready_epoch(self, worker: int) -> int:
        return self.broker.epochs[worker] if worker in self.broker.workers else 0

    def process_of(self, log_id: int) -> int:
        return 1 + log_id % self.broker.worker_count

    @property
    def processes(self) -> Processes:
        return Processes.with_workers(self.broker.worker_count)


class MoveRig:
    """A broker of `worker_count` workers with two logs."""

    log_count = 2

    def __init__(self, directory: Path, *, worker_count: int = 2, **settings: Any) -> None:
        self.directory, self.settings = directory, settings
        self.worker_count = worker_count
        self.net = Net()
        self.store = MemoryStore(SystemClock())
        self.epochs = dict.fromkeys(range(worker_count + 1), 1)
        self.workers: dict[int, Rig] = {}
        self.coordinator = Coordinator(self)
        for index in range(1, worker_count + 1):
            self._start(index)
        self.settle()

    def _start(self, index: int) -> None:
        logs = [log for log in range(self.log_count) if log % self.worker_count == index - 1]
        box = Box(self.net, index)
        self.workers[index] = Rig(
            self.directory, mailbox=box, logs=logs, process_index=index,
            worker_count=self.worker_count, rebalance="off", **self.settings,
        )  # fmt: skip

    def restart_all(self, worker_count: int) -> None:
        """Everything dies, and another number of workers takes the logs."""
        for index in list(self.workers):
            self._kill(index)
        self.coordinator.box.die()
        self.worker_count = worker_count
        self.epochs = dict.fromkeys(range(worker_count + 1), 1)
        self.coordinator = Coordinator(self)
        for index in range(1, worker_count + 1):
            self._start(index)
        self.settle()

    def _kill(self, index: int) -> None:
        rig = self.workers.pop(index)
        self.net.boxes[index].die()
        rig.crash()

    def crash(self, index: int, *, heard: bool = False) -> None:
        """It dies, and its successor is there at once. `heard`: what it has said still arrives."""
        if heard:
            self.net.hear(index)
        if index == COORDINATOR:
            self.coordinator.box.die()
            self.coordinator = Coordinator(self)
        else:
            self._kill(index)
            self._start(index)
        self.epochs[index] += 1
        for other, box in list(self.net.boxes.items()):
            if other != index and box.is_alive:
                for watcher in box.epoch_watchers:
                    watcher(index, self.epochs[index])

    # ------------------------------------------------------------ going on

    def turn(self) -> None:
        """Everybody does what there is to do; no message moves."""
        for rig in self.workers.values():
            rig.worker.do_work()
        self.coordinator.placement.do_work(self.coordinator.clock.monotonic_ns())

    def _is_quiet(self) -> bool:
        waits = any(
            journal.busy or rig.worker.arrivals.is_busy or rig.worker.departures.is_busy
            for rig in self.workers.values()
            for journal in rig.worker.state.journals.values()
        )
        queues = self.coordinator.placement._queues.values()
        return not waits and not self.net.queue and not any(queue.ids for queue in queues)

    def step(self) -> bool:
        """One message is delivered; False if there is none and there will be none."""
        for _ in range(TURNS_MAX):
            if self.net.step():
                self.turn()
                return True
            self.turn()
            if self._is_quiet():
                return False
        raise AssertionError("the workers never come to rest")

    def settle(self) -> None:
        """Until nothing is on its way."""
        for _ in range(TURNS_MAX):
            if not self.step():
                return
        raise AssertionError(f"it goes on for ever: {self.net.delivered[-20:]}")

    # ------------------------------------------------------------ what is asked of it

    def create(self, **options: Any) -> Any:
        """A topic of one partition, in log 0; its partition record."""
        record = self.coordinator.topics.create(TOPIC, TopicOptions(**options), 1)
        self.coordinator.topics.commit()
        (partition,) = self.coordinator.topics.partitions(record)
        self.place(partition)
        return partition

    def place(self, partition: Any) -> None:
        """Wait until its worker has it."""
        done: list[Any] = []
        self.coordinator.placement.when_placed([partition], 1 << 62, done.append)
        self.settle()
        assert done == [None]

    def partition(self) -> Any:
        """What the metadata says."""
        directory = self.coordinator.topics
        (partition,) = directory.partitions(directory.require(TOPIC))
        return partition

    def start_move(self, log_id: int) -> list[Any]:
        """Begin a move; the list gets (value, error) when it is over."""
        outcome: list[Any] = []
        self.coordinator.mover.start(
            self.partition(), log_id, lambda value, error: outcome.append((value, error))
        )
        return outcome

    def owner(self) -> Rig:
        """The one worker that serves the partition, which is the one that the metadata names."""
        partition = self.partition()
        serving = []
        for index, rig in self.workers.items():
            known = rig.worker.state.catalog.by_id.get(partition.partition_id)
            if known is not None:
                assert not known.moving, f"worker {index} does not know whose it is"
                serving.append(index)
                log_id = rig.worker.state.logs[known.log_slot].log_id
                assert log_id == partition.log_id, "it serves from another log"
            assert not rig.worker.state.catalog.others
        assert serving == [self.coordinator.process_of(partition.log_id)]
        return self.workers[serving[0]]

    def stop(self) -> None:
        """Orderly."""
        for rig in self.workers.values():
            rig.stop()
