"""The policy against loops over all bindings, with random records, resources and orders of changes."""

from __future__ import annotations

import random
import re

import pytest

from danube_fast.clock import SystemClock
from danube_fast.security.changed_rights import Changes
from danube_fast.security.ordered_keys import OrderedKeys
from danube_fast.security.policy import Policy
from danube_fast.security.records import (
    BUILTIN_ROLES,
    Binding,
    Credential,
    Principal,
    Record,
    Role,
    key_of,
)
from danube_fast.security.scopes import Glob
from danube_fast.types import Permission
from danube_fast.workers.process.access import Access

SEEDS = range(20)
STEPS = 80
CHECKS_PER_STEP = 25

NAMESPACES = ("a", "ab", "b", "system", "sys", "s.m")
TOPICS = ("t", "tt", "t-1", "u-t-1", "abcabc", "reply-1")
SUBSCRIPTIONS = ("s", "s1", "s-s", "a:b", "x/y", "s#1", "s\n", "*")
SUBJECTS = ("t", "t-value", "x.y", "a/b")
PEOPLE = ("alice", "bob", "carol", "ops")
OF_HANDLES = (Permission.PRODUCE, Permission.CONSUME)
GROUPS = ("ops", "dev", "all")
ROLES = ("r1", "r2", "r3", *BUILTIN_ROLES)


def is_match(glob: str, text: str) -> bool:
    marks = {"*": "[^/#]*", "?": "[^/#]"}
    return re.fullmatch("".join(marks.get(c, re.escape(c)) for c in glob), text) is not None


def is_namespace_match(glob: str, namespace: str) -> bool:
    return glob == "system" if namespace == "system" else is_match(glob, namespace)


def taken_apart(resource: str) -> tuple[str, str, str]:
    """Namespace, topic and subscription of a resource."""
    path, _, subscription = resource.partition("#")
    if resource.startswith("namespace:"):
        return resource.removeprefix("namespace:"), "", ""
    _, namespace, topic = path.split("/")
    return namespace, topic, subscription


def covers(scope: str, permission: Permission, resource: str) -> bool:
    """Whether a scope below the cluster covers a resource for a permission."""
    if scope.startswith("subject:"):
        return resource.startswith("subject:") and is_match(scope[8:], resource[8:])
    if not resource.startswith(("namespace:", "/")):
        return False
    namespace, topic, subscription = taken_apart(resource)
    if scope.startswith("namespace:"):
        return is_namespace_match(scope[10:], namespace)
    namespace_glob, topic_glob, subscription_glob = taken_apart(scope)
    if not topic or not is_namespace_match(namespace_glob, namespace):
        return False
    if not is_match(topic_glob, topic):
        return False
    if not subscription_glob:
        return True
    if not subscription:
        return permission == "lookup"
    return permission in ("consume", "lookup") and is_match(subscription_glob, subscription)


def expected(
    records: dict[str, Record], name: str, permission: Permission, resource: str, groups: list[str]
) -> bool:
    """The rules, one after the other."""
    principal = records.get(f"principal/{name}")
    if not isinstance(principal, Principal) or principal.disabled:
        return False
    subjects = {f"user:{name}"} | {f"group:{group}" for group in [*principal.groups, *groups]}
    at_cluster: set[Permission] = set()
    for binding in records.values():
        if not isinstance(binding, Binding) or binding.subject not in subjects:
            continue
        role = BUILTIN_ROLES.get(binding.role) or records.get(f"role/{binding.role}")
        if not isinstance(role, Role):
            continue
        if binding.scope == "cluster":
            at_cluster |= set(role.permissions)
        elif permission in role.permissions and covers(binding.scope, permission, resource):
            return True
    if resource.startswith(("/system/", "namespace:system")):
        if permission == "produce":
            return False
        if permission == "consume" and "manage_cluster" not in at_cluster:
            return False
    return permission in at_cluster


