"""The recipes of docs/security.md, as they stand there, against a broker."""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import shlex
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

import danube_fast
from danube_fast.children import module_command
from danube_fast.security.curve import read_key_file
from tests.crash.rig import free_port
from tests.delivery.sign_on_rig import IssuerKey, JwksServer, SignOnServer
from tests.delivery.test_security import TOPIC, SecuredServer, refused
from tests.delivery.test_server_key import all_have
from tests.workers.broker import ROOT, wait_until

PAGE = ROOT / "docs/security.md"
FOLDER = "/srv/danube"
READY_SECONDS = 90


def block(heading: str, language: str = "console", number: int = 0) -> str:
    """A block of code of a section."""
    section = re.split(rf"^#+ {heading}$", PAGE.read_text(), flags=re.MULTILINE)[1]
    section = section.split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)[number]


def lines(heading: str, number: int = 0) -> list[str]:
    """What a person types in a console block of a section."""
    text = block(heading, number=number).replace("\\\n", "")
    return [line[2:] for line in text.splitlines() if line.startswith("$ ")]


def printed(heading: str) -> list[str]:
    """What the commands of that block print."""
    return [line for line in block(heading).splitlines() if not line.startswith("$ ")]


class Shell:
    """Runs lines, and keeps what they export."""

    def __init__(self, folder: Path, **variables: str) -> None:
        outside = {
            name: text for name, text in os.environ.items() if not name.startswith("DANUBE_")
        }
        self._folder = folder
        self.environment = {
            **outside, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(folder / "config"), **variables,
        }  # fmt: skip

    def started(self, line: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command."""
        words = shlex.split(line, comments=True)
        environment = dict(self.environment)
        while "=" in words[0]:
            name, _, environment[name] = words.pop(0).partition("=")
        assert words[0] == "danube-fast", line
        return subprocess.Popen(
            module_command("danube_fast.cli.main", *words[1:]), env=environment, cwd=self._folder,
            text=True, stdout=subprocess.PIPE, **options,
        )  # fmt: skip

    def run(self, line: str) -> str:
        """Run a command to its end; what it prints."""
        if line.startswith("export "):
            for word in shlex.split(line, comments=True)[1:]:
                name, _, self.environment[name] = word.partition("=")
            return ""
        if line.startswith("mv "):
            subprocess.run(shlex.split(line), cwd=self._folder, check=True, timeout=60)
            return ""
        with self.started(line, stderr=subprocess.PIPE) as process:
            try:
                output, errors = process.communicate(timeout=120)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == 0, f"{line}: {errors}"
        return output


@contextmanager
def serving(shell: Shell, line: str) -> Iterator[str]:
    """`danube-fast serve` until the block ends; what it printed when it was ready."""
    with shell.started(line) as process:
        try:
            assert process.stdout is not None
            text = ""
            while "Ctrl-C" not in text:
                readable, _, _ = select.select([process.stdout], [], [], READY_SECONDS)
                more = os.read(process.stdout.fileno(), 4096) if readable else b""
                assert more, f"not ready within {READY_SECONDS} s: {text!r}"
                text += more.decode()
            yield text
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def take_first_steps(shell: Shell, data_dir: Path, server_key: str) -> None:
    """Make the users ann, orders and billing."""
    for line in lines("First steps"):
        line = line.replace(FOLDER, str(data_dir))
        shell.run(re.sub(r"'LmZ[^']*'", f"'{server_key}'", line))


def secured(server: SecuredServer) -> Shell:
    """A shell of the administrator ann, with the topic of the page."""
    server.make_ann()
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
    return Shell(
        server.folder, DANUBE_URL=server.url, DANUBE_SERVER_KEY=server.server_key,
        DANUBE_KEY_FILE=str(server.folder / "ann.key"),
    )  # fmt: skip


def key_in(text: str) -> str:
    """The server key in what `serve` prints."""
    found = re.search(r"server key (\S{40})$", text, re.MULTILINE)
    assert found is not None, text
    return found[1]


def test_the_start(tmp_path: Path) -> None:
    (line,) = lines("Security")
    data_dir, address = tmp_path / "data", f"127.0.0.1:{free_port(4)}"
    line = line.replace(FOLDER, str(data_dir)).replace("0.0.0.0:6650", address)
    with serving(Shell(tmp_path), line) as text:
        known = {"10.0.0.7:6650": address, FOLDER: str(data_dir), "LmZ$WkjZ...": key_in(text)}
        for shown in printed("Security"):
            for on_the_page, here in known.items():
                shown = shown.replace(on_the_page, here)
            assert shown in text.splitlines()


def test_the_first_steps(tmp_path: Path) -> None:
    with SecuredServer(tmp_path / "data", tmp_path) as server:
        shell = Shell(tmp_path, DANUBE_URL=server.url)
        take_first_steps(shell, server.data_dir, server.server_key)
        assert "orders may produce" in shell.run(
            "danube-fast security check orders produce /shop/orders"
        )


def test_the_sign_on(tmp_path: Path) -> None:
    port = free_port(5)
    known = {
        "0.0.0.0:6650": f"127.0.0.1:{port}", "broker.example.com:6650": f"127.0.0.1:{port}",
        "0.0.0.0:6649": f"127.0.0.1:{port + 4}", "broker.example.com:6649": f"127.0.0.1:{port + 4}",
        "broker.example.com": "127.0.0.1",
    }  # fmt: skip

    def here(text: str) -> str:
        for on_the_page, word in known.items():
            text = text.replace(on_the_page, word)
        return text

    issuer, jwks = IssuerKey("RS256"), JwksServer(tmp_path)
    jwks.serve(issuer.jwk())
    issuers = block("Sign-on", "toml").replace("https://login.example.com/jwks", jwks.url)
    (tmp_path / "issuers.toml").write_text(f'{issuers}jwks_ca = "{jwks.certificate.certificate}"\n')
    (tmp_path / "issuers.toml").chmod(0o600)
    admin = Shell(tmp_path, DANUBE_URL=f"danube://127.0.0.1:{port}")
    make_certificate, serve, add_token = map(here, lines("Sign-on"))
    known["sha256:5d1c..."] = admin.run(make_certificate).strip()
    with closing(jwks), serving(admin, serve) as text:
        take_first_steps(admin, tmp_path / "danube-data", key_in(text))
        admin.run(add_token)
        client = Shell(tmp_path)
        *exports, listing = map(here, lines("From a client"))
        for line in exports:
            client.run(line)
        assert TOPIC in client.run(listing)
        names: dict[str, Any] = {"danube_fast": danube_fast, "vault": SimpleNamespace()}
        for token in ((tmp_path / "orders.token").read_text().strip(), issuer.token(sub="orders")):
            names["vault"].token = lambda token=token: token
            exec(here(block("From a client", "python")), names)
            with names["client"] as connected:
                connected.producer(TOPIC).publish(b"in")
        list_them, end_them = lines("Listing and ending sign-ons")
        rows = admin.run(list_them).splitlines()
        ended = admin.run(end_them)
        assert f"ended {len(rows) - 1} sign-ons" in ended and len(rows) > 2, (rows, ended)
        assert not admin.run(list_them)


def test_the_contexts(tmp_path: Path) -> None:
    with SecuredServer(tmp_path / "data", tmp_path) as server:
        secured(server)
        shell = Shell(tmp_path)
        add, once, use, show = (
            line.replace("danube://10.0.0.7:6650", server.url).replace("LmZ$WkjZ...", server.server_key)
            for line in lines("Contexts")
        )  # fmt: skip
        shell.run(add)
        assert TOPIC in shell.run(once)
        shell.run(use)
        rows = [line.split(maxsplit=2) for line in shell.run(show).splitlines()]
        assert ["key_file", str(tmp_path / "ann.key"), "context"] in rows, rows
        assert TOPIC in shell.run("danube-fast topics list")


def test_the_quotas(tmp_path: Path) -> None:
    with SecuredServer(tmp_path / "data", tmp_path) as server:
        shell = secured(server)
        set_quota, describe = lines("Quotas of namespaces")
        shell.run(set_quota)
        head, *rows = [re.split("  +", line) for line in shell.run(describe).splitlines()]
        page_head, page_row, dots = (
            re.split("  +", line) for line in printed("Quotas of namespaces")
        )
        assert head == page_head and dots == ["..."]
        assert page_row[:2] in [row[:2] for row in rows], rows
        assert ["namespace_handles_max", "1000", "0"] in rows


def test_the_audit(tmp_path: Path) -> None:
    with SecuredServer(tmp_path / "data", tmp_path) as server:
        shell = secured(server)
        with server.come_in("ann") as ann:
            server.add(ann.admin, "pia", ("viewer", "cluster"))
        with server.come_in("pia") as pia:
            for _ in range(17):
                refused(lambda: pia.admin.delete_topic(TOPIC))
        denied, of_pia, files = lines("Audit")

        def shown() -> list[str]:
            found = shell.run(denied).splitlines()
            return found if len(found) > 1 else []

        head, *rows = wait_until("a record of what was denied", shown, 30)
        page_head, page_row, page_closed = printed("Audit")
        assert head.split() == page_head.split()
        form = re.escape(page_row.removesuffix(", 17 times"))
        for on_the_page, pattern in {
            r"2026\-11\-27\ 19:28:49\.123Z": r"[-\d]{10} [:\d]{8}\.\d{3}Z",
            r"5f0c6e0d2b7a9c11": r"\w+",
            r"10\.0\.0\.9": r"127\.0\.0\.1",
        }.items():
            assert on_the_page in form
            form = form.replace(on_the_page, pattern)
        form = re.sub(r"(\\ )+", r"\\s+", form)
        assert all(re.fullmatch(rf"{form}(, \d+ times)?", row) for row in rows), (form, rows)
        assert page_closed.split()[2] == "pia" and "closed" in page_closed
        users = {line.split()[2] for line in shell.run(of_pia).splitlines()[1:]}
        assert users == {"pia"}, users
        server.stop()
        found = json.loads(Shell(tmp_path).run(files.replace(FOLDER, str(server.data_dir))))
        assert {"delete_topic", "create_topic"} <= {row["action"] for row in found}
        server.start()


def test_the_rotation(tmp_path: Path) -> None:
    with SecuredServer(tmp_path / "data", tmp_path) as server:
        server.make_ann()
        old = server.server_key
        shell = Shell(
            tmp_path, DANUBE_URL=server.url, DANUBE_SERVER_KEY=old,
            DANUBE_KEY_FILE=str(tmp_path / "ann.key"),
        )  # fmt: skip
        prepare, both, activate, retire, one = lines("Rotation of the server key")
        printed = shell.run(prepare)
        new = printed.split()[0]
        assert old in printed and new != old
        for line in (both, activate, retire, one):
            shell.run(line.replace("NEW", new).replace("OLD", old))
        assert all_have(server, new)
        assert "coordinator: listens with the key in use" in shell.run(
            "danube-fast security server-key show"
        )
        assert read_key_file(server.data_dir / "server.key").public == new


OTHERS = "Rotation of other keys"


def fails(shell: Shell, line: str) -> str:
    """What a command says that must be refused."""
    with pytest.raises(AssertionError, match=re.escape(line)) as caught:
        shell.run(line)
    return str(caught.value)


def shown_certificate(url: str) -> str:
    """The fingerprint of the certificate that a port shows to new connections."""
    parts = urlsplit(url)
    pem = ssl.get_server_certificate((parts.hostname or "", parts.port or 0), timeout=60)
    return f"sha256:{hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()}"


def test_the_rotation_of_an_api_key_and_of_a_certificate(tmp_path: Path) -> None:
    with SignOnServer(tmp_path / "data", tmp_path, workers=1) as server:
        admin = secured(server)
        with server.come_in("ann") as ann:
            server.add(ann.admin, "orders", ("producer", TOPIC))
        first, second = tmp_path / "orders.token", tmp_path / "new.token"
        admin.run("danube-fast security tokens add orders --to-file orders.token")
        client = Shell(
            tmp_path, DANUBE_URL=server.url, DANUBE_SIGN_ON=server.sign_on_url,
            DANUBE_TLS=server.certificate.fingerprint, DANUBE_TOKEN_FILE=str(first),
        )  # fmt: skip
        use = "danube-fast topics list"
        assert TOPIC in client.run(use)
        add, change, listing, remove = lines(OTHERS)
        admin.run(add)
        assert TOPIC in client.run(use)
        client.run(change)
        assert TOPIC in client.run(use)
        old, new = (path.read_text()[4:20] for path in (first, second))
        rows = admin.run(listing)
        assert old in rows and new in rows
        admin.run(remove.replace("ID", old))
        assert TOPIC in client.run(use)
        assert "not accepted" in fails(client, f"DANUBE_TOKEN_FILE={first} {use}")

        make, both, put, one = lines(OTHERS, 2)
        old = server.certificate.fingerprint
        new = admin.run(make.replace("broker.example.com", "127.0.0.1")).strip()
        client.run(both.replace("sha256:OLD", old).replace("sha256:NEW", new))
        assert TOPIC in client.run(use)
        admin.run(put)
        for url in (server.sign_on_url, f"https://127.0.0.1:{server.port + 1}"):
            wait_until(f"the new certificate at {url}", lambda url=url: shown_certificate(url) == new)  # fmt: skip
        assert TOPIC in client.run(use)
        client.run(one.replace("sha256:NEW", new))
        assert TOPIC in client.run(use)
        fails(client, f"DANUBE_TLS={old} {use}")


def test_the_rotation_of_the_key_of_a_user(tmp_path: Path) -> None:
    with SecuredServer(tmp_path / "data", tmp_path, workers=1) as server:
        admin = secured(server)
        with server.come_in("ann") as ann:
            server.add(ann.admin, "orders", ("producer", TOPIC))
        client = Shell(
            tmp_path, DANUBE_URL=server.url, DANUBE_SERVER_KEY=server.server_key,
            DANUBE_KEY_FILE=str(tmp_path / "orders.key"),
        )  # fmt: skip
        use = "danube-fast topics list"
        make, add, change, listing, revoke = lines(OTHERS, 1)
        new = client.run(make).strip()
        admin.run(add)
        assert TOPIC in client.run(use)
        client.run(change)
        assert TOPIC in client.run(use)
        old, rows = server.keys["orders"], admin.run(listing)
        assert f"curve:{old}" in rows and f"curve:{new}" in rows
        admin.run(revoke.replace("OLD", old))
        assert TOPIC in client.run(use)
        assert "not registered" in fails(client, f"DANUBE_KEY_FILE={tmp_path / 'orders.key'} {use}")


@pytest.mark.parametrize("which", [0, 1], ids=["lost", "leaked"])
def test_the_recovery(tmp_path: Path, which: int) -> None:
    server = SecuredServer(tmp_path / "data", tmp_path)
    with server:
        server.make_ann()
        before = server.server_key
        server.stop()
        line = lines("Recovery")[which]
        assert FOLDER in line
        printed = Shell(tmp_path).run(line.replace(FOLDER, str(server.data_dir)))
        server.start()
        assert server.server_key in printed and (server.server_key != before) == bool(which)
        (tmp_path / "ann.key").unlink()
        shell = Shell(
            tmp_path, DANUBE_URL=server.url, DANUBE_SERVER_KEY=server.server_key,
            DANUBE_KEY_FILE=str(server.data_dir / "bootstrap-admin.key"),
        )  # fmt: skip
        shell.run("danube-fast security new-key ann.key")
        shell.run("danube-fast security keys add ann --public-key-of ann.key")
        shell.run("export DANUBE_KEY_FILE=ann.key")
        assert "ann" in shell.run("danube-fast security users list")
