"""`danube-fast doctor`: looks at this host, or at a running broker, and says what to change."""

from __future__ import annotations

import os
from statistics import median
from typing import Annotated, Any

import typer

from danube_fast.cli import exposure
from danube_fast.cli.broker import connect
from danube_fast.cli.host import Finding, Verdict, examine
from danube_fast.cli.options import (
    ConfigOption,
    DataDirOption,
    OutputForm,
    OutputOption,
    command,
)
from danube_fast.cli.output import print_result
from danube_fast.clock import SystemClock
from danube_fast.errors import DanubeError
from danube_fast.types import AUTH_NONE_TEXT

__all__ = ["doctor"]

ROUND_TRIPS = 5
ROUND_TRIP_SLOW_MS = 50.0
_MARKS = {Verdict.OK: "ok", Verdict.WARNING: "warning", Verdict.FAILURE: "FAILURE"}


@command(
    "danube-fast doctor --data-dir /srv/danube", "danube-fast doctor --url danube://127.0.0.1:6650"
)
def doctor(
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Look at this running broker instead.")
    ] = None,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Check this host, or with --url a running broker; exit code 1 if something must change."""
    if url is not None:
        findings = _examine_broker(url)
    else:
        from danube_fast.config import load_settings

        settings = load_settings({"data_dir": data_dir}, os.environ, config).settings
        findings = list(examine(settings.data_dir))
        findings += exposure.addresses(
            settings.auth, settings.listen, settings.admin,
            tls=bool(settings.tls_certificate), sign_on=settings.sign_on,
        )  # fmt: skip
        findings += exposure.files(settings)
        findings += exposure.named_files(settings, SystemClock().wall_ns())
    result = [finding._asdict() for finding in findings]
    print_result(output, result, "\n".join(_lines(findings)))
    if any(finding.verdict is Verdict.FAILURE for finding in findings):
        raise typer.Exit(1)


def _lines(findings: list[Finding]) -> list[str]:
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.verdict]:8} {finding.check:{width}}  {finding.seen}")
        if finding.advice:
            section = f" (tuning.md: {finding.section})" if finding.section else ""
            lines.append(f"{'':8} {'':{width}}  -> {finding.advice}{section}")
    return lines


def _examine_broker(url: str) -> list[Finding]:
    """Ask a broker about itself, and time its answers."""
    clock = SystemClock()
    times_ms = []
    with connect(url) as client:
        status: Any = {}
        for _ in range(ROUND_TRIPS):
            began_ns = clock.monotonic_ns()
            status = client.admin.cluster_status()
            times_ms.append((clock.monotonic_ns() - began_ns) / 1_000_000)
        lagging = _lagging(client)
        exposed = list(exposure.records(client, status, clock.wall_ns()))
    middle = median(times_ms)
    slow = middle > ROUND_TRIP_SLOW_MS
    advice = "look at the load of its host with `danube-fast status`" if slow else ""
    findings = [
        Finding(
            "round trip",
            Verdict.WARNING if slow else Verdict.OK,
            f"{middle:.1f} ms (median of {ROUND_TRIPS})",
            advice,
        )
    ]
    if auth := status.get("auth"):
        findings.append(_auth(auth))
    findings += exposed
    if (audit := status.get("audit", "off")) not in ("off", "on"):
        advice = "administrative changes are refused until it can: make room, or look at its folder"
        findings.append(Finding("audit log", Verdict.FAILURE, f"not written: {audit}", advice))
    if fault := status.get("audit_topic_fault"):
        advice = "its records are in the files of the audit log, and come when it takes them: repair what is said"
        findings.append(Finding("/system/audit", Verdict.WARNING, f"waits: {fault}", advice))
    findings += [_process(process) for process in status.get("processes", [])]
    if status.get("history"):
        findings.append(_history(status["history"]))
    return findings + lagging


def _auth(auth: str) -> Finding:
    if auth == "none":
        return Finding("auth", Verdict.OK, AUTH_NONE_TEXT)
    return Finding("auth", Verdict.OK, f"{auth}: clients prove who they are")


def _history(history: dict[str, Any]) -> Finding:
    lag = f"{history['lag_bytes']} bytes and {history['lag_seconds']} s behind"
    seen = f"{history['store']}, {lag}"
    if history["fault"]:
        return Finding("history", Verdict.FAILURE, seen, history["fault"])
    return Finding("history", Verdict.OK, seen)


def _process(process: dict[str, Any]) -> Finding:
    name = str(process.get("name", process.get("process", "?")))
    state, restarts = str(process.get("state", "?")), int(process.get("restarts", 0))
    seen = f"{state}, pid {process.get('pid')}, {restarts} restarts"
    if state.lower() != "ready":
        advice = "wait a moment; if it stays so, read the broker's log"
        return Finding(name, Verdict.FAILURE, seen, advice)
    steps = [str(process.get("fault", ""))]
    if restarts:
        steps.append("read the broker's log for why it died")
    if any(steps):
        return Finding(name, Verdict.WARNING, seen, "; besides, ".join(filter(None, steps)))
    return Finding(name, Verdict.OK, seen)


def _lagging(client: Any) -> list[Finding]:
    """Subscriptions that stand still although there is something to deliver."""
    findings = []
    for topic in client.admin.list_topics():
        name = topic["topic"]
        try:
            subscriptions = client.admin.list_subscriptions(topic=name)
        except DanubeError as error:
            findings.append(Finding(name, Verdict.FAILURE, str(error)))
            continue
        for entry in subscriptions:
            if entry["lag_messages"] and not entry["consumers"]:
                findings.append(
                    Finding(
                        f"{name} {entry['subscription']}",
                        Verdict.WARNING,
                        f"{entry['lag_messages']} messages wait and no consumer is connected",
                        "start its consumer, or delete it: it keeps the log from being trimmed",
                        "Disk",
                    )
                )
    return findings
