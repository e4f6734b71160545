"""produce and consume: what reaches the client, what comes out, and that one reads the other's JSON."""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube_fast.cli import produce as produce_module
from danube_fast.cli.output import StdoutClosed, time_text
from danube_fast.cli.records import formatter, json_line, parse_records, topic_of
from danube_fast.client.values.message import Message
from tests.cli.conftest import Run
from tests.cli.fakes import PUBLISH_TIME_NS, FakeBroker

TOPIC = "/default/x"


def kept(fake: FakeBroker) -> list[tuple[bytes | None, bytes | None, dict[str, str]]]:
    return [(m.payload, m.key, m.attributes) for m in fake.messages[TOPIC]]


def test_messages_from_the_command_line(run: Run, fake: FakeBroker) -> None:
    outcome = run("produce", TOPIC, "-m", "one", "-m", "zwö", "--key", "k", "--output", "json")
    assert outcome.code == 0, outcome.err
    assert kept(fake) == [(b"one", b"k", {}), ("zwö".encode(), b"k", {})]
    summary = outcome.json()
    assert list(summary) == [
        "messages", "bytes", "seconds", "messages_per_s", "first_offset", "last_offset",
    ]  # fmt: skip
    assert (summary["messages"], summary["bytes"]) == (2, 7)
    assert (summary["first_offset"], summary["last_offset"]) == (0, 1)
    assert fake.producer_options == {}


def test_text_summary(run: Run, fake: FakeBroker) -> None:
    outcome = run("produce", TOPIC, "-m", "one")
    assert outcome.out.startswith("1 message (3 B) to /default/x in ")
    assert outcome.out.endswith("offsets 0 to 0\n")


def test_options_reach_the_producer(run: Run, fake: FakeBroker) -> None:
    run("produce", TOPIC, "-m", "a", "--dispatch", "reliable", "--durability", "os",
        "--partitions", "3", "--name", "loader")  # fmt: skip
    assert fake.producer_options == {
        "name": "loader", "dispatch": "reliable", "durability": "os", "partitions": 3,
    }  # fmt: skip


def test_the_transport_is_chosen(run: Run, fake: FakeBroker) -> None:
    run("produce", TOPIC, "-m", "a", "--transport", "zmq")
    run("consume", TOPIC, "--subscription", "s", "--from", "earliest", "--max", "1",
        "--transport", "shm")  # fmt: skip
    run("produce", TOPIC, "-m", "b")
    assert fake.transports == ["zmq", "shm", "auto"]
    assert run("produce", TOPIC, "-m", "a", "--transport", "pigeon").code == 2


def test_a_file_goes_in_batches(run: Run, fake: FakeBroker, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(b"".join(b"%d\n" % number for number in range(10_000)) + b"no line end")
    outcome = run("produce", TOPIC, "--file", str(file), "--repeat", "2", "--output", "json")
    assert outcome.json()["messages"] == 20_002
    lines = [*(b"%d" % number for number in range(10_000)), b"no line end"]
    assert [payload for payload, _, _ in kept(fake)] == lines * 2
    assert len(fake.calls) < 12


def test_empty_lines_are_messages_and_an_empty_file_is_none(
    run: Run, fake: FakeBroker, tmp_path: Path
) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(b"\n\r\n")
    run("produce", TOPIC, "--file", str(file))
    assert [payload for payload, _, _ in kept(fake)] == [b"", b"\r"]
    file.write_bytes(b"")
    outcome = run("produce", "/default/empty", "--file", str(file), "--output", "json")
    assert outcome.code == 0
    assert outcome.json()["messages"] == 0
    assert outcome.json()["first_offset"] is None


def test_raw_is_one_message_of_every_byte(run: Run, fake: FakeBroker, tmp_path: Path) -> None:
    content = b"a\n\n" + bytes(range(256)) + b"\n"
    file = tmp_path / "blob"
    file.write_bytes(content)
    run("produce", TOPIC, "--file", str(file), "--input", "raw", "--attribute", "name=blob=1")
    assert kept(fake) == [(content, None, {"name": "blob=1"})]


def test_a_missing_file_is_not_found(run: Run, fake: FakeBroker) -> None:
    outcome = run("produce", TOPIC, "--file", "/nowhere/at/all")
    assert outcome.code == 3
    assert "/nowhere/at/all" in outcome.sentence()


def test_a_pipe_goes_line_by_line(
    run: Run, fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"a\nb\nc\n")
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(pipe))
        outcome = run("produce", TOPIC, "--file", "-")
    assert outcome.code == 0, outcome.err
    assert fake.calls == [("publish", 1), ("send", 1), ("send", 1)]


