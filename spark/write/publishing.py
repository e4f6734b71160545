"""The driver's side of a write: commit what tasks have staged, publish it once, note that, and sweep.

    open the producer -> commit (the first one counts) -> frames from its next sequence on -> done -> sweep

A driver that comes to the same batch again finds the commit, and goes on behind what the broker has already: after a kill, in
a second driver, from the command line. A driver opens the producer before it commits, and the broker takes nothing of
an older one then: of two drivers the later goes on, and the other ends with ProducerFenced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from danube_fast.client.client import Client
from danube_fast.client.entry import broker_url
from danube_fast.client.link.steps import deadline_after
from danube_fast.client.produce.frames import FramePublisher, open_frames_steps
from danube_fast.client.values.access import Access
from danube_fast.client.values.limits import CONNECT_TIMEOUT_SECONDS, REQUEST_TIMEOUT_SECONDS
from danube_fast.clock import SystemClock
from danube_fast.errors import (
    DanubeError,
    DataLoss,
    FailedPrecondition,
    NotFound,
    PermissionDenied,
    ProducerFenced,
)
from danube_fast.history.stores.store import ObjectStore
from danube_fast.spark.write.options import ONCE_PREFIX, STREAM_PREFIX, check_write_id
from danube_fast.spark.write.record import (
    BatchState,
    Commit,
    Done,
    StagedObject,
    create_commit,
    create_done,
    delete_batches,
    find_batch,
    list_batches,
    mark_doubt,
    read_commit,
    read_done,
    read_doubt,
    try_read_commit,
)
from danube_fast.spark.write.staging import StagingTarget, read_staged
from danube_fast.types import Dispatch

__all__ = [
    "STEPS",
    "BrokerLink",
    "Proposal",
    "finish_batch",
    "producer_name",
    "publish_proposal",
    "reached",
]

_NO_ACCESS = Access()
PRODUCER_PREFIX = "spark-"
STEPS = ("staged", "committed", "half", "published", "done", "swept")
"""The instants at which a driver may be killed, in their order; `half`: some frames are published."""
STAGING_REMEDY = (
    "start the broker with --store URL, or name a store for what tasks stage: .option('staging', "
    "'s3://bucket/prefix'), or file:///folder where all executors are on one host"
)


class Proposal(NamedTuple):
    """What a driver wants to commit: a batch, and what its tasks have staged."""

    write_id: str
    batch: int
    query: str
    """Id of the stream's query; empty: a batch write."""
    topic: str
    partition_ids: tuple[int, ...]
    objects: list[StagedObject]
    must_exist: bool = False
    """Tasks have staged nothing, as the batch was committed before."""


def reached(step: str) -> None:
    """Mark an instant of `STEPS`; tests end the process here."""


def producer_name(write_id: str) -> str:
    """Name of the producer of a write."""
    return f"{PRODUCER_PREFIX}{write_id}"


