"""Sizes and durations: written with units, shown with units, raw in JSON."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from danube_fast.broker.subscription.policy import parse_policy
from danube_fast.broker.topics.policy import merge_values
from danube_fast.checks import amount_text, parse_amount
from danube_fast.cli.options import seconds_of
from danube_fast.cli.output import duration_text
from danube_fast.client.values.options import parse_time
from danube_fast.config import load_settings
from danube_fast.errors import InvalidArgument
from danube_fast.testing import Broker
from tests.cli.conftest import Run
from tests.cli.fakes import FakeBroker

TOPIC = "/default/t"
MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("segment_bytes", "64MiB", 64 * MIB),
        ("segment_bytes", "1.5 GiB", 1536 * MIB),
        ("segment_bytes", "1GB", 10**9),
        ("segment_bytes", "4096", 4096),
        ("publish_bytes_per_second", "10MiB", 10 * MIB),
        ("heartbeat_ms", "10s", 10_000),
        ("heartbeat_ms", "500", 500),
        ("retention_seconds_min", "7d", 7 * 86_400),
        ("retention_seconds_min", "1.5h", 5400),
        ("spin_us", "2ms", 2000),
        ("retention_seconds_min", "10m", 600),
        ("retention_seconds_min", "10min", 600),
        ("producers_max", "5", 5),
        ("producers_max", "5s", None),
        ("publish_messages_per_second", "5s", None),
        ("segment_bytes", "10s", None),
        ("heartbeat_ms", "soon", None),
    ],
)
def test_amounts_are_written_with_units(name: str, text: str, value: int | None) -> None:
    assert parse_amount(name, text) == value
    if value is not None:
        assert parse_amount(name, amount_text(name, value).removesuffix("/s")) == value


def test_a_part_of_a_unit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no whole number of ms"):
        parse_amount("heartbeat_ms", "10us")


SPANS = {"90s": 90, "10m": 600, "10min": 600, "1.5h": 5400, "2 d": 172_800, "3600": 3600}


@pytest.mark.parametrize(("text", "seconds"), SPANS.items())
def test_all_options_that_are_a_time_take_them(
    run: Run, fake: FakeBroker, text: str, seconds: int
) -> None:
    run("security", "audit", "--since", text)
    assert fake.asked[-1][1]["since_seconds"] == seconds
    run("history", "flush", TOPIC, "--hold-seconds", text)
    assert fake.asked[-1][1]["hold_seconds"] == seconds
    run("security", "keys", "add", "ann", "--uid", "7", "--expires-seconds", text)
    assert fake.asked[-1][1]["expires_seconds"] == seconds
    assert seconds_of("--timeout", text) == seconds
    if not text.isdecimal():
        assert parse_time(f"-{text}") == dt.timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["soon", "10 years", "-1", "0.5", "1ns", "nan", "inf", "9" * 400])
def test_what_is_no_time_is_a_usage_error(run: Run, fake: FakeBroker, text: str) -> None:
    result = run("history", "flush", TOPIC, f"--hold-seconds={text}")
    assert result.code == 2 and "is no time here; give whole seconds" in result.err
    assert fake.asked == []


def test_a_key_ends_within_a_time_that_is_told(run: Run, fake: FakeBroker) -> None:
    words = "security", "keys", "add", "ann", "--uid", "7", "--expires-seconds"
    result = run(*words, "99999999999d")
    assert result.code == 2 and "and at most 11574d" in " ".join(result.err.split())
    assert run(*words, "11574d").code == 0


def test_what_is_no_value_of_a_quota_is_told_with_one(run: Run, fake: FakeBroker) -> None:
    result = run("namespaces", "set-quota", "shop", "namespace_topics_max")
    assert result.code == 2 and "such as namespace_topics_max=100" in " ".join(result.err.split())


def test_a_time_ago_has_its_unit() -> None:
    for text in ("-10", "-", "-soon", "-inf", f"-{'9' * 40}d"):
        assert parse_time(text) is None


def test_settings_and_policies_take_them(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text('segment_bytes = "64MiB"\nworkers = 3\n')
    environment = {"DANUBE_SESSION_TIMEOUT_MS": "10s"}
    settings = load_settings({"message_bytes_max": "1MiB"}, environment, file).settings
    found = settings.segment_bytes, settings.session_timeout_ms, settings.message_bytes_max
    assert found == (64 * MIB, 10_000, MIB)
    with pytest.raises(InvalidArgument, match="or written as 64MiB"):
        load_settings(None, {"DANUBE_SEGMENT_BYTES": "much"})
    values = merge_values({}, {"message_ttl_ms": "10s", "backlog_bytes_max": "1GiB"})
    assert values == {"message_ttl_ms": 10_000, "backlog_bytes_max": 1024 * MIB}
    assert parse_policy({"ack_timeout_ms": "1min"}).ack_timeout_ms == 60_000


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.0004, "0.4 ms"), (0.25, "250 ms"), (3.648653985, "3.65 s"),
        (60, "1 min"), (3725, "1 h 2 min"), (180_000, "2 d 2 h"),
    ],
)  # fmt: skip
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


STATUS: dict[str, Any] = {
    "lag_messages": 12, "lag_seconds": 3.648653985, "log_bytes": 5 * MIB, "ack_timeout_ms": 30_000,
    "worker_loads": [0.001, 0.0],
}  # fmt: skip


def test_numbers_have_units_for_people_and_none_in_json(run: Run, fake: FakeBroker) -> None:
    fake.answers["cluster_status"] = STATUS
    lines = [line.split("  ") for line in run("status").out.splitlines()]
    assert {line[0].strip(): line[-1].strip() for line in lines} == {
        "lag messages": "12", "lag time": "3.65 s", "log bytes": "5.0 MiB", "ack timeout": "30 s",
        "worker loads": "0.1 %, 0.0 %",
    }  # fmt: skip
    assert run("status", "-o", "json").json() == STATUS


def test_what_others_have_published_does_not_steer_a_terminal(run: Run, fake: FakeBroker) -> None:
    fake.answers["cluster_status"] = {"fault": "a\nb\x1b[1m\r\x00\x9b ü"}
    (line,) = run("status").out.splitlines()
    assert line.endswith(r"a\nb\x1b[1m\r\x00\x9b ü")
    fault = run("status", "-o", "json").json()["fault"]
    assert fault == fake.answers["cluster_status"]["fault"]


def test_extents_are_for_programs(run: Run, fake: FakeBroker) -> None:
    place = {"partition": TOPIC, "worker": 0, "extents": [[1, 1, 0, -1]]}
    fake.answers["describe_topic"] = {"topic": TOPIC, "placement": [place]}
    assert "EXTENTS" not in run("topics", "describe", TOPIC).out
    assert run("topics", "describe", TOPIC, "-o", "json").json()["placement"] == [place]


def test_a_policy_is_shown_by_the_names_that_one_sets(run: Run) -> None:
    with Broker(workers=1) as broker, broker.client() as client:
        client.admin.create_topic(TOPIC)
        client.admin.set_namespace_policy("default", {"producers_max": 7, "message_ttl_ms": "1h"})
        client.admin.set_topic_policy(TOPIC, {"message_ttl_ms": "10s"})
        out = run("topics", "policy", TOPIC, "--url", broker.url).out
        shown = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
        assert shown["message_ttl_ms"] == ["10", "s", "topic"]
        assert shown["producers_max"] == ["7", "namespace"]
        assert shown["retention_policy"] == ["until_acked", "default"]
        raw = run("topics", "policy", TOPIC, "-o", "json", "--url", broker.url).json()
        assert raw == client.admin.topic_policy(TOPIC) and raw["message_ttl_ms"] == 10_000
        names = run("namespaces", "policy", "default", "--url", broker.url).out
        assert "message_ttl_ms" in names and "1 h" in names
        with pytest.raises(InvalidArgument, match="'a/b' is not the name of a namespace"):
            client.admin.create_namespace("a/b")


def test_topics_are_listed_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from danube_fast.client import admin_client

    monkeypatch.setattr(admin_client, "TOPICS_PER_PAGE", 2)
    with Broker(workers=1) as broker, broker.client() as client:
        names = [f"/default/t{n}" for n in range(5)]
        for name in names:
            client.admin.create_topic(name)
        assert [found["topic"] for found in client.admin.list_topics("default")] == names
        assert [found["topic"] for found in client.admin.list_topics(pattern="*[13]")] == names[
            1::2
        ]


def test_a_failed_write_names_its_file() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "danube_fast.cli.main", "config", "show"],
            stdout=full, stderr=subprocess.PIPE, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert b"/dev/full: No space left on device" in done.stderr
