"""Runs of one variant: its server, a consumer, a producer, and what their reports add up to."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from danube_fast.bench.load.processes import hear_all
from danube_fast.bench.load.rig import Rig, blank
from danube_fast.bench.peers.adapter import WINDOW_BYTES, Adapter, Variant
from danube_fast.bench.peers.server import HOST, Server, free_port
from danube_fast.bench.plan import Figures, Plan
from danube_fast.bench.workloads.latency import set_latencies
from danube_fast.bench.workloads.requests import converse, set_requests
from danube_fast.errors import Internal

__all__ = ["MESSAGES_MAX", "Bench", "sized"]

_HERE = "danube_fast.bench.peers.roles"
PROBE_MESSAGES = 1000
PROBE_STEP = 20
MESSAGES_MAX = 5_000_000


def sized(run: Callable[[Plan], Figures], plan: Plan, seconds: float) -> Plan:
    """The plan with as many messages as take about so long: found out by runs that grow."""
    messages = PROBE_MESSAGES
    while True:
        rate = run(msgspec.structs.replace(plan, messages=messages)).messages_per_s or 1.0
        wanted = min(max(PROBE_MESSAGES, int(rate * seconds)), MESSAGES_MAX)
        if wanted <= messages * PROBE_STEP:
            return msgspec.structs.replace(plan, messages=wanted)
        messages *= PROBE_STEP


class Bench:
    """One variant with its server up; runs as many plans as wanted."""

    def __init__(self, rig: Rig, adapter: Adapter, variant: Variant, server: Server | None) -> None:
        self._rig = rig
        self._adapter = adapter
        self._variant = variant
        self._server = server
        self._version = adapter.version()

    @classmethod
    @contextlib.contextmanager
    def of(cls, rig: Rig, adapter: Adapter, variant: Variant) -> Iterator[Bench]:
        """Start what the variant needs; end it afterwards."""
        server = adapter.start(rig.folder, variant)
        try:
            yield cls(rig, adapter, variant, server)
        finally:
            if server is not None:
                server.stop()

    def run(self, plan: Plan) -> Figures:
        """One run of a workload that the variant has. Raises what a member failed with."""
        options = self._variant.options | {
            "peer": self._adapter.name,
            "address": self._server.address if self._server else f"{HOST}:{free_port()}",
            "folder": str(self._rig.folder),
            "topic": f"bench-{os.getpid()}-{secrets.token_hex(8)}",
            "topics": plan.topics,
            "is_lossy": self._variant.is_lossy,
            "message_bytes": plan.message_bytes,
            "messages": plan.messages,
            "rate": plan.rate,
            "fd": self._rig.payloads(plan.messages, plan.message_bytes),
        }
        run = self._run_requests if plan.workload == "requests" else self._run
        try:
            return run(plan, options)
        finally:
            self._adapter.sweep(options["topic"])

    def _run(self, plan: Plan, options: dict[str, Any]) -> Figures:
        suffix = "_paced" if plan.workload == "latency" else ""
        with self._rig.crew() as crew:
            members = []
            for name in ("consume", "produce"):  # whoever subscribes late misses what is not kept
                member = crew.start(name, f"{_HERE}:{name}{suffix}", options, [options["fd"]])
                member.hear()
                members.append(member)
            used = self._used()
            for member in members:
                member.tell("go")
            received, sent = hear_all(members)
            figures = self._charged(self._figures(plan, sent, received), used)
            for member in members:
                member.tell("bye")
        return figures

    def _run_requests(self, plan: Plan, options: dict[str, Any]) -> Figures:
        with self._rig.crew() as crew:
            responder = crew.start("responder", f"{_HERE}:reply", options)
            responder.hear()
            responder.tell("go")
            requester = crew.start("requester", f"{_HERE}:ask", options, [options["fd"]])
            requester.hear()
            used = self._used()
            asked, replied = converse(responder, requester)
            figures = self._charged(self._blank(plan), used)
            set_requests(figures, plan, asked, replied)
            for member in crew.members:
                member.tell("bye")
        return figures

    def _used(self) -> float:
        """Processor time of the server up to now."""
        return self._server.cpu_seconds() if self._server else 0.0

    def _charged(self, figures: Figures, used: float) -> Figures:
        """With what a run has cost the server since `used`."""
        if self._server is not None:
            figures.broker_cpu_s = self._server.cpu_seconds() - used
            figures.broker_rss_mb = self._server.resident_mb()
        return figures

    def _blank(self, plan: Plan) -> Figures:
        figures = blank(plan)
        figures.system, figures.version = self._variant.system, self._version
        figures.transport, figures.durability = self._variant.transport, self._variant.durability
        return figures

    def _figures(self, plan: Plan, sent: dict[str, Any], received: dict[str, Any]) -> Figures:
        figures = self._blank(plan)
        figures.client_cpu_s = sent["cpu"] + received["cpu"]
        if plan.workload == "latency":
            set_latencies(figures, plan, sent["times"], received["arrived"])
            faults = received["faults"]
        else:
            if not received["received"]:
                raise Internal(f"{figures.system} delivered nothing")
            seconds = max(received["ended_ns"] - sent["began_ns"], 1) / 1e9
            figures.messages_per_s = received["received"] / seconds
            figures.mb_per_s = figures.messages_per_s * plan.message_bytes / 1e6
            acked_ns = max(sent["acked_ns"] - sent["began_ns"], 1)
            figures.extra["acked_per_s"] = plan.messages / acked_ns * 1e9
            figures.window, figures.client = WINDOW_BYTES, self._variant.client
            faults = received
        for name in ("lost", "duplicated", "corrupted"):
            setattr(figures, name, faults[name])
        return figures
