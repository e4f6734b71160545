"""The policy by examples: what scopes cover, when records count, what copies and refusals look like."""

from __future__ import annotations

import pytest

from danube_fast.errors import InvalidArgument, PermissionDenied
from danube_fast.security.ordered_keys import OrderedKeys
from danube_fast.security.policy import Policy, PolicyAuthorizer
from danube_fast.security.records import Binding, Credential, Principal, Record, Role, key_of
from danube_fast.types import AUDIT_TOPIC, Permission

LOOKUP, PRODUCE, CONSUME = Permission.LOOKUP, Permission.PRODUCE, Permission.CONSUME
TOPIC, BROKER, CLUSTER = (
    Permission.MANAGE_TOPIC,
    Permission.MANAGE_BROKER,
    Permission.MANAGE_CLUSTER,
)


def policy_of(*records: Record) -> Policy:
    policy = Policy()
    for record in records:
        policy.put(record)
    return policy


def bound(role: str, scope: str, *more: Record) -> Policy:
    """A policy that binds a role to alice."""
    return policy_of(Principal("alice"), Binding("b", "user:alice", role, scope), *more)


COVERAGE = [
    # scope, resources that it covers, resources that it does not
    (
        "cluster",
        ["cluster", "namespace:a", "/a/t", "/a/t#s", "subject:x", "partition 17", "session", "", "/a/b/c", "/a"],
        [],
    ),
    (
        "namespace:a",
        ["namespace:a", "/a/t", "/a/t#s", "/a/t#s/1", "/a/t#s#1"],
        ["cluster", "namespace:ab", "namespace:A", "namespace:", "/ab/t", "/A/t", "/b/a", "subject:a", "session", "a",
         "/a", "/a/", "/a/t/u", "/a/t#", "//a/t", "/a/../b", "/a/t\n", "namespace:a\n", " /a/t", "namespace:a/t"],
    ),
    (
        "namespace:a*",
        ["namespace:a", "namespace:ab", "/a/t", "/ab/t", "/abc/t#s"],
        ["namespace:ba", "/ba/t", "/b/a", "cluster", "subject:a", "namespace:a/b", "/a/b/c"],
    ),
    ("namespace:?", ["namespace:a", "/b/t#s"], ["namespace:", "namespace:ab", "/ab/t"]),
    (
        "/a/t",
        ["/a/t", "/a/t#s", "/a/t#anything at all"],
        ["namespace:a", "/a/tt", "/a/T", "/a/t-part-0", "/b/t", "/a/t/", "/a/t#", "cluster", "/a/t\n"],
    ),
    (
        "/a/t*",
        ["/a/t", "/a/tt", "/a/t-part-0", "/a/t-1#s"],
        ["/a/ut", "/ab/t", "/a/t/u", "namespace:a", "/a/t#", "/a/u#t"],
    ),
    ("/a/*-eu-?", ["/a/x-eu-1", "/a/-eu-1#s"], ["/a/x-eu-12", "/a/x-eu-", "/a/eu-1"]),
    ("/a/*b*c*", ["/a/bc", "/a/abxcx", "/a/bbcc"], ["/a/cb", "/a/ac"]),
    ("/a/ab*ba", ["/a/abba", "/a/abxba"], ["/a/aba", "/a/ab"]),
    ("/*/t", ["/a/t", "/b/t#s"], ["/a/tt", "/system/t", "namespace:a", "/a/b/t"]),
    ("/*/*", ["/a/t", "/b/u#s"], ["/system/t", "/system/reply-1#s", "namespace:a", "cluster", "/a", "/a/b/c"]),
    ("/s?stem/*", ["/sistem/t"], ["/system/t"]),
    ("namespace:*", ["namespace:a", "/a/t"], ["namespace:system", "/system/t", "/system/t#s", "cluster"]),
    ("namespace:system", ["namespace:system", "/system/t", "/system/t#s"], ["/systems/t"]),
    ("/system/reply-*", ["/system/reply-1", "/system/reply-1#s"], ["/system/audit", "/a/reply-1"]),
    ("subject:orders", ["subject:orders"], ["subject:orders2", "/a/orders", "namespace:orders", "subject:"]),
    ("subject:o*", ["subject:o", "subject:orders"], ["subject:o/x", "subject:o#x", "subject:xo", "/a/o"]),
]  # fmt: skip


