"""The ZapThread, asked over its endpoint: whom it admits, and that nothing ends it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from danube_fast.errors import FailedPrecondition
from danube_fast.net import zap as zap_module
from danube_fast.net.zap import ENDPOINT, ZapThread
from danube_fast.security.curve import new_key_pair

WAIT_MS = 60_000
KEY = bytes(range(32))
PROOF = f"curve:{z85.encode(KEY).decode()}"
CURVE = [b"1.0", b"7", b"danube", b"127.0.0.1", b"", b"CURVE", KEY]
NULL = [b"1.0", b"7", b"danube", b"localhost:1000:100:4711", b"", b"NULL"]


def changed(request: list[bytes], at: int, part: bytes) -> list[bytes]:
    return [*request[:at], part, *request[at + 1 :]]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


class Asked:
    """A thread that admits all, and what it was asked."""

    def __init__(self, context: zmq.Context[Any], **limits: int) -> None:
        self.context = context
        self.proofs: list[str] = []
        self.answer: Callable[[str], bool] = lambda proof: True
        self.zap = ZapThread(context, self._admit, **limits)
        self.zap.start()
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(ENDPOINT)

    def _admit(self, proof: str) -> bool:
        self.proofs.append(proof)
        return self.answer(proof)

    def close(self) -> None:
        self.zap.stop()
        self._socket.close(linger=0)

    def send(self, *parts: bytes) -> None:
        """Send a message as it is."""
        self._socket.send_multipart(parts)

    def ask(self, *request: bytes) -> list[bytes]:
        """The reply to a request."""
        self._socket.send_multipart([b"", *request])
        assert self._socket.poll(WAIT_MS), "no reply in time"
        empty, *reply = self._socket.recv_multipart()
        assert empty == b""
        return [bytes(part) for part in reply]


@pytest.fixture
def asked(context: zmq.Context[Any]) -> Iterator[Asked]:
    made = Asked(context)
    yield made
    made.close()


def test_who_is_admitted_gets_the_proof_as_its_user_id(asked: Asked) -> None:
    *of_key, first = asked.ask(*CURVE)
    *of_user, second = asked.ask(*NULL)
    assert of_key == [b"1.0", b"7", b"200", b"OK", PROOF.encode()]
    assert of_user == [b"1.0", b"7", b"200", b"OK", b"uid:1000"]
    assert asked.proofs == [PROOF, "uid:1000"]
    for number, named in enumerate((first, second)):
        assert named[:14] == b"\x08Identity\0\0\0\x08\0" and len(named) == 21
        assert int.from_bytes(named[-2:]) == number
    assert first[14:19] != second[14:19]


def test_who_is_not_admitted_gets_400(asked: Asked) -> None:
    asked.answer = lambda proof: False
    for request in (CURVE, NULL):
        assert asked.ask(*request) == [b"1.0", b"7", b"400", b"refused", b"", b""]
    asked.answer = lambda proof: 1  # type: ignore[return-value]
    assert asked.ask(*CURVE)[2] == b"400"


def test_a_local_user_comes_in_so_often(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    asked = Asked(context, local_at_once=100)
    other = changed(NULL, 3, b"localhost:1001:100:4711")
    codes = [asked.ask(*NULL)[2] for _ in range(100)]
    assert set(codes) == {b"200"}
    while (late := asked.ask(*NULL)[2]) == b"200":
        codes.append(late)
        assert len(codes) < 10_000, "50 a second at most come in"
    assert late == b"500"
    assert {asked.ask(*request)[2] for request in (other, CURVE)} == {b"200"}
    (record,) = [record for record in caplog.records if "too often" in record.getMessage()]
    assert "uid:1000" in record.getMessage()
    asked.close()


@pytest.mark.parametrize(
    "request_parts",
    [
        [b"1.0"],
        [b"1.0", b"7"],
        CURVE[:5],
        CURVE[:6],
        [*CURVE, b""],
        [*CURVE, KEY],
        [*CURVE, *[b"x"] * 1000],
        changed(CURVE, 0, b"2.0"),
        changed(CURVE, 0, b""),
        changed(CURVE, 1, bytes(256)),
        changed(CURVE, 2, b""),
        changed(CURVE, 2, b"danube2"),
        changed(CURVE, 2, b"global"),
        changed(CURVE, 3, bytes(100_000)),
        changed(CURVE, 5, b"curve"),
        changed(CURVE, 5, b"CURVE\0"),
        changed(CURVE, 5, b"GSSAPI"),
        changed(CURVE, 6, KEY[:-1]),
        changed(CURVE, 6, KEY + b"x"),
        changed(CURVE, 6, b""),
        changed(NULL, 2, b""),
        [*NULL, b""],
        [*NULL, KEY],
        [*changed(NULL, 5, b"PLAIN"), b"alice", b"secret"],
        [*changed(NULL, 5, b"PLAIN")],
        *[
            changed(NULL, 3, address)
            for address in (
                b"", b"127.0.0.1", b"::1", b"::1000:100:4711", b"1000:100:4711", b":1000:100:4711",
                b"localhost", b"localhost:", b"localhost:1000", b"localhost:1000:100",
                b"localhost:1000:100:", b"localhost::100:4711", b"localhost:-1:100:4711",
                b"localhost:+1:100:4711", b"localhost: 1:100:4711", b"localhost:01:100:4711",
                b"localhost:1000:100:4711:5", b"localhost:1000:100:4711\n",
                b"localhost:\xd9\xa1:100:4711", b"localhost:4294967295:100:4711",
                b"localhost:99999999999:100:4711", b"otherhost:1000:100:4711", b"x" * 256,
            )
        ],
    ],
)  # fmt: skip
def test_anything_else_is_refused_without_a_question(
    asked: Asked, request_parts: list[bytes]
) -> None:
    reply = asked.ask(*request_parts)
    assert reply[0] == b"1.0"
    assert reply[2:] == [b"400", b"refused", b"", b""]
    assert asked.proofs == []
    assert asked.ask(*CURVE)[2] == b"200"


def test_the_request_id_is_repeated(asked: Asked) -> None:
    for number in (b"", b"1", bytes(255)):
        assert asked.ask(*changed(CURVE, 1, number))[1] == number
    assert asked.ask(*changed(CURVE, 1, bytes(256)))[1] == b""


def test_messages_without_an_envelope_are_passed_over(asked: Asked) -> None:
    asked.send(b"x")
    asked.send(b"", b"")
    asked._socket.poll(WAIT_MS)
    assert asked._socket.recv_multipart()[3] == b"400"
    asked.send(b"1.0", b"7")
    assert asked.ask(*CURVE)[2] == b"200"


def test_an_error_denies_is_logged_once_and_ends_nothing(
    asked: Asked, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(proof: str) -> bool:
        raise ValueError("the table of principals is torn")

    asked.answer = fail
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            assert asked.ask(*CURVE)[2:5] == [b"500", b"ask again", b""]
        assert len(caplog.records) == 1
        monkeypatch.setattr(zap_module, "_LOG_SECONDS", 0)
        assert asked.ask(*CURVE)[2] == b"500"
        assert len(caplog.records) == 2
    asked.answer = lambda proof: True
    assert asked.ask(*CURVE)[2] == b"200"
    assert asked.zap.is_alive


def test_a_second_thread_of_a_context_is_refused(asked: Asked) -> None:
    second = ZapThread(asked.context, lambda proof: True)
    with pytest.raises(FailedPrecondition, match="one ZapThread in a context"):
        second.start()
    assert not second.is_alive
    assert asked.ask(*CURVE)[2] == b"200"


def test_another_thread_follows_one_that_was_stopped(context: zmq.Context[Any]) -> None:
    for _ in range(3):
        zap = ZapThread(context, lambda proof: True)
        zap.start()
        assert zap.is_alive
        zap.stop()
        zap.stop()
        assert not zap.is_alive


def test_a_thread_that_was_never_started_stops(context: zmq.Context[Any]) -> None:
    ZapThread(context, lambda proof: True).stop()


def test_the_end_of_the_context_ends_the_thread() -> None:
    context: zmq.Context[Any] = zmq.Context()
    zap = ZapThread(context, lambda proof: True)
    zap.start()
    context.term()
    zap._thread.join(WAIT_MS / 1000)
    assert not zap.is_alive, "the thread outlived its context"
    zap.stop()


def test_stop_does_not_wait_for_ever(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zap_module, "_STOP_SECONDS", 0.01)
    begun, may_end = threading.Event(), threading.Event()

    def hang(proof: str) -> bool:
        begun.set()
        return may_end.wait(WAIT_MS / 1000)

    asked.answer = hang
    asked.send(b"", *CURVE)
    assert begun.wait(WAIT_MS / 1000), "the thread was not asked"
    asked.zap.stop()
    assert asked.zap.is_alive
    may_end.set()
    asked.zap._thread.join(WAIT_MS / 1000)
    assert not asked.zap.is_alive, "the thread did not end"


def test_keys_are_written_as_pairs_have_them(asked: Asked) -> None:
    pair = new_key_pair()
    asked.ask(*changed(CURVE, 6, z85.decode(pair.public)))
    assert asked.proofs == [f"curve:{pair.public}"]