def test_delimiter_splits_at_its_first_place(run: Run, fake: FakeBroker, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(b"k1::v:1::x\nno mark\n::empty key\n")
    run("produce", TOPIC, "--file", str(file), "-K", "::")
    assert [(p, k) for p, k, _ in kept(fake)] == [
        (b"v:1::x", b"k1"), (b"no mark", None), (b"empty key", b""),
    ]  # fmt: skip


def test_key_field(run: Run, fake: FakeBroker) -> None:
    run("produce", TOPIC, "-m", '{"id": "a"}', "-m", '{"id": 7}', "--key-field", "id")
    assert [k for _, k, _ in kept(fake)] == [b"a", b"7"]
    outcome = run("produce", TOPIC, "-m", '{"id": 1}', "-m", "{}", "--key-field", "id")
    assert outcome.code == 2
    assert "line 2" in outcome.sentence()


def test_rate_holds_back(run: Run, fake: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(produce_module.time, "sleep", slept.append)
    run("produce", TOPIC, *(w for _ in range(5) for w in ("-m", "x")), "--rate", "100")
    assert len(fake.messages[TOPIC]) == 5
    assert len(slept) == 4
    assert 0.03 < slept[-1] <= 0.04  # the fifth is due 40 ms after the first; sleeping was faked


def test_consume_prints_acks_and_ends_at_max(run: Run, fake: FakeBroker) -> None:
    run("produce", TOPIC, "-m", "a", "-m", "", "-m", "c", "-m", "d")
    outcome = run("consume", TOPIC, "--subscription", "s", "--from", "earliest", "--max", "3")
    assert (outcome.code, outcome.out) == (0, "a\n\nc\n")
    assert outcome.err == "3 messages from /default/x\n"
    assert fake.acked == [0, 1, 2]
    assert fake.flushed_acks == 1
    assert fake.consumer_options == {
        "subscription": "s", "type": "exclusive", "initial_position": "earliest",
    }  # fmt: skip


def test_consume_ends_at_the_timeout_without_acking_if_told(run: Run, fake: FakeBroker) -> None:
    run("produce", TOPIC, "-m", "a")
    outcome = run(
        "consume", TOPIC, "--subscription", "s", "--from", "7", "--timeout", "0.05", "--no-ack"
    )
    assert (outcome.code, outcome.out, fake.acked) == (0, "a\n", [])
    assert fake.consumer_options["initial_position"] == 7


def test_nothing_is_acked_that_was_not_printed(
    run: Run, fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("produce", TOPIC, "-m", "a")

    def gone(content: bytes) -> None:
        raise StdoutClosed

    monkeypatch.setattr("danube_fast.cli.consume.write", gone)
    outcome = run("consume", TOPIC, "--subscription", "s")
    assert (outcome.code, outcome.err) == (141, "")
    assert fake.acked == []


def test_json_lines(run: Run, fake: FakeBroker) -> None:
    run("produce", TOPIC, "-m", "text", "--key", "k", "--attribute", "a=1")
    line = run("consume", TOPIC, "--subscription", "s", "--max", "1", "-o", "json").json()
    assert line == {
        "topic": TOPIC, "offset": 0, "key": "k", "attributes": {"a": "1"},
        "publish_time": "2013-11-21T02:13:20.123456789Z", "producer_name": "fake", "sequence": 0,
        "redelivery_count": 0, "payload": "text",
    }  # fmt: skip


def test_json_round_trip_through_a_file(run: Run, fake: FakeBroker, tmp_path: Path) -> None:
    original = [
        Message(b"\xff\x00", key=b"\xfe", attributes={"a": "ü"}, event_time=5),
        Message(None, key="dead"),
        Message(b"", key=None),
        Message(b'"\n', key=b""),
    ]
    file = tmp_path / "messages.jsonl"
    file.write_bytes(b"".join(map(json_line, original)))
    outcome = run("produce", TOPIC, "--file", str(file), "--input", "json")
    assert outcome.code == 0, outcome.err
    again = fake.messages[TOPIC]
    for name in ("payload", "key", "attributes", "event_time"):
        assert [getattr(m, name) for m in again] == [getattr(m, name) for m in original]


@given(payload=st.none() | st.binary(max_size=20), key=st.none() | st.binary(max_size=9))
def test_any_bytes_survive_json(payload: bytes | None, key: bytes | None) -> None:
    (record,) = parse_records([json_line(Message(payload, key=key))], is_json=True)
    assert (record.payload, record.key) == (payload, key)


def test_binary_is_base64() -> None:
    line = json.loads(json_line(Message(b"\xff", key=b"\xfe")))
    assert "payload" not in line
    assert base64.b64decode(line["payload_base64"]) == b"\xff"
    assert base64.b64decode(line["key_base64"]) == b"\xfe"


def test_formats() -> None:
    message = Message(
        b"pay\xff", key="k", offset=7, topic="/default/x-part-3", partition=3,
        attributes={"a": "1", "b": "2"}, publish_time=PUBLISH_TIME_NS,
    )  # fmt: skip
    assert formatter(r"%t %p %o %k %s")(message) == b"/default/x 3 7 k pay\xff\n"
    assert formatter(r"%%\t%h\\%T")(message) == (b"%\ta=1,b=2\\2013-11-21T02:13:20.123456789Z\n")
    assert formatter("%k|%s")(Message(None)) == b"|\n"


def test_partition_names() -> None:
    assert topic_of(Message(b"", topic="/default/x")) == "/default/x"
    assert topic_of(Message(b"", topic="/default/x-part-12", partition=12)) == "/default/x"
    assert topic_of(Message(b"", topic="/default/x-part-12")) == "/default/x-part-12"


def test_times_are_exact() -> None:
    assert time_text(0) == "1970-01-01T00:00:00.000000000Z"
    assert time_text(PUBLISH_TIME_NS) == "2013-11-21T02:13:20.123456789Z"