def random_glob(rng: random.Random, name: str) -> str:
    """A name with some of its parts replaced by wildcards, or as it is."""
    if rng.random() < 0.4:
        return name
    for _ in range(rng.randint(1, 3)):
        start = rng.randint(0, len(name))
        end = rng.randint(start, len(name))
        name = name[:start] + rng.choice("*?*") + name[end:]
    return name


def random_scope(rng: random.Random) -> str:
    namespace, topic = (
        random_glob(rng, rng.choice(NAMESPACES)),
        random_glob(rng, rng.choice(TOPICS)),
    )
    plain = [name for name in SUBSCRIPTIONS if not re.search(r"[/#\n]", name)]
    return rng.choice(
        [
            "cluster",
            f"namespace:{namespace}",
            f"/{namespace}/{topic}",
            f"/{namespace}/{topic}",
            f"/{namespace}/{topic}#{random_glob(rng, rng.choice(plain))}",
            f"/{namespace}/{topic}#{random_glob(rng, rng.choice(plain))}",
            f"subject:{random_glob(rng, rng.choice(SUBJECTS[:-1]))}",
        ]
    )


def random_resource(rng: random.Random) -> str:
    namespace, topic = rng.choice(NAMESPACES), rng.choice(TOPICS)
    return rng.choice(
        [
            f"/{namespace}/{topic}",
            f"/{namespace}/{topic}",
            f"/{namespace}/{topic}#{rng.choice(SUBSCRIPTIONS)}",
            f"/{namespace}/{topic}#{rng.choice(SUBSCRIPTIONS)}",
            f"namespace:{namespace}",
            f"subject:{rng.choice(SUBJECTS)}",
            rng.choice(["cluster", "partition 17", "session", ""]),
        ]
    )


def random_record(rng: random.Random) -> Record:
    draw = rng.random()
    if draw < 0.1:
        return Role(f"r{rng.randint(1, 3)}", rng.sample(list(Permission), rng.randint(0, 4)))
    if draw < 0.25:
        groups = rng.sample(GROUPS, rng.randint(0, 3))
        return Principal(rng.choice(PEOPLE), groups, rng.random() < 0.15)
    if draw < 0.3:
        return Credential(f"uid:{rng.randint(0, 3)}", rng.choice(PEOPLE), rng.randint(0, 3))
    subject = rng.choice([f"user:{rng.choice(PEOPLE)}"] * 2 + [f"group:{rng.choice(GROUPS)}"])
    return Binding(f"b{rng.randint(0, 25)}", subject, rng.choice(ROLES), random_scope(rng))


def change(rng: random.Random, policy: Policy, records: dict[str, Record]) -> None:
    """One put or remove, in both."""
    if records and rng.random() < 0.25:
        key = rng.choice(sorted(records))
        del records[key]
        assert policy.remove(key)
    else:
        record = random_record(rng)
        records[key_of(record)] = record
        policy.put(record)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_policy_decides_as_straight_loops_do(seed: int) -> None:
    rng = random.Random(seed)
    policy, records = Policy(), {}
    granted = 0
    for person in PEOPLE:
        records[f"principal/{person}"] = Principal(person)
        policy.put(Principal(person))
    for _ in range(30):
        change(rng, policy, records)
    for step in range(STEPS):
        change(rng, policy, records)
        for _ in range(CHECKS_PER_STEP):
            name, resource = rng.choice((*PEOPLE, "stranger")), random_resource(rng)
            permission = rng.choice((*Permission, *[Permission.CONSUME, Permission.LOOKUP] * 3))
            groups = rng.choice([[], [], ["dev"]])
            want = expected(records, name, permission, resource, groups)
            granted += want
            assert policy.permits(name, permission, resource, groups) == want, (
                f"seed {seed}, step {step}: {name} {permission} {resource!r} with {groups} is to be "
                f"{want}; records: {sorted(map(repr, records.values()))}"
            )
    assert granted > 50, f"seed {seed}: next to nothing was granted, so next to nothing was tried"


