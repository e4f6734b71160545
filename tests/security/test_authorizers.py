"""Authorizers of other packages: they take rights away, their faults deny, and no loop waits for them."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from danube_fast.admin.guard import Guarded
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import (
    DanubeError,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from danube_fast.security.authorizers import (
    ANSWER_NS,
    FAULT_NS,
    LOST_OF_ONE_MAX,
    QUESTIONS_OF_ONE_MAX,
    VERSION_NS,
    AskedAuthorizer,
    check_authorizer,
    load_authorizer,
)
from danube_fast.security.question_threads import ANSWER_SECONDS, THREADS_MAX
from danube_fast.security.records import BOOTSTRAP
from danube_fast.types import Permission
from danube_fast.undecided import Undecided, when_decided
from danube_fast.workers.coordinator.request_access import RequestAccess
from tests.security.authorizer_rig import (
    Gate,
    Loop,
    Moved,
    Versions,
    loop_with,
    opened_gate,
)
from tests.security.rules import install, write_rules
from tests.workers.broker import ROOT

P = Permission
PAGE = ROOT / "docs/security.md"
WAIT_SECONDS = 30
TOPIC = "/shop/orders"


@pytest.fixture
def gate() -> Iterator[Gate]:
    with opened_gate() as made:
        yield made


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of rules; the package is on the module path."""
    install(tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    path = tmp_path / "rules"
    write_rules(path, "pia produce /shop/\n")
    return path


def loop_of(text: str) -> Loop:
    return loop_with(load_authorizer(text, SystemClock(), 2000))


def test_it_takes_away_and_gives_nothing(rules: Path) -> None:
    loop = loop_of(f"rules:{rules}")
    refusal = loop.outcome("pia", P.PRODUCE, TOPIC)
    assert isinstance(refusal, PermissionDenied) and "a rule of the house" in str(refusal)
    assert not loop.permits("pia", P.PRODUCE, TOPIC)
    for principal, permission, resource in (
        ("pia", P.CONSUME, TOPIC), ("pia", P.PRODUCE, "/other/orders"), ("ann", P.PRODUCE, TOPIC),
    ):  # fmt: skip
        assert loop.permits(principal, permission, resource)
    assert not loop.access.permits("nick", P.CONSUME, TOPIC), "the rules do not mention nick"
    asked = Path(f"{rules}.asked").read_text()
    assert "nick" not in asked, "it is not asked for what roles do not give"


def test_its_faults_deny_and_are_logged(rules: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = loop_of("bad")
    with caplog.at_level(logging.WARNING):
        for topic in (TOPIC, "/shop/a", "/shop/b"):
            refusal = loop.outcome("ann", P.CONSUME, topic)
            assert isinstance(refusal, PermissionDenied) and "could not decide" in str(refusal)
    assert not loop.permits("ann", P.MANAGE_CLUSTER, "cluster")
    assert caplog.text.count("which denies") == 1, "a fault fills no log"
    assert loop.access.version[2] == 0
    loop.access.authorize(BOOTSTRAP, P.MANAGE_CLUSTER, "cluster")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (SystemExit("out"), PermissionDenied),
        (KeyError("x"), PermissionDenied),
        (Unavailable("it is down"), Unavailable),
        (ConnectionRefusedError(111, "refused"), Unavailable),
        (TimeoutError("timed out"), Unavailable),
    ],
)
def test_what_it_raises_denies(gate: Gate, fault: Any, kind: type[DanubeError]) -> None:
    loop = loop_with(AskedAuthorizer("gate", gate, SystemClock()))
    gate.raises = fault
    gate.open()
    refusal = loop.outcome("pia", P.PRODUCE, TOPIC)
    assert type(refusal) is kind and "the authorizer gate could not decide" in str(refusal)
    assert not loop.permits("pia", P.PRODUCE, TOPIC)


def test_a_question_is_asked_once_and_nothing_is_permitted_before_its_answer(gate: Gate) -> None:
    loop = loop_with(AskedAuthorizer("gate", gate, SystemClock()))
    ends: list[Any] = []
    for _ in range(3):

        def step() -> None:
            loop.access.authorize("pia", P.PRODUCE, TOPIC)
            ends.append("opened")

        when_decided(step, ends.append)
    loop.until("the question", lambda: gate.asked)
    assert not ends
    with pytest.raises(Undecided, match="is being asked whether pia may produce /shop/orders"):
        loop.access.permits("pia", P.PRODUCE, TOPIC)
    gate.denies.add("/shop/other")
    gate.open("/shop/other")
    assert loop.outcome("ann", P.PRODUCE, "/shop/other") is not None, "another one overtakes it"
    assert not ends
    gate.open(TOPIC)
    loop.until("the answer", lambda: len(ends) == 3)
    assert ends == ["opened"] * 3
    assert gate.asked.count(("pia", P.PRODUCE, TOPIC)) == 1


