"""Records of the policy: what is accepted, what is refused and how, and that they survive the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from danube_fast.errors import InvalidArgument
from danube_fast.security.records import (
    BUILTIN_ROLES,
    EXPIRES_NS_MAX,
    GROUPS_MAX,
    LABEL_CHARACTERS_MAX,
    Binding,
    Credential,
    Principal,
    Record,
    Role,
    check_key,
    check_record,
    key_of,
)
from danube_fast.types import Permission

CURVE = "curve:" + "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"

RECORDS: list[tuple[Record, str]] = [
    (Role("writers", [Permission.LOOKUP, Permission.PRODUCE]), "role/writers"),
    (Role("idle", []), "role/idle"),
    (Binding("b1", "user:alice@example.org", "writers", "/iot/dev-*"), "binding/b1"),
    (Binding("b.2", "group:ops", "admin", "cluster"), "binding/b.2"),
    (Principal("alice@example.org", ["ops", "dev"]), "principal/alice@example.org"),
    (Principal("bob", disabled=True), "principal/bob"),
    (Credential(CURVE, "alice@example.org", 17, "laptop, été"), f"credential/{CURVE}"),
    (Credential("uid:0", "root"), "credential/uid:0"),
    (Credential("uid:4294967294", "last"), "credential/uid:4294967294"),
    (Credential(f"mtls:{'0a' * 32}", "bob"), f"credential/mtls:{'0a' * 32}"),
    (Credential("mtls:CN=a/b\\,c,O=Köln", "bob"), "credential/mtls:CN=a/b\\,c,O=Köln"),
    (Credential(f"mtls:CN={'x' * 189}", "bob"), f"credential/mtls:CN={'x' * 189}"),
]

NAMES_REFUSED = [
    "", ".", "..", "../", "../role/admin", "a/b", "/a", "a#b", "a b", " a", "a ", "a\0", "a\n", "\n",
    "a\r\nb", "a\tb", "a*", "a?", "[a]", "a:b", "a;b", "a,b", "a'b", 'a"b', "a\\b", "%2e%2e", "$a",
    "аdmin", "admın", "ａdmin", "admin\u200b", "\u202eadmin", "é", "１", "a" * 129, None, 7, b"admin",
]  # fmt: skip
"""Cyrillic а, dotless i, full width a and 1, zero width space and right-to-left mark among them."""

SCOPES = [
    "cluster", "namespace:iot", "namespace:*", "namespace:io?", "namespace:system", "/iot/dev", "/*/*",
    "/iot/dev-*", "/i?t/*-a*b", "/system/reply-*", "/iot/dev#app", "/iot/dev#*", "/*/*#a?c*", "/iot/dev#a:b{}",
    "subject:orders-value", "subject:*", f"/{'a' * 128}/{'b' * 128}#{'c' * 256}",
]  # fmt: skip

SCOPES_REFUSED = [
    "", "*", "Cluster", "cluster ", " cluster", "cluster\n", "cluster/", "namespace", "namespace:", "namespace:a/b",
    "namespace:a#b", "namespace:[ab]", "namespace:a b", "namespace:a\n", "namespace:é", "namespace:/a",
    "Namespace:a", "/", "//", "///", "/a", "/a/", "//b", "/a/b/", "/a/b/c", "a/b", "/a/b#", "/a/b##", "/a/b#c#d",
    "/a/b#c/d", "/a#c/b", "/a/#c", "/[a]/b", "/a/[!b]", "/a/b#[c]", "/a/b#c\\d", "/a/b#c d", "/a/b#c\n", "/a/b\n",
    "/a/b\0", "/a/b#\0", "/а/b", "/a/b#é", "/a/b c", "/a:b/c", "/a/b@c", "subject:", "subject:a/b", "subject:a#b",
    "subject:[a]", "subject:a\n", "subject:а", "topic:/a/b", "namespace:" + "a" * 129, "/a/" + "b" * 129,
    "/a/b#" + "c" * 257, "subject:" + "a" * 257, None, 7, b"cluster", ["cluster"],
]  # fmt: skip


def refused(record: Any) -> str:
    """The message of the refusal, which must say what to do."""
    with pytest.raises(InvalidArgument) as caught:
        check_record(record)
    text = str(caught.value)
    assert "; " in text and "\n" not in text and "\0" not in text
    assert len(text) < 1000
    return text


@pytest.mark.parametrize(("record", "key"), RECORDS, ids=[key for _, key in RECORDS])
def test_records_are_fine_and_survive_the_wire(record: Record, key: str) -> None:
    check_record(record)
    assert key_of(record) == key
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(record), type=Record) == record
    assert msgspec.to_builtins(record)["kind"] == key.partition("/")[0]


@pytest.mark.parametrize("name", NAMES_REFUSED, ids=ascii)
def test_names_that_are_none_are_refused_everywhere(name: Any) -> None:
    refused(Role(name, []))
    refused(Binding(name, "user:a", "viewer", "cluster"))
    refused(Binding("b", "user:a", name, "cluster"))
    refused(Binding("b", f"user:{name}" if isinstance(name, str) else name, "viewer", "cluster"))
    refused(Binding("b", f"group:{name}" if isinstance(name, str) else name, "viewer", "cluster"))
    refused(Principal(name))
    refused(Principal("a", [name]))
    refused(Credential("uid:1", name))


def test_characters_that_only_look_alike_are_shown_in_the_refusal() -> None:
    assert "\\u0430dmin" in refused(Role("аdmin", []))


@pytest.mark.parametrize(
    "subject", ["alice", "user:", "group:", "role:a", "User:a", "user:a:b", "user: a", ":a"]
)
def test_subjects_of_no_kind_are_refused(subject: str) -> None:
    assert "user:NAME or group:NAME" in refused(Binding("b", subject, "viewer", "cluster"))


@pytest.mark.parametrize("scope", SCOPES, ids=ascii)
def test_scopes_are_fine(scope: str) -> None:
    check_record(Binding("b", "user:a", "viewer", scope))


@pytest.mark.parametrize("scope", SCOPES_REFUSED, ids=ascii)
def test_scopes_that_are_none_are_refused(scope: Any) -> None:
    assert "namespace:NAME" in refused(Binding("b", "user:a", "viewer", scope))


@pytest.mark.parametrize("name", BUILTIN_ROLES)
def test_builtin_roles_stay_as_they_are(name: str) -> None:
    assert "built in" in refused(Role(name, [Permission.LOOKUP]))
    with pytest.raises(InvalidArgument, match="built in"):
        check_key(f"role/{name}")
    check_key(f"principal/{name}")
    check_record(Principal(name))
    check_record(Binding(name, "user:a", name, "cluster"))


def test_builtin_roles_have_these_permissions() -> None:
    assert {name: sorted(role.permissions) for name, role in BUILTIN_ROLES.items()} == {
        "admin": sorted(Permission),
        "operator": [
            "lookup",
            "manage_broker",
            "manage_namespace",
            "manage_schema",
            "manage_topic",
        ],
        "producer": ["lookup", "produce"],
        "consumer": ["consume", "lookup"],
        "viewer": ["lookup"],
    }


@pytest.mark.parametrize(
    "credential",
    [
        "", "curve:", CURVE[:-1], CURVE + "a", CURVE + "\n", CURVE[:-1] + "\n", CURVE[:-1] + " ", CURVE[:-1] + "~",
        CURVE[:-1] + "é", CURVE[6:], "Curve" + CURVE[5:], "uid:", "uid:-1", "uid:01", "uid:1 ", "uid:1\n", "uid:١",
        "uid:4294967295", "uid:99999999999", "uid:root", "gid:1", None, 7,
        "mtls:", f"mtls:{'0A' * 32}", f"mtls:{'0a' * 31}", "mtls:orders", "mtls:=orders", "mtls: CN=orders",
        "mtls:CN=orders\n", "mtls:CN=a\nb", "MTLS:CN=orders",
    ],
    ids=ascii,
)  # fmt: skip
def test_credentials_that_are_none_are_refused_and_not_repeated(credential: Any) -> None:
    text = refused(Credential(credential, "alice"))
    assert "curve: and the 40 characters" in text
    assert not isinstance(credential, str) or len(credential) < 10 or credential not in text


@pytest.mark.parametrize(
    "record",
    [
        Role("r", [Permission.LOOKUP, Permission.LOOKUP]),
        Role("r", ["lookup"]),  # type: ignore[list-item]
        Role("r", "lookup"),  # type: ignore[arg-type]
        Role("r", None),  # type: ignore[arg-type]
        Principal("a", ["g", "g"]),
        Principal("a", "g"),  # type: ignore[arg-type]
        Principal("a", [f"g{i}" for i in range(GROUPS_MAX + 1)]),
        Principal("a", disabled=1),  # type: ignore[arg-type]
        Credential("uid:1", "a", -1),
        Credential("uid:1", "a", EXPIRES_NS_MAX + 1),
        Credential("uid:1", "a", True),
        Credential("uid:1", "a", 1.5),  # type: ignore[arg-type]
        Credential(f"mtls:CN={'x' * 190}", "a"),
        Credential(f"mtls:CN={'é' * 95}", "a"),
        Credential("mtls:CN=a\x00b", "a"),
        Credential("mtls:CN=a\u202eb", "a"),
        Credential("uid:1", "a", label="a\nb"),
        Credential("uid:1", "a", label="\x1b[2J"),
        Credential("uid:1", "a", label="a" * (LABEL_CHARACTERS_MAX + 1)),
        Credential("uid:1", "a", label=None),  # type: ignore[arg-type]
        "role/r",
        None,
    ],
    ids=lambda record: ascii(record)[:60],
)
def test_records_that_make_no_sense_are_refused(record: Any) -> None:
    refused(record)


def test_limits_themselves_are_fine() -> None:
    check_record(Principal("a", [f"g{i}" for i in range(GROUPS_MAX)]))
    check_record(Credential("uid:1", "a", EXPIRES_NS_MAX, "a" * LABEL_CHARACTERS_MAX))
    check_record(Role("a" * 128, list(Permission)))


@pytest.mark.parametrize(
    "text",
    [
        b'{"name":"a","permissions":[]}',
        b'{"kind":"rule","name":"a","permissions":[]}',
        b'{"kind":"role","name":"a","permissions":["everything"]}',
        b'{"kind":"principal","name":"a","disable":true}',
        b'{"kind":"principal","name":"a","disabled":"true"}',
        b'{"kind":"binding","binding":"b","subject":"user:a","role":"r"}',
        b'{"kind":"credential","credential":"uid:1","principal":"a","expires_ns":null}',
    ],
)
def test_the_decoder_refuses_what_is_no_record(text: bytes) -> None:
    """A field that is not known is refused too: a typing error must not enable a principal."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Record)


def test_records_do_not_change() -> None:
    with pytest.raises(AttributeError):
        Principal("a").disabled = True  # type: ignore[misc]
    assert Principal("a").groups is not Principal("b").groups
