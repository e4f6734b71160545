"""Secrets are where they belong and nowhere else: searched for in all that a broker writes and shows."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jwt
import pytest
from zmq.utils import z85

from danube_fast.children import module_command
from danube_fast.errors import DanubeError
from danube_fast.security.api_keys import new_api_key
from danube_fast.security.curve import new_key_pair, read_key_file
from danube_fast.security.tls import client_context
from tests.delivery.secrets_rig import ServedServer, forms_of, found_in, lines_of, processes
from tests.delivery.test_security import TOPIC, SecuredServer
from tests.delivery.test_server_key import all_have, pinned, step
from tests.delivery.test_sign_on import add_api_key
from tests.workers.broker import ROOT, wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecuredServer]:
    with SecuredServer(tmp_path / "data", tmp_path) as secured:
        yield secured


def run(
    server: SecuredServer, *words: str, user: str = "ann", environment: Mapping[str, str] | None = None
) -> bytes:  # fmt: skip
    """A command line, as a user types it; all that it prints."""
    outside = {name: text for name, text in os.environ.items() if not name.startswith("DANUBE_")}
    environment = {
        "PYTHONPATH": str(ROOT), **(environment or outside), "DANUBE_SERVER_KEY": server.server_key,
        "DANUBE_KEY_FILE": str(server.folder / f"{user}.key"),
        "XDG_CONFIG_HOME": str(server.folder / "config"),
    }  # fmt: skip
    done = subprocess.run(
        module_command("danube_fast.cli.main", *words), env=environment, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_no_secret_is_anywhere_but_in_its_file(server: SecuredServer) -> None:
    data, url = server.data_dir, ["--url", server.url]
    known = {"bootstrap": read_key_file(data / "bootstrap-admin.key").secret}
    known["server"] = read_key_file(data / "server.key").secret
    server.make_ann()
    old = server.server_key
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", TOPIC))
    with server.come_in("pia") as pia:
        pia.producer(TOPIC).publish(b"in")
    server.new_key("eve")
    with contextlib.suppress(DanubeError):
        server.come_in("eve", timeout=3.0).close()
    with contextlib.suppress(DanubeError):  # the wrong half of a pair
        pinned(server, new_key_pair().public, timeout=3.0).close()
    for user in ("ann", "pia", "eve"):
        known[user] = read_key_file(server.folder / f"{user}.key").secret
    shown = {
        "status": run(server, "status", *url, "-o", "json"),
        "refused": run(server, "status", *url, "-o", "json", user="eve"),
        "doctor": run(server, "doctor", *url, "-o", "json"),
        "doctor of the folder": run(server, "doctor", "--data-dir", str(data), "-o", "json"),
        "config": run(server, "config", "show", "-o", "json"),
        "keys": run(server, "security", "keys", "list", *url, "-o", "json"),
        "context": run(server, "context", "show", "-o", "json"),
        "server-key": run(server, "--debug", "security", "server-key", "prepare", *url),
    }
    known["next"] = read_key_file(data / "server.key.next").secret
    new = step(server, old, "activate")["active"]
    wait_until("the new key at every port", lambda: all_have(server, new))
    assert b'"auth":"required"' in shown["status"].replace(b" ", b""), shown["status"]
    assert new.encode() in shown["server-key"], shown["server-key"]
    assert server.broker is not None
    shown["log"] = server.broker.error_text().encode()
    shown["ready line"] = str(server.broker.ready).encode()
    for pid in processes(server.broker.process.pid):
        shown[f"arguments of {pid}"] = Path(f"/proc/{pid}/cmdline").read_bytes()
        shown[f"environment of {pid}"] = Path(f"/proc/{pid}/environ").read_bytes()
    for path in data.rglob("*"):
        if path.is_file() and not path.name.startswith("server.key"):
            shown[str(path)] = path.read_bytes()
    assert any("metadata" in name for name in shown) and any("logs" in name for name in shown)
    texts = {name: (secret.encode(), z85.decode(secret)) for name, secret in known.items()}
    assert texts["next"][0] in (data / "server.key").read_bytes(), "the search finds nothing"
    found = found_in(shown, texts)
    assert not found, found


# ---------------------------------------------------------------- sign-on, TLS and components


def all_that_is_shown(server: ServedServer, api_key: str) -> dict[str, bytes]:
    """What a broker with sign-on writes and shows."""
    assert server.broker is not None
    url, data = ["--url", server.url], str(server.data_dir)
    of_the_broker = {**server.environment, "DANUBE_CONFIG": str(server.config)}
    commands = {
        "config": ["config", "show", "-o", "json"],
        "config, as a table": ["config", "show"],
        "check of it": ["config", "check", "-o", "json"],
        "help": ["serve", "--help"],
        "status": ["status", *url, "-o", "json"],
        "doctor": ["doctor", *url, "-o", "json"],
        "doctor of the folder": ["doctor", "--data-dir", data, "-o", "json"],
        "audit log": ["security", "audit", *url, "-o", "json"],
        "API keys": ["security", "tokens", "list", *url, "-o", "json"],
        "sign-ons": ["security", "sign-ons", "list", *url, "-o", "json"],
        "clients": ["clients", "list", *url, "-o", "json"],
        "refused": ["--debug", "serve", "-o", "json", "--listen", f"127.0.0.1:{server.port}"],
    }
    shown = {
        name: run(server, *words, environment=of_the_broker) for name, words in commands.items()
    }
    shown["log"] = server.broker.error_text().encode()
    shown["ready line"] = str(server.broker.ready).encode()
    context = client_context(str(server.certificate.certificate))
    with contextlib.closing(
        http.client.HTTPSConnection("127.0.0.1", server.port + 1, timeout=60, context=context)
    ) as admin:
        admin.request("GET", "/metrics", headers={"Authorization": f"Bearer {api_key}"})
        answer = admin.getresponse()
        shown["metrics"] = answer.read()
        assert answer.status == 200, shown["metrics"]
    for pid in processes(server.broker.process.pid):
        shown[f"arguments of {pid}"] = Path(f"/proc/{pid}/cmdline").read_bytes()
        if pid != server.broker.process.pid:  # what it is started with is of who starts it
            shown[f"environment of {pid}"] = Path(f"/proc/{pid}/environ").read_bytes()
    for path in server.data_dir.rglob("*"):
        if path.is_file() and not path.name.startswith("server.key"):
            shown[str(path)] = path.read_bytes()
    return shown


def test_what_clients_sign_on_with_is_nowhere(tmp_path: Path) -> None:
    """Nor what the broker has for that: its certificate's key, an issuer's secret, the texts of components."""
    with ServedServer(tmp_path) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC)
            server.add(ann.admin, "pia", ("viewer", "cluster"))
            made = add_api_key(ann.admin, "pia")
        expires = int(time.time()) + 600
        token = jwt.encode({**server.claims, "exp": expires}, server.shared_secret, "HS256")
        stale = jwt.encode({**server.claims, "exp": 1}, server.shared_secret, "HS256")
        bearers = {
            "an API key": (made.text, 200), "one that is none": (new_api_key().text, 401),
            "a token": (token, 200), "one that has ended": (stale, 401),
            "a secret": (f"user:pia+{secrets.token_hex(16)}", 200), "another": (secrets.token_hex(16), 401),
            "one behind which is a fault": (f"fault:{secrets.token_hex(16)}", 503),
        }  # fmt: skip
        for name, (bearer, expected) in bearers.items():
            status, answer = server.sign_on(bearer, new_key_pair().public)
            assert status == expected, (name, answer)
        assert all(Path(text).exists() for text in server.texts), "a component was not asked"
        shown = all_that_is_shown(server, made.text)
    assert b"logins:..." in shown["config"] and b"rules:..." in shown["config, as a table"]
    assert b"ZeroDivisionError" in shown["log"] and b'"auth":"required"' in shown["status"].replace(
        b" ", b""
    )
    assert b"error" in shown["refused"], shown["refused"]
    assert made.id.encode() in shown["API keys"] and made.id.encode() in shown["sign-ons"]
    forms = {name: forms_of(bearer) for name, (bearer, _) in bearers.items()}
    forms["secret part of the API key"] = forms_of(made.text[21:])
    forms["signature"] = forms_of(token.rpartition(".")[2])
    forms["secret of the issuer"] = forms_of(server.shared_secret)
    forms |= {f"text of component {i}": forms_of(text) for i, text in enumerate(server.texts)}
    forms["key of the certificate"] = tuple(
        line.encode() for line in lines_of(server.certificate.key)
    )
    assert len(forms["key of the certificate"]) > 1
    assert found_in({"": server.certificate.key.read_bytes()}, forms), "the search finds nothing"
    found = found_in(shown, forms)
    assert not found, found


def core_limit(pid: int) -> list[str]:
    for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
        if line.startswith("Max core file size"):
            return line.split()[4:6]
    raise AssertionError("no limit of core files")


def test_no_process_of_a_secured_broker_dumps_its_memory(server: SecuredServer) -> None:
    assert server.broker is not None
    for pid in processes(server.broker.process.pid):
        assert set(core_limit(pid)) <= {"0", "1"}, pid


CRASH = "import os, sys; sys.argv[1:] and __import__('danube_fast.children').children.forbid_core_dumps(); os.abort()"


@pytest.mark.parametrize("forbids", [True, False])
def test_a_crash_dumps_memory_unless_that_is_forbidden(forbids: bool, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    child = subprocess.Popen(
        [sys.executable, "-c", CRASH, *(["yes"] if forbids else [])], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (hard, hard)),
    )  # fmt: skip
    _, status = os.waitpid(child.pid, 0)
    child.returncode = -signal.SIGABRT
    assert os.WTERMSIG(status) == signal.SIGABRT
    is_file = not Path("/proc/sys/kernel/core_pattern").read_text().startswith("|")
    if not forbids:  # the other case would pass by itself where nothing is dumped anyway
        assert os.WCOREDUMP(status) or not is_file or hard == 0
    else:
        assert not os.WCOREDUMP(status) and not list(tmp_path.iterdir())
