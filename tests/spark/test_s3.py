"""The pipeline over a real S3 server: writes whose driver is killed, an export, a replay, a read of the store alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.spark.options import ReadOptions
from danube_fast.spark.plan import make_plan
from danube_fast.spark.replay.run import Replay, replay
from danube_fast.spark.write.record import list_batches
from danube_fast.spark.write.staging import open_staging
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import SMALL, keep_for_ever, publish
from tests.delivery.s3_rig import give_credentials, s3_url
from tests.history.s3_servers import BUCKET, plain_client, seaweed_server
from tests.spark.export_rig import run, seen_by_duckdb
from tests.spark.write_rig import assert_once, killed_driver, numbers, payloads_of, write
from tests.workers.broker import wait_until

COUNT = 3000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a store on SeaweedFS, for which this process has credentials."""
    with pytest.MonkeyPatch.context() as patch, seaweed_server(tmp_path_factory.mktemp("s3")) as at:
        give_credentials(patch, tmp_path_factory.mktemp("nothing"))
        plain_client(at).create_bucket(Bucket=BUCKET)
        yield s3_url(at, "pipeline")


@pytest.fixture(scope="module")
def broker(url: str) -> Iterator[Broker]:
    with Broker(workers=2, store=url, **SMALL) as running:
        yield running


@pytest.mark.parametrize("step", ["staged", "committed", "half"])
def test_a_killed_write_is_gone_on_with(broker: Broker, url: str, step: str) -> None:
    topic, store = f"/default/written-{step}", open_staging(url)
    with broker.client() as client:
        keep_for_ever(client, topic)
        killed_driver(broker.url, url, topic, step, 0, COUNT, step)
        assert write(broker.url, url, topic, step, numbers(0, COUNT), run="second") == COUNT
        assert_once(client, topic, numbers(0, COUNT))
        assert write(broker.url, url, topic, step, numbers(0, COUNT), run="third") == COUNT
        assert_once(client, topic, numbers(0, COUNT))
        wait_until(
            "the sweep of what was staged",
            lambda: (
                [(each.state, each.staged) for each in list_batches(store, step)] == [("done", [])]
            ),
        )
    store.close()


def test_it_is_exported_replayed_and_read_without_the_broker(
    broker: Broker, url: str, tmp_path: Path
) -> None:
    source, target, folder = "/default/source", "/default/replayed", tmp_path / "out"
    with broker.client() as client:
        keep_for_ever(client, source)
        keep_for_ever(client, target)
        publish(client, 0, COUNT, source)
        assert run(source, f"parquet:{folder}", {"url": broker.url}).messages == COUNT
        publish(client, COUNT, 500, source)
        assert run(source, f"parquet:{folder}", {"url": broker.url}).messages == 500
        assert seen_by_duckdb(folder) == list(range(COUNT + 500))
        done = replay(Replay(source, target, url=broker.url, checkpoint=tmp_path / "records"))
        assert done.messages == COUNT + 500
        assert payloads_of(client, target) == payloads_of(client, source)
    plan = make_plan(ReadOptions.parse({"store": url, "topic": source}))
    assert sum(each.high - each.low for each in plan.ranges) == COUNT + 500
