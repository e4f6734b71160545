"""Commands as a shell or a supervisor runs them: closed streams, SIGTERM, wrong words, against a real broker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import danube_fast
from tests.crash.rig import Server
from tests.workers.broker import Broker, wait_until

PROGRAM = [sys.executable, "-m", "danube_fast.cli.main"]
TOPIC = "/default/streams"
WAIT_SECONDS = 60
TERMINATED = 143
COUNT = 20_000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Server(tmp_path_factory.mktemp("streams") / "data", workers=1) as started:
        with danube_fast.connect(started.url) as client, client.producer(TOPIC) as producer:
            producer.send_many([b"x"] * COUNT)
            producer.flush(timeout=WAIT_SECONDS)
        yield started.url


def closed(streams: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with these streams closed, as a shell does it."""
    line = f'exec "$@" {streams}'
    return subprocess.run(
        ["sh", "-c", line, "sh", *PROGRAM, *words],
        capture_output=True, text=True, timeout=WAIT_SECONDS, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", [["topics", "list"], ["produce", TOPIC, "-m", "x"]])
def test_a_command_without_streams_does_its_work(url: str, streams: str, words: list[str]) -> None:
    result = closed(streams, *words, "--url", url)
    assert (result.returncode, result.stderr) == (0, "")
    assert (TOPIC in result.stdout) == (">&-" not in streams.replace("2>&-", ""))


def test_input_that_is_closed_is_empty(url: str) -> None:
    result = closed("<&-", "produce", TOPIC, "--file", "-", "--url", url)
    assert "Traceback" not in result.stderr
    assert result.returncode == 0 and result.stdout == "nothing to send\n"


def test_what_fails_without_streams_has_its_exit_code() -> None:
    result = closed("2>&-", "topics", "list", "--url", "danube://127.0.0.1:1")
    assert result.returncode == 5


def test_no_file_of_a_server_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    words = ["serve", "--data-dir", str(tmp_path), "--listen", "127.0.0.1:0", "-o", "json"]
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", *PROGRAM, *words], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        for pid in (ready["pid"], ready["coordinator_pid"], *ready["worker_pids"]):
            for number in (0, 2):
                assert os.readlink(f"/proc/{pid}/fd/{number}") == os.devnull
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0


def test_the_port_of_a_worker_is_named_as_such(url: str) -> None:
    host, _, port = url.rpartition(":")
    result = closed("", "topics", "list", "--url", f"{host}:{int(port) + 2}")
    assert result.returncode == 2
    assert "this is the port of a worker" in result.stderr
    assert "the address that `danube-fast serve` prints" in result.stderr


@pytest.mark.parametrize("rate", ["nan", "inf", "-1"])
def test_a_rate_is_a_number_above_0(url: str, rate: str) -> None:
    result = closed("", "produce", TOPIC, "-m", "x", "--rate", rate, "--url", url)
    assert result.returncode == 2 and "a number above 0" in result.stderr


def test_a_payload_that_was_forgotten_is_no_tombstone(url: str) -> None:
    words = ["produce", TOPIC, "--input", "json", "--url", url, "-m"]
    result = closed("", *words, '{"key": "k", "paylaod": "x"}')
    assert result.returncode == 2
    assert "line 1 has no field 'payload' (its fields: key, paylaod)" in result.stderr
    assert closed("", *words, '{"key": "k", "payload": null}').returncode == 0


def test_seek_takes_a_time_ago(url: str) -> None:
    with danube_fast.connect(url) as client:
        client.consumer(TOPIC, subscription="ago", initial_position="latest").close()
        result = closed("", "subscriptions", "seek", TOPIC, "ago", "-10m", "--yes", "--url", url)
        assert (result.returncode, result.stderr) == (0, "")
        assert client.admin.describe_subscription(TOPIC, "ago")["lag_messages"] >= COUNT
    result = closed("", "subscriptions", "seek", TOPIC, "ago", "-10m", "--ye", "--url", url)
    assert result.returncode == 2


def test_a_server_that_cannot_start_says_so_in_json(tmp_path: Path) -> None:
    with Broker(tmp_path / "data", fake="", workers=1) as first:
        first.wait_ready()
        result = closed(
            "", "serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "-o", "json"
        )  # fmt: skip
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1
    assert last.startswith('{"error":{"code":"FailedPrecondition","message":"the data directory')


def test_sigterm_acknowledges_what_was_printed(url: str) -> None:
    with danube_fast.connect(url) as client:

        def lag() -> int:
            return int(client.admin.describe_subscription(TOPIC, "term")["lag_messages"])

        client.consumer(TOPIC, subscription="term", initial_position="earliest").close()
        before = lag()
        process = subprocess.Popen(
            [*PROGRAM, "consume", TOPIC, "--subscription", "term", "--url", url],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        for _ in range(COUNT):
            process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        printed = COUNT + process.stdout.read().count("\n")
        told = process.stderr.read()
        process.wait(timeout=WAIT_SECONDS)
        process.stdout.close()
        process.stderr.close()
        assert process.returncode == TERMINATED
        found = re.match(r"interrupted: ([0-9,]+) messages .* acknowledged", told)
        assert found, told
        acked = int(found[1].replace(",", ""))
        assert 0 < acked <= printed, "what was being printed comes again"

        wait_until("the acks", lambda: lag() == before - acked)