def test_an_answer_counts_for_a_while(gate: Gate) -> None:
    clock = Moved()
    loop = loop_with(AskedAuthorizer("gate", gate, clock))
    gate.open()
    assert loop.permits("pia", P.PRODUCE, TOPIC)
    gate.denies.add(TOPIC)
    assert loop.permits("pia", P.PRODUCE, TOPIC) and len(gate.asked) == 1
    clock.moved_ns += ANSWER_NS
    assert not loop.permits("pia", P.PRODUCE, TOPIC) and len(gate.asked) == 2


def test_one_that_hangs_denies_when_its_time_is_over_and_holds_up_no_other_user(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Moved()
    loop = loop_with(AskedAuthorizer("gate", gate, clock))
    ends: list[DanubeError] = []
    topics = [f"/shop/t{number}" for number in range(2 * THREADS_MAX)]

    def ask(topic: str) -> None:
        when_decided(lambda: loop.access.authorize("pia", P.PRODUCE, topic), ends.append)

    for topic in topics:
        ask(topic)
    loop.until("questions that hang", lambda: len(gate.asked) == LOST_OF_ONE_MAX)
    gate.open("/shop/ann")
    assert loop.outcome("ann", P.PRODUCE, "/shop/ann") is None, "pia has all threads"
    assert len(gate.asked) == LOST_OF_ONE_MAX + 1 and not ends
    clock.moved_ns += int(ANSWER_SECONDS * SECOND_NS)
    with caplog.at_level(logging.WARNING):
        loop.until("the end of all", lambda: len(ends) == len(topics))
    assert {type(error) for error in ends} == {Unavailable}
    assert "has not answered within 5 s; try again" in str(ends[0])
    assert "2 threads ask it, and 2 of them have waited for more than 5 s" in caplog.text
    gate.open("/shop/late")
    clock.moved_ns += FAULT_NS
    assert loop.outcome("ann", P.PRODUCE, "/shop/late") is None
    refusal = loop.outcome("pia", P.PRODUCE, topics[0])
    assert type(refusal) is Unavailable and "is asked no other until one of them ends" in str(
        refusal
    )
    assert loop.outcome("ann", P.PRODUCE, "/shop/late") is None
    gate.close()  # those that hung end, and late answers count for nothing
    loop.until("the end of those that hung", lambda: not loop.access._outer._threads.running)
    assert loop.outcome("pia", P.PRODUCE, topics[0]) is None
    asked = [resource for _, _, resource in gate.asked]
    assert set(asked) == {*topics[:LOST_OF_ONE_MAX], "/shop/ann", "/shop/late"}


def test_questions_that_wait_are_bounded_and_what_is_open_comes_first(gate: Gate) -> None:
    loop = loop_with(AskedAuthorizer("gate", gate, SystemClock()))
    access = loop.access

    def ask(number: int, **how: bool) -> None:
        access.check("pia", P.PRODUCE, f"/shop/t{number}", **how)

    for number in range(QUESTIONS_OF_ONE_MAX):
        with pytest.raises(Undecided):
            ask(number)
    with pytest.raises(Unavailable, match="too many questions wait") as caught:
        ask(QUESTIONS_OF_ONE_MAX)
    assert type(caught.value) is Unavailable
    with pytest.raises(Undecided):
        ask(-1, is_open=True)
    with pytest.raises(Undecided):
        access.check("ann", P.PRODUCE, TOPIC)
    loop.until("all questions that may be asked", lambda: len(gate.asked) == LOST_OF_ONE_MAX + 1)
    gate.open("/shop/t0")
    loop.until("the next questions", lambda: len(gate.asked) == LOST_OF_ONE_MAX + 3)
    assert ("pia", P.PRODUCE, "/shop/t-1") in gate.asked
    gate.open(count=1)
    ends: list[Any] = []
    last = f"/shop/t{QUESTIONS_OF_ONE_MAX - 1}"
    when_decided(lambda: ends.append(access.authorize("pia", P.PRODUCE, last)), ends.append)
    loop.until("the end of the flood", lambda: ends == [None])


def test_new_rules_are_another_version(rules: Path) -> None:
    loop = loop_of(f"live:{rules}")
    loop.until("the version", lambda: loop.access.version[2])
    before = loop.access.version
    assert not loop.permits("pia", P.PRODUCE, TOPIC) and loop.access.version == before
    write_rules(rules, "pia consume /shop/orders\n")
    loop.until("the new version", lambda: loop.access.version != before)
    assert loop.permits("pia", P.PRODUCE, TOPIC), "an answer of older rules"


def test_an_answer_of_older_rules_does_not_count(gate: Gate) -> None:
    clock, rules = Moved(), Versions()
    asked = AskedAuthorizer("gate", rules, clock)
    loop = loop_with(asked)
    loop.until("the version", lambda: loop.access.version[2] == 1)
    ends: list[Any] = []
    when_decided(lambda: ends.append(loop.access.authorize("pia", P.PRODUCE, TOPIC)), ends.append)
    try:
        loop.until("the question", lambda: len(rules.asked) == 1)
        rules.version = 2
        clock.moved_ns += VERSION_NS
        loop.until("the question by the new rules", lambda: len(rules.asked) == 2)
        rules.open("1")
        loop.until("the old answer", lambda: asked._threads.running == 1)
        loop.turn()
        assert not ends
        rules.open("2")
        loop.until("the answer", lambda: ends)
    finally:
        rules.close()
    (refusal,) = ends
    assert isinstance(refusal, PermissionDenied) and "the new rules" in str(refusal)


def test_reply_topics_are_no_matter_of_other_rules(rules: Path) -> None:
    write_rules(rules, "pia produce /\npia consume /\n")
    access = loop_of(f"rules:{rules}").access
    access.owner_of = lambda topic: "pia"
    access.authorize("pia", P.PRODUCE, "/system/reply-1")
    access.authorize("pia", P.CONSUME, "/system/reply-1")
    assert not access.permits("ann", P.CONSUME, "/system/reply-1")


def test_http_waits_without_holding_up_its_thread(gate: Gate) -> None:
    loop = loop_with(AskedAuthorizer("gate", gate, SystemClock()))
    guard: Any = RequestAccess(loop.access, SystemClock())
    guard.principal_of_request = lambda headers, certificate: "pia"

    async def answered(scope: Any, receive: Any, send: Any) -> None:
        await send("answered")

    async def ask(path: str) -> Any:
        told: list[Any] = []

        async def send(message: Any) -> None:
            told.append(message)

        scope = {"type": "http", "path": path, "headers": []}
        await Guarded(answered, guard)(scope, None, send)  # type: ignore[arg-type]
        return told[0]

    async def requests() -> None:
        waiting = asyncio.create_task(ask("/metrics"))
        async with asyncio.timeout(WAIT_SECONDS):
            while not gate.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await ask("/healthz") == "answered" and not waiting.done()
            gate.open()
            while not waiting.done():
                loop.turn()
                await asyncio.sleep(0.01)
        assert waiting.result() == "answered"
        gate.denies.add("cluster")
        loop.access.serve_from(lambda work: work())

    asyncio.run(requests())


class OpaRules(BaseHTTPRequestHandler):
    """What OPA answers: pia may consume."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        results = {
            ("allow", "pia", "consume", TOPIC): True, ("scopes", "pia"): ["namespace:shop"],
        }  # fmt: skip
        rule = self.path.removeprefix("/v1/data/danube/")
        result = results.get((rule, *asked.values()))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({} if result is None else {"result": result}).encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def shown_to(loop: Loop, principal: str) -> list[str]:
    """Of two topics those that lists show."""
    shown: list[Any] = []

    def step() -> None:
        visible = loop.access.visible_to(principal)
        shown.append([each for each in (TOPIC, "/other/orders") if visible.shows(each)])

    when_decided(step, shown.append)
    loop.until("the answer", lambda: shown)
    return list(shown[0])


def test_the_example_of_the_page() -> None:
    section = PAGE.read_text().split("The **authorizer** raises")[1]
    code = section.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    with HTTPServer(("127.0.0.1", 0), OpaRules) as opa:
        thread = threading.Thread(target=opa.serve_forever, args=(0.02,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{opa.server_port}/v1/data/danube"
            loop = loop_with(AskedAuthorizer("opa", names["Opa"](url), SystemClock()))
            loop.until("the version", lambda: loop.access.version[2])
            assert loop.permits("pia", P.CONSUME, TOPIC)
            refusal = loop.outcome("ann", P.CONSUME, TOPIC)
            assert isinstance(refusal, PermissionDenied) and "ann may not consume" in str(refusal)
            assert shown_to(loop, "pia") == [TOPIC] and shown_to(loop, "ann") == []
        finally:
            opa.shutdown()
            thread.join()
    refusal = loop.outcome("pia", P.PRODUCE, TOPIC)  # OPA is down
    assert isinstance(refusal, Unavailable) and "could not decide" in str(refusal)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unknown", "no installed package has an authorizer 'unknown'; there are: .*rules"),
        ("broken:x", "cannot be loaded.*no rules"),
        ("gone", "cannot be loaded"),
        (
            "hanging:x",
            "of the package house-rules, which has not been made within 0.5 s; repair what",
        ),
        ("later:x", "authorize is a coroutine function"),
        ("nothing:x", "gives no object with authorize"),
        ("blind:x", r"gives no object with lookup_scopes\(principal\); see docs/security.md"),
    ],
)
def test_one_that_cannot_be_had(rules: Path, text: str, words: str) -> None:
    with pytest.raises((InvalidArgument, Unavailable), match=words):
        load_authorizer(text, SystemClock(), 1000)


def test_the_setting_is_checked_before_anything_begins(rules: Path) -> None:
    check_authorizer("rules:/any/file", "required")
    with pytest.raises(InvalidArgument):
        check_authorizer("unknown", "required")
    with pytest.raises(FailedPrecondition, match="--auth required"):
        check_authorizer("rules", "none")
    nothing: Any = load_authorizer("", SystemClock(), 2000)
    assert nothing is None
