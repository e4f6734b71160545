"""Spark, `sql`, `export`, `replay` and `spark writes` at a broker that asks who they are: by a key file, by a token."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.cli.contexts.context_file import choose
from danube_fast.cli.main import main
from danube_fast.client.values.access import Access
from danube_fast.errors import DanubeError, InvalidArgument, PermissionDenied
from danube_fast.security.api_keys import new_api_key
from danube_fast.security.curve import new_key_pair, read_key_file
from danube_fast.spark.failures import translated
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.source import DanubeSource, row_schema
from danube_fast.spark.write.options import WriteOptions
from danube_fast.spark.write.publishing import BrokerLink, create_commit
from danube_fast.spark.write.staging import open_staging
from tests.delivery.history_rig import keep_for_ever
from tests.delivery.sign_on_rig import SignOnServer
from tests.spark.write_rig import payloads_of
from tests.workers.broker import ROOT

READ, WRITTEN, COPY = "/shop/orders", "/shop/written", "/shop/copy"
COUNT = 100
COUNTING = f"select count(*) n from '{READ}'"
COMMAND_SECONDS = 240
RunHere = Callable[..., str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SignOnServer]:
    """A secured broker with a store; pia may consume what is read, and both at the other topics."""
    folder = tmp_path_factory.mktemp("secured")
    store = f"file://{folder / 'store'}"
    with SignOnServer(folder / "data", folder, store=store, history_flush_seconds=1) as broker:
        broker.make_ann()
        with broker.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            for topic in (READ, WRITTEN, COPY):
                keep_for_ever(ann, topic)
            with ann.producer(READ) as producer:
                producer.send_many([b"%d" % number for number in range(COUNT)])
            rights = [
                (role, topic) for topic in (WRITTEN, COPY) for role in ("consumer", "producer")
            ]
            broker.add(ann.admin, "pia", ("consumer", READ), *rights)
            made = new_api_key()
            ann.admin.add_api_key("pia", made.id, made.salt, made.digest)
        token = folder / "pia.token"
        token.touch(0o600)
        token.write_text(made.text)
        yield broker


@pytest.fixture(params=["key", "token"])
def way_in(request: pytest.FixtureRequest, server: SignOnServer) -> dict[str, str]:
    """Options of Spark, each of the two ways."""
    return by_key(server) if request.param == "key" else by_token(server)


def by_key(server: SignOnServer, user: str = "pia") -> dict[str, str]:
    return {
        "url": server.url, "server_key": server.server_key,
        "key_file": str(server.folder / f"{user}.key"),
    }  # fmt: skip


def by_token(server: SignOnServer) -> dict[str, str]:
    return {
        "url": server.url, "sign_on": server.sign_on_url, "tls": server.certificate.fingerprint,
        "token_file": str(server.folder / "pia.token"),
    }  # fmt: skip


def staging(server: SignOnServer) -> str:
    return f"file://{server.folder / 'store'}"


def run(folder: Path, *words: str, **options: str) -> subprocess.CompletedProcess[str]:
    """Run a command with these values in its environment."""
    outside = {name: text for name, text in os.environ.items() if not name.startswith("DANUBE_")}
    told = {f"DANUBE_{name.upper()}": text for name, text in options.items()}
    return subprocess.run(
        [sys.executable, "-m", "danube_fast.cli.main", *words],
        env={**outside, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(folder / "config"), **told},
        cwd=folder, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False,
    )  # fmt: skip


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> RunHere:
    """Runs a command in this process, where it takes the session that is active; what it prints."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("DANUBE_URL", *(f"DANUBE_{field.upper()}" for field in Access._fields)):
        monkeypatch.delenv(name, raising=False)

    def run_it(*words: str, **options: str) -> str:
        for name, text in options.items():
            monkeypatch.setenv(f"DANUBE_{name.upper()}", text)
        capfd.readouterr()
        code = main(words)
        choose("")
        out, err = capfd.readouterr()
        assert code == 0, err
        return out

    return run_it


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """A sentence on standard error, and no traceback."""
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    for part in parts:
        assert part in line
    assert not done.stdout


# ---------------------------------------------------------------- commands


@pytest.mark.usefixtures("spark")
def test_sql_by_the_environment(server: SignOnServer, run_here: RunHere) -> None:
    assert json.loads(run_here("sql", COUNTING, "-o", "json", **by_key(server))) == {"n": COUNT}


@pytest.mark.usefixtures("spark")
def test_sql_by_a_context(server: SignOnServer, run_here: RunHere) -> None:
    words = [w for n, text in by_token(server).items() for w in (f"--{n.replace('_', '-')}", text)]
    run_here("context", "add", "prod", *words)
    shown = run_here("--context", "prod", "sql", COUNTING, "-o", "json")
    assert json.loads(shown) == {"n": COUNT}


