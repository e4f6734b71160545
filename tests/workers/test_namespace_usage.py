"""What the coordinator makes of the use of namespaces that workers report, and the words that they share."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.broker import messages as m
from danube_fast.broker.topics.quota import NO_QUOTA, NamespaceQuota
from danube_fast.errors import ResourceExhausted
from danube_fast.ring.buckets import Bucket, BucketTable, JointBucket
from danube_fast.ring.control import ProcessState
from danube_fast.ring.namespace_words import NamespaceWords
from danube_fast.workers.reports import namespaces
from danube_fast.workers.reports.namespaces import NamespaceUsage
from tests.workers.shard_rig import FakeMailbox

SECOND = 1_000_000_000
ME, OTHER = 1, 2


@pytest.fixture
def table() -> Iterator[BucketTable]:
    made = BucketTable.create()
    yield made
    made.close()


class Control:
    """Epochs of two workers."""

    def __init__(self) -> None:
        self.epochs = {ME: 1, OTHER: 1}

    def epoch(self, process: int) -> int:
        return self.epochs[process]

    def state(self, process: int) -> ProcessState:
        return ProcessState.READY


def test_a_joint_bucket_waits_for_both_and_charges_both(table: BucketTable) -> None:
    own = Bucket(table.address(1), 10, 0)
    common = Bucket(table.address(2), 100, 0, burst_ns=0)
    both = JointBucket(own, common)
    assert both.room(0, 100) == 1 and both.wait_ns(0) == 0
    both.take(0, 50, 0)
    assert common.wait_ns(0) == SECOND // 2
    assert both.wait_ns(0) == own.wait_ns(0) == 5 * SECOND - 250_000_000


def test_handles_of_another_worker_count_until_it_starts_again(table: BucketTable) -> None:
    control: Any = Control()
    words = NamespaceWords(table, control, [ME, OTHER], "n")
    assert [words.take_handle(OTHER, 3) for _ in range(4)] == [True, True, True, False]
    assert not words.take_handle(ME, 3)
    assert (words.handles(ME), words.handles(OTHER)) == (0, 3)
    control.epochs[OTHER] = 2
    assert words.handles_of_all() == 0
    assert words.take_handle(ME, 3)
    assert NamespaceWords(table, control, [ME, OTHER], "m").handles_of_all() == 0


# ---------------------------------------------------------------- the coordinator


STORAGE = NamespaceQuota(namespace_storage_bytes_max=1000)


class Usages:
    """The coordinator's side, with workers that say what a test has them say."""

    def __init__(self, table: BucketTable, quota: NamespaceQuota = STORAGE) -> None:
        self.mailbox, self.control = FakeMailbox(), Control()
        self.now_ns = 0
        self.quota = quota
        boot: Any = SimpleNamespace(
            mailbox=self.mailbox, buckets=table, control=self.control,
            clock=SimpleNamespace(monotonic_ns=lambda: self.now_ns),
            config=SimpleNamespace(processes=SimpleNamespace(workers=[ME, OTHER])),
        )  # fmt: skip
        self.hosts: set[int] = set()
        self.quotas = quotas = SimpleNamespace(
            quota_listeners=[],
            quota=lambda name: self.quota,
            with_quota=lambda: ["n"] if self.quota != NO_QUOTA else [],
        )
        topics: Any = SimpleNamespace(namespaces=quotas)
        self.usage = NamespaceUsage(boot, topics, lambda name: self.hosts)
        self.words = NamespaceWords(table, boot.control, [ME, OTHER], "n")

    def say(
        self, worker: int, kept: int | None, accepted: int = 0, *, is_measured: bool = True,
        is_whole: bool = True,
    ) -> str:  # fmt: skip
        """Have a worker report; why the namespace is full."""
        used = {}
        if kept is not None:
            used["n"] = m.NamespaceUse(kept, accepted, 0, is_measured)
        self.tell(worker, used, is_whole=is_whole)
        notices = self.mailbox.notices
        return notices[-1].full.get("n", "") if notices and used else ""  # type: ignore[attr-defined]

    def tell(self, worker: int, used: dict[str, m.NamespaceUse], *, is_whole: bool = False) -> None:
        """Have a worker report these."""
        request: Any = SimpleNamespace(peer=worker, message=m.NamespaceUsed(used, is_whole))
        self.mailbox.handlers[m.NamespaceUsed](request)

    def changed(self) -> None:
        """Tell that the quota has changed."""
        for listener in self.quotas.quota_listeners:
            listener("n")


