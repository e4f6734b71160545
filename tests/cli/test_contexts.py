"""Contexts: the file, the order in which values count, and what a failed connection says."""

from __future__ import annotations

import itertools
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from danube_fast.cli.contexts.context_file import ContextFile, complete_contexts
from danube_fast.security.curve import new_key_pair, write_key_file
from tests.cli.conftest import Run
from tests.cli.fakes import FakeBroker
from tests.crash.rig import free_port

DEFAULT = "danube://127.0.0.1:6650"
KEY, OTHER_KEY = new_key_pair(), new_key_pair()


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def path_of(config_home: Path) -> Path:
    return config_home / "danube-fast" / "contexts.toml"


EACH = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize(
    ("option", "environment", "named", "current"), EACH, ids=["".join("01"[on] for on in each) for each in EACH],
)  # fmt: skip
def test_option_then_environment_then_context_then_default(
    run: Run, fake: FakeBroker, monkeypatch: pytest.MonkeyPatch,
    option: bool, environment: bool, named: bool, current: bool,
) -> None:  # fmt: skip
    for name in ("named", "current"):
        assert run("context", "add", name, "--url", f"danube://{name}:1").code == 0
    words = ["topics", "list"]
    expected = DEFAULT
    if current:
        run("context", "use", "current")
        expected = "danube://current:1"
    if named:
        words = ["--context", "named", *words]
        expected = "danube://named:1"
    if environment:
        monkeypatch.setenv("DANUBE_URL", "danube://environment:1")
        expected = "danube://environment:1"
    if option:
        words += ["--url", "danube://option:1"]
        expected = "danube://option:1"
    assert run(*words).code == 0
    assert fake.urls == [expected]


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        ([], "", "current"), ([], "other", "other"), (["--context", "third"], "other", "third"),
        (["--context=third"], "", "third"), (["--context", "none"], "other", ""), ([], "none", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["before", "behind"])
def test_which_context_is_in_use(
    run: Run, monkeypatch: pytest.MonkeyPatch,
    words: list[str], variable: str, expected: str, place: str,
) -> None:  # fmt: skip
    for name in ("current", "other", "third"):
        run("context", "add", name, "--url", f"danube://{name}:1")
    run("context", "use", "current")
    if variable:
        monkeypatch.setenv("DANUBE_CONTEXT", variable)
    line = [*words, "context", "show"] if place == "before" else ["context", "show", *words]
    found = run(*line, "-o", "json").json()
    assert found["context"] == expected
    url = f"danube://{expected}:1" if expected else DEFAULT
    source = "context" if expected else "default"
    assert found["values"][0] == {"value": "url", "is": url, "from": source}


