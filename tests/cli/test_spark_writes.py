"""spark writes: ls, resume and abort over a folder and a real broker; no Spark is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.history.stores.store import ObjectStore
from danube_fast.spark.write import publishing
from danube_fast.spark.write.publishing import BrokerLink, Proposal
from danube_fast.spark.write.record import create_commit
from danube_fast.spark.write.staging import open_staging
from danube_fast.testing.broker import Broker
from tests.cli.conftest import Run
from tests.spark.write_rig import assert_once, numbers, payloads_of, propose, write

TOPIC = "/default/written"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(store=f"file://{tmp_path_factory.mktemp('history')}") as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_staging(f"file://{tmp_path}")


def _commit(link: BrokerLink, store: ObjectStore, proposal: Proposal) -> None:
    """Commit as a driver does that is killed behind it."""
    publisher = link.open_frames(proposal.topic, proposal.write_id)
    create_commit(store, publishing._commit_of(proposal, publisher))
    link.close_frames(publisher)


def test_ls_resume_abort(run: Run, broker: Broker, store: ObjectStore) -> None:
    with broker.client() as client, BrokerLink(broker.url, 30) as link:
        client.admin.create_topic(TOPIC)
        write(broker.url, store.url, TOPIC, "ended", numbers(0, 100))
        _commit(link, store, propose(link, store, TOPIC, "left", numbers(100, 100), run="r"))
        propose(link, store, TOPIC, "begun", numbers(200, 100))
        words = ["--store", store.url, "--url", broker.url]
        rows = run("spark", "writes", "ls", *words, "-o", "json").json()
        assert [(r["write_id"], r["batch"], r["topic"], r["state"], r["rows"]) for r in rows] == [
            ("begun", 0, None, "staged", None),
            ("ended", 0, TOPIC, "done", 100),
            ("left", 0, TOPIC, "committed", 100),
        ]
        assert [row["staged_bytes"] > 0 for row in rows] == [True, False, True]
        assert all(0 <= row["age_s"] < 600 for row in rows)
        refused = run("spark", "writes", "resume", "begun", *words)
        assert refused.code == 4 and "begun is not committed" in refused.sentence()
        assert run("spark", "writes", "resume", *words, "-o", "json").json() == [
            {"write_id": "left", "batch": 0, "published": 100}
        ]
        assert run("spark", "writes", "resume", *words).code == 0
        assert_once(client, TOPIC, numbers(0, 200))
        asked = run("spark", "writes", "abort", "begun", *words)
        assert asked.code == 2 and "deletes 2 staged objects" in asked.sentence()
        assert len(run("spark", "writes", "ls", *words, "-o", "json").json()) == 3
        for write_id in ("begun", "ended", "left"):
            assert run("spark", "writes", "abort", write_id, *words, "--yes").code == 0
        assert not list(store.list())
        missing = run("spark", "writes", "abort", "begun", *words, "--yes")
        assert missing.code == 3 and "knows no write begun" in missing.sentence()
        missing = run("spark", "writes", "resume", "begun", *words)
        assert missing.code == 3 and "knows no write begun" in missing.sentence()
        assert len(payloads_of(client, TOPIC)) == 200


def test_one_that_cannot_go_on_stops_no_other(run: Run, broker: Broker, store: ObjectStore) -> None:
    topics = ["/default/gone", "/default/there"]
    words = ["--store", store.url, "--url", broker.url]
    with broker.client() as client, BrokerLink(broker.url, 30) as link:
        for topic in topics:
            client.admin.create_topic(topic)
            _commit(link, store, propose(link, store, topic, topic[9:], numbers(0, 10)))
        client.admin.delete_topic(topics[0])
        outcome = run("spark", "writes", "resume", *words, "-o", "json")
        assert outcome.code == 4 and "was deleted before all rows" in outcome.sentence()
        assert outcome.json() == [{"write_id": "there", "batch": 0, "published": 10}]
        asked = run("spark", "writes", "abort", "gone", *words)
        assert "some rows may be published" in asked.sentence()


def test_the_store_of_the_broker(run: Run, broker: Broker) -> None:
    empty = run("spark", "writes", "ls", "--url", broker.url)
    assert empty.code == 0 and "no writes in file://" in empty.err
    with Broker() as plain:
        refused = run("spark", "writes", "ls", "--url", plain.url)
        assert refused.code == 4 and "--store URL" in refused.sentence()


def test_ls_makes_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert run("spark", "writes", "ls", "--store", f"file://{tmp_path}/folder").code == 0
    assert not list((tmp_path / "folder").iterdir())
    assert run("spark", "writes", "ls", "--store", f"file://{tmp_path}/none").code == 4
