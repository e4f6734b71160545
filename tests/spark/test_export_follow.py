"""Following a topic through restarts: of the broker, of a worker, and whatever else is away for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from danube_fast.clock import SECOND_NS
from danube_fast.errors import DeadlineExceeded, Unavailable
from danube_fast.spark.export.files import Piece, Work
from danube_fast.spark.export.patience import AWAY_SECONDS, PAUSE_SECONDS_MAX, Patience
from danube_fast.spark.export.runners import LocalRunner
from danube_fast.spark.export.tables import DeltaTarget
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import SMALL, keep_for_ever, publish
from tests.spark.export_rig import run, seen_by_duckdb

FOLLOW: dict[str, Any] = {"follows": True, "follow_bytes": 1}


class Enough(Exception):
    """Ends a follow."""


@pytest.fixture
def own_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A broker that is killed; requests give up soon."""
    monkeypatch.setattr("danube_fast.spark.export.job.POLL_SECONDS", 0.02)
    monkeypatch.setattr("danube_fast.client.admin_client.REQUEST_TIMEOUT_SECONDS", 1.0)
    with Broker(workers=2, store=f"file://{tmp_path / 'store'}", **SMALL) as running:
        yield running


def _ending(count: int, between: Callable[[], None]) -> Callable[[str], None]:
    """End a follow behind `count` plans; `between` is called behind each one before."""
    done: list[str] = []

    def on_point(name: str) -> None:
        if name == "checkpointed":
            done.append(name)
            if len(done) == count:
                raise Enough
            between()

    return on_point


def _fill(broker: Broker, topic: str, start: int = 0) -> None:
    with broker.client() as client:
        if not start:
            keep_for_ever(client, topic)
        publish(client, start, 100, topic)


def test_the_broker_restarts(own_broker: Broker, tmp_path: Path) -> None:
    topic, folder = "/default/restarts", tmp_path / "out"
    _fill(own_broker, topic)
    troubles: list[str] = []

    def on_trouble(error: Unavailable | DeadlineExceeded) -> None:
        troubles.append(str(error))
        own_broker.start()
        _fill(own_broker, topic, 100)

    on_point = _ending(2, own_broker.kill)
    with pytest.raises(Enough):
        run(
            topic,
            f"parquet:{folder}",
            {"url": own_broker.url},
            on_point,
            on_trouble=on_trouble,
            **FOLLOW,
        )
    assert len(troubles) == 1
    assert seen_by_duckdb(folder) == list(range(200))


def test_a_worker_is_killed(own_broker: Broker, tmp_path: Path) -> None:
    topic, folder = "/default/worker-killed", tmp_path / "out"
    _fill(own_broker, topic)
    published = [100]

    def kill() -> None:
        for index in range(2):
            own_broker.kill_worker(index)
        _fill(own_broker, topic, published[0])
        published[0] += 100

    with pytest.raises(Enough):
        run(topic, f"parquet:{folder}", {"url": own_broker.url}, _ending(3, kill), **FOLLOW)
    assert seen_by_duckdb(folder) == list(range(300))


@pytest.mark.parametrize("tries", [1, 2])
def test_a_plan_is_cut_short(broker: Broker, tmp_path: Path, tries: int) -> None:
    """`tries`: the run that fails; the first binds the target to nothing."""
    topic, folder = f"/default/cut-short-{tries}", tmp_path / "out"
    _fill(broker, topic)
    runs: list[int] = []

    class Failing(LocalRunner):
        def run(self, work: Work, pieces: Sequence[Piece]) -> None:
            runs.append(len(pieces))
            if len(runs) == tries:
                # as Spark says it
                raise RuntimeError("danube_fast.errors.Unavailable: the store is away")
            super().run(work, pieces)

    @contextlib.contextmanager
    def runner() -> Iterator[LocalRunner]:
        yield Failing()

    on_point = _ending(2, lambda: _fill(broker, topic, 100))
    troubles: list[str] = []
    with pytest.raises(Enough):
        run(
            topic, f"parquet:{folder}", {"url": broker.url}, on_point, runner=runner,
            on_trouble=lambda error: troubles.append(str(error)), **FOLLOW,
        )  # fmt: skip
    assert (troubles, len(runs)) == (["the store is away"], 3)
    assert seen_by_duckdb(folder) == list(range(200))


@pytest.mark.parametrize("is_there", [False, True])
def test_a_commit_without_an_answer(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    topic, folder = f"/default/no-answer-{is_there}", tmp_path / "out"
    _fill(broker, topic)
    commit = DeltaTarget.commit
    failures: list[int] = []

    def failing(self: DeltaTarget, plan: Any) -> None:
        if failures:
            commit(self, plan)
            return
        failures.append(plan.number)
        if is_there:
            commit(self, plan)
        raise Unavailable("the table is away")

    monkeypatch.setattr(DeltaTarget, "commit", failing)
    points: list[str] = []

    def on_point(name: str) -> None:
        if name == "checkpointed":
            raise Enough

    def on_trouble(error: Unavailable | DeadlineExceeded) -> None:
        points.append(str(error))
        _fill(broker, topic, 100)

    with pytest.raises(Enough):
        run(
            topic, f"delta:{folder}", {"url": broker.url}, on_point, on_trouble=on_trouble, **FOLLOW
        )
    rows = DeltaTable(str(folder)).to_pyarrow_table()["offset"].to_pylist()
    assert sorted(rows) == list(range(200 if is_there else 100))
    assert failures == [1] and points == ["the table is away"]


def test_patience_has_an_end() -> None:
    now_ns = [0]
    pauses: list[float] = []
    told: list[str] = []

    class FakeClock:
        def monotonic_ns(self) -> int:
            return now_ns[0]

        def wall_ns(self) -> int:
            return now_ns[0]

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now_ns[0] += int(seconds * SECOND_NS)

    patience = Patience(lambda error: told.append(str(error)), FakeClock(), sleep)
    patience.wait(Unavailable("first"))
    patience.end()

    def fail_for_ever() -> None:
        while True:
            patience.wait(DeadlineExceeded("again"))

    with pytest.raises(DeadlineExceeded, match="again; all tries have failed for 3600 s"):
        fail_for_ever()
    assert told == ["first", "again"]
    assert max(pauses) == PAUSE_SECONDS_MAX and pauses[1] == pauses[0] < 1
    assert sum(pauses[1:]) == pytest.approx(AWAY_SECONDS)
