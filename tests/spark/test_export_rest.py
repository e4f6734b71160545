"""Exports to Iceberg through a REST catalogue that answers, that fails, and that answers what is not so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog

from danube_fast.errors import FailedPrecondition, Unavailable
from danube_fast.spark.export.job import POINTS
from danube_fast.spark.export.typed import TypedField
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import keep_for_ever, payloads, publish
from tests.spark.export_rig import fill, kill_at, run
from tests.spark.rest_catalog import Fault, RestCatalogServer, rest_catalog

pytestmark = pytest.mark.usefixtures("small_files")
TOPIC = "/default/rested"
COUNT = 3000
FAULTS = [
    Fault("never", 500),
    Fault("never", 503),
    Fault("never", 0),
    Fault("before", 500),
    Fault("before", 200),
    Fault("before", 0),
]


@pytest.fixture(scope="module")
def options(broker: Broker, store_folder: Path) -> dict[str, str]:
    """How to read a topic with numbered messages: from the store alone."""
    fill(broker, TOPIC, COUNT)
    return {"store": f"file://{store_folder}"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[RestCatalogServer]:
    """A catalogue that answers."""
    with rest_catalog(tmp_path / "warehouse") as server:
        yield server


def _target(served: RestCatalogServer) -> str:
    return f"iceberg:{served.url}#air.flights"


def _table(served: RestCatalogServer) -> Any:
    return load_catalog("default", type="rest", uri=served.url).load_table("air.flights")


def _offsets(served: RestCatalogServer) -> list[int]:
    return sorted(_table(served).scan(selected_fields=("offset",)).to_arrow()["offset"].to_pylist())


def test_rows_and_increments(options: dict[str, str], served: RestCatalogServer) -> None:
    to = _target(served)
    run(TOPIC, to, {**options, "end": "1000"})
    assert _offsets(served) == list(range(1000))
    run(TOPIC, to, options)
    again = run(TOPIC, to, options)
    assert again.messages == 0 and again.plans == 0
    rows = _table(served).scan().to_arrow().sort_by("offset")
    assert rows["offset"].to_pylist() == list(range(COUNT))
    assert rows["payload"].to_pylist() == payloads(0, COUNT)
    assert len(_table(served).snapshots()) == served.commits == 2
    run(TOPIC, to, {**options, "start": "10"}, mode="overwrite")
    assert _offsets(served) == list(range(10, COUNT))


def test_a_dry_run_makes_no_table(
    options: dict[str, str], served: RestCatalogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(TOPIC, _target(served), options, is_dry=True).messages == COUNT
    assert served.catalog.list_namespaces() == []
    assert [path.name for path in tmp_path.iterdir()] == ["warehouse"]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_anywhere_leaves_each_message_once(
    options: dict[str, str], served: RestCatalogServer, point: str
) -> None:
    to = _target(served)
    run(TOPIC, to, {**options, "end": "1000"})
    kill_at(point, topic=TOPIC, to=to, options=options)
    is_there = point in ("committed", "checkpointed")
    assert _offsets(served) == list(range(COUNT if is_there else 1000))
    run(TOPIC, to, options)
    assert _offsets(served) == list(range(COUNT))
    assert served.commits == 2


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.applied}-{fault.status}")
def test_a_commit_that_fails_or_seems_to(
    options: dict[str, str], served: RestCatalogServer, fault: Fault
) -> None:
    to = _target(served)
    run(TOPIC, to, {**options, "end": "1000"})
    served.faults = [fault]
    with pytest.raises(Unavailable, match=r"the catalogue at http.*again"):
        run(TOPIC, to, options)
    assert served.commits == 2
    assert _offsets(served) == list(range(COUNT if fault.applied == "before" else 1000))
    run(TOPIC, to, options)
    assert _offsets(served) == list(range(COUNT))
    assert served.commits == (2 if fault.applied == "before" else 3)


@pytest.mark.parametrize("fault", [Fault("never", 409), Fault("before", 409)])
def test_a_commit_that_is_refused_is_tried_again(
    options: dict[str, str], served: RestCatalogServer, fault: Fault
) -> None:
    """A commit that was sent twice on its way is refused the second time, and is there."""
    run(TOPIC, _target(served), {**options, "end": "1000"})
    served.faults = [fault]
    run(TOPIC, _target(served), options)
    assert _offsets(served) == list(range(COUNT))
    assert len(_table(served).snapshots()) == 2


@pytest.mark.parametrize(
    ("late_in", "mode"),
    [
        (1, "append"),
        (3, "append"),
        (4, "append"),
        (5, "append"),
        (3, "overwrite"),
        (4, "overwrite"),
    ],
)
def test_a_commit_that_comes_late(
    options: dict[str, str], served: RestCatalogServer, late_in: int, mode: str
) -> None:
    """The run that does it again looks at the table in requests 1 to 3, and commits in 4."""
    to = _target(served)
    run(TOPIC, to, {**options, "end": "1000"})
    served.faults = [Fault("late", 503)]
    with pytest.raises(Unavailable):
        run(TOPIC, to, options, mode=mode)
    served.late_in = late_in
    run(TOPIC, to, options)
    served.apply_late()
    assert _offsets(served) == list(range(COUNT))
    assert run(TOPIC, to, options).messages == 0
    assert _offsets(served) == list(range(COUNT))


def _with_late_commit(options: dict[str, str], served: RestCatalogServer) -> str:
    """Export some, and then the rest by a commit that is refused and comes late; the target."""
    to = _target(served)
    run(TOPIC, to, {**options, "end": "1000"})
    served.faults = [Fault("late", 503)]
    with pytest.raises(Unavailable):
        run(TOPIC, to, options)
    return to


@pytest.mark.parametrize("late_in", [3, 4])
def test_an_overwrite_is_none_of_what_it_gives_up(
    options: dict[str, str], served: RestCatalogServer, late_in: int
) -> None:
    """A plan that was given up comes late, under the number of the overwrite."""
    to = _with_late_commit(options, served)
    served.late_in = late_in
    run(TOPIC, to, {**options, "start": "10"}, mode="overwrite")
    assert _offsets(served) == list(range(10, COUNT))


def test_an_overwrite_that_was_killed_is_done_over_what_came_late(
    options: dict[str, str], served: RestCatalogServer
) -> None:
    to = _with_late_commit(options, served)
    kill_at("placed", topic=TOPIC, to=to, options={**options, "start": "10"}, mode="overwrite")
    served.apply_late()
    run(TOPIC, to, options)
    assert _offsets(served) == list(range(10, COUNT))


def test_a_late_commit_without_files_changes_nothing(
    broker: Broker, served: RestCatalogServer
) -> None:
    topic, to = "/default/late-empty", _target(served)
    more = {"fields": (TypedField("n", "int64"),), "columns": "offset,n"}
    options = {"url": broker.url}
    with broker.client() as client:
        keep_for_ever(client, topic)
        publish(client, 0, 10, topic)  # that match no schema: all of them are rejected
        served.faults = [Fault("late", 503)]
        with pytest.raises(Unavailable):
            run(topic, to, options, **more)
        with client.producer(topic) as producer:
            producer.send_many([b'{"n": %d}' % n for n in range(10)])
        run(topic, to, options, **more)
        assert _offsets(served) == list(range(10, 20))
        served.apply_late()
        assert run(topic, to, options, **more).messages == 0
    assert _offsets(served) == list(range(10, 20))


@pytest.mark.parametrize(
    "form", ["file:///{}", "file:/{}", "/{}", "s3://bucket/{}", "file://host/{}"]
)
def test_where_a_catalogue_puts_its_table(
    options: dict[str, str], served: RestCatalogServer, tmp_path: Path, form: str
) -> None:
    """Catalogues write a folder of a host in several ways."""
    import pyarrow as pa

    folder = tmp_path / "elsewhere"
    served.catalog.create_namespace("air")
    schema = pa.schema([("offset", pa.int64())])
    made = served.catalog.create_table("air.flights", schema, location=str(folder))
    told = made.metadata.model_copy(update={"location": form.format(str(folder)[1:])})
    Path(made.metadata_location.removeprefix("file://")).write_text(told.model_dump_json())
    if "://bucket" in form or "://host" in form:
        with pytest.raises(FailedPrecondition, match="not in a folder of this host"):
            run(TOPIC, _target(served), options, columns="offset")
        return
    run(TOPIC, _target(served), options, columns="offset")
    assert _offsets(served) == list(range(COUNT))
    assert next((folder / "data").glob("part-*.parquet"), None) is not None
