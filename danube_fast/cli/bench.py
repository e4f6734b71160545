"""`danube-fast bench`: the load-test harness."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from danube_fast.cli.options import OutputForm, OutputOption, command, seconds_option
from danube_fast.cli.output import note, print_result

__all__ = ["bench"]

TopicDurability = Literal["memory", "os", "fsync", "non_reliable"]
SecondsOption = Annotated[float | None, seconds_option("About how long, instead.", 0.1)]
PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE.svg", help="Bars of the rates as an SVG.")
]
SpinOption = Annotated[
    int | None,
    typer.Option(min=0, metavar="US", help="Workers and clients look on so long, then sleep."),
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Compare with the floors; exit 1 on a miss.")
]
LogOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Log to fill, recover or read back from.")
]
PeersOption = Annotated[
    str | None,
    typer.Option(metavar="NAME,...|all", help="Other systems under the same load, side by side."),
]
SweepOption = Annotated[
    str | None,
    typer.Option(metavar="SETTING=V1,V2,...", help="The same load on brokers set differently."),
]
PageOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE.md", help="Page whose table of --peers is written anew; repeatable."
    ),
]


@command(
    "danube-fast bench throughput --durability os --messages 5000000",
    "danube-fast bench latency --rate 1000 --seconds 10 --output json",
    "danube-fast bench --check --plot floors.svg",
    "danube-fast bench --peers all --runs 5",
    "danube-fast bench latency --transport shm --sweep spin_us=0,50,200 --runs 5",
)
def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKLOAD ...]", help="Which to run (default: all)."),
    ] = None,
    check: CheckOption = False,
    transport: Annotated[
        str | None,
        typer.Option(
            metavar="zmq|shm|tcp", help="How clients reach the broker (zmq; --peers: both)."
        ),
    ] = None,
    durability: Annotated[TopicDurability | None, typer.Option(help="Of the topics.")] = None,
    message_bytes: Annotated[int | None, typer.Option(min=1, metavar="N", help="Size.")] = None,
    messages: Annotated[int | None, typer.Option(min=1, metavar="N", help="How many.")] = None,
    seconds: SecondsOption = None,
    producers: Annotated[
        int | None, typer.Option(min=1, max=256, metavar="N", help="Producer processes.")
    ] = None,
    consumers: Annotated[
        int | None, typer.Option(min=1, max=256, metavar="N", help="Each receives everything.")
    ] = None,
    topics: Annotated[int | None, typer.Option(min=1, metavar="N", help="Topics.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, metavar="N", help="Clients.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="MSGS_PER_S", help="Open loop; without, as fast as it goes."),
    ] = None,
    log_bytes: LogOption = None,
    spin_us: SpinOption = None,
    runs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Medians of so many (--check: 5).")
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A broker that is there (default: its own).")
    ] = None,
    plot: PlotOption = None,
    peers: PeersOption = None,
    sweep: SweepOption = None,
    page: PageOption = None,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Measure a broker under load, and verify that everything arrived exactly as sent.

    Starts a broker with two workers in a temporary directory unless --url names one. Workloads: throughput, messages,
    topics, publishers, fanout, merge, sustained (beside bare writes of the disk), lapped, shared, key-shared,
    failover, acks, promotion, delayed (--seconds: the span of the due times), unacked, crowd, publish-latency,
    latency, requests, isolation, auth, handshakes, policy, answers, ready, recovery, idle, readback, soak,
    history-upload, -publish, -lapped, -seam, -offset, -turns, -upload-s3, -offset-s3; raw ZeroMQ: reference, echo, curve.
    --peers compares other systems, in topics and requests when named (docs/peers.md); --sweep sets brokers differently.
    """
    changes: dict[str, Any] = {
        "transport": transport, "message_bytes": message_bytes, "messages": messages,
        "seconds": seconds, "producers": producers, "consumers": consumers, "topics": topics,
        "clients": clients, "rate": rate, "log_bytes": log_bytes, "spin_us": spin_us,
        "durability": durability,
    }  # fmt: skip
    given = {name: value for name, value in changes.items() if value is not None}
    from danube_fast.bench import command  # loads the kernels; --help must not wait for them
    from danube_fast.bench.peers.beside import beside
    from danube_fast.bench.sweep import in_turns

    choices = command.Choices(
        workloads or [], given, runs, url, plot, output is OutputForm.JSON, peers, sweep, page or ()
    )
    measure = command.measure if peers is None else beside
    measure = measure if sweep is None else in_turns
    emit = functools.partial(print_result, OutputForm.JSON)
    if not (command.check if check else measure)(choices, note, emit):
        raise typer.Exit(1)
