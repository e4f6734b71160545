"""Commands whose standard streams are closed, and those that end by SIGTERM."""

from __future__ import annotations

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


def test_a_file_never_takes_the_place_of_a_stream(tmp_path: Path) -> None:
    result = closed(
        "2>&-", "serve", "--data-dir", str(tmp_path), "--listen", "nowhere.invalid:0", "-o", "json"
    )
    assert result.returncode != 0 and result.stdout == ""


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
