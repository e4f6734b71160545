"""The processes around the workers, with workers that do nothing but take assignments."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from danube_fast.config import Settings
from danube_fast.errors import InvalidArgument, Unavailable
from danube_fast.frame.image import COMPILING_TEXT, image_path, image_sources, kernel_sources
from danube_fast.net import protocol
from danube_fast.ring.memory import map_fd
from danube_fast.security.server_keys import ServerKeys
from danube_fast.workers.supervisor import spawn
from danube_fast.workers.supervisor.contents import open_names
from danube_fast.workers.supervisor.datadir import TOKEN_CHARACTERS, DataDirectory
from danube_fast.workers.supervisor.spawn import Addresses, Shared
from tests.workers.broker import WAIT_SECONDS, Broker, Client, is_running, wait_until


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data") as started:
        started.wait_ready()
        yield started


def process(status: dict[str, Any], index: int) -> dict[str, Any]:
    entry: dict[str, Any] = status["processes"][index]
    return entry


def wait_restarted(broker: Broker, index: int, epoch: int = 2) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        entry = process(broker.status(), index)
        return entry if entry["epoch"] == epoch and entry["state"] == "ready" else None

    found: dict[str, Any] = wait_until(f"restart of process {index}", look)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_start_and_stop(tmp_path: Path, number: int) -> None:
    with Broker(tmp_path / "data", workers=3) as broker:
        ready = broker.wait_ready()
        assert ready["event"] == "ready"
        assert ready["workers"] == len(ready["worker_pids"]) == 3
        assert ready["pid"] == broker.process.pid
        assert all(is_running(pid) for pid in broker.pids)
        assert broker.stop(number) == 0
        assert "did not stop" not in broker.error_text(), "none had to be killed"
        assert not any(is_running(pid) for pid in broker.pids)
        assert broker.process.stdout is not None
        assert broker.process.stdout.read() == b"", "the ready line is all there is on stdout"
        assert "Traceback" not in broker.error_text()


def test_coordinator_is_restarted_on_its_port(broker: Broker) -> None:
    with Client(broker) as client:
        before = client.lookup("/default/a", {}).value
    os.kill(broker.ready["coordinator_pid"], signal.SIGKILL)
    wait_until("death", lambda: not is_running(broker.ready["coordinator_pid"]))
    with Client(broker) as client:
        after = client.lookup("/default/a")
        assert after.value == before
        assert (
            client.lookup("/default/b", {}).value["partitions"][0][0] > before["partitions"][0][0]
        )
    entry = wait_restarted(broker, 0)
    assert entry["restarts"] == 1
    assert f":{entry['port']}" in broker.ready["url"]


def test_worker_is_restarted_on_its_port(broker: Broker) -> None:
    with Client(broker) as client:
        before = client.lookup("/default/a", {}).value
        worker = before["partitions"][0][2]
        os.kill(broker.ready["worker_pids"][worker], signal.SIGKILL)
        entry = wait_restarted(broker, worker + 1)
        assert entry["port"] == broker.ready["worker_ports"][worker]
        assert client.lookup("/default/a").value == before
        stats = client.admin("topic_stats", topic="/default/a")
        assert len(stats["partition_stats"]) == 1, "the new worker was given the partition"
    assert broker.stop() == 0


def test_all_children_at_once(broker: Broker) -> None:
    for pid in broker.pids:
        os.kill(pid, signal.SIGKILL)
    for index in range(3):
        wait_restarted(broker, index)
    with Client(broker) as client:
        assert isinstance(client.lookup("/default/a", {}), protocol.Result)


def test_supervisor_killed_leaves_nothing(tmp_path: Path) -> None:
    def shared() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if "danube" in name}

    before = shared()
    with Broker(tmp_path / "data") as broker:
        broker.wait_ready()
        broker.process.kill()
        broker.process.wait()
        wait_until("end of all children", lambda: not any(map(is_running, broker.pids)))
        # other tests, beside this one, have some for a moment
        wait_until("end of all shared memory", lambda: not shared() - before)
    with Broker(tmp_path / "data") as again:  # the lock is free
        again.wait_ready()


def test_stopped_child_is_killed_and_restarted(tmp_path: Path) -> None:
    """Its process exists, but its heartbeat does not advance."""
    data = tmp_path / "data"
    with Broker(data, heartbeat_timeout_ms=5000) as broker:
        broker.wait_ready()
        (data / "freeze-1").touch()
        wait_until("the kill", lambda: not is_running(broker.ready["worker_pids"][1]))
        (data / "freeze-1").unlink()
        assert "has not shown life" in broker.error_text()
        wait_restarted(broker, 2)
        assert process(broker.status(), 1)["epoch"] == 1, "the others were left alone"


def test_child_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    with Broker(tmp_path / "data", stop_timeout_ms=1500) as broker:
        broker.wait_ready()
        os.kill(broker.ready["worker_pids"][0], signal.SIGSTOP)
        assert broker.stop() == 0
        assert not is_running(broker.ready["worker_pids"][0])
        assert "did not stop" in broker.error_text()


def test_second_server_is_refused(broker: Broker) -> None:
    with Broker(Path(broker.settings.data_dir)) as second:
        assert second.process.wait(WAIT_SECONDS) == 1
        text = second.error_text()
    assert f"in use by the server with pid {broker.process.pid}" in text
    assert len(text.splitlines()) == 1


def test_newer_format_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "FORMAT").write_text("danube-fast data format 999\n")
    with Broker(data) as broker:
        assert broker.process.wait(WAIT_SECONDS) == 1
        assert "format 999" in broker.error_text()
        assert len(broker.error_text().splitlines()) == 1


def test_number_of_workers_may_change(tmp_path: Path) -> None:
    seen: list[list[Any]] = []
    for count in (3, 1, 3):
        with Broker(tmp_path / "data", workers=count) as broker:
            broker.wait_ready()
            with Client(broker) as client:
                if not seen:
                    assert isinstance(
                        client.lookup("/default/a", {"partitions": 8}), protocol.Result
                    )
                found = client.lookup("/default/a").value["partitions"]
            logs = broker.status()["logs"]
            assert [log["worker"] for log in logs] == [log_id % count for log_id in range(3)]
            assert {row[2] for row in found} == set(range(count))
            seen.append([row[0] for row in found])
            assert broker.stop() == 0
    assert seen[0] == seen[1] == seen[2]
    assert sorted(os.listdir(tmp_path / "data" / "logs")) == ["0000", "0001", "0002"]


def free_ports() -> int:
    """First of four free ports in a row, outside the range that the system gives to others."""
    for _ in range(100):
        first = random.randrange(20_000, 30_000)
        try:
            with contextlib.ExitStack() as stack:
                for port in range(first, first + 4):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    pytest.fail("no four free ports in a row")


def test_port_that_is_taken_is_named(tmp_path: Path) -> None:
    port = free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with Broker(tmp_path / "data", listen=f"127.0.0.1:{port}") as broker:
            assert broker.process.wait(WAIT_SECONDS) == 1
            text = broker.error_text()
    assert f"cannot listen on 127.0.0.1:{port}" in text
    failure = json.loads(text.splitlines()[-1])["error"]  # it was started with -o json
    assert failure["message"].startswith("coordinator ended with 1")


def test_ports_that_follow_from_listen(tmp_path: Path) -> None:
    port = free_ports()
    with Broker(tmp_path / "data", listen=f"127.0.0.1:{port}") as broker:
        ready = broker.wait_ready()
        assert ready["url"] == f"danube://127.0.0.1:{port}"
        assert ready["admin"] == f"http://127.0.0.1:{port + 1}"
        assert ready["worker_ports"] == [port + 2, port + 3]


def test_port_rules() -> None:
    with pytest.raises(InvalidArgument, match="65535"):
        Addresses(Settings(listen="127.0.0.1:65534", workers=2))
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        Addresses(Settings(listen="6650"))
    addresses = Addresses(Settings(listen="127.0.0.1:0", workers=2, advertise="broker.example"))
    with addresses.admin_socket:
        assert addresses.ports == [0, 0, 0]
        assert addresses.url == "danube://broker.example:0"
        with pytest.raises(Unavailable, match="--admin"):
            Addresses(Settings(admin=f"127.0.0.1:{addresses.admin_port}", listen="127.0.0.1:0"))


@pytest.mark.parametrize(
    ("listen", "admin", "host", "open_to_others"),
    [
        ("127.0.0.1:0", "", "127.0.0.1", []),
        ("127.8.0.1:0", "", "127.8.0.1", []),
        ("localhost:0", "", "localhost", []),
        ("0.0.0.0:0", "", "127.0.0.1", ["listen"]),
        ("[::]:0", "", "::1", ["listen"]),
        ("192.0.2.1:0", "", "127.0.0.1", ["listen"]),
        ("broker.example:0", "", "127.0.0.1", ["listen"]),
        ("192.0.2.1:0", "0.0.0.0:0", "0.0.0.0", ["listen", "admin"]),
        ("127.0.0.1:0", "0.0.0.0:0", "0.0.0.0", ["admin"]),
    ],
)
def test_the_admin_port_stays_on_loopback_unless_told(
    listen: str, admin: str, host: str, open_to_others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = SimpleNamespace(getsockname=lambda: ("", 0), close=lambda: None)
    monkeypatch.setattr(spawn, "_listen", lambda *_: listening)
    settings = Settings(listen=listen, admin=admin, advertise="here", insecure=True)
    addresses = Addresses(settings)
    assert addresses.admin_host == host
    words = [text.split()[1].strip("-") for text in addresses.warnings()]
    assert sorted(words) == sorted(open_to_others)
    for text in addresses.warnings():
        assert "may do everything" in text
        assert "127.0.0.1" in text, "it says what to do"
    asks = msgspec.structs.replace(settings, auth="required", insecure=False)
    for careful in (msgspec.structs.replace(settings, insecure=False), asks):
        is_open = "admin" in open_to_others or (careful.auth == "none" and open_to_others)
        with pytest.raises(InvalidArgument, match="--insecure") if is_open else nullcontext():
            Addresses(careful)
    tls = {"tls_certificate": "tls.pem", "tls_key": "tls.key"}
    assert not Addresses(msgspec.structs.replace(asks, **tls)).warnings()
    if open_to_others:
        with pytest.raises(InvalidArgument, match="--insecure"):
            Addresses(msgspec.structs.replace(settings, insecure=False, **tls))


def test_a_broker_that_others_reach_says_so(tmp_path: Path) -> None:
    # a spelling of 127.0.0.1 that is not known as one: nothing leaves this host
    with Broker(tmp_path / "data", admin="127.1:0", insecure=True) as broker:
        broker.wait_ready()
        assert "warning: --admin 127.1:0 lets other hosts" in broker.error_text()


def refusal(folder: Path, **changes: Any) -> str:
    """Why `serve` does not start there."""
    with Broker(folder, **changes) as broker:
        assert broker.process.wait(WAIT_SECONDS) == 1, "it was not refused"
        return broker.error_text()


@pytest.mark.parametrize("lost", ["", "server.key"])
def test_a_secured_broker_does_not_start_open_by_mistake(tmp_path: Path, lost: str) -> None:
    """Without its key too, as a backup without secrets is."""
    folder = tmp_path / "data"
    DataDirectory.open(str(folder)).close()
    ServerKeys(folder).open()
    (folder / (lost or "nothing")).unlink(missing_ok=True)
    text = refusal(folder)
    assert "is of a secured broker" in text and "--auth required" in text and "--insecure" in text
    assert (
        "--listen 127.0.0.1:PORT" in text
        and "server.pub" in text
        and ("server.key" in text) == (not lost)
    )
    with Broker(folder, insecure=True) as broker:
        broker.wait_ready()
        assert "may do everything now (--insecure)" in broker.error_text()


@pytest.mark.parametrize("name", ["", "metadata", "metadata/data.mdb", "metadata.seal", "audit"])
def test_a_secured_broker_does_not_start_where_every_user_may_write(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "data"
    DataDirectory.open(str(folder)).close()
    for made in ("metadata", "audit"):
        (folder / made).mkdir(mode=0o750)
    (folder / "metadata/data.mdb").touch()
    for path in (folder, folder / "metadata"):
        path.chmod(0o751)
    (folder / name).chmod(0o777)
    text = refusal(folder, auth="required")
    assert str(folder / name if not name else folder) in text and "chmod -R o-w" in text
    assert not name or f"{name} (0777)" in text
    assert ("become administrator" in text) is not name.endswith(("seal", "audit"))
    (folder / name).chmod(0o750)
    assert not open_names(folder, stat.S_IWOTH)


def test_names_that_others_do_not_reach_are_not_open(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    DataDirectory.open(str(folder)).close()
    (folder / "metadata.seal").chmod(0o666)
    (folder / "of-someone-else").mkdir(mode=0o777)
    for mode, bits, found in (
        (0o751, stat.S_IWOTH, 1), (0o750, stat.S_IWOTH, 0), (0o750, stat.S_IWGRP | stat.S_IWOTH, 1), (0o700, stat.S_IWGRP, 0),
    ):  # fmt: skip
        folder.chmod(mode)
        assert open_names(folder, bits) == ["metadata.seal (0666)"] * found, f"{mode:o}"


def test_rings_are_repaired_before_a_restart(tmp_path: Path) -> None:
    from danube_fast.ring.layout import AT_HEAD, AT_TAIL
    from danube_fast.ring.spsc import SpscRing

    directory = DataDirectory.open(str(tmp_path / "data"))
    shared = Shared(Settings(listen="127.0.0.1:0", workers=1), directory)
    try:
        outbound = SpscRing.attach(map_fd(shared._rings[1, 0]))
        outbound.try_push(b"last words")
        assert shared.repair_rings(1, lambda process: True) == []
        assert outbound.pop() == b"last words"
        outbound.try_push(b"more")
        with map_fd(shared._rings[1, 0]) as memory:
            memory[AT_TAIL : AT_TAIL + 8] = (1 << 40).to_bytes(8, "little")
        assert shared.repair_rings(1, lambda process: True) == [0]
        assert shared.repair_rings(1, lambda process: False) == []
        with map_fd(shared._rings[1, 0]) as memory:
            assert memory[AT_TAIL : AT_TAIL + 8] != (1 << 40).to_bytes(8, "little")
            assert memory[AT_HEAD : AT_HEAD + 8] <= memory[AT_TAIL : AT_TAIL + 8]
        assert SpscRing.attach(map_fd(shared._rings[1, 0])).try_push(b"goes on")
    finally:
        shared.close()
        directory.close()


def get(broker: Broker, path: str) -> tuple[int, str]:
    url = broker.ready["admin"] + path
    try:
        with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_admin_port(broker: Broker) -> None:
    assert get(broker, "/healthz") == (200, '{"status":"ok"}')
    code, text = get(broker, "/readyz")
    assert (code, '"status":"ready"' in text) == (200, True)
    code, text = get(broker, "/metrics")
    assert code == 200
    assert 'danube_fast_messages_in_total{process="worker-1"} 0.0' in text
    assert 'danube_fast_process_up{process="coordinator"} 1.0' in text
    os.kill(broker.ready["worker_pids"][0], signal.SIGSTOP)
    os.kill(broker.ready["coordinator_pid"], signal.SIGKILL)
    assert get(broker, "/healthz")[0] == 200, "the request waits for the next coordinator"
    os.kill(broker.ready["worker_pids"][0], signal.SIGCONT)


def test_lookup_waits_for_its_topic(broker: Broker) -> None:
    with Client(broker) as waiting, Client(broker) as making:
        began = time.monotonic()
        late = waiting.lookup("/default/never", None, 300)
        assert late.code == 5 and "topics create /default/never" in late.text
        assert time.monotonic() - began > 0.25
        request = waiting.send(protocol.Lookup, "/default/soon", None, 60_000)
        other = waiting.send(protocol.Lookup, "/default/soone", None, 1_000)
        made = making.lookup("/default/soon", {"dispatch": "non_reliable"})
        answers = {answer.request: answer for answer in (waiting.receive(), waiting.receive())}
        assert answers[request].value == made.value
        assert answers[other].code == 5, "a longer name is another topic"
        refused = making.lookup("/default/soon", {"dispatch": "reliable"})
        assert refused.code == 9
        assert making.lookup("soon", {}).code == 3


def test_lookup_waits_for_its_worker(tmp_path: Path) -> None:
    with Broker(tmp_path / "data", workers=1, restart_delay_ms=5000) as broker:
        broker.wait_ready()
        with Client(broker) as client:
            client.lookup("/default/a", {})
            os.kill(broker.ready["worker_pids"][0], signal.SIGKILL)
            wait_until("death", lambda: process(broker.status(), 1)["state"] == "failed")
            down = client.lookup("/default/a", None, 200)
            assert down.code == 14 and "worker 0" in down.text
            created = client.lookup("/default/b", {}, 60_000)
            assert isinstance(created, protocol.Result), "it waits until the worker is back"


def test_an_image_that_is_missing_or_damaged_is_built_anew(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    said: list[str] = []

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", f"from danube_fast.frame import image; {code}"],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        said[:] = done.stderr.splitlines()
        return done.stdout.strip()

    look = "import sys; print(image.is_built(), 'numba' in sys.modules, 'llvmlite' in sys.modules)"
    assert run(look) == "False False False"
    path = Path(run("print(image.image_path())"))
    assert path.parent == tmp_path / "cache" / "danube-fast"
    whole = image_path().read_bytes()
    path.write_bytes(whole)
    assert run(look) == "True False False"
    for damaged in (whole[:-1], whole[:10], b"", whole[:500] + b"?" + whole[501:]):
        path.write_bytes(damaged)
        assert run(look) == "False False False"
    use = "from danube_fast.frame.crc import crc32c; print(hex(crc32c(b'123456789')))"
    assert run(use) == "0xe3069283", "built anew"
    assert said == [f"danube-fast: {COMPILING_TEXT}"], "one line, and no bar without a terminal"
    assert not any(source.parent.name == "bench" for source in kernel_sources())
    assert run(look) == "True False False"


def test_constants_of_kernels_decide_of_the_image() -> None:
    """Kernels with the words of an older version would write anywhere."""
    named = {"/".join(path.parts[-3:]) for path in image_sources()}
    for name in (
        "shard/publish/turn_layout.py", "shard/publish/siblings.py", "danube_fast/net/protocol.py",
        "danube_fast/wal/layout.py", "broker/admission/layout.py", "shard/publish/turn_kernel.py",
        "danube_fast/frame/image_builder.py", "danube_fast/frame/image_compiler.py",
    ):  # fmt: skip
        assert name in named, f"{name} may change, and old kernels are used"
    assert any(path.name == "errors.py" for path in image_sources()), "statuses"


def test_endpoints_are_called_after_the_data_directory(tmp_path: Path) -> None:
    """The same after a restart: clients of a broker that died reconnect to the same name."""
    tokens = []
    for name in ("a", "a", "b"):
        directory = DataDirectory.open(str(tmp_path / name))
        tokens.append(directory.token)
        directory.close()
    assert tokens[0] == tokens[1] != tokens[2]
    assert len(tokens[0]) == TOKEN_CHARACTERS


def test_the_supervisor_is_light() -> None:
    """It starts before all others, and they wait for it: what takes long to import is not for it."""
    look = (
        "import sys, danube_fast.workers.supervisor.supervisor; "
        "print([name for name in ('numpy', 'zmq', 'lmdb', 'numba', 'llvmlite') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"
