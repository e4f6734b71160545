"""Help, exit codes, errors in one sentence, quiet ends, completion."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from danube_fast import errors
from danube_fast.cli import failures
from danube_fast.cli.main import app
from danube_fast.testing import Broker
from tests.cli.conftest import Run
from tests.cli.fakes import FakeBroker

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "danube_fast.cli.main"]


def leaves() -> list[list[str]]:
    """Every command line prefix that runs something, and the groups."""
    found = []

    def descend(command: object, words: list[str]) -> None:
        found.append(words)
        for name, child in getattr(command, "commands", {}).items():
            descend(child, [*words, name])

    descend(typer.main.get_command(app), [])
    return found


def test_the_commands_are_those_that_exist() -> None:
    top = {words[0] for words in leaves() if len(words) == 1}
    assert {"serve", "produce", "consume", "topics", "subscriptions", "status"} <= top
    assert {"doctor", "wal", "config", "completion", "namespaces"} <= top


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_every_help_ends_with_an_example(run: Run, words: list[str]) -> None:
    outcome = run(*words, "--help")
    assert outcome.code == 0
    assert outcome.err == ""
    _, found, example = outcome.out.partition("Example:\n")
    assert found, outcome.out
    assert " ".join(["danube-fast", *words]) in example


@pytest.mark.parametrize("words", [w for w in leaves() if w], ids=" ".join)
def test_every_command_offers_json(run: Run, words: list[str]) -> None:
    text = run(*words, "--help").out
    is_group = "Commands:" in text
    assert is_group or words == ["completion"] or re.search(r"--output\s+<text\|json>", text), text


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_examples_are_commands_that_parse(words: list[str]) -> None:
    """Every word that begins with a dash in an example is an option of the command it shows."""
    import shlex

    root = typer.main.get_command(app)
    command = root
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]
    for line in (command.epilog or "").splitlines()[2:]:
        shown = line.split("#")[0].split("|")[-1]
        typed = shlex.split(shown, comments=True)
        while typed and "=" in typed[0]:
            typed.pop(0)
        if typed[0] != "danube-fast":
            continue  # a shell's own words around a command
        target = root
        place = 1
        while place < len(typed) and typed[place] in getattr(target, "commands", {}):
            target = target.commands[typed[place]]  # type: ignore[attr-defined]
            place += 1
        known = {option for parameter in target.params for option in parameter.opts}
        unknown = [word for word in typed[place:] if word.startswith("-") and len(word) > 1]
        assert set(unknown) <= known, line


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgument, 2),
        (errors.NotFound, 3),
        (errors.AlreadyExists, 4),
        (errors.FailedPrecondition, 4),
        (errors.TopicDeleted, 4),
        (errors.ProducerFenced, 4),
        (errors.PermissionDenied, 4),
        (errors.ResourceExhausted, 4),
        (errors.Unavailable, 5),
        (errors.DeadlineExceeded, 5),
        (errors.DataLoss, 1),
        (errors.Internal, 1),
        (errors.DanubeError, 1),
    ],
)
def test_every_error_has_its_exit_code_and_one_sentence(
    run: Run, fake: FakeBroker, error: type[errors.DanubeError], code: int
) -> None:
    fake.answers["list_topics"] = error("it did not work; do something else")
    outcome = run("topics", "list")
    assert outcome.code == code
    assert outcome.sentence() == "danube-fast: it did not work; do something else"
    assert outcome.out == ""
    with_traceback = run("topics", "list", "--debug")
    assert with_traceback.code == code
    assert "Traceback" in with_traceback.err


def test_every_error_kind_is_in_the_table() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    for kind in kinds:
        if issubclass(kind, errors.DanubeError):
            assert any(issubclass(kind, known) for known, _ in failures._EXIT_CODES)


@pytest.mark.parametrize(
    "words",
    [
        ("nope",),
        ("topics", "nope"),
        ("topics", "create"),
        ("topics", "list", "--nope"),
        ("topics", "create", "/default/x", "--dispatch", "maybe"),
        ("topics", "create", "/default/x", "--partitions", "-1"),
        ("produce", "/default/x"),
        ("produce", "/default/x", "-m", "a", "--file", "b"),
        ("produce", "/default/x", "-m", "a", "--rate", "0"),
        ("produce", "/default/x", "-m", "a", "--key", "k", "-K", ":"),
        ("produce", "/default/x", "-m", "a", "--attribute", "novalue"),
        ("produce", "/default/x", "-m", "not json", "--input", "json"),
        ("produce", "/default/x", "-m", "[1]", "--key-field", "k"),
        ("consume", "/default/x"),
        ("consume", "/default/x", "--subscription", "s", "--from", "yesterday"),
        ("consume", "/default/x", "--subscription", "s", "-F", "%z"),
        ("consume", "/default/x", "--subscription", "s", "-F", "half %"),
        ("consume", "/default/x", "--subscription", "s", "-F", "%s", "--output", "json"),
        ("topics", "delete", "/default/x"),
        ("subscriptions", "delete", "/default/x", "s"),
        ("namespaces", "delete", "x"),
        ("serve", "--workers", "many"),
        ("serve", "--workers", "0"),
        ("serve", "--listen", "nowhere"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_and_one_sentence(run: Run, fake: FakeBroker, words: tuple[str]) -> None:
    fake.messages["/default/x"] = []
    outcome = run(*words)
    assert outcome.code == 2, outcome
    outcome.sentence()
    assert outcome.out == ""
    assert not fake.asked


def test_url_comes_from_option_environment_default(
    run: Run, fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers["list_topics"] = []
    run("topics", "list")
    monkeypatch.setenv("DANUBE_URL", "danube://env:1")
    run("topics", "list")
    run("topics", "list", "--url", "danube://flag:1")
    assert fake.urls == ["danube://127.0.0.1:6650", "danube://env:1", "danube://flag:1"]


def test_ctrl_c_is_130_and_quiet(run: Run, fake: FakeBroker) -> None:
    fake.messages["/default/x"] = []
    fake.interrupt = KeyboardInterrupt()
    outcome = run("consume", "/default/x", "--subscription", "s")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")


def test_an_unforeseen_error_is_one_sentence(
    run: Run, fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.messages["/default/x"] = []
    fake.interrupt = ZeroDivisionError("oh\nno")
    outcome = run("consume", "/default/x", "--subscription", "s")
    assert outcome.code == 1
    assert "ZeroDivisionError" in outcome.sentence()
    assert "--debug" in outcome.err


def test_version(run: Run) -> None:
    outcome = run("--version")
    assert outcome.code == 0
    assert re.fullmatch(r"danube-fast \d+\.\d+\.\d+\n", outcome.out)


def test_no_command_shows_the_help(run: Run) -> None:
    outcome = run()
    assert outcome.code == 2
    assert "Commands:" in outcome.out + outcome.err


def test_a_closed_stdout_is_quiet() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        result = subprocess.run(
            [*PROGRAM, "config", "show"], stdout=closed, stderr=subprocess.PIPE, timeout=60
        )
    assert result.stderr == b""
    assert result.returncode == 141


def test_ctrl_c_while_starting_is_quiet() -> None:
    code = (
        "import os, signal, sys\n"
        "from danube_fast.cli import broker, main\n"
        "broker.connect = lambda url: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['danube-fast', 'status']\n"
        "main.run()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(run: Run, shell: str) -> None:
    outcome = run("completion", shell)
    assert outcome.code == 0
    assert "_DANUBE_FAST_COMPLETE" in outcome.out


def test_bash_completes_commands() -> None:
    words = {"COMP_WORDS": "danube-fast top", "COMP_CWORD": "1"}
    environment = {**os.environ, "_DANUBE_FAST_COMPLETE": "complete_bash", **words}
    result = subprocess.run(
        PROGRAM, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["topics"]


def completed(words: str, url: str) -> list[str]:
    """What a shell is offered for the last of these words."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "DANUBE_URL": url}
    environment = {**os.environ, "_DANUBE_FAST_COMPLETE": "complete_bash", **asked}
    result = subprocess.run(
        PROGRAM, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0 and not result.stderr, result.stderr
    return result.stdout.split()


def test_bash_completes_names_of_topics_and_subscriptions(danube_broker: Broker) -> None:
    with danube_broker.client() as client:
        for topic in ("/default/completed-a", "/default/completed-b"):
            client.admin.create_topic(topic)
        client.consumer("/default/completed-a", subscription="mine").close()
        url = danube_broker.url
        ours = ["/default/completed-a", "/default/completed-b"]
        assert completed("danube-fast produce /default/comp", url) == ours
        assert completed("danube-fast produce /default/completed-b", url) == ours[1:]
        assert set(ours) <= set(completed("danube-fast topics describe /", url))
        assert completed(f"danube-fast subscriptions describe {ours[0]} m", url) == ["mine"]
        assert completed(f"danube-fast consume {ours[0]} --subscription m", url) == ["mine"]
        for topic in ours:
            client.admin.delete_topic(topic)


def test_no_broker_completes_nothing_and_says_nothing() -> None:
    assert completed("danube-fast topics describe /default/x", "danube://127.0.0.1:9") == []


def test_help_does_not_wait_for_kernels() -> None:
    code = (
        "import sys; from danube_fast.cli.main import main; main(['--help']);"
        "sys.exit('numba' in sys.modules or 'zmq' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("replay", ("danube-fast topics create", "which has to be there", "parquet:DIR nor the target")),
        ("export", ("until_acked", "no Java")),
        ("sql", ("No Java",)),
    ],
)  # fmt: skip
def test_commands_over_topics_say_that_they_need_an_object_store(
    run: Run, name: str, also: tuple[str, ...]
) -> None:
    outcome = run(name, "--help")
    text = " ".join(outcome.out.replace("danube-\n", "danube-").split())
    text = text.replace("danube- fast", "danube-fast")
    needed = (
        "danube-fast serve --store URL",
        "credentials",
        "durability memory",
        "s3://BUCKET/PREFIX",
    )
    for each in (*needed, *also, "danube://127.0.0.1:6650"):
        assert each in text, (each, text)