class BrokerLink(Client):
    """A driver's client, which publishes ready frames; a context manager."""

    def __init__(
        self, url: str | None, timeout_seconds: float, access: Access = _NO_ACCESS
    ) -> None:
        """`timeout_seconds`: for the ack of a frame. Raises as `danube_fast.connect`."""
        super().__init__(
            broker_url(url), CONNECT_TIMEOUT_SECONDS,
            **{"name": "spark-write", "token": None, "tls": None, "transport": "auto", **access.arguments()},
        )  # fmt: skip
        self._timeout = timeout_seconds

    def target(self, topic: str, staging: str | None) -> StagingTarget:
        """Look up the topic, and make it if it is missing; where its rows are staged.

        Raises FailedPrecondition without a store, and for a topic that keeps nothing; what the broker raises.
        """
        store = staging or self._store_of_broker()
        deadline_ns = deadline_after(self._core.pump.clock, REQUEST_TIMEOUT_SECONDS)
        route = self._run(self._core.routes.lookup_steps(topic, {}, 0, deadline_ns))
        if route.dispatch == Dispatch.NON_RELIABLE:
            raise FailedPrecondition(
                f"{topic} is non_reliable and does not know what it got, so rows could double; write to a reliable topic"
            )
        ids = tuple(partition.partition_id for partition in route.partitions)
        payload_bytes_max = self.admin.topic_policy(topic)["message_bytes_max"]
        limits = dict(self._core.routes.bootstrap.limits)
        return StagingTarget(topic, ids, limits, store, payload_bytes_max)

    def _store_of_broker(self) -> str:
        try:
            status = self.admin.cluster_status()
        except PermissionDenied as error:
            raise PermissionDenied(
                f"{error}; a user without it names the store itself: .option('staging', 's3://bucket/prefix')"
            ) from error
        history: dict[str, Any] = status.get("history") or {}
        store: str = history.get("store") or ""
        if not store:
            raise FailedPrecondition(f"the broker has no store; {STAGING_REMEDY}")
        return store

    def open_frames(self, topic: str, write_id: str) -> FramePublisher:
        """Open the producer of a write; older ones of its name are fenced from now on. Raises NotFound for a missing
        topic, what the broker raises."""
        steps = open_frames_steps(
            self._core.producers, topic, producer_name(write_id), self._timeout
        )
        return self._run(steps)

    def send_frame(
        self, publisher: FramePublisher, index: int, frame: memoryview, count: int
    ) -> None:
        """Send a frame to a partition, by index. Raises what became of any frame before."""
        self._run(publisher.send_frame_steps(publisher.lanes[index], frame, count))

    def flush_frames(self, publisher: FramePublisher) -> None:
        """Wait for all acks. Raises what was not accepted."""
        self._run(publisher.flush_steps())

    def close_frames(self, publisher: FramePublisher) -> None:
        """Give the producer up."""
        with contextlib.suppress(DanubeError):
            self._run(publisher.close_steps())


def publish_proposal(link: BrokerLink, store: ObjectStore, proposal: Proposal) -> int:
    """Commit and publish a batch, or go on with what is committed of it already; how many rows it has.

    Commits of the same write that were not published yet go first. Raises ProducerFenced when another driver goes on,
    FailedPrecondition and DataLoss when it cannot be told what is published, what broker and store raise.
    """
    reached("staged")
    write_id, batch = proposal.write_id, proposal.batch
    batches = list_batches(store, write_id)
    _check_query(store, batches, proposal)
    for each in batches:
        if each.batch < batch and each.is_pending:
            _publish(link, store, read_commit(store, write_id, each.batch))
    if _is_done(batches, proposal):
        return _rows_done(store, batches, proposal)
    publisher = link.open_frames(proposal.topic, write_id)
    try:
        # looked at once more behind the opening: what an older driver did up to then is there now
        batches = list_batches(store, write_id)
        _check_query(store, batches, proposal)
        if _is_done(batches, proposal):
            return _rows_done(store, batches, proposal)
        commit = try_read_commit(store, write_id, batch)
        if commit is None and proposal.must_exist:
            raise FailedPrecondition(
                f"{write_id} was given up while its job ran again; run the job once more"
            )
        own = _commit_of(proposal, publisher)
        if commit is None:
            _check_staged(store, batches, proposal)
            commit = create_commit(store, own)
        reached("committed")
        _check_same(commit, proposal)
        if commit is own:
            return _publish_opened(link, store, commit, publisher, is_own=True)
    finally:
        link.close_frames(publisher)
    return _publish(link, store, commit)


def finish_batch(link: BrokerLink, store: ObjectStore, state: BatchState) -> int:
    """Publish what is committed of a batch and not published, and sweep what is staged; how many rows it has. Raises
    as `publish_proposal`, FailedPrecondition for one that is not committed."""
    if state.is_done or state.is_superseded:
        rows = read_done(store, state.write_id, state.batch).rows if state.is_done else 0
        store.delete(state.staged)
        return rows
    if not state.is_committed:
        raise FailedPrecondition(
            f"batch {state.batch} of {state.write_id} is not committed, so nothing says which rows count; run its job "
            "again, or remove them with `danube-fast spark writes abort`"
        )
    return _publish(link, store, read_commit(store, state.write_id, state.batch))


