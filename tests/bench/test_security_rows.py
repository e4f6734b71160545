"""The workloads about security, tiny, over real processes; and that they would see what they look for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import danube_fast
from danube_fast.bench import floors
from danube_fast.bench.load.payloads import LIST_MESSAGES
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Figures
from danube_fast.bench.workloads.catalog import WORKLOADS, planned
from danube_fast.bench.workloads.security import (
    answers,
    auth,
    curve,
    handshakes,
    policy,
    records,
    turns,
)
from danube_fast.bench.workloads.security.secured import ADMIN, Secured, secured
from danube_fast.errors import DanubeError, Internal, PermissionDenied
from danube_fast.security.curve import new_key_pair, write_key_file
from danube_fast.security.records import Binding, Principal, Role

ROWS = ["auth", "handshakes", "policy", "answers"]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def run(rig: Rig, name: str, **changes: Any) -> Figures:
    figures = WORKLOADS[name].run(rig, planned(name, **changes))
    assert figures.is_faultless, figures
    return figures


@pytest.mark.parametrize("name", ROWS)
def test_each_has_a_floor(name: str) -> None:
    assert [case for case in floors.CASES if case.workload == name]


# ---------------------------------------------------------------- auth


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "PAIRS", 1)
    monkeypatch.setattr(auth, "PACED_MESSAGES", 100)
    monkeypatch.setattr(auth, "WARM_SECONDS", 0.0)


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_rates_with_and_without_auth(rig: Rig, transport: str) -> None:
    extra = run(rig, "auth", messages=25_000, transport=transport).extra
    assert extra["rate_ratio"] == pytest.approx(extra["on_per_s"] / extra["off_per_s"])
    slower = extra["on_publish_p50_us"] / extra["off_publish_p50_us"]
    assert extra["latency_ratio"] == pytest.approx(1 / slower)


@pytest.mark.usefixtures("briefly")
def test_what_does_not_arrive_is_missed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_HERE", "tests.bench.lossy")
    messages = 4 * LIST_MESSAGES
    figures = WORKLOADS["auth"].run(rig, planned("auth", messages=messages))
    assert figures.lost == 2 * LIST_MESSAGES, "a list with auth, and one without"


def test_the_broker_with_auth_asks(rig: Rig) -> None:
    with secured(rig, planned("auth")) as made:
        rows = made.broker.status()["processes"]
        assert rows, "the harness may not ask for the status"
        with pytest.raises(DanubeError):
            danube_fast.connect(made.broker.url, transport="zmq", timeout=3.0)
        write_key_file(made.broker.folder / "eve.key", new_key_pair())
        with pytest.raises(PermissionDenied, match="not registered"):
            danube_fast.connect(made.broker.url, transport="zmq", **made.access("eve"))


# ---------------------------------------------------------------- curve


def test_rates_with_curve_and_without(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "TURNS", 1)
    extra = run(rig, "curve", messages=2000).extra
    for size in curve.SIZES:
        plain, coded = (extra[f"{way}_{size}_mb_per_s"] for way in ("plain", "curve"))
        assert plain > 0 and coded > 0
        assert extra[f"ratio_{size}"] == pytest.approx(coded / plain)


# ---------------------------------------------------------------- handshakes


def test_honest_clients_beside_failing_handshakes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "PAIRS", 1)
    monkeypatch.setattr(handshakes, "PACED_SECONDS", 0.5)
    extra = run(rig, "handshakes", messages=100_000, rate=200.0).extra
    assert extra["denied_per_s"] > 0
    assert extra["handshakes_per_s"] > extra["denied_per_s"], "no garbage was sent"
    for ratio, name in (
        ("rate_ratio", "per_s"),
        ("lists_ratio", "lists_per_s"),
        ("p99_ratio", "p99_us"),
    ):
        found = extra[f"attacked_{name}"] / extra[f"quiet_{name}"]
        assert extra[ratio] == pytest.approx(found)


def test_an_attack_by_a_registered_key_is_none(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_key_pair()
    monkeypatch.setattr(handshakes, "PAIRS", 1)
    monkeypatch.setattr(handshakes, "PACED_SECONDS", 0.5)
    monkeypatch.setattr(handshakes, "new_key_pair", lambda: made)
    add = Secured.add

    def add_more(self: Secured, client: danube_fast.Client, user: str, roles: Any) -> None:
        add(self, client, user, roles)
        if user == ADMIN:
            client.admin.set_credential(f"curve:{made.public}", ADMIN)

    monkeypatch.setattr(Secured, "add", add_more)
    with pytest.raises(Internal, match="let in"):
        run(rig, "handshakes", messages=100_000, rate=200.0)


# ---------------------------------------------------------------- policy


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PRINCIPALS", 50)
    monkeypatch.setattr(records, "ROLES", 20)
    monkeypatch.setattr(records, "BINDINGS", 500)
    monkeypatch.setattr(policy, "QUESTIONS", 2000)
    monkeypatch.setattr(policy, "PAIRS", 1)


@pytest.mark.usefixtures("few")
def test_checks_loading_and_turns_of_a_policy(rig: Rig) -> None:
    extra = run(rig, "policy", messages=40_000, rate=20_000.0, clients=4).extra
    assert 0 < extra["check_p50_us"] <= extra["check_p99_us"]
    assert 0 < extra["groups_check_p50_us"] <= extra["groups_check_p99_us"]
    assert extra["records"] > 50 + 20 + 500, "those of the broker's own users, too"
    assert extra["load_seconds"] > 0 and extra["changes_per_s"] > 0 and extra["turns"] > 0
    found = extra["changed_turn_p99_us"] / extra["quiet_turn_p99_us"]
    assert extra["turn_ratio"] == pytest.approx(found)


@pytest.mark.usefixtures("few")
def test_a_policy_that_refuses_what_is_bound_is_seen() -> None:
    made = records.make_records(with_groups=False)
    policy._check(policy._in_memory(made), made)
    bindings = [each for each in made if not isinstance(each, Binding)]
    with pytest.raises(Internal, match="which is bound"):
        policy._check(policy._in_memory(bindings), made)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("with_groups", [False, True])
def test_records_are_as_many_as_they_are_to_be(with_groups: bool) -> None:
    made = records.make_records(with_groups=with_groups)
    kinds = [sum(isinstance(each, kind) for each in made) for kind in (Principal, Role, Binding)]
    assert kinds == [50, 20, 500]
    of_groups = sum(isinstance(each, Binding) and "group:" in each.subject for each in made)
    assert of_groups == (250 if with_groups else 0)
    assert made == records.make_records(with_groups=with_groups)


# ---------------------------------------------------------------- answers


def test_times_of_answers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TOPICS", 5)
    extra = run(rig, "answers", messages=40).extra
    for name in ("lookup", "describe", "watch", "open", "subscribe"):
        forbidden, missing = (extra[f"{name}_{side}_p50_us"] for side in ("forbidden", "missing"))
        assert forbidden > 0 and missing > 0
        assert extra[f"{name}_apart"] == pytest.approx(
            max(forbidden / missing, missing / forbidden)
        )
        assert 0 <= extra[f"{name}_later"] <= 1 and 0 <= extra[f"{name}_p"] <= 1


def test_answers_that_differ_in_more_than_time_are_seen(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "TOPICS", 3)
    add = Secured.add

    def add_a_viewer(self: Secured, client: danube_fast.Client, user: str, roles: Any) -> None:
        add(self, client, user, roles or [("viewer", "namespace:default")])

    monkeypatch.setattr(Secured, "add", add_a_viewer)
    with pytest.raises(Internal, match="lookup tells what is forbidden from what is missing"):
        run(rig, "answers", messages=40)


def test_a_share_of_pairs_and_how_likely_it_is() -> None:
    """Small samples by counting pairs; large ones by what the test promises."""
    rng = np.random.default_rng(1)
    for size in (1, 2, 7, 30):
        first, second = rng.integers(0, 9, size), rng.integers(0, 9, size + 3)
        pairs = np.subtract.outer(first, second)
        counted = float(np.mean((pairs > 0) + 0.5 * (pairs == 0)))
        assert answers.later_share(first, second)[0] == pytest.approx(counted)
    alike = [answers.later_share(*rng.integers(0, 50, (2, 300)))[1] for _ in range(400)]
    assert 0.02 < float(np.mean(np.array(alike) < 0.05)) < 0.09
    share, p = answers.later_share(*(rng.normal(shift, 1, 2000) for shift in (0.2, 0.0)))
    assert share > 0.52 and p < 1e-4
    assert answers.later_share(np.ones(5), np.ones(5)) == (0.5, 1.0)