@pytest.fixture
def usages(table: BucketTable) -> Iterator[Usages]:
    made = Usages(table)
    yield made
    made.mailbox.close()


def test_what_may_be_accepted_waits_until_all_have_counted(usages: Usages) -> None:
    usages.say(ME, 100, 100)
    assert usages.words.until == 0, "a worker is silent"
    usages.say(OTHER, 0, 0, is_measured=False)
    assert usages.words.until == 0, "a worker has not counted all"
    usages.say(OTHER, 300, 50)
    assert usages.words.until == 1000 - 400 + 150


def test_a_worker_that_never_speaks_does_not_hold_publishers_for_ever(usages: Usages) -> None:
    usages.say(ME, 100, 100)
    usages.now_ns = namespaces.WAIT_NS
    usages.say(ME, 100, 100)
    assert usages.words.until == 1000


def test_a_partition_that_moves_is_never_missing(usages: Usages) -> None:
    """The source has dropped it before the target speaks, or before that has counted it."""
    usages.say(ME, 600, 600)
    usages.say(OTHER, 0, 0)
    assert usages.words.until == 1000
    usages.say(ME, 0, 600)
    assert usages.words.until == 1000, "for one report more it counts"
    usages.say(OTHER, 0, 0, is_measured=False)
    usages.say(ME, 0, 600)
    assert usages.words.until == 1000, "and while a worker has not counted all"
    usages.say(OTHER, 600, 0)
    assert usages.words.until == 1000


def test_what_is_deleted_may_be_accepted_again(usages: Usages) -> None:
    usages.say(OTHER, 0, 0)
    assert "keeps 1000 bytes" in usages.say(ME, 1000, 1000)
    assert usages.words.until == 1000
    for _ in range(2):
        assert usages.say(ME, 400, 1000) == ""
    assert usages.words.until == 1600
    assert usages.usage.of("n").storage_bytes == 400


def test_a_worker_without_anything_of_it_any_more_gives_back_all(
    usages: Usages, table: BucketTable
) -> None:
    table.set_word(usages.words.accepted_address(OTHER), 700)
    usages.say(ME, 100, 100)
    usages.say(OTHER, 700, 700)
    assert usages.words.until == 1000
    usages.say(OTHER, None)
    usages.say(ME, 100, 100)
    assert usages.words.until == 1000 - 100 + 100 + 700


def test_a_worker_that_was_started_again_is_asked_and_counts_as_before_until_it_answers(
    usages: Usages,
) -> None:
    usages.say(ME, 100, 100)
    assert m.NamespaceFull({}) in usages.mailbox.notices, "the other worker is asked"
    usages.say(OTHER, 500, 500)
    usages.control.epochs[OTHER] = 2
    usages.mailbox.notices.clear()
    for _ in range(2):
        usages.say(ME, 0, 100)
    assert len(usages.mailbox.notices) == 4, "answers, and a question with each"
    assert usages.words.until == 1000, "what was freed counts when all have spoken"
    usages.say(OTHER, None)
    assert usages.words.until == 1100
    usages.say(ME, 0, 100)
    assert len(usages.mailbox.notices) == 5
    assert usages.words.until == 1100


