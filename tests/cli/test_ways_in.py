"""The way into a broker comes from one place as a whole: every mixture of environment and context, and of an option.

P server_key, K key_file, S sign_on, T token_file, C tls
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from danube_fast.cli.broker import connect
from danube_fast.cli.contexts.context_file import ContextFile, choose, values
from danube_fast.cli.contexts.open_client import access_of
from danube_fast.errors import InvalidArgument, NotFound
from danube_fast.security.curve import new_key_pair
from tests.cli.conftest import Run

FIELDS = {"P": "server_key", "K": "key_file", "S": "sign_on", "T": "token_file", "C": "tls"}
KEYS = {"environment": new_key_pair().public, "context": new_key_pair().public}
WAY_IN = ("key_file", "sign_on", "token_file")


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def value(letter: str, place: str) -> str:
    """A value that tells where it is from."""
    texts = {"P": KEYS[place], "S": f"https://{place}:1", "C": "sha256:" + place.encode().hex()}
    return texts.get(letter, f"/{place}/{FIELDS[letter]}")


def set_environment(letters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for letter, field in FIELDS.items():
        name = f"DANUBE_{field.upper()}"
        if letter in letters:
            monkeypatch.setenv(name, value(letter, "environment"))
        else:
            monkeypatch.delenv(name, raising=False)


def set_context(letters: str) -> None:
    """Make the context prod of these values."""
    found: dict[str, Any] = {FIELDS[letter]: value(letter, "context") for letter in letters}
    if "P" in letters:
        found["server_key"] = [found["server_key"]]
    with ContextFile.changing() as file:
        file.put("prod", dict.fromkeys(FIELDS.values(), "") | {"server_key": []} | found)


ROWS: list[tuple[str, str, str]] = [
    # environment, context, what the client gets: of the environment, of the context
    ("", "", "|"),
    ("", "PK", "|PK"),
    ("", "STC", "|STC"),
    ("", "PSTC", "|PSTC"),
    ("PK", "", "PK|"),
    ("PK", "PK", "PK|"),
    ("K", "PK", "K|P"),
    ("P", "PK", "P|K"),
    ("P", "STC", "P|STC"),
    # the certificate is rotated
    ("C", "STC", "C|ST"),
    # a key of the environment, a sign-on of the context, and the other way round
    ("PK", "STC", "PK|"),
    ("ST", "PK", "ST|P"),
    # another place to sign on: neither the token nor the certificate of the context
    ("ST", "STC", "ST|"),
    ("STC", "STC", "STC|"),
    # DANUBE_TLS is for `health`, too
    ("C", "", "|"),
    ("C", "PK", "|PK"),
    ("PKC", "", "PK|"),
    ("", "PKC", "|PK"),
]  # fmt: skip
REFUSED: list[tuple[str, str, str]] = [
    # a token of one place does not go to an address of the other one
    ("S", "ST", "DANUBE_SIGN_ON needs DANUBE_TOKEN_FILE"),
    ("S", "STC", "DANUBE_SIGN_ON needs DANUBE_TOKEN_FILE"),
    ("SC", "STC", "DANUBE_SIGN_ON needs DANUBE_TOKEN_FILE"),
    ("T", "STC", "DANUBE_TOKEN_FILE needs DANUBE_SIGN_ON"),
    ("S", "PK", "DANUBE_SIGN_ON needs DANUBE_TOKEN_FILE"),
    ("T", "PK", "DANUBE_TOKEN_FILE needs DANUBE_SIGN_ON"),
    ("T", "", "DANUBE_TOKEN_FILE needs DANUBE_SIGN_ON"),
    ("", "S", "sign_on of the context prod needs token_file of the context prod"),
    ("", "PT", "token_file of the context prod needs sign_on of the context prod"),
    ("PKST", "", "DANUBE_KEY_FILE and DANUBE_SIGN_ON are two ways in"),
    ("PKT", "ST", "DANUBE_KEY_FILE and DANUBE_TOKEN_FILE are two ways in"),
    ("", "PKST", "key_file of the context prod and sign_on of the context prod are two ways in"),
    ("K", "", "DANUBE_KEY_FILE needs DANUBE_SERVER_KEY"),
    ("K", "STC", "DANUBE_KEY_FILE needs DANUBE_SERVER_KEY"),
    ("", "K", "key_file of the context prod needs server_key of the context prod"),
    ("P", "", "DANUBE_SERVER_KEY needs a key of yours: give DANUBE_KEY_FILE"),
    ("", "P", "server_key of the context prod needs a key of yours: give DANUBE_KEY_FILE"),
]  # fmt: skip


@pytest.mark.parametrize("option", [False, True], ids=["", "url"])
@pytest.mark.parametrize(("told", "kept", "expected"), ROWS)
def test_what_the_client_gets(
    run: Run, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch,
    told: str, kept: str, expected: str, option: bool,
) -> None:  # fmt: skip
    set_environment(told, monkeypatch)
    set_context(kept)
    url = ["--url", "danube://option:1"] if option else []
    outcome = run("--context", "prod", "topics", "list", *url)
    (call,) = asked
    assert outcome.code == 3, outcome.err
    own, others = expected.split("|")
    wanted = {FIELDS[letter]: value(letter, "environment") for letter in own}
    wanted |= {FIELDS[letter]: value(letter, "context") for letter in others}
    token_file = wanted.pop("token_file", "")
    token = call.pop("token", None)
    assert {name: text for name, text in call.items() if name in FIELDS.values()} == wanted
    assert (token is not None) == bool(token_file)
    if token is not None:
        with pytest.raises(Exception, match=f"token file {token_file}"):
            token()


@pytest.mark.parametrize("option", [False, True], ids=["", "url"])
@pytest.mark.parametrize(("told", "kept", "sentence"), REFUSED)
def test_what_is_no_way_in(
    run: Run, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch,
    told: str, kept: str, sentence: str, option: bool,
) -> None:  # fmt: skip
    set_environment(told, monkeypatch)
    set_context(kept)
    url = ["--url", "danube://option:1"] if option else []
    outcome = run("--context", "prod", "topics", "list", *url)
    assert outcome.code == 2 and sentence in outcome.sentence()
    assert not asked


def test_every_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 1,024: what comes from where, and nothing of a sign-on from two places."""
    subsets = ["".join(each) for n in range(6) for each in itertools.combinations("PKSTC", n)]
    choose("prod")
    accepted = 0
    for kept, told in itertools.product(subsets, repeat=2):
        if not told:
            set_context(kept)
        set_environment(told, monkeypatch)
        found = {field: of for field, of in values().items() if field in FIELDS.values()}
        place = "environment" if set(told) & set("KST") else "context"
        for letter, field in FIELDS.items():
            at = (
                {place}
                if field in WAY_IN
                else {"environment", place if letter == "C" else "context"}
            )
            places = [
                source for source, letters in (("environment", told), ("context", kept))
                if letter in letters and source in at
            ]  # fmt: skip
            expected = (value(letter, places[0]), places[0]) if places else ("", "default")
            assert tuple(found[field]) == expected, (told, kept, field)
        of = {letter for letter, field in FIELDS.items() if found[field].text}
        is_sound = (
            not {"K", "S"} <= of and not {"K", "T"} <= of and ("S" in of) == ("T" in of)
            and ("K" not in of or "P" in of) and ("P" not in of or bool({"K", "S"} & of))
        )  # fmt: skip
        try:
            access_of(values())
        except InvalidArgument:
            assert not is_sound, (told, kept)
        else:
            assert is_sound, (told, kept)
            accepted += 1
    choose("")
    assert accepted


