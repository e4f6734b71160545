"""A secured broker with an authorizer of another package, over real processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.errors import PermissionDenied
from tests.delivery.test_security import FELT_SECONDS, TOPIC, SecuredServer, refused
from tests.security.rules import install, write_rules
from tests.workers.broker import wait_until

MESSAGES = 1000
START_MS = 12_000


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    install(tmp_path / "packages")
    path = tmp_path / "rules"
    write_rules(path, "pia consume /shop/\n")
    return path


@pytest.fixture
def server(tmp_path: Path, rules: Path) -> Iterator[SecuredServer]:
    made = SecuredServer(
        tmp_path / "data", tmp_path, authorizer=f"live:{rules}", packages=str(tmp_path / "packages")
    )
    with made:
        made.make_ann()
        with made.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC, durability="memory")
            made.add(ann.admin, "pia", ("producer", TOPIC), ("consumer", TOPIC))
        yield made
        assert made.broker is not None
        made.broker.check_errors()


def test_rules_of_another_package_stand_behind_roles(server: SecuredServer, rules: Path) -> None:
    with server.come_in("pia") as pia, server.come_in("ann") as ann:
        assert not ann.admin.check_permission("pia", "consume", TOPIC)["allowed"]
        assert "a rule of the house" in refused(lambda: pia.consumer(TOPIC, subscription="s"))
        producer = pia.producer(TOPIC)
        producer.publish(b"in")
        write_rules(rules, "pia produce /shop/\n")  # from now on, and for what is open

        def is_refused() -> bool:
            try:
                producer.publish(b"late")
            except PermissionDenied as error:
                return "a rule of the house" in str(error)
            return False

        wait_until("the producer's refusal", is_refused, FELT_SECONDS)
        consumer = pia.consumer(TOPIC, subscription="s", initial_position="earliest")
        assert consumer.receive(timeout=20).payload == b"in"
        write_rules(rules, "fault\n")

        def is_undecided() -> bool:
            text = refused(lambda: pia.producer(TOPIC).publish(b"no"))
            return "could not decide" in text and "ZeroDivisionError" not in text

        wait_until("the refusal of rules that fail", is_undecided, FELT_SECONDS)
        assert ann.admin.cluster_status()["auth"] == "required", "the broker goes on"


def test_it_is_asked_for_handles_and_not_for_messages(server: SecuredServer, rules: Path) -> None:
    """Each answer takes 2 ms: a question for each message would be seen in the count, and in the time."""
    write_rules(rules, "slow\n")
    asked = Path(f"{rules}.asked")
    with server.come_in("pia") as pia:
        producer = pia.producer(TOPIC)
        consumer = pia.consumer(TOPIC, subscription="s", initial_position="earliest")
        producer.publish(b"first")
        before = len(asked.read_text().splitlines())
        for number in range(MESSAGES):
            producer.publish(b"%d" % number)
        taken = 0
        while taken < MESSAGES + 1:
            batch = consumer.receive_batch(timeout=20)
            assert len(batch)
            taken += len(batch)
            consumer.ack(batch)
        more = asked.read_text().splitlines()[before:]
    assert len(more) < 50, Counter(more).most_common(5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unknown", "no installed package has an authorizer 'unknown'"),
        ("broken:x", "the authorizer broken is house_rules:broken of another package, which cannot be loaded: OSError"),
        ("gone", "which cannot be loaded: ModuleNotFoundError"),
        ("nothing:x", "gives no object with authorize(principal, permission, resource)"),
    ],
)  # fmt: skip
def test_one_that_cannot_be_had_refuses_the_start(
    tmp_path: Path, rules: Path, text: str, words: str
) -> None:
    server = SecuredServer(
        tmp_path / "data", tmp_path, authorizer=text, packages=str(tmp_path / "packages")
    )
    with server._broker() as broker:
        assert broker.process.wait(120) == 1
        said = broker.error_text()
    assert words in said and "Traceback" not in said


@pytest.mark.parametrize("makers", [0, 1, 2])
def test_one_that_is_never_made_refuses_the_start(tmp_path: Path, rules: Path, makers: int) -> None:
    """In all processes, or in those that come last; a start that tries for ever would time out here."""
    server = SecuredServer(
        tmp_path / "data", tmp_path, authorizer=f"hanging:{rules}#{makers}",
        packages=str(tmp_path / "packages"), worker_start_timeout_ms=START_MS,
    )  # fmt: skip
    with server._broker() as broker:
        assert broker.process.wait(120) == 1
        said = broker.error_text()
    reason = (
        "the authorizer hanging is house_rules:hanging of the package house-rules, which has not been made within "
        f"{START_MS / 2000:g} s; repair what it waits for"
    )
    assert reason in said and "ended with 1 before it was ready" in said, said
    assert "Traceback" not in said and str(rules) not in said
