"""Overwriting an export: what the topic does not have any more is replaced only if that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from danube_fast.errors import DataLoss
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import keep_for_ever, publish
from tests.spark.export_rig import kill_at, run, seen_by_duckdb

pytestmark = pytest.mark.usefixtures("small_files")


@pytest.mark.parametrize("form", ["parquet", "delta"])
@pytest.mark.parametrize("is_old", [False, True])
def test_messages_that_are_gone_are_kept(
    broker: Broker, tmp_path: Path, form: str, is_old: bool
) -> None:
    """`is_old`: the checkpoint is of a version that did not note where an export began."""
    topic, folder = f"/default/kept-{form}-{is_old}", tmp_path / "out"
    to, options = f"{form}:{folder}", {"url": broker.url}
    with broker.client() as client:
        keep_for_ever(client, topic)
        publish(client, 0, 100, topic)
        client.admin.purge_topic(topic)
        publish(client, 100, 100, topic)
        run(topic, to, options)
        assert run(topic, to, options, mode="overwrite").replaced == 100  # all of it is there
        publish(client, 200, 50, topic)
        run(topic, to, options)
        client.admin.purge_topic(topic)
        publish(client, 250, 20, topic)
    checkpoint = folder / "_danube/checkpoint"
    if is_old:
        state = json.loads(checkpoint.read_text())
        del state["first"]
        checkpoint.write_text(json.dumps(state))
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*.*"))
    said = "150 or more are gone" if is_old else r"offsets 100 to 250 of .*, partition 0, which"
    for is_dry in (True, False):
        with pytest.raises(DataLoss, match=f"{said}.*--skip-lost"):
            run(topic, to, options, mode="overwrite", is_dry=is_dry)
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*.*")) == before
    asked = {**options, "failOnDataLoss": "false"}
    rehearsed = run(topic, to, asked, mode="overwrite", is_dry=True)
    assert (rehearsed.messages, rehearsed.replaced) == (20, 150)
    report = run(topic, to, asked, mode="overwrite")
    assert (report.messages, report.replaced) == (20, 150)
    if form == "parquet":
        assert seen_by_duckdb(folder) == list(range(250, 270))
    assert run(topic, to, options, mode="overwrite").replaced == 20


def test_files_of_a_plan_that_was_cut_short_count(broker: Broker, tmp_path: Path) -> None:
    """A refused overwrite leaves the plan that it would give up, and what was staged for it."""
    topic, folder = "/default/kept-pending", tmp_path / "out"
    to, options = f"parquet:{folder}", {"url": broker.url}
    with broker.client() as client:
        keep_for_ever(client, topic)
        publish(client, 0, 3000, topic)
        kill_at("renamed", topic=topic, to=to, options=options)
        client.admin.purge_topic(topic)
        publish(client, 3000, 20, topic)
    with pytest.raises(DataLoss, match="offsets 0 to 3000"):
        run(topic, to, options, mode="overwrite")
    run(topic, to, options)
    assert seen_by_duckdb(folder) == list(range(3020))


def test_a_table_without_its_checkpoint(broker: Broker, tmp_path: Path) -> None:
    """Where the export began is not known, so it may have been at the topic's first message."""
    topic, folder = "/default/kept-unknown", tmp_path / "out"
    to, options = f"delta:{folder}", {"url": broker.url}
    with broker.client() as client:
        keep_for_ever(client, topic)
        publish(client, 0, 100, topic)
        run(topic, to, options)
        (folder / "_danube/checkpoint").unlink()
        run(topic, to, options, mode="overwrite")
        (folder / "_danube/checkpoint").unlink()
        client.admin.purge_topic(topic)
        publish(client, 100, 20, topic)
    with pytest.raises(DataLoss, match="offsets 0 to 100"):
        run(topic, to, options, mode="overwrite")