# ---------------------------------------------------------------- another broker in the same command


@pytest.mark.parametrize("told", ["", "PK", "ST", "STC", "S", "PKSTC"])
@pytest.mark.parametrize("kept", ["PK", "ST", "PSTC", ""])
def test_a_context_that_is_named_for_a_target_counts_alone(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, told: str, kept: str
) -> None:
    """Neither the environment nor the context in use has a say, whole or not."""
    set_environment(told, monkeypatch)
    monkeypatch.setenv("DANUBE_URL", "danube://environment:1")
    set_context(kept)
    with ContextFile.changing() as file:
        file.put("prod", {"url": "danube://context:1"})
        file.put("used", {"url": "danube://used:1", "key_file": "/used/key"})
        file.use("used")
    with pytest.raises(NotFound, match="this is a test"):
        connect("", context="prod")
    (call,) = asked
    assert call["url"] == "danube://context:1"
    wanted = {FIELDS[letter]: value(letter, "context") for letter in kept}
    assert ("token" in call) == (wanted.pop("token_file", None) is not None)
    assert {name: text for name, text in call.items() if name in FIELDS.values()} == wanted


@pytest.mark.parametrize(
    ("kept", "sentence"),
    [
        ("K", "key_file of the context prod needs server_key of the context prod"),
        ("P", "server_key of the context prod needs a key of yours: give key_file of the context"),
        ("S", "sign_on of the context prod needs token_file of the context prod"),
        ("PKST", "key_file of the context prod and sign_on of the context prod are two ways in"),
    ],
)
def test_a_target_whose_context_is_no_way_in(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, kept: str, sentence: str
) -> None:
    set_environment("PK", monkeypatch)
    set_context(kept)
    with pytest.raises(InvalidArgument, match=sentence) as caught:
        connect("", context="prod")
    assert "danube-fast context show prod" in str(caught.value) and not asked


def test_a_target_of_a_context_that_is_not_there(run: Run, asked: list[dict[str, Any]]) -> None:
    words = "replay", "/default/a", "/default/b", "--to-context", "new"
    outcome = run(*words)
    assert outcome.code == 3 and "there is no context 'new'" in outcome.sentence()
    set_context("PK")
    outcome = run(*words[:-1], "prod", "--to-url", "danube://elsewhere:1")
    assert outcome.code == 2 and "--to-url and --to-context" in outcome.sentence()
    assert not asked