def _check_query(store: ObjectStore, batches: Sequence[BatchState], proposal: Proposal) -> None:
    """Raise FailedPrecondition if the write id is that of another topic or of another query, or if the checkpoint of the
    query has had batches under another write id."""
    for each in reversed(batches):
        known: Commit | Done | None = None
        with contextlib.suppress(NotFound):  # swept just now
            if each.is_done:
                known = read_done(store, each.write_id, each.batch)
            elif each.is_committed:
                known = read_commit(store, each.write_id, each.batch)
        if known is not None:
            _check_same(known, proposal)
            break
    _check_begun(store, batches, proposal)


def _check_begun(store: ObjectStore, batches: Sequence[BatchState], proposal: Proposal) -> None:
    """Raise FailedPrecondition for a stream that has begun under another write id: Spark repeats the last batch of a
    checkpoint, and its rows would be published under both. Each batch leaves a record, an empty one too, and the newest
    stays: without any there was no batch."""
    own_id = f"{STREAM_PREFIX}{proposal.query}"
    if not proposal.query or _has_record(batches):
        return
    if proposal.batch == 0 and (
        proposal.write_id == own_id or not _has_record(list_batches(store, own_id))
    ):
        return
    raise FailedPrecondition(
        f"the checkpoint of this query has earlier batches, and {store.url} has none of them under {proposal.write_id}: "
        "they were published under another write_id, with another staging or to another sink, or were given up with "
        "`danube-fast spark writes abort`; take that write_id again (or leave write_id out, if there was none), or begin "
        "a new checkpoint"
    )


def _has_record(batches: Sequence[BatchState]) -> bool:
    """Whether any of the batches was committed."""
    return any(each.is_committed or each.is_done for each in batches)


def _check_same(known: Commit | Done, proposal: Proposal) -> None:
    """Raise FailedPrecondition if what is known of a write id is of another topic or of another query."""
    if known.topic != proposal.topic:
        if proposal.write_id == f"{STREAM_PREFIX}{proposal.query}":
            raise FailedPrecondition(
                f"the checkpoint is that of a stream to {known.topic}; use another checkpointLocation for {proposal.topic}"
            )
        also = " and another checkpointLocation" if proposal.query else ""
        raise FailedPrecondition(
            f"write_id {proposal.write_id} is that of a write to {known.topic}; choose another one{also} for "
            f"{proposal.topic}"
        )
    if known.query != proposal.query:
        raise FailedPrecondition(
            f"write_id {proposal.write_id} is that of another query, whose checkpoint is another one, and its "
            "batches would be taken for those; choose another write_id, or forget that query with `danube-fast "
            f"spark writes abort {proposal.write_id}`"
        )


def _check_staged(store: ObjectStore, batches: Sequence[BatchState], proposal: Proposal) -> None:
    """Raise FailedPrecondition unless all that tasks have staged is there: a commit of less could never be published."""
    found = find_batch(batches, proposal.batch)
    here = {*(found.staged if found else ())}
    if lost := [each.key for each in proposal.objects if each.key not in here]:
        raise FailedPrecondition(
            f"{store.url} has {len(lost)} of the staged objects of {proposal.write_id} no more, such as {lost[0]}: the "
            "write was given up meanwhile, or executors have another folder of that name; run the job again"
        )


def _is_done(batches: Sequence[BatchState], proposal: Proposal) -> bool:
    """Whether the batch was published before. Raises FailedPrecondition if later ones of its stream were, too: Spark
    repeats the last batch of a checkpoint alone, so this checkpoint is an old one."""
    done = [each.batch for each in batches if each.is_done]
    if proposal.query and any(batch > proposal.batch for batch in done):
        raise FailedPrecondition(
            f"batch {proposal.batch} of {proposal.write_id} comes behind batch {max(done)}, which is done: its checkpoint "
            "is an old copy, or another driver has gone on; begin a new query with another checkpoint"
        )
    return any(batch >= proposal.batch for batch in done)


def _rows_done(store: ObjectStore, batches: Sequence[BatchState], proposal: Proposal) -> int:
    """Leave a batch that was published before; what is staged for it goes, also what a killed driver has left."""
    found = find_batch(batches, proposal.batch)
    store.delete({*(found.staged if found else ()), *(each.key for each in proposal.objects)})
    return read_done(store, found.write_id, found.batch).rows if found and found.is_done else 0