def test_export_and_replay(server: SignOnServer, way_in: dict[str, str], tmp_path: Path) -> None:
    words = ("export", READ, "--to", f"json:{tmp_path / 'out'}", "--dry-run", "-o", "json")
    done = run(tmp_path, *words, **way_in)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["messages"] == COUNT
    name = Path(way_in.get("key_file", "token")).stem
    words = ("replay", READ, COPY, "--id", name, "--checkpoint", str(tmp_path), "-o", "json")
    done = run(tmp_path, *words, **way_in)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["messages"] == COUNT


@pytest.mark.usefixtures("spark")
def test_export_by_spark(server: SignOnServer, run_here: RunHere, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run_here("export", READ, "--to", f"json:{folder}", **by_key(server))
    lines = [line for path in folder.glob("*.json") for line in path.read_text().splitlines()]
    assert sorted(int(json.loads(line)["payload"]) for line in lines) == [*range(COUNT)]


@pytest.mark.parametrize("command", ["sql", "export", "replay"])
def test_commands_without_a_key(server: SignOnServer, tmp_path: Path, command: str) -> None:
    words = {
        "sql": ("sql", COUNTING), "export": ("export", READ, "--to", f"json:{tmp_path / 'out'}"),
        "replay": ("replay", READ, COPY),
    }[command]  # fmt: skip
    done = run(tmp_path, *words, url=server.url)
    assert_refused(done, 4, "danube-fast: ", "asks who you are", "DANUBE_KEY_FILE")
    assert not (tmp_path / "out").exists()


def test_a_wrong_server_key(server: SignOnServer, tmp_path: Path) -> None:
    wrong = {**by_key(server), "server_key": new_key_pair().public}
    done = run(tmp_path, "export", READ, "--to", f"json:{tmp_path / 'out'}", **wrong)
    assert_refused(done, 4, "wrong server key")
    assert not (tmp_path / "out").exists()


def test_a_topic_without_the_right(server: SignOnServer, tmp_path: Path) -> None:
    with server.come_in("ann") as ann:
        keep_for_ever(ann, "/shop/hidden")
    words = ("export", "/shop/hidden", "--to", f"json:{tmp_path / 'out'}")
    assert_refused(run(tmp_path, *words, **by_key(server)), 4, "/shop/hidden")


def test_writes_are_resumed(
    server: SignOnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is gone behind its commit; `spark writes resume` publishes by a key."""
    from danube_fast.spark.write import publishing
    from tests.spark.write_rig import propose

    class Gone(Exception):
        pass

    def commit_and_go(*arguments: Any) -> Any:
        create_commit(*arguments)
        raise Gone

    options = WriteOptions.parse({**by_key(server), "topic": COPY})
    store = open_staging(staging(server))
    with BrokerLink(options.url, 30, options.access) as link, server.come_in("ann") as ann:
        before = len(payloads_of(ann, COPY))
        proposal = propose(link, store, COPY, "resumed", [b"a", b"b"])
        monkeypatch.setattr(publishing, "create_commit", commit_and_go)
        with pytest.raises(Gone):
            publishing.publish_proposal(link, store, proposal)
        words = ("spark", "writes", "resume", "resumed", "--store", staging(server))
        assert_refused(run(tmp_path, *words, url=server.url), 4, "asks who you are")
        done = run(tmp_path, *words, **by_key(server))
        assert done.returncode == 0, done.stderr
        assert len(payloads_of(ann, COPY)) == before + 2


# ---------------------------------------------------------------- PySpark


def test_a_frame_is_read_and_written(
    spark: Any, server: SignOnServer, way_in: dict[str, str]
) -> None:
    with translated():
        read = spark.read.format("danube").options(topic=READ, **way_in).load()
        assert read.count() == COUNT
        with server.come_in("ann") as ann:
            before = len(payloads_of(ann, WRITTEN))
            write = read.select("payload").write.format("danube").options(topic=WRITTEN, **way_in)
            write.option("staging", staging(server)).mode("append").save()
            assert len(payloads_of(ann, WRITTEN)) == before + COUNT


def test_a_stream_reads_and_writes(
    spark: Any, server: SignOnServer, way_in: dict[str, str], tmp_path: Path
) -> None:
    with server.come_in("ann") as ann:
        before = len(payloads_of(ann, WRITTEN))
        read = spark.readStream.format("danube").options(topic=READ, columns="payload", **way_in)
        write = read.load().writeStream.format("danube").options(topic=WRITTEN, **way_in)
        write = write.options(staging=staging(server), checkpointLocation=str(tmp_path))
        with translated():
            query = write.trigger(availableNow=True).start()
            assert query.awaitTermination(120), "the stream did not end within 120 s"
        assert len(payloads_of(ann, WRITTEN)) == before + COUNT


def test_a_frame_that_is_refused(spark: Any, server: SignOnServer) -> None:
    other = {**by_key(server), "server_key": new_key_pair().public}
    cases: tuple[tuple[dict[str, str], type[DanubeError], str], ...] = (
        ({"url": server.url}, PermissionDenied, "no key is given"),
        (other, PermissionDenied, "wrong server key"),
        ({**by_token(server), "tls": "sha256:" + "0" * 64}, PermissionDenied, "no token was sent"),
    )
    for options, kind, part in cases:
        with pytest.raises(kind, match=part), translated():
            spark.read.format("danube").options(topic=READ, **options).load().count()


def test_a_writer_that_does_not_manage_the_broker_names_the_store(server: SignOnServer) -> None:
    options = WriteOptions.parse({**by_key(server), "topic": WRITTEN})
    with BrokerLink(options.url, 30, options.access) as link:
        assert link.target(WRITTEN, staging(server)).store == staging(server)
        with pytest.raises(PermissionDenied, match="staging"):
            link.target(WRITTEN, None)


def test_no_secret_leaves_the_driver(
    spark: Any, server: SignOnServer, way_in: dict[str, str]
) -> None:
    """Plans, tasks and what executors get have paths; secrets are read where a client is opened."""
    token = (server.folder / "pia.token").read_text()
    secrets = [token, read_key_file(server.folder / "pia.key").secret]
    source = DanubeSource({"topic": READ, **way_in})
    reader = source.reader(row_schema())
    parts = reader.partitions()
    assert sum(1 for _ in parts)
    frame = spark.read.format("danube").options(topic=READ, **way_in).load()
    shown = [
        pickle.dumps(source), pickle.dumps(reader), pickle.dumps(parts),
        pickle.dumps(source.streamReader(row_schema())),
        frame._jdf.queryExecution().toString().encode(),
        str(spark.sparkContext.getConf().getAll()).encode(),
        repr(ReadOptions.parse({"topic": READ, **way_in})).encode(),
    ]  # fmt: skip
    for secret in secrets:
        assert all(secret.encode() not in each for each in shown)


def test_the_event_log_has_no_secret(server: SignOnServer, tmp_path: Path) -> None:
    code = """
import json, sys
from danube_fast.spark.session import spark_session
options, folder = json.loads(sys.argv[1]), sys.argv[2]
settings = {
    "spark.eventLog.enabled": "true", "spark.eventLog.dir": f"file://{folder}", "spark.eventLog.compress": "false",
}
with spark_session("local[1]", settings=settings) as spark:
    print(spark.read.format("danube").options(**options).load().count())
"""
    folder = tmp_path / "events"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps({"topic": READ, **by_token(server)}), str(folder)],
        capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [str(COUNT)], done.stderr
    logged = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"SparkListenerJobEnd" in logged
    token = (server.folder / "pia.token").read_text()
    assert token.encode() not in logged and token not in done.stdout + done.stderr


def test_each_process_signs_on_with_a_key_of_its_own(server: SignOnServer) -> None:
    options = pickle.loads(pickle.dumps(ReadOptions.parse({"topic": READ, **by_token(server)})))
    code = """
import pickle, sys
with pickle.load(sys.stdin.buffer).connect() as client:
    print(client._core._trust.public)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(options), capture_output=True, timeout=60,
        check=False,
    )  # fmt: skip
    with options.connect() as one, options.connect() as two:
        drawn = [one._core._trust.public, two._core._trust.public, done.stdout.decode().strip()]
    assert all(drawn) and len({*drawn}) == len(drawn), done.stderr


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("parse", [ReadOptions.parse, WriteOptions.parse])
@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"token": "dfk_0123456789abcdef_topsecret"}, "token_file"),
        ({"token_file": "dfk_0123456789abcdef_topsecret", "sign_on": "https://x:1"}, "path of a file"),
        ({"token_file": "eyJtopsecret.x.y", "sign_on": "https://x:1"}, "path of a file"),
        ({"key_file": 'public = "x"\nsecret = "topsecret"\n'}, "path of a file"),
        ({"key_file": "ann.key"}, "needs the option server_key"),
        ({"server_key": "x" * 40}, "needs a key of yours: give the option key_file"),
        ({"sign_on": "https://x:1"}, "needs the option token_file"),
        ({"token_file": "t"}, "needs the option sign_on"),
        ({"key_file": "k", "server_key": "x", "sign_on": "https://x:1", "token_file": "t"}, "two ways in"),
        ({"server_uid": "ann"}, "number of the local user"),
        ({"server_uid": "1" * 5000}, "number of the local user"),
        ({"tls": "ca.pem"}, "the option tls is for a sign-on"),
    ],
)  # fmt: skip
def test_options_that_are_no_way_in(parse: Any, given: dict[str, str], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match) as caught:
        parse({"topic": READ, **given})
    assert "topsecret" not in str(caught.value)


def test_names_of_options_have_any_case() -> None:
    given = {"Topic": READ, "SERVER_KEY": "k", "Key_File": "ann.key"}
    expected = Access(server_key="k", key_file="ann.key")
    assert ReadOptions.parse(given).access == WriteOptions.parse(given).access == expected
