"""A worker that takes assignments and does nothing else, for tests of the processes around it."""

from __future__ import annotations

import sys
from pathlib import Path

import zmq

from danube_fast.broker import messages as m
from danube_fast.broker.answers import PartitionCounts
from danube_fast.net.server import Server
from danube_fast.ring.control import ProcessState
from danube_fast.workers.process.boot import boot
from danube_fast.workers.process.mailbox import Request


def main() -> int:
    booted = boot()
    assigned: dict[int, m.Assignment] = {}

    def assign(request: Request[m.Assign]) -> None:
        for entry in request.message.partitions:
            assigned[entry.partition_id] = entry
        request.reply()

    def unassign(request: Request[m.Unassign]) -> None:
        for partition_id in request.message.partition_ids:
            assigned.pop(partition_id, None)
        request.reply()

    def stats(request: Request[m.PartitionStats]) -> None:
        wanted = [assigned[pid] for pid in request.message.partition_ids or () if pid in assigned]
        request.reply(
            [
                PartitionCounts(
                    partition_id=each.partition_id, topic=each.topic, dispatch=each.dispatch,
                    durability=each.durability, log_id=each.log_id, first_offset=0, end_offset=0,
                    next_offset=0, messages_in=0, bytes_in=0, producers=0, subscriptions=[],
                    readers=0, refusal="",
                )
                for each in wanted
            ]
        )  # fmt: skip

    booted.mailbox.serve(m.Assign, assign)
    booted.mailbox.serve(m.Unassign, unassign)
    booted.mailbox.serve(m.PartitionStats, stats)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    config = booted.config
    server = Server(context, message_bytes_max=1 << 20, handshake_timeout_ms=5000)
    port = server.bind(config.tcp_host, config.tcp_port, config.ipc_endpoint)
    booted.set_state(ProcessState.READY, port)
    poller = zmq.Poller()
    poller.register(booted.mailbox.fileno(), zmq.POLLIN)
    frozen = Path(config.data_dir) / f"freeze-{config.number}"
    while not booted.stop_requested:
        if not frozen.exists():
            booted.heartbeat()
        now_ns = booted.clock.monotonic_ns()
        if not booted.mailbox.do_work(now_ns) and booted.mailbox.prepare_sleep():
            poller.poll(100)
    booted.set_state(ProcessState.STOPPED)
    server.close()
    context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