def test_every_value_reaches_the_client(
    run: Run, asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("dfk_0123456789abcdef_secret\n")
    token.chmod(0o600)
    write_key_file(tmp_path / "ann.key", KEY)
    run("context", "add", "key", "--url", "danube://key:1", "--server-key", f"{KEY.public} {OTHER_KEY.public}",
        "--key-file", str(tmp_path / "ann.key"), "--server-uid", "1234")  # fmt: skip
    run("context", "add", "token", "--url", "danube://token:1", "--sign-on", "https://token:2", "--tls",
        "sha256:00", "--token-file", str(token))  # fmt: skip
    run("--context", "key", "topics", "list")
    run("--context", "token", "topics", "list")
    by_key, by_token = ({k: v for k, v in call.items() if k not in ("name", "timeout", "transport")} for call in asked)  # fmt: skip
    assert by_key == {
        "url": "danube://key:1", "server_key": f"{KEY.public} {OTHER_KEY.public}",
        "key_file": str(tmp_path / "ann.key"), "server_uid": 1234,
    }  # fmt: skip
    assert by_token.pop("token")() == "dfk_0123456789abcdef_secret"
    assert by_token == {"url": "danube://token:1", "sign_on": "https://token:2", "tls": "sha256:00"}
    token.chmod(0o644)
    with pytest.raises(Exception, match="chmod 600"):
        asked[-1]["token"]()
    # each value by itself: the environment counts more
    monkeypatch.setenv("DANUBE_SERVER_KEY", OTHER_KEY.public)
    run("--context", "key", "topics", "list")
    assert asked[-1]["server_key"] == OTHER_KEY.public
    monkeypatch.setenv("DANUBE_SERVER_UID", "77")
    run("--context", "key", "topics", "list")
    assert asked[-1]["key_file"] == str(tmp_path / "ann.key") and asked[-1]["server_uid"] == 77
    monkeypatch.setenv("DANUBE_SERVER_UID", "ann")
    outcome = run("--context", "key", "topics", "list")
    assert outcome.code == 2 and "DANUBE_SERVER_UID is 'ann'" in outcome.sentence()


def test_a_failed_connection_names_the_context(run: Run) -> None:
    port = free_port(1)
    run("context", "add", "prod", "--url", f"danube://127.0.0.1:{port}", "--use")
    outcome = run("status")
    assert outcome.code == 5 and "context in use is prod" in outcome.sentence()
    outcome = run("--context", "none", "status", "--url", f"danube://127.0.0.1:{port}")
    assert outcome.code == 5 and "context" not in outcome.sentence()
    outcome = run("--context", "typo", "status")
    assert outcome.code == 3 and "danube-fast context list" in outcome.sentence()


def test_the_file_is_its_owners_alone(run: Run, config_home: Path) -> None:
    before = os.umask(0)
    try:
        run("context", "add", "prod", "--url", "danube://prod:1", "--use")
    finally:
        os.umask(before)
    path = path_of(config_home)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        outcome = run("context", "ls")
        assert outcome.code == 4 and "chmod 600" in outcome.sentence()
        assert run("status").code == 4, "another broker is asked"
    path.chmod(0o600)
    path.parent.chmod(0o777)
    assert "chmod 700" in run("context", "ls").sentence()
    path.parent.chmod(0o700)
    path.write_text("current = 7")
    assert run("context", "ls").code == 2


def test_contexts_are_made_changed_listed_and_removed(
    run: Run, config_home: Path, tmp_path: Path
) -> None:
    assert run("context", "ls").err == "no contexts; make one with: danube-fast context add\n"
    odd = tmp_path / 'with "quotes" \\ and ü.key'
    write_key_file(odd, OTHER_KEY)
    run("context", "add", "a.b", "--url", "danube://one:1")
    key = ("--server-key", KEY.public, "--key-file", str(odd))
    run("context", "add", "a.b", *key, "--use")
    found = run("context", "show", "a.b", "-o", "json").json()
    assert found == {
        "context": "a.b", "url": "danube://one:1", "server_key": [KEY.public],
        "key_file": str(odd), "sign_on": "", "tls": "", "token_file": "",
        "server_uid": "",
    }  # fmt: skip
    run("context", "add", "other", "--url", "danube://two:1")
    assert run("context", "ls", "-o", "json").json() == [
        {"context": "a.b", "in_use": True, "url": "danube://one:1"},
        {"context": "other", "in_use": False, "url": "danube://two:1"},
    ]
    assert complete_contexts("o") == ["other"]
    assert "a.b" in run("context", "show").out
    assert run("context", "ls").out == run("context", "list").out
    refused = run("context", "delete", "a.b")
    assert refused.code == 2 and "--yes" in refused.sentence()
    assert run("context", "delete", "nosuch").code == 3
    assert run("context", "delete", "a.b", "--yes").code == 0
    assert ContextFile.read().current == "" and ContextFile.read().names == ["other"]
    assert run("context", "use", "a.b").code == 3
    assert run("context", "use", "none").code == 0
    assert [path.name for path in path_of(config_home).parent.iterdir()] == ["contexts.toml"]


def test_a_way_in_that_no_command_would_take_is_refused(
    run: Run, config_home: Path, tmp_path: Path
) -> None:
    own = tmp_path / "ann.key"
    write_key_file(own, KEY)
    key, signs_on = ["--key-file", str(own)], ["--sign-on", "https://x:1", "--token-file", "t"]
    server_key = ["--server-key", KEY.public]
    for words, told in [
        ([*server_key, *key, *signs_on], "are two ways in"),
        (server_key, "needs a key of yours"),
        (key, "needs server_key"),
        (["--sign-on", "https://x:1"], "needs token_file"),
        ([*server_key, "--key-file", str(tmp_path / "none.key")], "no key file"),
    ]:
        outcome = run("context", "add", "prod", *words)
        assert outcome.code in (2, 4) and told in outcome.sentence()
        assert not path_of(config_home).exists()
    assert run("context", "add", "prod", *server_key, *key).code == 0
    refused = run("context", "add", "prod", *signs_on)
    assert refused.code == 2 and "--key-file ''" in refused.sentence()
    assert run("context", "add", "prod", *signs_on, "--key-file", "").code == 0
    assert run("context", "add", "prod", "--server-key", "").code == 0
    found = run("context", "show", "prod", "-o", "json").json()
    assert found["sign_on"] and not found["key_file"] and not found["server_key"]


def test_changes_at_once_are_all_kept() -> None:
    at_once, names = threading.Barrier(8, timeout=30), [f"n{number}" for number in range(40)]

    def change(mine: list[str]) -> None:
        at_once.wait()
        for name in mine:
            with ContextFile.changing() as file:
                file.put(name, {"url": "danube://one:1"})

    threads = [threading.Thread(target=change, args=(names[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a change waits for ever"
    assert ContextFile.read().names == sorted(names)


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        (["add", "none"], ""),
        (["add", "a/b"], ""),
        (["add", "x", "--url", "http://x"], ""),
        (["add", "x", "--server-key", "a secret that is no key"], "a secret that is no key"),
        (["add", "x", "--token-file", "dfk_0123456789abcdef_topsecret"], "topsecret"),
        (["add", "x", "--sign-on", "http://x:1"], ""),
        (["add", "x", "--server-uid", "ann"], ""),
        (["add", "x", "--server-uid", "-1"], ""),
    ],
    ids=["reserved", "slash", "url", "key", "token", "plain-http", "user", "below-0"],
)
def test_what_cannot_be_right_is_refused(
    run: Run, config_home: Path, words: list[str], hidden: str
) -> None:
    outcome = run("context", *words)
    assert outcome.code == 2 and outcome.sentence()
    assert not hidden or hidden not in outcome.err
    assert not path_of(config_home).exists()
