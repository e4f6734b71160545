"""topics peek, tail, purge; subscriptions skip; consume --pattern and --last: on a real broker."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import tty
from collections.abc import Iterator

import pytest

from danube_fast.children import module_command
from tests.cli.conftest import Run
from tests.crash.rig import Server
from tests.workers.broker import ROOT

TOPIC = "/default/looked"
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("cli") / "data", workers=1) as running:
        with running.client() as client, client.producer(TOPIC) as producer:
            for number in range(20):
                producer.publish(b"payload %d" % number, key=b"k%d" % (number % 3))
        yield running


@pytest.fixture(autouse=True)
def _url(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DANUBE_URL", server.url)


def test_peek_and_tail(run: Run) -> None:
    assert run("topics", "peek", TOPIC, "-n", "2").out == "0@0 k0 payload 0\n0@1 k1 payload 1\n"
    assert run("topics", "peek", TOPIC, "-n", "1", "--from", "5", "-F", "%s").out == "payload 5\n"
    assert run("topics", "tail", TOPIC, "-n", "2", "-F", "%o").out == "18\n19\n"
    line = json.loads(run("topics", "tail", TOPIC, "-n", "1", "-o", "json").out)
    assert (line["offset"], line["payload"], line["topic"]) == (19, "payload 19", TOPIC)
    outcome = run("topics", "peek", "/default/missing")
    assert outcome.code == 3
    assert "topics create" in outcome.sentence()
    for verb in ("peek", "tail"):
        outcome = run("topics", verb, TOPIC, "-F", "%q")
        assert outcome.code == 2
    outcome = run("topics", "tail", "/default/missing", "--follow")
    assert outcome.code == 3


EVIL_KEY, EVIL = (
    b"k\x1b[32m\n0@9 forged",
    "\x1b]0;owned\x07\x1b[31mred\n\tzwei \u00e9\u3000\x9b1m\u202e".encode() + b"\xff",
)
EVIL_TOPIC = "/default/evil"


@pytest.fixture(scope="module")
def evil(server: Server) -> str:
    with server.client() as client, client.producer(EVIL_TOPIC) as producer:
        producer.publish(EVIL, key=EVIL_KEY, attributes={"a": "\x1b[2J"})
    return server.url


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"topics peek {EVIL_TOPIC}", "0@0 KEY PAYLOAD"), (f"topics tail {EVIL_TOPIC}", "0@0 KEY PAYLOAD"),
        (f"topics tail {EVIL_TOPIC} -F %h|%k|%s", "a=\\x1b[2J|KEY|PAYLOAD"),
        (f"consume {EVIL_TOPIC} --subscription a --from earliest --max 1", "PAYLOAD"),
        (f"consume {EVIL_TOPIC} --subscription b --from earliest --max 1 -F %k", "KEY"),
    ],
)  # fmt: skip
def test_a_message_does_not_steer_a_terminal(evil: str, line: str, shown: str) -> None:
    """Line ends and tabs of a payload are text; those of a key would forge a line."""
    key = r"k\x1b[32m\n0@9 forged"
    payload = "\\x1b]0;owned\\x07\\x1b[31mred\n\tzwei \u00e9\u3000\\x9b1m\\u202e\\xff"
    assert at_terminal(line) == f"{shown}\n".replace("KEY", key).replace("PAYLOAD", payload)


def test_json_at_a_terminal_holds_the_same(evil: str) -> None:
    text = at_terminal(f"topics tail {EVIL_TOPIC} -o json")
    assert "\x1b" not in text and "\x9b" not in text and "\x7f" not in text
    assert json.loads(text)["key"] == EVIL_KEY.decode()


def test_a_pipe_gets_payloads_as_they_are(evil: str) -> None:
    assert piped(f"topics peek {EVIL_TOPIC} -F %k%s") == EVIL_KEY + EVIL + b"\n"
    assert piped(f"consume {EVIL_TOPIC} --subscription c --from earliest --max 1") == EVIL + b"\n"
    shown = rb"0@0 k\x1b[32m\n0@9 forged " + EVIL + b"\n"
    assert piped(f"topics peek {EVIL_TOPIC}") == shown, "a key forges a line"


def at_terminal(line: str) -> str:
    """What a command writes to a terminal."""
    leader, follower = pty.openpty()
    try:
        tty.setraw(follower)
        subprocess.run(
            module_command("danube_fast.cli.main", *line.split()), cwd=ROOT, stdout=follower,
            stderr=subprocess.DEVNULL, timeout=60, check=True,
        )  # fmt: skip
        return os.read(leader, 10_000).decode()
    finally:
        os.close(follower)
        os.close(leader)


def piped(line: str) -> bytes:
    """What a command writes to a pipe."""
    command = module_command("danube_fast.cli.main", *line.split())
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True).stdout


def test_follow_shows_what_comes(server: Server) -> None:
    with server.client() as client:
        client.publish("/default/followed", b"before")
        code = "import sys; from danube_fast.cli.main import main; sys.exit(main(sys.argv[1:]))"
        command = ["topics", "tail", "/default/followed", "-n", "1", "-f", "-F", "%s"]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *command, "--url", server.url],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        try:
            assert _line(process) == b"before\n"
            client.publish("/default/followed", b"after")
            assert _line(process) == b"after\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_SECONDS) == 130
        finally:
            process.kill()
            process.communicate()


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], WAIT_SECONDS)
    assert readable, "no line came"
    return process.stdout.readline()


def test_skip_and_purge(run: Run, server: Server) -> None:
    with server.client() as client, client.producer("/default/rid") as producer:
        for number in range(10):
            producer.publish(b"%d" % number)
        client.consumer("/default/rid", subscription="s", initial_position="earliest").close()
        assert run("subscriptions", "skip", "/default/rid", "s", "3").code == 2
        outcome = run("subscriptions", "skip", "/default/rid", "s", "3", "--yes")
        assert (outcome.code, outcome.out) == (0, "skipped 3 messages of s on /default/rid\n")
        for wrong in ((), ("3", "--all")):
            outcome = run("subscriptions", "skip", "/default/rid", "s", *wrong, "--yes")
            assert outcome.code == 2
            assert "--all" in outcome.sentence()
        outcome = run("consume", "/default/rid", "--subscription", "s", "--max", "1")
        assert outcome.out == "3\n"
        outcome = run("topics", "purge", "/default/rid", "--yes")
        assert (outcome.code, outcome.out) == (0, "purged /default/rid: 10 messages\n")
        producer.publish(b"new")
        answer = run("subscriptions", "describe", "/default/rid", "s", "-o", "json").json()
        assert (answer["lag_messages"], answer["gaps"]) == (1, 1)
        text = run("subscriptions", "describe", "/default/rid", "s").out
        assert "lag time" in text
        assert "purged" in text
        assert run("subscriptions", "list", "/default/rid").code == 0
        outcome = run("subscriptions", "skip", "/default/rid", "s", "--all", "--yes", "-o", "json")
        assert outcome.json()["skipped"] == 1


def test_consume_says_on_stderr_what_never_comes(run: Run, server: Server) -> None:
    topic = "/default/warned"
    with server.client() as client, client.producer(topic) as producer:
        for number in range(5):
            producer.publish(b"%d" % number)
        client.consumer(topic, subscription="s", initial_position="earliest").close()

        def purge_when_it_is_there() -> None:
            while not client.admin.describe_subscription(topic, "s")["consumers"]:
                pass
            client.admin.purge_topic(topic)
            producer.publish(b"new")

        thread = threading.Thread(target=purge_when_it_is_there, daemon=True)
        thread.start()
        outcome = run(
            "consume", topic, "--subscription", "s", "--no-ack", "--timeout", "3"
        )  # fmt: skip
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    assert outcome.out.endswith("new\n")
    assert "danube-fast: " not in outcome.err
    (warning,) = [line for line in outcome.err.splitlines() if "never come" in line]
    assert warning == f"warning: offsets 0 to 4 of {topic} never come: these messages were purged"


def test_consume_a_pattern_or_the_last(run: Run, server: Server) -> None:
    with server.client() as client:
        for name in ("a", "b"):
            client.publish(f"/default/pat-{name}", name.encode())
    outcome = run(
        "consume", "--pattern", "/default/pat-*", "--subscription", "s", "--from", "earliest",
        "--max", "2", "-F", "%t %s",
    )  # fmt: skip
    assert sorted(outcome.out.splitlines()) == ["/default/pat-a a", "/default/pat-b b"]
    assert outcome.err == "2 messages from /default/pat-*\n"
    outcome = run("consume", TOPIC, "--subscription", "l", "--last", "2", "--max", "2", "-F", "%o")
    assert outcome.out == "18\n19\n"
    for wrong in ((), (TOPIC, "--pattern", "/default/*"), (TOPIC, "--last", "1", "--from", "3")):
        assert run("consume", *wrong, "--subscription", "s").code == 2
    outcome = run("consume", "--pattern", "pat-*", "--subscription", "s")
    assert outcome.code == 2
    assert "/namespace/glob" in outcome.sentence()


def test_partitions_grow(run: Run) -> None:
    assert run("topics", "create", "/default/wider", "--partitions", "2").code == 0
    outcome = run("topics", "set", "/default/wider", "--partitions", "4")
    assert (outcome.code, outcome.out) == (0, "/default/wider now has 4 partitions\n")
    outcome = run("topics", "set", "/default/wider", "--partitions", "3")
    assert outcome.code == 4
    assert "never shrinks" in outcome.sentence()
    assert run("topics", "set", "/default/wider").code == 2
