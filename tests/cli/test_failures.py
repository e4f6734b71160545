"""What a person or a program hears when a command fails: the cause, what was typed, how to go on."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.cli import broker as seam
from danube_fast.errors import ResourceExhausted, Unavailable
from danube_fast.testing import Broker
from tests.cli.conftest import Run
from tests.cli.fakes import FakeBroker, FakeProducer

TOPIC = "/default/t"
LIBRARY_WORDS = ("Input should", "Value error", "Expected `", "parse string", "METAVAR")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("topics create /default/x --partitions x", "--partitions 'x' is not a whole number"),
        ("topics create /default/x --partitions -1", "--partitions '-1' is too small: at least 0"),
        ("consume /default/x --subscription s --timeout soon", "--timeout 'soon' is not a number"),
        ("consume /default/x --subscription s --type shaerd", "'shaerd' is not one of 'exclusive'"),
        ("consume /default/x --subscription s --from soon", "'soon' is not a position"),
        ("consume /default/x", "missing: --subscription"),
        ("topics describe", "missing: the topic"),
        ("subscriptions skip /default/x s x", "the count 'x' is not a whole number"),
        ("produce /default/x -m a --rate fast", "--rate 'fast' is not a number"),
    ],
)
def test_usage_is_told_in_our_words_with_what_was_typed(
    run: Run, fake: FakeBroker, words: str, told: str
) -> None:
    outcome = run(*words.split())
    assert outcome.code == 2
    assert told in outcome.sentence()
    assert not any(word in outcome.err for word in LIBRARY_WORDS)


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("refused; pass a token= that is good there", "refused; pass a DANUBE_TOKEN_FILE that is good there"),
        ("give sign_on='https://HOST:PORT', too", "give DANUBE_SIGN_ON='https://HOST:PORT', too"),
        ("key_file= and server_key=: one", "DANUBE_KEY_FILE and DANUBE_SERVER_KEY: one"),
        ("its fingerprint, as tls=", "its fingerprint, as DANUBE_TLS"),
        ("pass key_file= or token= (commands: set DANUBE_KEY_FILE)", "set DANUBE_KEY_FILE"),
        ("no value 'tls=x' and my_tls= stay", "no value 'tls=x' and my_tls= stay"),
    ],
)  # fmt: skip
def test_the_way_in_has_the_names_of_commands(
    run: Run, fake: FakeBroker, told: str, shown: str
) -> None:
    fake.answers["describe_topic"] = Unavailable(told)
    assert run("topics", "describe", TOPIC).sentence() == f"danube-fast: {shown}"


@pytest.mark.parametrize("form", [["-o", "json"], ["--output", "json"], ["--output=json"]])
def test_a_failure_in_json_is_json(run: Run, fake: FakeBroker, form: list[str]) -> None:
    fake.answers["describe_topic"] = Unavailable("the broker is away; start it")
    outcome = run("topics", "describe", TOPIC, *form)
    assert outcome.code == 5 and not outcome.out
    assert json.loads(outcome.err) == {
        "error": {"code": "Unavailable", "message": "the broker is away", "remedy": "start it"}
    }
    usage = run("topics", "create", TOPIC, "--partitions", "x", *form)
    assert usage.code == 2
    assert json.loads(usage.err)["error"]["code"] == "InvalidArgument"


def test_the_exit_codes_are_documented(run: Run) -> None:
    text = run("--help").out
    for words in ("2 usage", "3 not found", "4 refused", "5 unreachable", "1 anything else"):
        assert words in text


# ---------------------------------------------------------------- who is there


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_who_does_not_answer_is_told_apart(run: Run, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]

    def answer_like_http() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(64)
            connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer_like_http)
    thread.start()
    http = run("status", "--url", f"danube://127.0.0.1:{port}")
    thread.join()
    refused = run("status", "--url", f"danube://127.0.0.1:{free}")
    unknown = run("status", "--url", "danube://no-such-host.invalid:6650")
    assert "is not a broker but an HTTP server" in http.sentence()
    assert f"nothing listens at 127.0.0.1:{free} (connection refused)" in refused.sentence()
    assert "try again if it is starting again" in refused.sentence()
    assert "the host 'no-such-host.invalid' is unknown" in unknown.sentence()
    assert [http.code, refused.code, unknown.code] == [5, 5, 5]


def test_one_of_several_hosts_is_enough(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]

    def greet() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(64)
            connection.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f")

    thread = threading.Thread(target=greet)
    thread.start()
    seam._try_all(f"danube://127.0.0.1:{free},127.0.0.1:{port}", has_key=False)
    thread.join()
    with pytest.raises(Unavailable, match=f"nothing listens at 127.0.0.1:{free}"):
        seam._try_all(f"danube://127.0.0.1:{free},no-such-host.invalid:1", has_key=False)


def test_a_broker_that_is_back_soon_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator may be starting again: nothing listens at the port for a moment."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    waits: list[float] = []

    with contextlib.ExitStack() as listening:

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                made = listening.enter_context(socket.create_server(("127.0.0.1", port)))
                thread = threading.Thread(target=lambda: made.accept()[0].close())
                thread.start()
                listening.callback(thread.join)

        monkeypatch.setattr("time.sleep", wait)
        with pytest.raises(Unavailable, match="is not a broker but something else"):
            seam._try_all(f"danube://127.0.0.1:{port}", has_key=False)
    assert len(waits) == 2


def test_a_broker_that_asks_for_a_key(
    run: Run, listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names CURVE in its greeting, in whichever pieces that comes; a client with a key goes on."""
    port = listener.getsockname()[1]
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)

    def greet() -> None:
        connection, _ = listener.accept()
        with connection:
            for at in (0, 10, 11, 15):
                connection.sendall(greeting[at : {0: 10, 10: 11, 11: 15}.get(at)])
                connection.settimeout(10)
                connection.recv(64) if not at else None

    thread = threading.Thread(target=greet)
    thread.start()
    outcome = run("status", "--url", f"danube://127.0.0.1:{port}")
    thread.join()
    assert outcome.code == 4 and "set DANUBE_SERVER_KEY and DANUBE_KEY_FILE" in outcome.sentence()
    thread = threading.Thread(target=greet)
    thread.start()
    seam._try_all(f"danube://127.0.0.1:{port}", has_key=True)
    thread.join()