def _commit_of(proposal: Proposal, publisher: FramePublisher) -> Commit:
    ids = [lane.partition_id for lane in publisher.lanes]
    _check_partitions(proposal.topic, proposal.partition_ids, ids)
    lanes = publisher.lanes[: len(proposal.partition_ids)]
    return Commit(
        write_id=proposal.write_id, batch=proposal.batch, topic=proposal.topic,
        query=proposal.query, made_ns=SystemClock().wall_ns(),
        partition_ids=list(proposal.partition_ids),
        sequences=[lane.next_sequence for lane in lanes],
        producer_epochs=[lane.producer_epoch for lane in lanes], objects=proposal.objects,
    )  # fmt: skip


def _check_partitions(topic: str, staged: Sequence[int], found: Sequence[int]) -> None:
    """Raise FailedPrecondition unless the partitions for which rows were staged are there; more may be."""
    if list(staged) != list(found[: len(staged)]):
        raise FailedPrecondition(
            f"{topic} was deleted and made again since its rows were staged; give them up with `danube-fast spark writes "
            "abort`, then run the job again under another write_id"
        )


def _publish(link: BrokerLink, store: ObjectStore, commit: Commit) -> int:
    """Go on with a commit of another driver, or of an earlier time."""
    with contextlib.suppress(NotFound):
        reason = read_doubt(store, commit.write_id, commit.batch)
        raise FailedPrecondition(_doubtful(commit, reason))
    try:
        with _behind_commit(commit):
            publisher = link.open_frames(commit.topic, commit.write_id)
    except NotFound:
        raise FailedPrecondition(
            f"{commit.topic} was deleted before all rows of {commit.write_id} were published; give them up with "
            f"`danube-fast spark writes abort {commit.write_id}`"
        ) from None
    try:
        return _publish_opened(link, store, commit, publisher, is_own=False)
    finally:
        link.close_frames(publisher)


def _publish_opened(
    link: BrokerLink, store: ObjectStore, commit: Commit, publisher: FramePublisher, *, is_own: bool
) -> int:
    """Publish what the broker has not yet of a commit, note that it is done, and sweep. `is_own`: the commit was made
    with this very producer."""
    _check_partitions(
        commit.topic, commit.partition_ids, [lane.partition_id for lane in publisher.lanes]
    )
    _check_known(store, commit, publisher, is_own=is_own)
    try:
        with _behind_commit(commit):
            _send(link, store, commit, publisher)
    except (ProducerFenced, DataLoss) as error:
        if any(isinstance(lane.failure, DataLoss) for lane in publisher.lanes):
            mark_doubt(store, commit.write_id, commit.batch, str(error))
            raise
        return _rows_of_other(store, commit, error)
    reached("published")
    rows = sum(commit.row_counts)
    done = Done(topic=commit.topic, query=commit.query, rows=rows, made_ns=SystemClock().wall_ns())
    with _behind_commit(commit):
        create_done(store, commit.write_id, commit.batch, done)
    reached("done")
    _sweep(store, commit)
    reached("swept")
    return rows


def _send(link: BrokerLink, store: ObjectStore, commit: Commit, publisher: FramePublisher) -> None:
    """Send the frames that the broker has not, and wait for all acks. Raises what became of any of them."""
    for number, (index, frame, count) in enumerate(_left(store, commit, publisher)):
        link.send_frame(publisher, index, frame, count)
        if number == 0:
            reached("half")
    link.flush_frames(publisher)
    for lane in publisher.lanes:  # one whose rows were acked, and lost behind that
        if isinstance(lane.failure, DataLoss):
            raise lane.failure


@contextlib.contextmanager
def _behind_commit(commit: Commit) -> Iterator[None]:
    """Add to an error how the rows of a commit are published after all. Those that have a cause in the commit itself,
    its topic or another driver tell their own remedy."""
    try:
        yield
    except (DataLoss, FailedPrecondition, NotFound):
        raise
    except DanubeError as error:
        resume = f"`danube-fast spark writes resume {commit.write_id}`"
        if commit.query:
            how = f"start the query again with the same checkpoint, or run {resume}"
        elif commit.write_id.startswith(ONCE_PREFIX):
            how = f"run {resume} (a job that is run again would publish them twice)"
        else:
            how = f"run the job again with the same write_id, or {resume}"
        raise type(error)(
            f"{error}; the rows of write_id {commit.write_id}, batch {commit.batch}, are committed: to publish those "
            f"that are left, {how}; the option timeoutSeconds gives it more time"
        ) from None