@pytest.mark.parametrize(("scope", "covered", "other"), COVERAGE, ids=[row[0] for row in COVERAGE])
def test_what_scopes_cover(scope: str, covered: list[str], other: list[str]) -> None:
    policy = bound("operator", scope)
    assert [r for r in covered if not policy.permits("alice", TOPIC, r)] == []
    assert [r for r in other if policy.permits("alice", TOPIC, r)] == []
    assert not any(policy.permits("alice", CLUSTER, r) for r in covered + other)
    assert not any(policy.permits("bob", TOPIC, r) for r in covered + other)


@pytest.mark.parametrize("scope", ["/a/t#s", "/a/t#s*", "/a*/t#?", "/*/*#s"])
def test_a_scope_with_a_subscription_grants_consume_there_and_lookup_of_the_topic(
    scope: str,
) -> None:
    policy = bound("admin", scope)
    granted = {
        (permission, resource)
        for permission in Permission
        for resource in ("/a/t#s", "/a/t", "/a/t#x-s", "/a/u", "/b/u#x", "namespace:a", "cluster", "session")
        if policy.permits("alice", permission, resource)
    }  # fmt: skip
    granted -= {(LOOKUP, "/a/u")} if scope == "/*/*#s" else set()
    assert granted == {(CONSUME, "/a/t#s"), (LOOKUP, "/a/t#s"), (LOOKUP, "/a/t")}


def test_a_scope_with_a_subscription_grants_no_lookup_that_the_role_lacks() -> None:
    policy = bound("eater", "/a/t#s", Role("eater", [CONSUME]))
    assert policy.permits("alice", CONSUME, "/a/t#s")
    assert not policy.permits("alice", LOOKUP, "/a/t")
    assert not policy.permits("alice", CONSUME, "/a/t")


def test_subscriptions_of_any_text_are_covered_by_their_topic_alone() -> None:
    """Names of subscriptions may hold what separates; no glob reaches across."""
    for subscription in ("s/1", "s#1", "s\n", "*", "s [1]", "é"):
        resource = f"/a/t#{subscription}"
        assert bound("consumer", "/a/t").permits("alice", CONSUME, resource)
        assert not bound("consumer", "/a/u").permits("alice", CONSUME, resource)
    assert not bound("consumer", "/a/t#s*").permits("alice", CONSUME, "/a/t#s/1")
    assert not bound("consumer", "/a/t#s*").permits("alice", CONSUME, "/a/t#s#1")
    assert not bound("consumer", "/a/t#s").permits("alice", CONSUME, "/a/t#s#s")


def test_messages_of_system_are_not_covered_by_cluster_scope() -> None:
    for resource in ("/system/audit", "/system/audit#s", "/system/x/y"):
        traffic = bound("traffic", "cluster", Role("traffic", [PRODUCE, CONSUME, LOOKUP, BROKER]))
        assert not traffic.permits("alice", PRODUCE, resource)
        assert not traffic.permits("alice", CONSUME, resource)
        assert traffic.permits("alice", LOOKUP, resource)
        assert traffic.permits("alice", BROKER, resource)
        admin = bound("admin", "cluster")
        assert not admin.permits("alice", PRODUCE, resource)
        assert admin.permits("alice", CONSUME, resource)
        # the permission itself is needed all the same
        root = bound("root", "cluster", Role("root", [CLUSTER]))
        assert not root.permits("alice", CONSUME, resource)
        # manage_cluster counts at cluster scope only
        below = bound("consumer", "cluster", Binding("c", "user:alice", "admin", "namespace:a"))
        assert not below.permits("alice", CONSUME, resource)
    # a scope that names the namespace opens it
    assert bound("producer", "/system/in").permits("alice", PRODUCE, "/system/in")
    # both halves may come from different bindings, of the user and of a group
    halves = policy_of(
        Principal("alice", ["ops"]),
        Role("root", [CLUSTER]),
        Binding("1", "user:alice", "consumer", "cluster"),
        Binding("2", "group:ops", "root", "cluster"),
    )
    assert halves.permits("alice", CONSUME, "/system/audit")
    assert not halves.permits("alice", PRODUCE, "/system/audit")