# ---------------------------------------------------------------- streams


def test_a_stream_publishes_what_stands_before_a_wrong_line(
    run: Run, fake: FakeBroker, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    lines = [json.dumps({"payload": f"{n}"}) for n in range(20)]
    path.write_text("\n".join([*lines[:16], "no json", *lines[16:]]))
    outcome = run("produce", TOPIC, "--file", str(path), "--input", "json")
    assert outcome.code == 2
    sentence = outcome.sentence()
    assert "line 17 is no message in JSON" in sentence
    assert "16 messages before it were published and acknowledged" in sentence
    assert f"tail -n +17 {path}" in sentence
    assert [m.payload for m in fake.messages[TOPIC]] == [b"%d" % n for n in range(16)]


def test_a_stream_that_the_broker_ends_says_how_much_was_acknowledged(
    run: Run, fake: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_many(self: Any, payloads: list[Any], **columns: Any) -> None:
        raise ResourceExhausted("the disk is full; free some")

    monkeypatch.setattr(FakeProducer, "send_many", send_many)
    path = tmp_path / "lines"
    path.write_text("a\nb\nc\n")
    outcome = run("produce", TOPIC, "--file", str(path))
    assert outcome.code == 4
    assert "1 messages before it were published and acknowledged" in outcome.sentence()
    assert f"tail -n +2 {path}" in outcome.sentence()


def test_ctrl_c_tells_what_was_acknowledged(run: Run, fake: FakeBroker) -> None:
    run("produce", TOPIC, "-m", "a", "-m", "b")
    fake.interrupt = KeyboardInterrupt()
    outcome = run("consume", TOPIC, "--subscription", "s", "--from", "earliest")
    assert outcome.code == 130
    assert f"interrupted: 2 messages from {TOPIC} printed and acknowledged" in outcome.err
    assert fake.flushed_acks == 1


def test_a_timeout_counts_for_a_topic_that_is_missing_too() -> None:
    with Broker(workers=1) as broker:
        words = [sys.executable, "-m", "danube_fast.cli.main", "consume", "/default/missing"]
        options = ["--subscription", "s", "--timeout", "1", "--url", broker.url]
        done = subprocess.run([*words, *options], capture_output=True, timeout=25, check=False)
        assert done.returncode == 3, done
        assert b"/default/missing" in done.stderr


def test_progress_is_shown_at_a_terminal_only() -> None:
    code = (
        "import sys, danube_fast.cli.output as o\n"
        "o.PROGRESS_NS = 0\n"
        "with o.Progress() as p: p.show('1,234 messages')\n"
    )
    leader, follower = pty.openpty()
    subprocess.run([sys.executable, "-c", code], stderr=follower, timeout=60, check=True)
    os.close(follower)
    shown = os.read(leader, 1000)
    os.close(leader)
    assert b"1,234 messages" in shown
    silent = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=True
    )
    assert silent.stderr == b""


# ---------------------------------------------------------------- commands for what only clients could


def test_a_subscription_is_made_and_moved_by_commands(run: Run) -> None:
    with Broker(workers=1) as broker, broker.client() as client:
        url = ["--url", broker.url]
        client.admin.create_topic(TOPIC, partitions=2)
        made = ["subscriptions", "create", TOPIC, "s", "--type", "shared"]
        assert run(*made, *url).out == f"created s of {TOPIC}\n"
        assert run(*made, *url).code == 4
        assert run("subscriptions", "create", "/default/missing", "s", *url).code == 3
        for number in range(4):
            client.publish(TOPIC, b"%d" % number, key=str(number))
        move = ["subscriptions", "seek", TOPIC, "s"]
        assert "add --yes" in run(*move, "latest", *url).sentence()
        lags = {}
        for place in ("latest", "earliest", "10m"):
            assert run(*move, place, "--yes", *url).code == 0
            lags[place] = client.admin.describe_subscription(TOPIC, "s")["lag_messages"]
        assert lags == {"latest": 0, "earliest": 4, "10m": 4}
        assert run(*move, "soon", "--yes", *url).code == 2


def test_messages_may_be_delayed_and_a_tail_followed(run: Run) -> None:
    with Broker(workers=1) as broker, broker.client() as client:
        url = ["--url", broker.url]
        words = ["produce", TOPIC, "-m", "a", "-m", "b", "--deliver-after"]
        assert run(*words, "1h", *url).code == 0
        assert run(*words, "soon", *url).code == 2
        client.consumer(TOPIC, subscription="s", initial_position="earliest").close()
        assert client.admin.describe_subscription(TOPIC, "s")["lag_messages"] == 2
        assert run("consume", TOPIC, "--subscription", "s", "--timeout", "500ms", *url).out == ""
        shown = run("topics", "tail", TOPIC, "-F", "%s", *url)
        assert shown.out == "a\nb\n"
        assert "-f, --follow" in run("topics", "tail", "--help").out