def _rows_of_other(store: ObjectStore, commit: Commit, error: DanubeError) -> int:
    """How many rows another driver has published of a commit, where it has done all of it, and has swept what this one
    would read; else raise the error, or ProducerFenced with what to do."""
    batches = list_batches(store, commit.write_id)
    if any(each.is_done and each.batch >= commit.batch for each in batches):
        return sum(commit.row_counts)
    if not isinstance(error, ProducerFenced):
        raise error
    raise ProducerFenced(
        f"another driver goes on with {commit.write_id}, batch {commit.batch}; end one of the two, and look with "
        "`danube-fast spark writes ls`"
    ) from None


def _check_known(
    store: ObjectStore, commit: Commit, publisher: FramePublisher, *, is_own: bool
) -> None:
    """Raise FailedPrecondition, from now on, unless the broker still knows what it has of a commit. A producer that it
    has forgotten begins again at sequence 0 and epoch 1."""
    counts = commit.row_counts
    for index, sequence in enumerate(commit.sequences):
        lane = publisher.lanes[index]
        end = sequence + counts[index]
        is_newer = is_own or lane.producer_epoch > commit.producer_epochs[index]
        if is_newer and sequence <= lane.next_sequence <= end:
            continue
        reason = (
            f"its producer {publisher.name} was at sequence {sequence} to {end} of {lane.topic}, and is at "
            f"{lane.next_sequence} now: the broker has forgotten it (producer_expiry_seconds, producers_max), or "
            "another producer has its name"
        )
        mark_doubt(store, commit.write_id, commit.batch, reason)
        raise FailedPrecondition(_doubtful(commit, reason))


def _doubtful(commit: Commit, reason: str) -> str:
    return (
        f"it cannot be told which rows of {commit.write_id}, batch {commit.batch}, {commit.topic} has: {reason}; look, "
        f"then give up the rest with `danube-fast spark writes abort {commit.write_id}`"
    )


def _left(
    store: ObjectStore, commit: Commit, publisher: FramePublisher
) -> Iterator[tuple[int, memoryview, int]]:
    """The frames of a commit that the broker has not: partition by index, frame, messages. Objects of which it has all
    are not read. Raises DataLoss if the broker stands within a frame."""
    index_of = {partition_id: index for index, partition_id in enumerate(commit.partition_ids)}
    wanted = [lane.next_sequence for lane in publisher.lanes]
    at = list(commit.sequences)
    needed: list[StagedObject] = []
    for each in commit.objects:
        if needed or any(at[index] + count > wanted[index] for index, count in each.rows.items()):
            needed.append(each)
        else:
            for index, count in each.rows.items():
                at[index] += count
    for partition_id, frame, count in read_staged(store, needed):
        index = index_of[partition_id]
        begin, at[index] = at[index], at[index] + count
        if begin >= wanted[index]:
            yield index, frame, count
        elif at[index] > wanted[index]:
            raise DataLoss(
                f"{commit.topic}: the broker has a part of a frame of {commit.write_id}: up to sequence "
                f"{wanted[index]}, and the frame is {begin} to {at[index]}; another producer has its name"
            )


def _sweep(store: ObjectStore, commit: Commit) -> None:
    """Delete what is not needed behind a batch that is done: all that was staged for it, and the batches before."""
    batches = list_batches(store, commit.write_id)
    delete_batches(store, [each for each in batches if each.batch < commit.batch])
    found = find_batch(batches, commit.batch)
    store.delete(found.staged if found else [])


def forget_write(
    store: ObjectStore, write_id: str, *, batch: int | None = None
) -> list[BatchState]:
    """Delete all that a store has of a write, or of one batch of it; what that was. Raises NotFound, what the store
    raises."""
    check_write_id(write_id)  # an empty one would be all of them
    found = [each for each in list_batches(store, write_id) if batch is None or each.batch == batch]
    if not found:
        raise NotFound(
            f"{store.url} knows no write {write_id}; `danube-fast spark writes ls` lists them"
        )
    delete_batches(store, found)
    return found