def test_a_report_costs_what_has_changed_and_not_what_is_there(usages: Usages) -> None:
    asked: list[str] = []

    def quota(name: str) -> NamespaceQuota:
        asked.append(name)
        return usages.quota

    usages.quotas.quota = quota
    everything = {f"n{number}": m.NamespaceUse(10, 10, 0, True) for number in range(1000)}
    for worker in (ME, OTHER):
        usages.tell(worker, everything, is_whole=True)
    asked.clear()
    usages.tell(ME, {"n7": m.NamespaceUse(20, 20, 0, True)})
    assert set(asked) == {"n7"}
    asked.clear()
    for _ in range(100):
        usages.now_ns += SECOND
        usages.usage.do_work(usages.now_ns)
    assert not asked, "and nothing while nothing changes"


def test_a_report_of_a_part_leaves_the_others_as_they_were(usages: Usages) -> None:
    usages.say(OTHER, 300, 300)
    usages.say(ME, 100, 100)
    usages.tell(ME, {})
    assert usages.words.until == 1000 and usages.usage.of("n").storage_bytes == 400
    for _ in range(2):
        usages.say(ME, 0, 100, is_whole=False)
    assert usages.words.until == 1100 and usages.usage.of("n").storage_bytes == 300


def test_the_word_of_the_last_worker_counts_for_namespaces_that_it_has_nothing_of(
    usages: Usages,
) -> None:
    usages.say(ME, 100, 100)
    assert usages.words.until == 0
    usages.say(OTHER, None)
    assert usages.words.until == 1000


def test_a_part_is_not_taken_for_all_of_a_worker(usages: Usages) -> None:
    """Of a worker whose coordinator was started again, and that has not noticed."""
    usages.say(OTHER, 0, 0)
    usages.say(ME, 100, 100, is_whole=False)
    assert usages.words.until == 0
    usages.say(ME, 100, 100)
    assert usages.words.until == 1000


def test_all_workers_with_partitions_of_it_have_counted_before_publishers_come_in(
    usages: Usages,
) -> None:
    """A quota that is set: no worker is silent, but one does not know of it yet."""
    usages.hosts = {ME, OTHER}
    usages.say(OTHER, None)
    usages.say(ME, 400, 400)
    assert usages.words.until == 0
    usages.say(OTHER, 500, 0)
    assert usages.words.until == 1000 - 500


def test_all_workers_are_told_that_a_namespace_is_full_and_that_it_is_so_no_more(
    usages: Usages,
) -> None:
    usages.say(OTHER, 0, 0)
    usages.mailbox.notices.clear()
    usages.say(ME, 1000, 1000)
    told = [notice.full["n"] for notice in usages.mailbox.notices]  # type: ignore[attr-defined]
    assert len(told) == 2 and all("keeps 1000 bytes" in text for text in told)
    usages.mailbox.notices.clear()
    usages.say(ME, 900, 1000)
    assert usages.mailbox.notices == [m.NamespaceFull({"n": ""})] * 2
    usages.mailbox.notices.clear()
    usages.say(ME, 800, 1000)
    assert usages.mailbox.notices == [m.NamespaceFull({"n": ""})], "the one that spoke"


def test_a_worker_that_cannot_be_told_is_asked_again_and_the_others_are_told(
    usages: Usages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[int, dict[str, str]]] = []
    stuck = {ME}

    def notify(peer: int, message: Any) -> None:
        if peer in stuck:
            raise ResourceExhausted("64 MiB wait for it")
        told.append((peer, message.full))

    usages.say(ME, 400, 400)
    usages.say(OTHER, 400, 400)
    monkeypatch.setattr(usages.mailbox, "notify", notify)
    usages.quota = NamespaceQuota(namespace_storage_bytes_max=500)
    usages.changed()
    assert [peer for peer, full in told if "keeps 800 bytes" in full["n"]] == [OTHER]
    for _ in range(3):
        usages.now_ns += SECOND
        usages.usage.do_work(usages.now_ns)
    assert len(caplog.records) == 1, "said once"
    stuck.clear()
    usages.now_ns += SECOND
    usages.usage.do_work(usages.now_ns)
    assert told[1:] == [(ME, {})], "asked for all that it has"
    usages.tell(ME, {"n": m.NamespaceUse(400, 400, 0, True)}, is_whole=True)
    assert "keeps 800 bytes" in told[-1][1]["n"] and told[-1][0] == ME
    stuck.add(OTHER)
    usages.tell(OTHER, {"n": m.NamespaceUse(400, 400, 0, True)})
    assert usages.usage._unheard() == [OTHER], "nor does an answer raise"


