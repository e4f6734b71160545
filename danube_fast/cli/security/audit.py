"""`danube-fast security audit`: who has changed what, and what was denied."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from danube_fast.cli.broker import Ask, asking
from danube_fast.cli.options import OutputForm, seconds_of
from danube_fast.cli.output import note, print_result, print_table, safe_text

__all__ = ["enter"]

FOLLOW_SECONDS = 1.0
RECORDS_MAX = 1000
VALUE_CHARACTERS_MAX = 60
ARGUMENTS_CHARACTERS_MAX = 160
Row = Mapping[str, Any]


class _Page(NamedTuple):
    """Some records, and whether there are no more yet."""

    records: Sequence[Row]
    is_last: bool


def enter(app: typer.Typer) -> None:
    """Enter the command into the group `security`."""
    asking(
        app, "danube-fast security audit --since 1h --denied",
        "danube-fast security audit --data-dir /srv/danube -o json", name="audit",
    )(audit)  # fmt: skip


def audit(
    ask: Ask,
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back, such as 10min or 7d; 0: all.")] = "1d",
    principal: Annotated[str, typer.Option("--user", "--principal", metavar="USER", help="What this user did.")] = "",
    denied: Annotated[bool, typer.Option("--denied", help="Only what was refused.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    count: Annotated[int, typer.Option("--max", min=1, metavar="N", help="Records at most, the newest.")] = RECORDS_MAX,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", metavar="DIR", help="Read the files of a broker's data directory, without the broker.")] = None,
) -> None:  # fmt: skip
    """Print the audit log: administrative changes with their outcome, and denied actions."""
    seconds = int(seconds_of("--since", since) or 0)
    wanted: dict[str, Any] = {"since_seconds": seconds, "principal": principal, "denied": denied}
    if follow:
        pages = _pages_of(ask, wanted) if data_dir is None else _file_pages(data_dir, **wanted)
        _follow(ask.form, pages, count)
        return
    if data_dir is None:
        found: Sequence[Row] = ask("list_audit", **wanted, limit=count)
    else:
        pages = _file_pages(data_dir, **wanted, ends=True)
        found = [each for page in pages for each in page.records][-count:]
    if ask.form is OutputForm.JSON:
        print_result(ask.form, found)
        return
    ended = {_change_of(each) for each in found if each["event"] == "end"}
    begun = {_change_of(each): each for each in found if each["event"] == "begin"}
    rows = [
        # what was asked for is in the record of the begin
        _row(each, begun.get(_change_of(each), {}) if each["event"] == "end" else each)
        for each in found
        if each["event"] != "begin" or _change_of(each) not in ended
    ]
    print_table(ask.form, rows, "nothing was recorded")


def _change_of(record: Row) -> tuple[str, str]:
    """Name the change that a begin and an end are of."""
    return record.get("process", ""), record.get("request", "")


def _row(record: Row, asked: Row) -> dict[str, Any]:
    """Make a line of the table. `asked`: the record that has the arguments."""
    who = record.get("principal", "")
    proof = record.get("proof", "")
    action = " ".join(
        each
        for each in (
            record.get("action", ""),
            record.get("resource", ""),
            _arguments_text(asked.get("arguments", {}), record.get("resource", "")),
        )
        if each
    )
    outcome = record.get("outcome", "") or {
        "begin": "begun",
        "lost": "not recorded",
        "closed": "closed",
    }.get(record["event"], "")
    times = record.get("count", 1)
    return {
        "time": record.get("time", "").replace("T", " "),
        "who": f"{who} ({proof})" if who and proof else who or proof or "-",
        "from": record.get("address", "") or "-",
        "what": action or "-",
        "outcome": outcome if times == 1 else f"{outcome}, {times:,} times",
    }


def _arguments_text(arguments: Mapping[str, Any], resource: str) -> str:
    """Arguments in brackets, shortened; those that the resource says already are left out."""
    parts = []
    for name, value in arguments.items():
        text = _value_text(value)
        if name != "not_shown" and resource not in (text, f"{name}:{text}"):
            parts.append(f"{name}={_shortened(text, VALUE_CHARACTERS_MAX)}")
    return f"({_shortened(', '.join(parts), ARGUMENTS_CHARACTERS_MAX)})" if parts else ""


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_value_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ",".join(map(_value_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _follow(form: OutputForm, pages: Iterator[_Page], count: int) -> None:
    """Print the newest `count` records, and then all that come, a line each."""
    first: deque[Row] = deque(maxlen=count)
    for page in pages:
        first.extend(page.records)
        if page.is_last:
            _print_lines(form, first)
            break
    for page in pages:
        _print_lines(form, page.records)


def _print_lines(form: OutputForm, records: Iterable[Row]) -> None:
    for record in records:
        line = None
        if form is not OutputForm.JSON:
            line = "  ".join(safe_text(str(each)) for each in _row(record, record).values())
        print_result(form, record, line)


def _pages_of(ask: Ask, wanted: dict[str, Any]) -> Iterator[_Page]:
    """Ask the broker for page after page, for ever."""
    from threading import Event

    with ask.connect() as client:
        after: str | None = None
        while True:
            page = client.admin.call("list_audit", **wanted, **({"after": after} if after else {}))
            yield _Page(page["records"], page["is_last"])
            after = page["after"]
            if page["is_last"]:
                Event().wait(FOLLOW_SECONDS)


def _file_pages(
    data_dir: Path, *, since_seconds: int, principal: str, denied: bool, ends: bool = False
) -> Iterator[_Page]:
    """Read page after page of the files, for ever or until the end."""
    from threading import Event

    from danube_fast.clock import SystemClock
    from danube_fast.errors import NotFound
    from danube_fast.security.audit_files import chosen, read_page, since_text, start_at

    folder = data_dir / "audit"
    if not folder.is_dir():
        raise NotFound(f"there is no audit log in {folder}; name the data directory of a broker")
    since = since_text(SystemClock().wall_ns(), since_seconds)
    cursor, damaged = start_at(folder, since) if since else "", 0
    while True:
        page = read_page(folder, cursor)
        cursor, damaged = page.cursor, damaged + page.damaged
        records = chosen(page.records, since=since, principal=principal, denied=denied)
        yield _Page(records, page.is_last)
        if page.is_last and ends:
            break
        if page.is_last:
            Event().wait(FOLLOW_SECONDS)
    if damaged:
        note(f"{damaged} lines cannot be read: a kill or a full disk has cut them")
