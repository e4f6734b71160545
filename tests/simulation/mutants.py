"""Bugs planted on purpose: one line of a shipped module each, in a copy of the package. The simulation
must find every one of them.

    python tests/simulation/mutants.py                 all, with seeds and seconds until each was found
    python tests/simulation/mutants.py --only NAME     one
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SEEDS_MAX = 2000
FOLDERS = ("broker", "history", "wal", "net", "workers")
SECONDS_MAX = 3600


class Mutant(NamedTuple):
    """What stands somewhere once, and what stands there instead."""

    before: str
    after: str
    moves: float = 0.0
    """How often partitions move while it is looked for."""
    history: float = 0.0
    """How often there is an uploader, and a store."""


MUTANTS: dict[str, Mutant] = {
    "pages_come_for_the_one_that_asked_first": Mutant(
        "for partition in (*others.values(), last):",
        "for partition in (last,):",
    ),
    "pages_that_come_tell_no_one": Mutant(
        "            fetch.is_over = True\n",
        "            pass\n",
    ),
    "ack_before_sync": Mutant(
        "            waiting = group.on_synced\n",
        "            waiting = group.on_written\n",
    ),
    "shown_before_sync": Mutant(
        "group.synced_entries.append((partition, stored))",
        "group.written_entries.append((partition, stored))",
    ),
    "failed_sync_acks_all_the_same": Mutant(
        "                results[index] = borrowed\n"
        "            publication.refuse(place, error.code, str(error))\n",
        "                results[index] = borrowed\n",
    ),
    "duplicate_acked_before_its_original": Mutant(
        "            group.on_synced.append(publication)\n            publication.pending += 1\n",
        "            pass\n",
    ),
    "cursor_not_restored": Mutant("existing.restore_acked(record.ranges)", "pass"),
    "acked_above_the_cursor_lost_in_snapshots": Mutant(
        "Cursor(self.partition_id, sub.name, sub.cursor, acked)",
        "Cursor(self.partition_id, sub.name, sub.cursor, [])",
    ),
    "cursor_past_a_hole": Mutant(
        "records.append(Acked(self.partition_id, self.name, pairs))",
        "records.append(Acked(self.partition_id, self.name, [pairs[0], pairs[-1]]))",
    ),
    "a_fresh_message_is_walked_past": Mutant(
        "self.ledger.first_fresh(self.next_offset, visible)",
        "self.ledger.first_fresh(self.next_offset + 1, visible)",
    ),
    "delayed_messages_come_early": Mutant(
        "late = times[rows] > now_ns + self._timers.wall_ahead_ns",
        "late = times[rows] > now_ns + self._timers.wall_ahead_ns + 200_000_000",
    ),
    "what_was_cut_out_stands_for_its_neighbour": Mutant(
        "rows: Rows = np.array([row], np.int32)",
        "rows: Rows = np.array([max(row - 1, 0)], np.int32)",
    ),
    "what_is_woken_is_forgotten": Mutant(
        "if self.delays and self.delays.wake(now_ns + self._timers.wall_ahead_ns):",
        "if self.delays and self.delays.wake(now_ns + self._timers.wall_ahead_ns) > 1:",
    ),
    "seek_not_recorded": Mutant(
        "            self._sought = offset\n",
        "            self._sought = None\n",
    ),
    "others_hear_nothing_of_a_seek": Mutant(
        "if consumer is not seeker and consumer.announced and session is not None:",
        "if consumer is seeker and session is None:",
    ),
    "last_acks_before_a_move_are_not_waited_for": Mutant(
        "if drain.is_over or now_ns - drain.began_ns >= DRAIN_NS:",
        "if drain.began_ns:",
        moves=0.5,
    ),
    "what_waits_in_a_queue_counts_as_delivered": Mutant(
        "        ledger.give_back(slot, taken)\n", "        ledger.give_back(slot)\n"
    ),
    "a_death_counts_no_more_than_was_reported": Mutant(
        "ledger.taken_next(slot, taken, UNREPORTED_MESSAGES)", "ledger.taken_next(slot, taken, 0)"
    ),
    "a_death_fails_what_was_not_reported": Mutant(
        "ledger.fail_taken(slot, reported,", "ledger.fail_taken(slot, taken,"
    ),
    "a_death_is_no_failure": Mutant("if parting is Parting.DIED:", "if parting is None:"),
    "a_close_is_a_failure": Mutant(
        "if parting is not Parting.CLOSED and consumer.reports:", "if consumer.reports:"
    ),
    "standby_served_beside_the_active": Mutant(
        "everyone = everyone[:1]",
        "everyone = everyone[:2]",
    ),
    "exclusive_slot_kept_by_the_dead": Mutant(
        "        for consumer in list(session.consumers.values()):\n"
        "            self.detach(session, consumer, parting)\n"
        "        self._delivery.forget(session)\n",
        "        self._delivery.forget(session)\n",
    ),
    "silence_never_ends_a_session": Mutant(
        "state.sessions.silent(heard_until_ns)",
        "state.sessions.silent(0)",
    ),
    "window_of_a_producer_lost_at_restart": Mutant(
        'slot, fields["base_sequence"], fields["message_count"], fields["base_offset"]',
        'slot, fields["base_sequence"], 0, fields["base_offset"]',
    ),
    "window_of_a_producer_lost_at_trim": Mutant(
        "self.tables.restore_window(slot, record.window, record.next_sequence)",
        "self.tables.restore_window(slot, [], record.next_sequence)",
    ),
    "producer_recorded_under_another_id": Mutant(
        "r.ProducerOpened(partition_id, producer_id, name, epoch), durable",
        "r.ProducerOpened(partition_id, 1, name, epoch), durable",
    ),
    "producer_forgotten_at_restart": Mutant(
        "if begun is not None and used < begun.wall_ns:", "if begun is None:"
    ),
    "out_of_sequence_accepted": Mutant(
        "        return Status.OUT_OF_SEQUENCE\n",
        "        return Status.OK\n",
    ),
    "offsets_reused_after_a_loss": Mutant(
        "                row[PartitionWord.NEXT_OFFSET] = start\n",
        "",
    ),
    "permits_do_not_bound_a_frame_that_just_came": Mutant(
        "if self.kind is SubscriptionKind.SHARED and not consumer.flow.covers(stored):",
        "if not consumer.flow.willing:",
    ),
    "permits_do_not_bound_what_comes_again": Mutant(
        "rows = rows[: max(0, flow.message_credit if byte_count > 0 else 0)]",
        "rows = rows[:]",
    ),
    "bytes_do_not_bound_a_frame": Mutant(
        "byte_count = flow.bytes_left",
        "byte_count = 1 << 40",
    ),
    "redelivery_count_not_raised": Mutant(
        "cut = Cut(view, places, attempts)",
        "cut = Cut(view, places, None)",
    ),
    "delay_of_a_nack_ignored": Mutant(
        "            if wait_ns <= 0:\n",
        "            if wait_ns >= 0:\n",
    ),
    "ack_timeout_never_fires": Mutant(
        "        if timeout_ns and self.tracks:\n",
        "        if timeout_ns and not self.tracks:\n",
    ),
    "extension_ends_at_once": Mutant(
        "consumer.slot, until_ns)\n        self._extended_ns = min(self._extended_ns, until_ns)\n",
        "consumer.slot, 0)\n        self._extended_ns = 0\n",
    ),
    "ack_by_who_does_not_hold": Mutant(
        "            sub.ack(consumer, pairs)\n",
        "            sub.settle(pairs[0], min(pairs[1], sub.next_offset))\n",
    ),
    "key_goes_to_two_consumers": Mutant(
        "hashes, masks = view.key_hashes(), self._masks_of(view)",
        "hashes, masks = None, self._masks_of(view)",
    ),
    "join_moves_held_keys_at_once": Mutant(
        "        self._must_walk = True\n        self._starved = []\n        slots =",
        "        self._must_walk = True\n        self._starved = []\n        self.restart()\n        slots =",
    ),
    "filters_are_not_looked_at": Mutant(
        "[consumer.filters in takers for consumer in self._consumers]",
        "[True for consumer in self._consumers]",
    ),
    "poison_discards_its_neighbour": Mutant(
        "self.settle(poisoned.start, poisoned.end)",
        "self.settle(poisoned.start, poisoned.end + 1)",
    ),
    "dead_letter_acked_before_it_is_published": Mutant(
        "        target.turn += 1\n",
        "        target.turn += 1\n        self._mark_acked(message)\n",
    ),
    "fresh_ones_overtake_what_waits_for_the_log": Mutant(
        "return self.kind not in _IN_ORDER",
        "return True",
    ),
    "undelayed_ones_are_put_aside_with_delayed_ones": Mutant(
        "self._put_off(stored, rows[times[rows] > 0], times)",
        "self._put_off(stored, rows, times)",
    ),
    "trim_forgets_who_still_needs_it": Mutant(
        "limit, pin = lowest, (partition, who)",
        "pin = (partition, who)",
    ),
    "frontier_before_its_manifest": Mutant(
        "            added += [section] if section is not None else []\n",
        "            yield Ask(worker, m.SetUploaded(self._state.epoch, backlog.partition_id, "
        "taken.until, 0, manifest.number, 0))\n"
        "            added += [section] if section is not None else []\n",
        history=1.0,
    ),
    "frontier_forgotten_in_snapshots": Mutant(
        "records.append(partition.uploaded)", "pass", history=1.0
    ),
    "frontier_forgotten_at_a_move": Mutant(
        "            if not isinstance(record, r.Cursor):\n",
        "            if isinstance(record, r.Uploaded):\n                continue\n"
        "            if not isinstance(record, r.Cursor):\n",
        moves=1.0,
        history=1.0,
    ),
    "a_snapshot_does_not_wait_for_a_frontier": Mutant(
        "            and not journal.changing\n", "", history=1.0, moves=0.5
    ),
    "trimmed_before_it_is_uploaded": Mutant(
        "        until = partition.uploaded.until\n        claims =",
        "        until = partition.visible\n        claims =",
        history=1.0,
    ),
    "unsynced_frames_are_uploaded": Mutant(
        "if run.end_offset > partition.visible or end > log.synced_position:",
        "if run.end_offset > partition.visible:",
        history=1.0,
    ),
    "a_manifest_of_another_try_is_taken_for_its_own": Mutant(
        "            if found != data:\n", "            if not found:\n", history=1.0
    ),
    "a_record_of_an_older_uploader_counts": Mutant(
        "number=number, previous=base.number,",
        "number=number, previous=number - 1,",
        history=1.0,
    ),
    "a_snapshot_of_a_manifest_has_the_newest_section_only": Mutant(
        "added=full.sections, removed=[],", "added=list(added), removed=[],", history=1.0
    ),
    "what_a_failed_commit_made_is_not_read": Mutant(
        "            self._state.forget(backlog.partition_id)  # it may have been made\n",
        "",
        history=1.0,
    ),
    "history_is_read_one_section_early": Mutant(
        "place = bisect.bisect_right(self.sections, offset,",
        "place = bisect.bisect_left(self.sections, offset,",
        history=1.0,
    ),
    "a_gap_in_history_reaches_to_the_log": Mutant(
        "return Gap(min(end, chunk.base_offset), NEVER_USED)",
        "return Gap(end, NEVER_USED)",
        history=1.0,
    ),
    "a_topic_begins_where_its_log_begins": Mutant(
        "partition.begin_at(first if first < uploaded.until else max(found, first))",
        "partition.begin_at(max(found, first))",
        history=1.0,
    ),
    "what_only_history_has_is_too_old": Mutant(
        "if first is None or found <= first.base_offset:", "if False:", history=1.0
    ),
    "a_clock_that_is_set_back_puts_uploads_off": Mutant(
        "return max(seen_ns, self._state.now_wall_ns - size.came_ns)",
        "return max(0, self._state.now_wall_ns - size.came_ns)",
        history=1.0,
    ),
    "a_trim_hides_history": Mutant(
        "if not partition.is_in_history(partition.first_offset):", "if partition:", history=1.0
    ),
    "frames_of_other_offsets_are_uploaded": Mutant(
        "at = max(history.manifest.end_offset, owned.backlog.first_offset)",
        "at = max(history.manifest.end_offset - 1, owned.backlog.first_offset)",
        history=1.0,
    ),
}


def places_of(mutant: Mutant, package: Path) -> list[Path]:
    """Files of the package with that line, each as often as it has it."""
    found = []
    for folder in FOLDERS:
        for path in sorted((package / folder).rglob("*.py")):
            found += [path] * path.read_text().count(mutant.before)
    return found


def plant(mutant: Mutant, target: Path) -> None:
    """A copy of the package with one bug in it."""
    shutil.copytree(
        ROOT / "danube_fast", target / "danube_fast", ignore=shutil.ignore_patterns("__pycache__")
    )  # folders that are links become folders
    places = places_of(mutant, target / "danube_fast")
    if len(places) != 1:
        raise SystemExit(f"{mutant.before!r} is there {len(places)} times, not once")
    text = places[0].read_text()
    places[0].write_text(text.replace(mutant.before, mutant.after))


class Found(NamedTuple):
    """How a mutant ended."""

    name: str
    seeds: int
    """How many it took; 0: it was not found."""
    seconds: float
    text: str


def hunt(name: str, seeds_max: int = SEEDS_MAX, seconds_max: float = SECONDS_MAX) -> Found:
    """Run seeds until one finds the bug."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="df-mutant-") as folder:
        plant(MUTANTS[name], Path(folder))
        command = [
            sys.executable, "-m", "danube_fast.testing.simulation",
            "--seeds", f"0:{seeds_max}", "--lines", "0", "--moves", str(MUTANTS[name].moves),
            "--history", str(MUTANTS[name].history),
        ]  # fmt: skip
        result = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": folder}, cwd=folder, capture_output=True,
            text=True, check=False, timeout=seconds_max,
        )  # fmt: skip
    seconds = time.monotonic() - begun
    counted = re.search(r"after (\d+) seeds", result.stdout)
    if result.returncode == 1 and counted:
        told = re.search(r"^seed .*", result.stdout, re.MULTILINE)
        return Found(name, int(counted[1]), seconds, told[0] if told else "")
    return Found(name, 0, seconds, (result.stdout + result.stderr)[-500:])


def main() -> int:
    """Command line; 0 if all were found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=sorted(MUTANTS))
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX)
    options = parser.parse_args()
    missed = 0
    for name in [options.only] if options.only else MUTANTS:
        found = hunt(name, options.seeds)
        missed += found.seeds == 0
        verdict = f"{found.seeds} seeds" if found.seeds else "NOT FOUND"
        print(f"{name:45} {verdict:>12} {found.seconds:7.1f} s  {found.text[:150]}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
