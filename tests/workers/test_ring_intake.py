"""Publishes over rings that a kernel takes are handled as those that are taken one by one."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import Status
from danube_fast.net.greeting import bundle_bytes_max
from tests.workers.ring_script import SHARED, TOPICS, Action, Script, Side

CASES = int(os.environ.get("DANUBE_INTAKE_CASES", "12"))
SEED = int(os.environ.get("DANUBE_INTAKE_SEED", "1"))
ROUNDS = 6
RESULT = 67
ODD_REQUESTS = (0, (1 << 63) - 1, 1 << 63, -1, -1000)


def _answers(side: Side, number: int, shared: set[int]) -> list[Any]:
    """Answers of a client in their order; without offsets of frames for the partition to which several publish."""
    return [
        (*entry[:2], entry[2][::2], entry[3]) if entry[0] == 68 and entry[1] in shared else entry
        for entry in side.answers[number]
    ]


def _is_loose(entry: Any) -> bool:
    """Whether the time of an answer depends on what other clients sent: it waits for a group if there is one."""
    return bool(entry[0] == RESULT or (entry[0] == 68 and int(Status.DUPLICATE) in entry[2]))


def _in_order(answers: list[Any], begin: int, *, alone: bool) -> list[Any]:
    """Answers from number `begin` on, those last whose order is left open."""
    new = answers[begin:]
    if alone:
        return new
    loose = sorted((entry for entry in new if _is_loose(entry)), key=lambda each: each[:2])
    return [entry for entry in new if not _is_loose(entry)] + loose


def _first_difference(kernel: list[Any], ordinary: list[Any]) -> str:
    for at in range(max(len(kernel), len(ordinary))):
        one, other = kernel[at : at + 1], ordinary[at : at + 1]
        if one != other:
            return (
                f"number {at} of {len(kernel)} and {len(ordinary)}: kernel {one}, ordinary {other}"
            )
    return ""


def _compare(
    kernel: Side,
    ordinary: Side,
    shared: list[set[int]],
    begins: list[int],
    again: str,
    *,
    alone: bool,
) -> None:
    for number, begin in enumerate(begins):
        found = _first_difference(
            _in_order(_answers(kernel, number, shared[number]), begin, alone=alone),
            _in_order(_answers(ordinary, number, shared[number]), begin, alone=alone),
        )
        assert not found, f"answers to client {number} differ at {found}; again: {again}"
    for consumer in kernel.delivered.keys() | ordinary.delivered.keys():
        found = _first_difference(
            kernel.delivered.get(consumer, []), ordinary.delivered.get(consumer, [])
        )
        assert not found, f"deliveries to {consumer} differ at {found}; again: {again}"


def _compare_ends(kernel: Side, ordinary: Side, again: str) -> None:
    ends = [
        [(row["partition_id"], row["first_offset"], row["end_offset"]) for row in side.rig.stats()]
        for side in (kernel, ordinary)
    ]
    assert ends[0] == ends[1], f"partitions stand at {ends}; again: {again}"
    for partition in TOPICS:
        one, other = kernel.everything(partition), ordinary.everything(partition)
        if partition == SHARED:
            assert [at for at, _ in one] == [at for at, _ in other], f"offsets; again: {again}"
            one, other = sorted(one, key=lambda row: row[1]), sorted(other, key=lambda row: row[1])
            one, other = [(0, row[1]) for row in one], [(0, row[1]) for row in other]
        found = _first_difference(one, other)
        assert not found, f"partition {partition} differs at {found}; again: {again}"


def _shared_requests(side: Side, actions: list[Action]) -> list[set[int]]:
    """Numbers that requests with frames for the shared partition will have, by client."""
    found: list[set[int]] = [set() for _ in side.clients]
    numbers = [client.request for client in side.clients]
    for action in actions:
        if action.command is None:
            numbers[action.client] += 1
            if any(entry.lane[1] == SHARED for entry in action.entries):
                found[action.client] |= {numbers[action.client], *ODD_REQUESTS}
    return found


@pytest.mark.parametrize("case", range(CASES))
def test_what_the_kernel_takes_is_handled_as_what_is_taken_one_by_one(
    tmp_path: Path, case: int
) -> None:
    seed = SEED + case
    again = f"DANUBE_INTAKE_SEED={seed} DANUBE_INTAKE_CASES=1"
    draw = random.Random(seed)
    settings = {
        "message_bytes_max": 64 * 1024,
        "shm_ring_bytes": draw.choice((4096, 16 * 1024, 1 << 20)),
        "tail_bytes_max": draw.choice((0, 1 << 24)),
    }
    kernel = Side(tmp_path / "kernel", straight=True, **settings)
    ordinary = Side(tmp_path / "ordinary", straight=False, **settings)
    script = Script(draw, bundle_bytes_max(kernel.rig.settings))
    shared: list[set[int]] = [set() for _ in kernel.clients]
    try:
        for _ in range(ROUNDS):
            following = kernel.open_all()
            assert following == ordinary.open_all(), f"sequences differ; again: {again}"
            actions = script.round(following)
            for known, new in zip(shared, _shared_requests(kernel, actions), strict=True):
                known |= new
            begins = [len(answers) for answers in kernel.answers]
            kernel.play(actions)
            ordinary.play(actions)
            alone = script.alone is not None
            _compare(kernel, ordinary, shared, begins, again, alone=alone)
        assert kernel.taken, f"the kernel took nothing; again: {again}"
        assert kernel.rig.worker.intake.frames_in == ordinary.rig.worker.intake.frames_in
        _compare_ends(kernel, ordinary, again)
    finally:
        kernel.rig.stop()
        ordinary.rig.stop()
