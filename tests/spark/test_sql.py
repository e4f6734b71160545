"""`danube-fast sql`: topics in quotes, only the columns that a statement needs, rows as text or JSON; errors in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from danube_fast.cli.stored.sql import _plain
from danube_fast.demo.analysis import DELAYS_SQL
from danube_fast.errors import InvalidArgument
from danube_fast.spark import statement
from danube_fast.spark.statement import with_views
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import keep_for_ever

LEFT, RIGHT = "/default/left", "/default/right"
COUNT = 1000


@pytest.fixture(scope="module")
def filled(broker: Broker) -> Broker:
    """The broker with two topics."""
    with broker.client() as client:
        for topic in (LEFT, RIGHT):
            keep_for_ever(client, topic)
            with client.producer(topic) as producer:
                numbers = range(COUNT)
                producer.send_many(
                    [b"%d" % i for i in numbers], keys=[b"k%d" % (i % 5) for i in numbers]
                )
    return broker


def test_topics_become_views() -> None:
    text, views = with_views(
        "select * FROM '/a/b' x join `/a/c` y on x.key = y.key where z = '/a/d'"
    )
    assert list(views.values()) == ["/a/b", "/a/c"]
    assert "'/a/d'" in text and "/a/b" not in text
    with pytest.raises(InvalidArgument, match="not a topic name"):
        with_views("select * from '/a'")


@pytest.mark.parametrize(
    "text",
    [
        "select \"copied from '/a/d'\" s from '/a/b'",
        "select 1 from '/a/b' -- from '/a/d'",
        "select 1 /* from '/a/d'\n join '/a/e' */ from '/a/b'",
        "select 1 from '/a/b' where x = concat('copied from ', '\\'/a/d\\'')",
        "select `from '/a/d'` from '/a/b'",
    ],
)
def test_texts_and_comments_stay_as_they_are(text: str) -> None:
    written, views = with_views(text)
    (view,) = views
    assert views[view] == "/a/b"
    assert written == text.replace("'/a/b'", view)


@pytest.mark.parametrize(
    ("text", "rows", "columns"),
    [
        (f"select count(*) from '{LEFT}'", [(COUNT,)], "offset"),
        (f"select count(*) from '{LEFT}' where offset >= 990", [(10,)], "offset"),
        (
            f"select cast(key as string), count(*) from '{LEFT}' where offset < 10 group by 1 order by 1",
            [(f"k{i}", 2) for i in range(5)],
            "offset,key",
        ),
        (
            (
                f"select l.offset, cast(r.payload as string) from '{LEFT}' l join '{RIGHT}' r "
                "on l.offset = r.offset where l.offset < 2 order by 1"
            ),
            [(0, "0"), (1, "1")],
            "offset,payload",
        ),
        (
            (
                f"with t as (select * from '{LEFT}') select count(*) from t where offset < 10 "
                "union all select count(*) from t where offset >= 10"
            ),
            [(10,), (990,)],
            None,
        ),
        (
            f"select count(*) from '{LEFT}' where offset > (select max(offset) - 3 from '{RIGHT}')",
            [(3,)],
            None,
        ),
        (f"select count(*) from (select distinct key from '{LEFT}')", [(5,)], "key"),
        # what its result does not need is named, and has to be there
        (f"select count(*) from (select key, payload from '{LEFT}')", [(COUNT,)], "offset"),
        (
            f"select count(*) from '{LEFT}' where key is null or key is not null",
            [(COUNT,)],
            "key",
        ),
        (
            (
                f"with a as (select * from '{LEFT}'), b as (select * from '{RIGHT}') select count(*) from a where "
                "offset < 10 union all select count(*) from a where offset >= 990"
            ),
            [(10,), (10,)],
            None,
        ),
    ],
)
def test_statements(
    spark: Any, filled: Broker, monkeypatch: pytest.MonkeyPatch, text: str, rows: Any, columns: Any
) -> None:
    used: list[Any] = []
    find = statement._used_columns

    def noted(frame: Any, view_count: int) -> Any:
        used.append(find(frame, view_count))
        return used[-1]

    monkeypatch.setattr(statement, "_used_columns", noted)
    with statement.statement(spark, text, {"url": filled.url}, once=True) as frame:
        found = frame.collect()
    assert [tuple(row) for row in found] == rows
    assert used == [None if columns is None else tuple(columns.split(","))]
    assert not [view for view in spark.catalog.listTables() if view.name.startswith("danube_topic")]


def test_delays_of_an_hour_in_which_all_flights_were_cancelled(spark: Any, broker: Broker) -> None:
    """As in one hour of the demo's data set."""
    topic = "/default/cancelled"
    row = "2013,7,27,{},106,{},NA,245,NA,US,1632,NA,EWR,CLT,NA,529,{},6,2013-07-27T05:00:00Z"
    with broker.client() as client:
        keep_for_ever(client, topic)
        with client.producer(topic) as producer:
            for values in (("NA", "NA", 1), (517, 2, 5), (533, 4, 5)):
                producer.send(row.format(*values).encode(), key="US")
    text = DELAYS_SQL.replace("/default/flights", topic)
    with statement.statement(spark, text, {"url": broker.url}, once=True) as frame:
        assert [tuple(each) for each in frame.collect()] == [(5, 3.0)]


def test_a_frame_of_a_statement_serves_many_queries(spark: Any, filled: Broker) -> None:
    text = f"select * from '{LEFT}'"
    with statement.statement(spark, text, {"url": filled.url}) as frame:
        assert frame.filter("offset < 10").count() == 10
        assert frame.count() == COUNT


def test_what_is_read_is_held_until_the_end(spark: Any, filled: Broker, store_folder: Path) -> None:
    def holds() -> list[str]:
        return [path.name for path in (store_folder / "holds").glob("*")]

    before = holds()
    for options in ({"url": filled.url}, {"store": f"file://{store_folder}"}):
        with statement.statement(spark, f"select count(*) from '{LEFT}'", options) as frame:
            assert frame.collect()[0][0] == COUNT
            assert len(holds()) == len(before) + 1
        assert holds() == before


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "danube_fast.cli.main", "sql", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


def test_the_command(filled: Broker, tmp_path: Path) -> None:
    query = f"select offset, key, payload, event_time from '{LEFT}' order by offset"
    done = _run(tmp_path, query, "--url", filled.url, "--limit", "2", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"offset": i, "key": f"k{i}", "payload": str(i), "event_time": None} for i in range(2)
    ]
    assert done.stderr == "there are more rows: these are the first 2; --limit N shows more\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("select 1", 2, "names no topic"),
        ("select * from '/default/nothing'", 3, "/default/nothing does not exist"),
        (f"select nothing from '{LEFT}'", 2, "nothing"),
        (f"selec offset from '{LEFT}'", 2, "PARSE_SYNTAX_ERROR"),
        (f"select double('NA' || cast(key as string)) from '{LEFT}'", 2, "'NAk0' of the type"),
    ],
)
def test_errors_are_one_sentence(
    filled: Broker, tmp_path: Path, text: str, code: int, words: str
) -> None:
    done = _run(tmp_path, text, "--url", filled.url)
    assert words in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr and "\tat " not in done.stderr
    assert len(done.stderr.splitlines()) <= 4, done.stderr
    assert done.returncode == code, done.stderr


def test_bytes_that_are_no_text_are_told_from_text() -> None:
    shown = [_plain(each) for each in (b"text", b"\xff\x00", b"base64:/wA=", bytearray(b"base64"))]
    assert shown == ["text", "base64:/wA=", "base64:YmFzZTY0Oi93QT0=", "base64"]