@pytest.mark.parametrize("seed", SEEDS)
def test_changes_in_any_order_equal_a_fresh_load(seed: int) -> None:
    rng = random.Random(seed)
    policy, records = Policy(), {}
    for step in range(STEPS * 5):
        change(rng, policy, records)
        if step == STEPS:  # in order from here on
            assert len(policy.page("", 10**6)) == len(records)
    fresh = Policy()
    for record in rng.sample(list(records.values()), len(records)):
        fresh.put(record)
    assert policy.page("", 10**6) == fresh.page("", 10**6), f"seed {seed}"
    assert len(policy) == len(fresh) == len(records)
    for _ in range(500):
        question = (
            rng.choice(PEOPLE),
            rng.choice(list(Permission)),
            random_resource(rng),
            rng.sample(GROUPS, 1),
        )
        assert policy.permits(*question) == fresh.permits(*question), f"seed {seed}: {question}"
    for uid in range(4):
        for now_ns in range(4):
            found = [x.principal_of(f"uid:{uid}", now_ns) for x in (policy, fresh)]
            assert found[0] == found[1], f"seed {seed}: uid {uid} at {now_ns}"
    for key in rng.sample(list(records), len(records)):
        policy.remove(key)
    left, new = vars(policy), vars(Policy())
    assert vars(left["_keys"]) == vars(OrderedKeys()), f"seed {seed}"
    for name in left.keys() - {"changes", "sign_ons", "_keys"}:
        assert left[name] == new[name], f"seed {seed}: something is left behind in {name}"


@pytest.mark.parametrize("seed", SEEDS)
def test_whose_rights_have_changed_is_told(seed: int) -> None:
    """Of every answer that is another one behind a change, and where, for what clients have open; and not of everyone each
    time."""
    rng = random.Random(seed)
    access = Access(SystemClock())
    policy, records = access.policy, {}
    for _ in range(60):
        change(rng, policy, records)
    different = unconcerned = elsewhere = 0
    since = access.version
    access.take_changed(since)
    for step in range(STEPS):
        questions = [
            (rng.choice(PEOPLE), rng.choice(list(Permission)), random_resource(rng))
            for _ in range(CHECKS_PER_STEP * 4)
        ]
        before = [policy.permits(*each) for each in questions]
        for _ in range(rng.randint(1, 3)):
            change(rng, policy, records)
        changed = access.take_changed(since)
        since = access.version
        for question, old in zip(questions, before, strict=True):
            name, permission, resource = question
            fronts = access.changed_fronts(name, changed)
            is_open = permission in OF_HANDLES and resource.startswith("/")
            is_concerned = resource.startswith(fronts) if is_open else bool(fronts)
            unconcerned += not is_concerned
            elsewhere += bool(fronts) and not is_concerned
            if policy.permits(*question) != old:
                different += 1
                assert is_concerned, f"seed {seed}, step {step}: {question} was {old}; {changed}"
        assert access.take_changed(since) == Changes()
    assert elsewhere, f"seed {seed}: no change was told with its place"
    assert different and unconcerned > STEPS * CHECKS_PER_STEP, (different, unconcerned)


@pytest.mark.parametrize("seed", SEEDS)
def test_globs_match_as_regular_expressions_do(seed: int) -> None:
    rng = random.Random(seed)
    hits = 0
    for _ in range(2000):
        glob = "".join(rng.choices("ab*?", k=rng.randint(1, 7)))
        text = "".join(rng.choices("ababababab/#\n", k=rng.randint(0, 8)))
        want = is_match(glob, text)
        hits += want
        assert Glob(glob).matches(text) == want, f"seed {seed}: {glob} {text!r}, {want} is right"
    assert hits > 100, f"seed {seed}: hardly a text fits, so hardly anything was tried"
