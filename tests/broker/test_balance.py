"""The rebalancer's decisions, from loads alone: it helps, it comes to an end, and it keeps its caps."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.broker.balance import (
    HOUR_NS,
    PARTITION_PAUSES,
    RULES,
    Balancer,
    Move,
    Rules,
    Share,
    Strategy,
)

SECOND_NS = 1_000_000_000
MIB = 1 << 20
QUICK = Rules(busy=0.5, gap=0.25, margin=0.07, lasts_ns=5 * SECOND_NS, moves_per_hour_max=60)


class World:
    """Workers with partitions of steady loads; a worker can do 1.0 and no more."""

    def __init__(self, rules: Rules, loads: dict[int, tuple[int, float]], workers: int) -> None:
        self.rules = rules
        self.balancer = Balancer(rules, byte_count_max=100 * MIB)
        self.loads = {partition: load for partition, (_, load) in loads.items()}
        self.place = {partition: worker for partition, (worker, _) in loads.items()}
        self.workers = range(1, workers + 1)
        self.now_ns = SECOND_NS
        self.moves: list[tuple[int, Move]] = []
        self.byte_count = MIB

    def load(self, worker: int) -> float:
        return sum(load for part, load in self.loads.items() if self.place[part] == worker)

    def second(self, noise: float = 1.0) -> None:
        """Everybody reports once; a move is made at once."""
        self.now_ns += SECOND_NS
        for worker in self.workers:
            mine = [part for part in self.loads if self.place[part] == worker]
            whole = min(1.0, self.load(worker) * noise)
            total = self.load(worker) or 1.0
            shares = {
                part: Share(whole * self.loads[part] / total, self.byte_count) for part in mine
            }
            self.balancer.report(worker, whole, shares, self.now_ns)
        move = self.balancer.plan(self.workers, self.now_ns)
        if move is not None:
            assert self.place[move.partition_id] == move.source
            self.balancer.tried(move, self.now_ns)
            self.balancer.note_moved(move, self.now_ns)
            self.place[move.partition_id] = move.target
            self.moves.append((self.now_ns, move))

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second()


def test_a_busy_worker_sheds_to_an_idle_one_until_they_are_alike() -> None:
    world = World(QUICK, dict.fromkeys(range(4), (1, 0.2)), workers=2)
    world.run(4)
    assert not world.moves, "not before it has lasted"
    world.run(60)
    assert [move.target for _, move in world.moves] == [2, 2]
    assert world.load(1) == world.load(2)
    (first, _), (second, _) = world.moves
    assert second - first >= QUICK.lasts_ns, "a pause between two moves"


def test_one_hot_partition_is_never_moved_to_and_fro() -> None:
    world = World(QUICK, {1: (1, 0.95), 2: (2, 0.01)}, workers=2)
    world.run(3600)
    assert not world.moves


def test_what_lies_beside_a_hot_partition_leaves_it_alone() -> None:
    world = World(QUICK, {1: (1, 0.7), 2: (1, 0.12), 3: (1, 0.12)}, workers=2)
    world.run(3600)
    assert 1 not in {move.partition_id for _, move in world.moves} or len(world.moves) == 1
    assert max(world.load(1), world.load(2)) <= 0.71
    assert len(world.moves) <= 2


def test_a_short_burst_moves_nothing() -> None:
    world = World(QUICK, dict.fromkeys(range(10), (1, 0.02)), workers=2)
    for second in range(600):
        world.second(noise=5.0 if second % 20 < 3 else 1.0)
    assert not world.moves


def test_large_partitions_and_workers_that_are_down_are_left_alone() -> None:
    world = World(QUICK, dict.fromkeys(range(4), (1, 0.2)), workers=2)
    world.byte_count = 200 * MIB
    world.run(600)
    assert not world.moves
    world.byte_count = MIB
    world.run(2)
    assert world.balancer.plan([1], world.now_ns + QUICK.lasts_ns) is None


def test_who_reports_no_more_has_nothing_to_do() -> None:
    world = World(QUICK, {1: (1, 0.9)}, workers=2)
    world.run(10)
    assert world.balancer.load_of(1, world.now_ns) > 0.8
    assert world.balancer.load_of(1, world.now_ns + 60 * SECOND_NS) == 0.0
    world.balancer.forget(1)
    assert world.balancer.load_of(1, world.now_ns) == 0.0


def test_a_failed_move_counts_and_is_not_tried_again_at_once() -> None:
    world = World(QUICK, dict.fromkeys(range(3), (1, 0.3)), workers=2)
    tried: list[tuple[int, int]] = []
    for _ in range(45):
        world.now_ns += SECOND_NS
        shares = {part: Share(0.3, MIB) for part in range(3)}
        world.balancer.report(1, 0.9, shares, world.now_ns)
        move = world.balancer.plan(world.workers, world.now_ns)
        if move is not None:
            world.balancer.tried(move, world.now_ns)
            tried.append((world.now_ns, move.partition_id))
    assert len({partition for _, partition in tried}) == len(tried)
    assert len(tried) == 3


def test_every_strategy_has_rules_but_off() -> None:
    assert {*RULES, Strategy.OFF} == set(Strategy)
    orders = [RULES[name] for name in (Strategy.CONSERVATIVE, Strategy.BALANCED)]
    orders.append(RULES[Strategy.AGGRESSIVE])
    for calm, eager in itertools.pairwise(orders):
        assert calm.busy > eager.busy
        assert calm.gap > eager.gap
        assert calm.margin > eager.margin
        assert calm.lasts_ns > eager.lasts_ns
        assert calm.moves_per_hour_max < eager.moves_per_hour_max


WORLDS = st.integers(2, 6).flatmap(
    lambda workers: st.tuples(
        st.just(workers),
        st.lists(st.tuples(st.integers(1, workers), st.floats(0.0, 1.0)), min_size=1, max_size=12),
        st.sampled_from([QUICK, QUICK._replace(moves_per_hour_max=3), *RULES.values()]),
    )
)


@settings(deadline=None, max_examples=60)
@given(WORLDS)
def test_steady_loads_come_to_rest(drawn: tuple[int, list[tuple[int, float]], Rules]) -> None:
    """Whatever the loads: each move helps, none is taken back, the caps hold, and there is an end."""
    workers, parts, rules = drawn
    total = sum(load for _, load in parts) or 1.0
    # no worker has more than it can do: what is over, nobody can measure
    loads = {
        number: (worker, load / max(1.0, total)) for number, (worker, load) in enumerate(parts)
    }
    world = World(rules, loads, workers)
    squares = sum(world.load(worker) ** 2 for worker in world.workers)
    step = rules.lasts_ns // SECOND_NS
    for _ in range(40 * step):
        count = len(world.moves)
        before = dict(world.place)
        world.second()
        if len(world.moves) == count:
            continue
        _, move = world.moves[-1]
        now_busy = max(world.load(move.source), world.load(move.target))
        then = sum(load for part, load in world.loads.items() if before[part] == move.source)
        assert now_busy < then, "the busier of the two is no better off"
        now_squares = sum(world.load(worker) ** 2 for worker in world.workers)
        assert now_squares < squares
        squares = now_squares
    times = [at for at, _ in world.moves]
    assert all(b - a >= rules.lasts_ns for a, b in itertools.pairwise(times))
    for at in times:
        hour = [other for other in times if at <= other < at + HOUR_NS]
        assert len(hour) <= rules.moves_per_hour_max
    last: dict[int, int] = {}
    for at, move in world.moves:
        if move.partition_id in last:
            assert at - last[move.partition_id] >= PARTITION_PAUSES * rules.lasts_ns
        last[move.partition_id] = at
    assert max(Counter(move.partition_id for _, move in world.moves).values(), default=0) <= 3
