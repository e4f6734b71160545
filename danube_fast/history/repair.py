"""Repair of manifests: what surviving records say, and what objects hold, as one new snapshot for each partition.

    records that can be read --> what they know       --+
    every object, by its table --> what else there is --+--> sections --> a snapshot behind all other records
                                                        '--> offsets that nothing has: told as lost

The snapshot has the highest epoch of the store, so it fences older uploaders. Records before it are put aside
(superseding.py), the oldest first, as if they had been pruned. No object is deleted, none is changed; but a broker that
is started afterwards deletes those without a name. So those that matter are held for a while.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import InvalidArgument, NotFound
from danube_fast.history.audit import FIND, LOST, check_sections
from danube_fast.history.catalog import Damage, OnProgress, PartitionHistory, without_records
from danube_fast.history.holds import Hold, ensure_hold
from danube_fast.history.layout import OBJECTS_PREFIX, ObjectHeader, object_key
from danube_fast.history.manifest import (
    LOST_PREFIX,
    NONE,
    Record,
    Section,
    lost_section,
)
from danube_fast.history.ranges import Range, common, subtract
from danube_fast.history.records import Knowledge, Remains, know
from danube_fast.history.salvage import (
    Cover,
    Source,
    copy_piece,
    cover,
    section_in,
    sound_ranges,
)
from danube_fast.history.stores.store import ObjectStore
from danube_fast.history.superseding import in_use, supersede
from danube_fast.history.survey import Survey, all_keys, alone, look, place

__all__ = ["Found", "PartitionRepair", "Repair", "repair_history"]

HOLD_SECONDS = 7 * 24 * 3600
"""How long objects are held: a week, in which the operator can look at what a repair has told, and adopt it."""
COPY_NUMBER = 500_000_000_000
"""Numbers of objects that a repair makes begin here: no uploader comes so far."""
FAR = 1 << 62
"""Behind all offsets."""


class Found(msgspec.Struct, frozen=True):
    """Messages in an object."""

    key: str
    partition_id: int
    base_offset: int
    end_offset: int


class PartitionRepair(msgspec.Struct, frozen=True):
    """The changes of a repair to one partition."""

    partition_id: int
    topic: str
    """Empty: no record that can be read says it."""
    reasons: list[str]
    record: int
    """Number of the snapshot."""
    first_offset: int
    end_offset: int
    named: list[Found]
    """Objects that the manifest names anew."""
    copied: list[Found]
    """Messages that are copied out of objects of which the rest is not needed or not sound."""
    lost: list[Range]
    """Offsets that are told as lost from now on."""
    put_aside: int
    """Records."""


class Repair(msgspec.Struct, frozen=True):
    """The changes of a repair to a store, which are made or only planned."""

    store: str
    identity: str
    """Of the broker, in hex."""
    is_done: bool
    partitions: list[PartitionRepair]
    damages: list[Damage]
    """What stays damaged: readers are told."""
    unnamed: list[Found]
    """Messages that no manifest names, and that come back only if they are adopted."""
    held: int
    """Objects that no broker deletes for a while: those of `unnamed`, and all that were named anew, copied from or
    given up. Of a repair that is only planned: those that it would hold."""
    hold: str
    """Key of the hold on them; empty: there is none."""
    expires: int
    """When the hold ends, Unix time in seconds."""


class _Choice(NamedTuple):
    """The sections that a snapshot takes over, and where the rest may come from."""

    kept: list[Section]
    """Sections that stay as they are."""
    given_up: list[Source]
    """Sections that are damaged, of which an orphan has what they have lost."""
    orphans: list[Source]
    needed: list[Range]
    """Offsets that no section has which stays."""


class _Plan(NamedTuple):
    """All that is to be done to one partition."""

    repair: PartitionRepair
    remains: Remains
    newest: Record | None
    choice: _Choice
    cover: Cover


def repair_history(
    store: ObjectStore,
    adopted: Mapping[int, str],
    wall_ns: int,
    *,
    is_dry: bool = True,
    on_progress: OnProgress | None = None,
) -> Repair:
    """Find out what a repair has to do, and do it unless `is_dry`. No broker may use the store meanwhile.

    `adopted`: partitions, with the topic or an empty one, whose newest records may be missing: objects behind the end
    of their manifest are named, too. Raises what the store raises, FailedPrecondition for a store of two brokers or
    one that changes meanwhile, NotFound if there is nothing.
    """
    survey = look(store, on_progress)
    plans: list[_Plan] = []
    damages: list[Damage] = []
    for partition_id in sorted(survey.remains.keys() | adopted.keys()):
        plan = _plan(store, survey, partition_id, adopted.get(partition_id))
        damages += _left_damages(survey, partition_id, plan)
        if plan is not None:
            plans.append(plan)
    unnamed = _unnamed(survey, plans)
    headers = _headers_of_copies(survey, plans, wall_ns)
    held = _to_be_held(plans, unnamed, headers)
    hold: Hold | None = None
    if not is_dry:
        if plans and all_keys(store) != survey.keys:
            raise in_use(store, "objects or records have come or gone meanwhile")
        # first: a repair that is refused has found a living broker, which may not delete them either
        if held:
            hold = ensure_hold(store, held, HOLD_SECONDS, wall_ns)
        for plan, some in zip(plans, headers, strict=True):
            _carry_out(store, survey, plan, some)
    return Repair(
        store=store.url, identity=survey.identity.hex(), is_done=not is_dry,
        partitions=[plan.repair for plan in plans], damages=damages, unnamed=unnamed,
        held=len(held), hold=hold.key if hold is not None else "",
        expires=hold.expires_ms * MILLISECOND_NS // SECOND_NS if hold is not None else 0,
    )  # fmt: skip


# ---------------------------------------------------------------- what is to be done


def _plan(
    store: ObjectStore, survey: Survey, partition_id: int, adopted: str | None
) -> _Plan | None:
    """Decide on one partition; None if there is nothing to do."""
    remains = survey.remains.get(partition_id) or Remains(partition_id, [], {}, {}, is_pruned=False)
    known = survey.known.get(partition_id) or know({})
    topic = known.manifest.topic or adopted or ""
    if adopted and adopted != topic:
        raise InvalidArgument(
            f"partition {partition_id} is of {topic}, not of {adopted}; adopt it without a topic"
        )
    reasons = _reasons(remains, known, adopted)
    is_open = remains.is_end_lost or adopted is not None
    choice = _choose(store, survey, partition_id, known, is_open=is_open)
    if not (reasons or choice.orphans or adopted is not None):
        return None
    found = cover(
        store, partition_id, choice.needed, known.unused, choice.given_up, choice.orphans,
        known.first_offset,
    )  # fmt: skip
    ends = [section.end_offset for section in found.named] + [p.end_offset for p in found.pieces]
    end = max([known.end_offset, *ends])
    left = common(found.left, [(known.first_offset, end)])
    if adopted is not None and not (remains.keys or remains.is_bare or ends):
        raise NotFound(f"{store.url} has nothing of partition {partition_id}; name another one")
    if adopted is not None and not topic:
        raise InvalidArgument(
            f"no record tells the topic of partition {partition_id}; say it: --adopt {partition_id}=TOPIC"
        )
    orphans = {source.section for source in choice.orphans}
    is_further = bool(found.named) or any(piece.section in orphans for piece in found.pieces)
    if adopted is not None and (is_further or not remains.is_pruned) and not reasons:
        reasons = ["its newest records may be missing: it was to be adopted"]
    if is_further and not reasons:
        reasons = ["objects hold what others have lost"]
    if not reasons:
        return None
    before = {(each.base_offset, each.end_offset) for each in known.sections if _is_lost(each)}
    repair = PartitionRepair(
        partition_id=partition_id, topic=topic, reasons=reasons, record=remains.next_number,
        first_offset=known.first_offset, end_offset=end,
        named=[_found(partition_id, each) for each in found.named],
        copied=[
            Found(each.section.key, partition_id, each.base_offset, each.end_offset)
            for each in found.pieces
        ],
        lost=[each for each in left if each not in before], put_aside=len(remains.keys),
    )  # fmt: skip
    return _Plan(repair, remains, known.newest, choice, found._replace(left=left))


def _reasons(remains: Remains, known: Knowledge, adopted: str | None) -> list[str]:
    """Why the records of a partition need a snapshot; empty if they do not."""
    reasons = [text for _, text in sorted(remains.faults.items())]
    if remains.is_bare and adopted is not None:  # else it may be of a topic that was deleted
        reasons.append("records were pruned, and the later ones are missing")
    if adopted and remains.keys and not known.manifest.topic:
        reasons.append(f"no record tells its topic: it was to be {adopted}")
    if not (known.is_whole or reasons):
        reasons.append("the snapshot that its records build on is missing")
    if known.sections != known.manifest.sections:
        reasons.append("sections overlap")
    elif known.end_offset > known.manifest.end_offset and not reasons:
        reasons.append("sections lie behind the end of the manifest")
    return reasons


def _choose(
    store: ObjectStore, survey: Survey, partition_id: int, known: Knowledge, *, is_open: bool
) -> _Choice:
    """Choose sections that stay as they are, and what may take the place of others.

    A section that is damaged stays, unless another object has what it has lost.
    """
    first, limit = known.first_offset, FAR if is_open else known.end_offset
    sound = {
        section: sound_ranges(section, survey.damages_of(partition_id, section))
        for section in known.sections
        if section.end_offset > first
    }
    bad = [
        part
        for section, ranges in sound.items()
        for part in subtract([(section.base_offset, section.end_offset)], ranges)
    ]
    free = subtract([(first, limit)], [(s.base_offset, s.end_offset) for s in sound])
    wanted = subtract([*free, *bad], [(0, first), *known.unused])
    others = [
        section
        for section in survey.sections(partition_id)
        if section not in sound and common([(section.base_offset, section.end_offset)], wanted)
    ]
    whole = {section.key for section, ranges in sound.items() if _is_whole(section, ranges)}
    orphans = _audited(store, survey, partition_id, [s for s in others if s.key not in whole])
    helpful = [part for source in orphans for part in source.sound]
    kept: list[Section] = []
    given_up: list[Source] = []
    for section, ranges in sound.items():
        holes = subtract([(section.base_offset, section.end_offset)], ranges)
        if _is_lost(section):
            continue
        if common(holes, helpful):
            given_up.append(Source(section, ranges))
        else:
            kept.append(section)
    needed = subtract([(first, limit)], [(s.base_offset, s.end_offset) for s in kept])
    return _Choice(kept, given_up, orphans, needed)


def _is_whole(section: Section, ranges: list[Range]) -> bool:
    return ranges == [(section.base_offset, section.end_offset)]


def _is_lost(section: Section) -> bool:
    return section.key.startswith(LOST_PREFIX)


def _audited(
    store: ObjectStore, survey: Survey, partition_id: int, sections: list[Section]
) -> list[Source]:
    """Tell what of some sections is sound; those of which nothing is are left out."""
    history = PartitionHistory(partition_id, survey.identity, alone("", sections))
    damages = check_sections(store, [history], None)
    sources = [
        Source(each, sound_ranges(each, [d for d in damages if d.key == each.key]))
        for each in sections
    ]
    return [source for source in sources if source.sound]


def _left_damages(survey: Survey, partition_id: int, plan: _Plan | None) -> list[Damage]:
    """Find the damage that stays in a partition."""
    found = survey.damages.get(partition_id, [])
    if plan is None:
        remains = survey.remains.get(partition_id)
        return [without_records(partition_id)] if remains and remains.is_bare else found
    kept = {section.key for section in plan.choice.kept}
    lost = [
        Damage(
            each.key, LOST, FIND, plan.repair.topic, partition_id, each.base_offset,
            each.end_offset,
        )
        for each in _sections_of(plan, [])
        if _is_lost(each)
    ]  # fmt: skip
    return [*(each for each in found if each.key in kept), *lost]


def _found(partition_id: int, section: Section) -> Found:
    return Found(section.key, partition_id, section.base_offset, section.end_offset)


def _unnamed(survey: Survey, plans: Sequence[_Plan]) -> list[Found]:
    """Find messages in objects that belong to no manifest, or stand behind the end of theirs."""
    ends = {number: known.end_offset for number, known in survey.known.items()}
    ends.update((plan.repair.partition_id, plan.repair.end_offset) for plan in plans)
    return [
        _found(partition_id, section)
        for key in sorted(survey.tables)
        for partition_id in sorted({int(number) for number in survey.tables[key]["partition_id"]})
        if (section := section_in(key, survey.tables[key], partition_id)) is not None
        if section.end_offset > ends.get(partition_id, 0)
    ]


# ---------------------------------------------------------------- doing it


def _headers_of_copies(
    survey: Survey, plans: Sequence[_Plan], wall_ns: int
) -> list[list[ObjectHeader]]:
    """Give numbers to the objects that a repair makes: the headers of each plan."""
    taken = [place(key) for key in survey.keys if _is_object_key(key)]
    numbers = itertools.count(
        1 + max([COPY_NUMBER, *(number + 1 for epoch, number in taken if epoch == survey.epoch)])
    )
    return [
        [
            ObjectHeader(survey.identity, survey.epoch, next(numbers), wall_ns)
            for _ in plan.cover.pieces
        ]
        for plan in plans
    ]


def _to_be_held(
    plans: Sequence[_Plan], unnamed: Sequence[Found], headers: Sequence[Sequence[ObjectHeader]]
) -> list[str]:
    """List the objects that must not be deleted soon: what the operator is told of, and what has lost its name."""
    keys = {found.key for found in unnamed}
    for plan in plans:
        keys.update(section.key for section in plan.cover.named)
        keys.update(piece.section.key for piece in plan.cover.pieces)
        keys.update(source.section.key for source in plan.choice.given_up)
    keys.update(object_key(each.epoch, each.number) for some in headers for each in some)
    return sorted(keys)


def _is_object_key(key: str) -> bool:
    epoch, _, number = key.removeprefix(OBJECTS_PREFIX).partition("/")
    return key.startswith(OBJECTS_PREFIX) and epoch.isdecimal() and number.isdecimal()


def _carry_out(
    store: ObjectStore, survey: Survey, plan: _Plan, headers: Sequence[ObjectHeader]
) -> None:
    """Make the copies, the snapshot that names them, and only then put the old records aside."""
    repair, newest = plan.repair, plan.newest
    partition_id, number = repair.partition_id, repair.record
    copies = [
        copy_piece(store, partition_id, piece, header)
        for piece, header in zip(plan.cover.pieces, headers, strict=True)
    ]
    record = Record(
        identity=survey.identity, partition_id=partition_id, topic=repair.topic,
        incarnation=newest.incarnation if newest is not None else 0, number=number, previous=NONE,
        snapshot=number, owner_epoch=newest.owner_epoch if newest is not None else 0,
        uploader_epoch=survey.epoch, first_offset=repair.first_offset,
        end_offset=repair.end_offset, added=_sections_of(plan, copies), producers=plan.remains.producers,
    )  # fmt: skip
    supersede(store, record, plan.remains.keys)


def _sections_of(plan: _Plan, copies: Sequence[Section]) -> list[Section]:
    """All sections of the snapshot, in the order of offsets."""
    sections = sorted(
        [*plan.choice.kept, *plan.cover.named, *copies], key=lambda section: section.base_offset
    )
    for base, end in plan.cover.left:
        before = [each.append_max_ns for each in sections if each.base_offset < base]
        sections.append(lost_section(plan.repair.partition_id, base, end, max(before, default=0)))
    return sorted(sections, key=lambda section: section.base_offset)
