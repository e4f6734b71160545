"""Clients of rings that are not asked to signal: what they send is found all the same, and kernels take it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from danube_fast.broker.admission.layout import WORD_BYTES
from danube_fast.workers.shard.publish import ring_intake
from danube_fast.workers.shard.publish.siblings import SIBLINGS_MIN
from danube_fast.workers.shard.publish.turn_kernel import pause
from danube_fast.workers.shard.publish.turn_layout import (
    AT_LINKS,
    LINK_WORDS,
    JobWord,
    LinkStatus,
    LinkWord,
)
from tests.workers.ring_client import fresh_endpoint
from tests.workers.ring_turn_rig import LateSyncs, intake_of
from tests.workers.shard_faults import wait
from tests.workers.shard_rig import Rig
from tests.workers.test_ring_intake_limits import Counted, Publisher, finish


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs(ipc_endpoint=fresh_endpoint())


@pytest.fixture
def late(rig: Rig) -> Iterator[LateSyncs]:
    syncs = LateSyncs(rig)
    yield syncs
    syncs.close()


def statuses_of(rig: Rig) -> list[tuple[int, int]]:
    """Status of each link of the turn, and whether its last publish waits for a sync."""
    words = intake_of(rig)._words
    places = [
        AT_LINKS // WORD_BYTES + number * LINK_WORDS for number in range(words[JobWord.LINKS])
    ]
    return [(words[at + LinkWord.STATUS], words[at + LinkWord.WAITS_FOR_SYNC]) for at in places]


def strict_publishers(rig: Rig) -> list[Publisher]:
    """Enough clients, each with a topic of its own whose publishes wait for syncs; nothing is under way."""
    strict = []
    for partition in range(2, 2 + 2 * SIBLINGS_MIN):
        rig.assign(partition, durability="fsync")
        strict.append(Publisher(rig, partition, "p"))
    rig.turn(lambda: not rig.worker.state.journals[0].busy, "rest")
    return strict


def test_of_many_clients_those_that_wait_for_a_sync_do_not_signal_while_it_runs(
    rig: Rig, late: LateSyncs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they send meanwhile is looked for when it has ended; a client that waits for none is heard at once."""
    rig.assign(1, durability="memory")
    quick = Publisher(rig, 1, "quick")
    strict = strict_publishers(rig)
    met: list[list[tuple[int, int]]] = []

    def post_behind(job: int) -> int:
        met.append(statuses_of(rig))
        if len(met) == 1:
            for publisher in (*strict, quick):
                publisher.post(1)
        return int(pause(job))

    monkeypatch.setattr(ring_intake, "pause", post_behind)
    for publisher in (*strict, quick):
        publisher.post(1)
    rig.turn(lambda: quick.hear() == 2, "the answers that wait for no sync")
    assert met[0].count((LinkStatus.EMPTY, 1)) == len(strict), met[0]
    assert (LinkStatus.ARMED, 0) in met[0], met[0]
    assert not any(publisher.hear() for publisher in strict)
    late.wake()
    rig.turn(lambda: all(each.hear() for each in strict), "the answers behind the sync")
    late.wake()
    finish(rig, *strict)
    assert [each.answers for each in strict] == [[[0, 0], [0, 1]]] * len(strict)


def test_a_client_alone_signals_while_its_publish_waits(
    rig: Rig, late: LateSyncs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.assign(1, durability="fsync")
    publisher = Publisher(rig, 1, "p")
    rig.turn(lambda: not rig.worker.state.journals[0].busy, "rest")
    met: list[list[tuple[int, int]]] = []

    def note(job: int) -> int:
        met.append(statuses_of(rig))
        return int(pause(job))

    monkeypatch.setattr(ring_intake, "pause", note)
    publisher.post(1)
    rig.turn(lambda: bool(met), "a pause")
    assert met[0] == [(LinkStatus.ARMED, 1)]
    late.wake()
    finish(rig, publisher)


def test_what_comes_unasked_while_a_turn_closes_is_for_kernels(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ordinary way behind a turn leaves it alone, and the next turn takes it."""
    strict = strict_publishers(rig)
    counted, words = Counted(rig), intake_of(rig)._words
    syncs = rig.worker.state.logs[0].syncs
    paused: list[int] = []

    def post_behind(job: int) -> int:
        paused.append(job)
        if len(paused) > 1:
            return int(pause(job))
        for publisher in strict:
            publisher.post(1)
        # not by the kernel's pause, which leaves a sync that is late to Python
        wait(lambda: not syncs.backlog, "the end of the sync")
        words[JobWord.IS_CLOSING] = 1
        return 0

    monkeypatch.setattr(ring_intake, "pause", post_behind)
    for publisher in strict:
        publisher.post(1)
    finish(rig, *strict)
    assert paused and counted.taken == 2 * len(strict), counted.taken
    assert [each.answers for each in strict] == [[[0, 0], [0, 1]]] * len(strict)


@pytest.mark.parametrize(("sync_ns", "waits"), [(100_000, False), (5_000_000, True)])
def test_half_of_many_are_enough_where_syncs_are_quick(
    rig: Rig, sync_ns: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = strict_publishers(rig)
    words = intake_of(rig)._words
    words[JobWord.SIBLINGS] = len(strict)
    words[JobWord.SYNC_NS] = sync_ns
    met: list[int] = []

    def note(job: int) -> int:
        met.append(words[JobWord.AWAITED])
        return int(pause(job))

    monkeypatch.setattr(ring_intake, "pause", note)
    for publisher in strict[:SIBLINGS_MIN]:
        publisher.post(1)
    finish(rig, *strict[:SIBLINGS_MIN])
    assert (met[0] == 0) == waits, met
