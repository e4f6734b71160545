"""Where a setting's value comes from, and how a wrong one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube_fast.checks import shown_value
from danube_fast.config import Settings, load_settings, split_address
from danube_fast.errors import InvalidArgument, NotFound

FIELDS = Settings.__struct_fields__


def test_nothing_given_is_all_defaults() -> None:
    loaded = load_settings()
    assert loaded.settings == Settings()
    assert set(loaded.sources) == set(FIELDS)
    assert set(loaded.sources.values()) == {"default"}


def test_defaults_keep_their_own_ranges() -> None:
    values = msgspec.to_builtins(Settings())
    assert msgspec.convert(values, Settings) == Settings()
    assert load_settings(values).settings == Settings()


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("workers = 3\nspare_segments = 3\nheartbeat_ms = 300\n")
    environment = {"DANUBE_WORKERS": "4", "DANUBE_SPARE_SEGMENTS": "4"}
    loaded = load_settings({"workers": 5, "data_dir": None}, environment, file)
    assert loaded.settings == Settings(workers=5, spare_segments=4, heartbeat_ms=300)
    assert loaded.sources["workers"] == "flag --workers"
    assert loaded.sources["spare_segments"] == "DANUBE_SPARE_SEGMENTS"
    assert loaded.sources["heartbeat_ms"] == str(file)
    assert loaded.sources["data_dir"] == "default"


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_can_be_set_from_everywhere(tmp_path: Path, name: str) -> None:
    value = getattr(Settings(), name)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    (tmp_path / "x.toml").write_text(f"{name} = {json.dumps(value)}\n")
    for loaded in (
        load_settings({name: value}),
        load_settings(None, {f"DANUBE_{name.upper()}": text}),
        load_settings(file=tmp_path / "x.toml"),
    ):
        assert loaded.settings == Settings()
        assert loaded.sources[name] != "default"


@pytest.mark.parametrize("text", ["false", "0", "No", "off"])
def test_booleans_in_the_environment(text: str) -> None:
    assert not load_settings(None, {"DANUBE_AUTO_CREATE_TOPICS": text}).settings.auto_create_topics


def one_sentence(error: pytest.ExceptionInfo[Any]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_an_unknown_key_of_a_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("segment_byte = 1\n")
    with pytest.raises(InvalidArgument) as caught:
        load_settings(file=file)
    assert "'segment_bytes'" in one_sentence(caught)
    assert str(file) in one_sentence(caught)


def test_a_table_in_a_file_is_an_unknown_key(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("[log]\nsegment_bytes = 1\n")
    with pytest.raises(InvalidArgument, match="no setting 'log'"):
        load_settings(file=file)


def test_a_misspelt_variable_is_refused_and_a_foreign_one_named() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'workers'"):
        load_settings(None, {"DANUBE_WORKER": "3"})
    foreign = {"DANUBE_SERVICE_HOST": "10.0.0.1", "DANUBE_URL": "danube://x:1", "HOME": "/nowhere"}
    assert load_settings(None, foreign).ignored_variables == ["DANUBE_SERVICE_HOST"]


def test_variables_of_clients_are_no_settings() -> None:
    """A shell in which clients run may start a broker, too; what both call DANUBE_SIGN_ON is told apart."""
    of_clients = {
        "DANUBE_SIGN_ON": "https://broker.example:6652", "DANUBE_TOKEN_FILE": "/run/token",
        "DANUBE_TLS": "sha256:00", "DANUBE_SERVER_KEY": "a b", "DANUBE_KEY_FILE": "ann.key",
        "DANUBE_SERVER_UID": "77",
    }  # fmt: skip
    loaded = load_settings(None, of_clients)
    assert loaded.settings == Settings() and not loaded.ignored_variables
    of_a_broker = {
        "DANUBE_SIGN_ON": "0.0.0.0:6652", "DANUBE_AUTH": "required",
        "DANUBE_TLS_CERTIFICATE": "tls.pem", "DANUBE_TLS_KEY": "tls.key",
    }  # fmt: skip
    assert load_settings(None, of_a_broker).settings.sign_on == "0.0.0.0:6652"


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'workers'"):
        load_settings({"worker": 1})


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('workers = "two"', ["workers", "a whole number", "'two'"]),
        ("workers = 2.0", ["workers", "a whole number", "2.0"]),
        ("workers = true", ["workers", "a whole number", "True"]),
        ("auto_create_topics = 1", ["auto_create_topics", "true or false"]),
        ("data_dir = 7", ["data_dir", "a text"]),
        ('data_dir = ""', ["data_dir", "not empty"]),
        ("workers = 0", ["workers", "from 1 to 256", "0"]),
        ("workers = 257", ["workers", "from 1 to 256", "257"]),
        ("segment_bytes = 1_000_000", ["segment_bytes", "multiple of 4096"]),
        ("wal_bytes_max = -1", ["wal_bytes_max", "at least 0"]),
        ('log_format = "xml"', ["log_format", "text or json", "'xml'"]),
        ('listen = "6650"', ["listen", "HOST:PORT"]),
        ("heartbeat_ms = 2000", ["session_timeout_ms", "heartbeat_ms", "twice"]),
        ("heartbeat_timeout_ms = 500", ["heartbeat_timeout_ms", "from 2000 to", "500"]),
        ("workers = ", ["not TOML"]),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence(
    tmp_path: Path, toml: str, words: list[str]
) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(toml)
    with pytest.raises(InvalidArgument) as caught:
        load_settings(file=file)
    text = one_sentence(caught)
    assert all(word in text for word in [*words, str(file)]), text


@pytest.mark.parametrize("name", ["authenticator", "authorizer"])
def test_the_text_of_a_component_is_shown_nowhere(tmp_path: Path, name: str) -> None:
    for value, shown in (
        ("ldap:ldaps://bind:pass:word@directory", "ldap:..."), ("ldap:", "ldap:..."), ("ldap", "ldap"), ("", ""),
        (":password", ":..."), (["ldap:password"], "..."), (["ldap", "password"], "..."), ({"ldap": "password"}, "..."),
    ):  # fmt: skip
        assert shown_value(name, value) == shown
    assert shown_value("store", "file:///srv/store") == "file:///srv/store"
    file = tmp_path / "broker.toml"
    for toml in ('["ldap:password"]', '["ldap", "password"]', '{ldap = "password"}'):
        file.write_text(f"{name} = {toml}\n")
        with pytest.raises(InvalidArgument, match=f"{name} must be a text") as caught:
            load_settings(file=file)
        assert "password" not in one_sentence(caught)


@pytest.mark.parametrize("text", ["", "two", "2.5", "0x10"])
def test_a_wrong_number_in_the_environment_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="DANUBE_WORKERS"):
        load_settings(None, {"DANUBE_WORKERS": text})


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere\.toml"):
        load_settings(file=tmp_path / "nowhere.toml")


def test_addresses() -> None:
    assert split_address("localhost:0", "x") == ("localhost", 0)
    assert split_address("[::1]:6650", "x") == ("::1", 6650)
    for wrong in ("localhost", ":1", "::1:6650", "a:", "a:-1", "a:65536", "a:1x", "a:²"):
        with pytest.raises(InvalidArgument, match="HOST:PORT"):
            split_address(wrong, "x")
