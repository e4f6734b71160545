"""topics, subscriptions, namespaces, status: the operation that is asked for, and how answers look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danube_fast.broker.admin import OPERATIONS
from danube_fast.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from danube_fast.security.api_keys import verify
from danube_fast.security.records import ApiKey
from tests.cli.conftest import Run
from tests.cli.fakes import FakeBroker

TOPIC = "/default/x"
HOLD = "holds/001767225600000-0123456789abcdef"
ROWS = [
    {"topic": "/default/a", "dispatch": "reliable", "partitioned": False, "created_ns": 10**18},
    {"topic": "/default/longer", "dispatch": "reliable", "partitioned": True, "created_ns": 0},
]
SUBSCRIPTION = {
    "subscription": "billing", "type": "shared", "lag_messages": 12, "cursors": {TOPIC: 4},
    "consumers": [{"name": "c1", "byte_credit": 5}, {"name": "c2", "byte_credit": 0}],
}  # fmt: skip

CALLS: list[tuple[str, str, dict[str, Any]]] = [
    (f"topics create {TOPIC} --dispatch non_reliable --partitions 3", "create_topic",
     {"topic": TOPIC, "dispatch": "non_reliable", "durability": None, "partitions": 3}),
    ("topics list --namespace default --pattern /default/*", "list_topics",
     {"namespace": "default", "pattern": "/default/*"}),
    (f"topics describe {TOPIC}", "describe_topic", {"topic": TOPIC}),
    (f"topics stats {TOPIC}", "topic_stats", {"topic": TOPIC}),
    (f"topics set {TOPIC} --durability os", "set_topic", {"topic": TOPIC, "durability": "os"}),
    (f"topics set {TOPIC} --partitions 5", "set_topic", {"topic": TOPIC, "partitions": 5}),
    (f"topics move {TOPIC} --worker 1 --partition 2", "move_topic",
     {"topic": TOPIC, "worker": 1, "partition": 2}),
    (f"topics delete {TOPIC} --yes", "delete_topic", {"topic": TOPIC}),
    (f"topics purge {TOPIC} --yes", "purge_topic", {"topic": TOPIC}),
    (f"subscriptions skip {TOPIC} s 3 --yes", "skip_messages",
     {"topic": TOPIC, "subscription": "s", "count": 3}),
    (f"subscriptions list {TOPIC}", "list_subscriptions", {"topic": TOPIC}),
    (f"subscriptions describe {TOPIC} s", "describe_subscription",
     {"topic": TOPIC, "subscription": "s"}),
    (f"subscriptions delete {TOPIC} s --yes", "delete_subscription",
     {"topic": TOPIC, "subscription": "s"}),
    (f"subscriptions set-failure-policy {TOPIC} s --ack-timeout-ms 5 --poison-policy drop",
     "set_failure_policy",
     {"topic": TOPIC, "subscription": "s",
      "values": {"ack_timeout_ms": 5, "poison_policy": "drop"}}),
    (f"topics policy {TOPIC}", "topic_policy", {"topic": TOPIC}),
    (f"topics set-policy {TOPIC} message_ttl_ms=5 compaction=default", "set_topic_policy",
     {"topic": TOPIC, "values": {"message_ttl_ms": "5", "compaction": "default"}}),
    ("namespaces policy iot", "namespace_policy", {"namespace": "iot"}),
    ("namespaces set-policy iot producers_max=3", "set_namespace_policy",
     {"namespace": "iot", "values": {"producers_max": "3"}}),
    ("namespaces describe iot", "describe_namespace", {"namespace": "iot"}),
    ("namespaces set-quota iot namespace_topics_max=3", "set_namespace_quota",
     {"namespace": "iot", "values": {"namespace_topics_max": "3"}}),
    ("namespaces create iot", "create_namespace", {"namespace": "iot"}),
    ("namespaces list", "list_namespaces", {}),
    ("namespaces delete iot --yes", "delete_namespace", {"namespace": "iot"}),
    ("clients list", "list_clients", {"limit": None}),
    ("status", "cluster_status", {}),
    ("history flush /default/a --hold-seconds 60", "flush_history",
     {"topic": "/default/a", "hold_seconds": 60, "timeout_ms": 60_000}),
    (f"history renew {HOLD} --hold-seconds 60", "renew_history_hold",
     {"hold": HOLD, "hold_seconds": 60, "topic": None}),
    (f"history release {HOLD} --topic /default/a", "release_history_hold",
     {"hold": HOLD, "topic": "/default/a"}),
    ("security users add ann --group ops", "set_principal",
     {"name": "ann", "groups": ["ops"], "disabled": None}),
    ("security users list", "list_security", {"record_kind": "principal"}),
    ("security users delete ann --yes", "delete_security", {"record_kind": "principal", "name": "ann"}),
    ("security keys add ann --uid 7 --expires-seconds 60 --label laptop", "set_credential",
     {"credential": "uid:7", "principal": "ann", "expires_seconds": 60, "label": "laptop"}),
    ("security keys list", "list_security", {"record_kind": "credential"}),
    ("security keys revoke uid:7 --yes", "delete_security", {"record_kind": "credential", "name": "uid:7"}),
    ("security tokens list", "list_security", {"record_kind": "api_key"}),
    ("security tokens remove 8fK2lq0ZbX1cVd3e --yes", "delete_security",
     {"record_kind": "api_key", "name": "8fK2lq0ZbX1cVd3e"}),
    ("security sign-ons list --user ann --issuer corp --max 5", "list_sign_ons",
     {"principal": "ann", "source": "jwt:corp", "limit": 5}),
    (f"security sign-ons end curve:{'a' * 40} --yes", "end_sign_ons",
     {"public_key": "a" * 40, "principal": None, "source": None}),
    ("security sign-ons end --api-key 8fK2lq0ZbX1cVd3e --yes", "end_sign_ons",
     {"public_key": None, "principal": None, "source": "api_key:8fK2lq0ZbX1cVd3e"}),
    ("security roles add auditor lookup consume", "set_role",
     {"name": "auditor", "permissions": ["lookup", "consume"]}),
    ("security roles list", "list_security", {"record_kind": "role"}),
    ("security roles delete auditor --yes", "delete_security", {"record_kind": "role", "name": "auditor"}),
    ("security bindings add user:ann producer /a/* --name b", "set_binding",
     {"binding": "b", "subject": "user:ann", "role": "producer", "scope": "/a/*"}),
    ("security bindings list", "list_security", {"record_kind": "binding"}),
    ("security bindings delete b --yes", "delete_security", {"record_kind": "binding", "name": "b"}),
    ("security bindings delete b --yes --force", "delete_security",
     {"record_kind": "binding", "name": "b", "force": True}),
    ("security audit --since 10min --principal ann --denied", "list_audit",
     {"since_seconds": 600, "principal": "ann", "denied": True, "limit": 1000}),
    ("security check ann produce /a/x", "check_permission",
     {"principal": "ann", "permission": "produce", "resource": "/a/x"}),
    ("security server-key show", "describe_server_key", {}),
    ("security server-key prepare", "rotate_server_key", {"step": "prepare"}),
    ("security server-key activate", "rotate_server_key", {"step": "activate"}),
    ("security server-key retire", "rotate_server_key", {"step": "retire"}),
    ("security server-key revert", "rotate_server_key", {"step": "revert"}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "name", "arguments"), CALLS, ids=[c[0] for c in CALLS])
def test_each_command_asks_for_its_operation(
    run: Run, fake: FakeBroker, line: str, name: str, arguments: dict[str, Any]
) -> None:
    is_list = name.startswith("list_")
    fake.answers[name] = [] if is_list else {"some": "answer"}
    outcome = run(*line.split(), "--output", "json")
    assert outcome.code == 0, outcome.err
    assert outcome.json() == fake.answers[name]
    assert fake.asked == [(name, arguments)]
    operation = OPERATIONS[name]
    assert set(arguments) - {"limit"} <= set(operation.arguments.__struct_fields__)


def test_every_operation_has_a_command() -> None:
    drawn = {"add_api_key"}  # its command draws a secret; the test below
    assert set(OPERATIONS) == {name for _, name, _ in CALLS} | drawn


def test_an_api_key_is_shown_once_and_the_broker_never_sees_it(
    run: Run, fake: FakeBroker, tmp_path: Path
) -> None:
    fake.answers["add_api_key"] = None
    path = tmp_path / "ann.token"
    line = ["security", "tokens", "add", "ann", "--expires-seconds", "60", "--label", "desk"]
    printed = run(*line, "--output", "json").json()["api_key"]
    filed = run(*line, "--to-file", str(path), "--output", "json").json()
    assert path.stat().st_mode & 0o777 == 0o600
    assert set(filed) == {"id", "file"}
    for text, (name, arguments) in zip(
        (printed, path.read_text().strip()), fake.asked, strict=True
    ):
        assert name == "add_api_key"
        record = ApiKey(
            arguments["key_id"], arguments["principal"], arguments["salt"], arguments["digest"]
        )
        assert verify(text, record) and not verify(text[:-1] + "!", record)
        assert text.split("_", 2)[2] not in str(arguments)
        assert (arguments["expires_seconds"], arguments["label"]) == (60, "desk")
    assert run(*line, "--to-file", str(path)).code != 0, "a file is never overwritten"
    assert len(fake.asked) == 2
    assert run(*line).out.strip().startswith("dfk_")


PUBLIC = "a" * 40


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("users add zoe --public-key=", 2, "40 characters"),
        ("users add zoe --scope /a/*", 2, "--role"),
        ("users add zoe --uid -4", 2, "number of a user"),
        ("users add zoe --role viewer --scope /a/* --scope /b/*", 2, "give it once"),
        (f"users add zoe --public-key {PUBLIC}", 2, "of the broker"),
        ("users add zoe --role viewer --scope nowhere", 2, "nowhere"),
        ("roles add r nosuch", 2, "manage_cluster"),
        ("check ann nosuch /a/x", 2, "manage_cluster"),
        ("new-key=", 2, "no name"),
        ("roles delete admin", 2, "built in"),
        ("sign-ons end --yes", 2, "give one of"),
        ("sign-ons end --user ann --issuer corp --yes", 2, "give one of"),
        ("sign-ons end --user ann", 2, "add --yes"),
    ],
    ids=["no-key", "scope-alone", "no-uid", "two-scopes", "server-key", "bad-scope", "bad-role-permission",
         "bad-permission", "no-file", "built-in", "no-sign-ons", "two-holders", "sign-ons-without-yes"],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_asked(
    run: Run, fake: FakeBroker, monkeypatch: pytest.MonkeyPatch, line: str, code: int, said: str
) -> None:
    monkeypatch.setenv("DANUBE_SERVER_KEY", PUBLIC)
    words = ["new-key", ""] if line == "new-key=" else line.split()
    outcome = run("security", *words)
    assert outcome.code == code and said in outcome.err, outcome.err
    assert fake.asked == []


def test_a_user_with_keys_and_roles_is_one_change(run: Run, fake: FakeBroker) -> None:
    """Or a refused one would leave a part behind."""
    other = "b" * 40
    line = f"users add zoe --role producer --role auditor --scope /a/* --public-key {other} --uid 7 --uid 8"
    assert run("security", *line.split()).code == 0
    given = {
        "name": "zoe", "groups": None, "disabled": None, "roles": ["producer", "auditor"], "scope": "/a/*",
        "credentials": [f"curve:{other}", "uid:7", "uid:8"],
    }  # fmt: skip
    assert fake.asked == [("set_principal", given)]


def test_the_first_key_is_not_spent_on_a_role_that_may_be_mistyped(
    run: Run, fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DANUBE_KEY_FILE", "/srv/danube/bootstrap-admin.key")
    outcome = run("security", "users", "add", "zoe", "--role", "nosuch")
    assert outcome.code == 2 and "good for one connection" in outcome.err and fake.asked == []
    assert run("security", "users", "add", "zoe", "--role", "admin").code == 0


@pytest.mark.parametrize(
    ("disabled", "said"),
    [(True, "user zoe is disabled"), (False, "user zoe is enabled"), (None, "user zoe\n")],
)
def test_it_says_whether_a_user_is_disabled(
    run: Run, fake: FakeBroker, disabled: bool | None, said: str
) -> None:
    row = {"name": "zoe", "groups": [], "disabled": disabled}
    fake.answers["set_principal"] = None if disabled is None else row  # older brokers say nothing
    outcome = run("security", "users", "add", "zoe", "--group", "ops")
    assert outcome.code == 0 and outcome.out.startswith(said)
    assert ("security users add zoe --enabled" in outcome.out) == bool(disabled)


def test_the_list_of_users_says_which_are_disabled(run: Run, fake: FakeBroker) -> None:
    fake.answers["list_security"] = [
        {"name": "ann", "groups": [], "disabled": False},
        {"name": "zoe", "groups": [], "disabled": True},
    ]
    title, *lines = run("security", "users", "list").out.splitlines()
    assert title.split()[-1] == "DISABLED"
    assert [line.split()[-1] for line in lines] == ["no", "yes"]


def test_all_groups_are_taken_away(run: Run, fake: FakeBroker) -> None:
    assert run("security", "users", "add", "zoe", "--group", "").code == 0
    assert fake.asked == [("set_principal", {"name": "zoe", "groups": [], "disabled": None})]


@pytest.mark.parametrize(
    ("line", "field"),
    [("users delete", "name"), ("keys revoke", "credential"), ("roles delete", "name"),
     ("bindings delete", "binding"), ("tokens remove", "id")],
    ids=["user", "key", "role", "binding", "token"],
)  # fmt: skip
def test_what_is_not_there_is_not_said_to_go(
    run: Run, fake: FakeBroker, line: str, field: str
) -> None:
    fake.answers["list_security"] = [{field: "there"}]
    missing = run("security", *line.split(), "\x1bnope")
    assert missing.code == 3 and "--yes" not in missing.err and "\x1b" not in missing.err
    there = run("security", *line.split(), "there")
    assert there.code == 2 and "add --yes" in there.err
    assert {name for name, _ in fake.asked} == {"list_security"}


def test_a_file_of_an_api_key_that_was_refused_is_gone(
    run: Run, fake: FakeBroker, tmp_path: Path
) -> None:
    fake.answers["add_api_key"] = FailedPrecondition("two live keys")
    path = tmp_path / "ann.token"
    assert run("security", "tokens", "add", "ann", "--to-file", str(path)).code == 4
    assert not path.exists()


@pytest.mark.parametrize(
    "error", [Unavailable("lost; retry"), DeadlineExceeded("late"), KeyboardInterrupt()]
)
def test_an_api_key_that_may_have_been_made_is_said_to_be(
    run: Run, fake: FakeBroker, tmp_path: Path, error: BaseException
) -> None:
    fake.answers["add_api_key"] = error
    path = tmp_path / "ann.token"
    line = ["security", "tokens", "add", "ann"]
    filed = run(*line, "--to-file", str(path))
    assert filed.code != 0 and fake.asked[0][1]["key_id"] in path.read_text(), "it may be good"
    for word in (fake.asked[0][1]["key_id"], "tokens list", f"remove {path}"):
        assert word in filed.err, filed.err
    printed = run(*line)
    key_id = fake.asked[1][1]["key_id"]
    assert (
        f"tokens remove {key_id} --yes" in printed.err and "dfk_" not in printed.out + printed.err
    )


def test_an_api_key_that_was_not_asked_for_leaves_no_file(
    run: Run, fake: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(url: str, transport: str = "auto") -> Any:
        raise Unavailable("nothing listens there; start a broker")

    monkeypatch.setattr("danube_fast.cli.broker.connect", connect)
    path = tmp_path / "ann.token"
    failed = run("security", "tokens", "add", "ann", "--to-file", str(path))
    assert failed.code != 0 and "tokens list" not in failed.err and not path.exists()


def test_a_table_is_aligned_and_never_cut(run: Run, fake: FakeBroker) -> None:
    fake.answers["list_topics"] = ROWS
    lines = run("topics", "list").out.splitlines()
    assert lines == [
        "TOPIC            DISPATCH  PARTITIONED  CREATED",
        "/default/a       reliable  no           2001-09-09 01:46:40Z",
        "/default/longer  reliable  yes          -",
    ]


@pytest.mark.parametrize("group", ["keys", "tokens"])
def test_when_a_key_ends_is_a_time_with_its_zone(run: Run, fake: FakeBroker, group: str) -> None:
    fake.answers["list_security"] = [
        {"name": "a", "expires_ns": 10**18, "label": ""}, {"name": "b", "expires_ns": 0, "label": "till"},
    ]  # fmt: skip
    assert run("security", group, "list").out.splitlines() == [
        "NAME  EXPIRES               LABEL",
        "a     2001-09-09 01:46:40Z  -",
        "b     -                     till",
    ]


def test_an_empty_list_says_so(run: Run, fake: FakeBroker) -> None:
    fake.answers["list_topics"] = []
    outcome = run("topics", "list")
    assert (outcome.out, outcome.err) == ("", "no topics\n")
    assert run("topics", "list", "-o", "json").json() == []


def test_subscriptions_as_text(run: Run, fake: FakeBroker) -> None:
    fake.answers["list_subscriptions"] = [SUBSCRIPTION]
    lines = run("subscriptions", "list", TOPIC).out.splitlines()
    assert lines[0].split() == ["SUBSCRIPTION", "TYPE", "LAG", "MESSAGES", "CONSUMERS"]
    assert lines[1].split() == ["billing", "shared", "12", "2"]
    fake.answers["describe_subscription"] = SUBSCRIPTION
    text = run("subscriptions", "describe", TOPIC, "billing").out
    assert "lag messages  12" in text
    assert "c2" in text


def test_status_as_text(run: Run, fake: FakeBroker) -> None:
    fake.answers["cluster_status"] = {
        "version": "0.1.0",
        "sign_on": "",
        "processes": [{"process": "worker-0", "pid": 7, "state": "ready"}],
        "counters": dict.fromkeys(("a", "b", "c", "d", "messages_in"), 1),
    }
    text = run("status").out
    assert "version  0.1.0" in text
    assert "sign on  -" in text, "a blank says nothing"
    assert "worker-0" in text
    assert "  messages in  1" in text.splitlines()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (f"topics delete {TOPIC}", TOPIC),
        (f"topics purge {TOPIC}", TOPIC),
        (f"subscriptions skip {TOPIC} billing --all", "billing"),
        (f"subscriptions delete {TOPIC} billing", "billing"),
        ("namespaces delete iot", "iot"),
    ],
)
def test_destruction_needs_yes_and_says_what_it_would_do(
    run: Run, fake: FakeBroker, line: str, name: str
) -> None:
    outcome = run(*line.split())
    assert outcome.code == 2
    assert name in outcome.sentence()
    assert "--yes" in outcome.sentence()
    assert not fake.asked


def test_clients_are_a_table_of_connections(run: Run, fake: FakeBroker) -> None:
    topics = [{"topic": f"/default/t{number}"} for number in range(5)]
    fake.answers["list_clients"] = [
        {
            "process": "worker-1", "session": 7, "client": "meter", "principal": "anonymous",
            "transport": "shm", "silent_ms": 1234, "producer_count": 2, "consumer_count": 3,
            "producers": topics[:2], "consumers": topics[2:],
        }
    ]  # fmt: skip
    outcome = run("clients", "list", "--max", "5")
    assert fake.asked == [("list_clients", {"limit": 5})]
    head, line = outcome.out.splitlines()
    assert head.split()[:4] == ["CLIENT", "USER", "PROCESS", "SESSION"]
    assert line.split()[1] == "anonymous"
    assert "meter" in line and "1.2" in line and "/default/t2, and 2 more" in line