def test_nothing_is_permitted_by_default() -> None:
    policy = Policy()
    assert not policy.permits("alice", LOOKUP, "cluster")
    policy.put(Binding("b", "user:alice", "admin", "cluster"))
    assert not policy.permits("alice", LOOKUP, "cluster")  # bound, but not known
    policy.put(Principal("alice"))
    assert policy.permits("alice", LOOKUP, "cluster")
    policy.put(Principal("alice", disabled=True))
    assert not policy.permits("alice", LOOKUP, "cluster")
    assert not policy.permits("alice", LOOKUP, "cluster", ["admins"])
    policy.put(Principal("alice"))
    policy.remove("principal/alice")
    assert not policy.permits("alice", LOOKUP, "cluster")
    for name in ("", "anonymous", "user:alice", "Alice", "alice\n", "group:admins"):
        assert not policy.permits(name, LOOKUP, "cluster")


def test_groups_of_the_record_and_of_the_call() -> None:
    policy = policy_of(
        Principal("alice", ["dev"]),
        Principal("dev"),
        Binding("1", "group:dev", "producer", "/a/t"),
        Binding("2", "group:ops", "operator", "cluster"),
    )
    assert policy.permits("alice", PRODUCE, "/a/t")
    assert not policy.permits("dev", PRODUCE, "/a/t")  # a user of the name of a group
    assert not policy.permits("alice", TOPIC, "/a/t")
    assert policy.permits("alice", TOPIC, "/a/t", ["ops"])
    assert not policy.permits("alice", TOPIC, "/a/t", ["user:ops"])
    assert not policy.permits("bob", TOPIC, "/a/t", ["ops"])
    policy.put(Principal("alice", []))
    assert not policy.permits("alice", PRODUCE, "/a/t")


def test_a_binding_waits_for_its_role() -> None:
    policy = bound("later", "/a/*")
    assert not policy.permits("alice", PRODUCE, "/a/t")
    policy.put(Role("later", [PRODUCE]))
    assert policy.permits("alice", PRODUCE, "/a/t")
    policy.put(Role("later", [CONSUME]))
    assert not policy.permits("alice", PRODUCE, "/a/t")
    assert policy.permits("alice", CONSUME, "/a/t")
    policy.remove("role/later")
    assert not policy.permits("alice", CONSUME, "/a/t")


@pytest.mark.parametrize("scope", ["/a/t", "/a/*", "cluster", "/a/t#s", "/a/t#*"])
def test_two_bindings_that_say_the_same_are_removed_one_by_one(scope: str) -> None:
    policy = bound("consumer", scope, Binding("c", "user:alice", "consumer", scope))
    assert policy.remove("binding/b")
    assert policy.permits("alice", CONSUME, "/a/t#s")
    assert policy.remove("binding/c")
    assert not policy.permits("alice", CONSUME, "/a/t#s")
    assert not policy.remove("binding/c")


def test_a_binding_that_is_replaced_takes_back_what_it_granted() -> None:
    policy = bound("producer", "/a/*")
    policy.put(Binding("b", "user:alice", "producer", "/b/t"))
    assert not policy.permits("alice", PRODUCE, "/a/t")
    assert policy.permits("alice", PRODUCE, "/b/t")
    policy.put(Binding("b", "user:bob", "producer", "/b/t"))
    assert not policy.permits("alice", PRODUCE, "/b/t")
    assert len(policy) == 2


def test_a_record_that_is_refused_changes_nothing() -> None:
    policy = bound("producer", "/a/t")
    for record in (
        Binding("b", "user:alice", "producer", "/a"),
        Binding("b", "alice", "producer", "/a/t"),
        Role("admin", []),
        Principal("alice", ["a/b"]),
    ):
        with pytest.raises(InvalidArgument):
            policy.put(record)
    with pytest.raises(InvalidArgument, match="built in"):
        policy.remove("role/producer")
    assert len(policy) == 2
    assert policy.permits("alice", PRODUCE, "/a/t")


def test_credentials_prove_principals() -> None:
    policy = policy_of(
        Principal("alice"),
        Principal("off", disabled=True),
        Credential("uid:1", "alice"),
        Credential("uid:2", "alice", expires_ns=1000),
        Credential("uid:3", "off"),
        Credential("uid:4", "missing"),
    )
    assert policy.principal_of("uid:1", 2**62) == "alice"
    assert policy.principal_of("uid:2", 999) == "alice"
    assert policy.principal_of("uid:2", 1000) is None
    assert [policy.principal_of(f"uid:{i}", 0) for i in (3, 4, 5)] == [None, None, None]
    assert policy.principal_of("alice", 0) is None
    assert policy.principal_of("../principal/alice", 0) is None
    policy.put(Principal("missing"))
    assert policy.principal_of("uid:4", 0) == "missing"
    policy.put(Credential("uid:1", "missing"))
    assert policy.principal_of("uid:1", 0) == "missing"
    policy.remove("principal/missing")
    assert policy.principal_of("uid:1", 0) is None
    policy.remove("credential/uid:2")
    assert policy.principal_of("uid:2", 0) is None