def test_the_wait_ends_although_no_worker_speaks_any_more(usages: Usages) -> None:
    usages.say(ME, 100, 100)
    usages.mailbox.notices.clear()
    usages.usage.do_work(usages.now_ns)
    assert usages.mailbox.notices == [m.NamespaceFull({})], "the silent one is asked"
    assert usages.words.until == 0
    usages.now_ns += namespaces.WAIT_NS
    usages.usage.do_work(usages.now_ns)
    assert usages.words.until == 1000


def test_nothing_is_left_of_a_namespace_that_is_deleted_and_made_again(usages: Usages) -> None:
    bucket = Bucket(usages.words.publish_row, 10, 0)
    usages.say(OTHER, 0, 0)
    assert "keeps 1000 bytes" in usages.say(ME, 1000, 1000)
    bucket.take(0, 1000, 0)
    quota, usages.quota = usages.quota, NO_QUOTA
    usages.mailbox.notices.clear()
    usages.changed()
    assert usages.mailbox.notices == [m.NamespaceFull({"n": ""})] * 2, "all open it"
    usages.say(ME, 1000, 1000)  # it has not heard of that yet
    assert usages.words.until == 0 and usages.usage.of("n") == namespaces.Usage(0, 0)
    usages.quota = quota
    usages.hosts = {OTHER}
    usages.changed()
    assert usages.words.until == 0, "it is not known what is there"
    assert bucket.wait_ns(0) == 0, "and nothing is owed"
    assert usages.say(OTHER, 0, 0) == ""
    assert usages.words.until == 1000


def test_what_was_left_by_a_namespace_of_the_name_does_not_count_for_a_coordinator_that_is_new(
    table: BucketTable,
) -> None:
    usages = Usages(table)
    usages.words.set_until(5)
    usages.quota = NO_QUOTA
    new = Usages(table, usages.quota)
    new.quota = NamespaceQuota(namespace_storage_bytes_max=1000)
    new.changed()
    assert new.words.until == 0
    again = Usages(table)
    usages.words.set_until(5)
    again.changed()
    assert again.words.until == 5, "of a namespace that has its quota already it does"
    for each in (usages, new, again):
        each.mailbox.close()


def test_a_limit_that_changes_is_in_force_at_once(usages: Usages) -> None:
    usages.say(OTHER, 0, 0)
    usages.say(ME, 600, 600)
    usages.quota = NamespaceQuota(namespace_storage_bytes_max=500)
    usages.changed()
    assert usages.words.until == 500
    assert "namespace_storage_bytes_max 500" in str(usages.mailbox.notices[-1])
    usages.quota = NO_QUOTA
    usages.changed()
    assert usages.words.until == 0


def test_a_limit_that_changes_or_goes_is_felt_with_the_next_report(usages: Usages) -> None:
    usages.say(ME, 600, 600)
    usages.say(OTHER, 0, 0)
    usages.quota = NamespaceQuota(namespace_storage_bytes_max=500)
    assert "namespace_storage_bytes_max 500" in usages.say(ME, 600, 600)
    assert usages.words.until == 500
    usages.quota = NO_QUOTA
    assert usages.say(ME, 600, 600) == ""
    assert usages.words.until == 0