def test_pages_copy_the_whole_in_the_order_of_keys() -> None:
    records: list[Record] = [Principal(f"p{i}") for i in (3, 1, 2)]
    records += [Role("r", []), Credential("uid:7", "p1"), Binding("b", "user:p1", "r", "cluster")]
    policy = policy_of(*records)
    copied: list[Record] = []
    for _ in range(3):
        page = policy.page(key_of(copied[-1]) if copied else "", 4)
        assert len(page) <= 4
        copied += page
    assert copied == sorted(records, key=key_of)
    assert policy.page("principal/p", 1) == [
        Principal("p1")
    ]  # a key that is none, or none any more
    assert policy.page("", 0) == policy.page("", -1) == policy.page("role/r", 9) == []
    assert policy.get("role/r") == Role("r", [])
    assert policy.get("role/admin") is None
    policy.version = 7
    policy.clear()
    assert (len(policy), policy.page("", 9), policy.version) == (0, [], 7)
    assert policy.principal_of("uid:7", 0) is None
    policy.put(Principal("p1"))
    assert not policy.permits("p1", LOOKUP, "cluster")
    policy.put(Binding("b", "user:p1", "admin", "cluster"))
    assert policy.permits("p1", LOOKUP, "cluster")  # built-in roles outlive a clear


def test_what_is_removed_leaves_nothing_behind() -> None:
    policy = Policy()
    scopes = ("cluster", "/a/t", "/a/t#s", "/a/*", "/*/t#s*", "subject:x*", "namespace:a")
    for i, scope in enumerate(scopes):
        policy.put(Binding(f"b{i}", "user:alice", "viewer", scope))
    assert len(policy.page("", 10**6)) == len(scopes)
    for i in range(len(scopes)):
        policy.remove(f"binding/b{i}")
    left, new = vars(policy), vars(Policy())
    assert vars(left["_keys"]) == vars(OrderedKeys())
    counted = {"changes", "sign_ons", "_keys"}
    assert {name: left[name] for name in left.keys() - counted} == {
        name: new[name] for name in new.keys() - counted
    }


def test_globs_with_many_stars_take_no_time_without_bound() -> None:
    """A backtracking matcher would not come back from this."""
    policy = bound("producer", "/a/" + "*a" * 60 + "*b")
    assert not policy.permits("alice", PRODUCE, "/a/" + "a" * 128)
    policy = bound("producer", "/a/" + "*?a" * 40 + "*b")
    assert not policy.permits("alice", PRODUCE, "/a/" + "a" * 128)


def test_the_authorizer_refuses_in_one_sentence() -> None:
    authorizer = PolicyAuthorizer(bound("producer", "/a/t"))
    authorizer.authorize("alice", PRODUCE, "/a/t")
    with pytest.raises(PermissionDenied) as caught:
        authorizer.authorize("alice", CONSUME, "/a/t")
    assert str(caught.value).startswith(
        "alice may not consume /a/t; an administrator can bind a role: danube-fast security bindings add"
    )
    with pytest.raises(PermissionDenied) as caught:
        authorizer.authorize("eve\nroot", CONSUME, "/a/t#\x1b[2J")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("resource", [AUDIT_TOPIC, f"{AUDIT_TOPIC}#auditor"])
def test_the_topic_of_the_audit_log_is_written_by_no_one(resource: str) -> None:
    everything = Role("everything", list(Permission))
    for scope in (
        "cluster",
        "namespace:system",
        AUDIT_TOPIC,
        f"{AUDIT_TOPIC}#auditor",
        "/system/*",
    ):
        policy = policy_of(
            everything, Principal("alice"), Binding("b", "user:alice", "everything", scope)
        )
        permitted = {each for each in Permission if policy.permits("alice", each, resource)}
        never = {Permission.PRODUCE, Permission.MANAGE_TOPIC}
        assert permitted == (set(Permission) - never if scope == "cluster" else set()), scope
    reader = Role("reader", [Permission.CONSUME, Permission.LOOKUP])
    policy = policy_of(reader, Principal("alice"), Binding("b", "user:alice", "reader", "cluster"))
    assert not policy.permits("alice", CONSUME, resource)
    assert policy.permits("alice", CONSUME, "/shop/audit")
