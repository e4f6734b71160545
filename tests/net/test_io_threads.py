"""How it is told that ZeroMQ's threads have gone on: they sleep, or have run for a while since."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from danube_fast.net import io_threads
from danube_fast.net.io_threads import IoThreads
from tests.net.secure_rig import wait_for

TIMEOUT_SECONDS = 60


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    made.socket(zmq.ROUTER).close()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def threads() -> Iterator[IoThreads]:
    made = IoThreads()
    yield made
    made.close()


def test_a_thread_that_sleeps_has_gone_on(context: zmq.Context[Any], threads: IoThreads) -> None:
    def found() -> int:
        threads.await_all()
        return len(threads._threads)

    count = wait_for(found, "a thread with ZeroMQ's name")
    assert open_tasks() == 2 * count
    threads.close()
    assert open_tasks() == 0


def open_tasks() -> int:
    """Number of open files that tell of threads."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("/task/" in link for link in links)


def say_ran(folder: Path, ran_ns: int) -> None:
    """Write how long a thread has run, in one step, as its reader has the file open."""
    fd = os.open(folder / "schedstat", os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(fd, b"%010d 5 1\n" % ran_ns, 0)
    os.close(fd)


def held_up(tasks: Path, name: str = "7") -> Path:
    """Write what the kernel says of a thread that could run and does not; its folder."""
    folder = tasks / name
    folder.mkdir()
    (folder / "comm").write_text("ZMQbg/IO/0\n")
    (folder / "stat").write_text(f"{name} (ZMQbg/IO/0) R 1 1 1")
    say_ran(folder, 1_000)
    return folder


def test_a_thread_that_runs_has_gone_on_when_it_has_run_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: IoThreads
) -> None:
    """Files that say what the kernel would of a thread that is held up, and then runs."""
    folder = held_up(tmp_path)
    monkeypatch.setattr(io_threads, "_TASKS", tmp_path)
    monkeypatch.setattr(io_threads, "_LOOKS_MAX", TIMEOUT_SECONDS * 2000)
    waiter = threading.Thread(target=threads.await_all)
    waiter.start()
    for ran_ns in (1_000, 101_000):  # twice, as the first may be of before
        waiter.join(0.05)
        assert waiter.is_alive(), "a thread that was held up was not waited for"
        say_ran(folder, ran_ns)
    waiter.join(0.05)
    assert waiter.is_alive()
    say_ran(folder, 201_000)
    waiter.join(TIMEOUT_SECONDS)
    assert not waiter.is_alive(), "the wait did not end"


def test_a_thread_that_does_not_go_on_is_waited_for_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: IoThreads
) -> None:
    held_up(tmp_path)
    monkeypatch.setattr(io_threads, "_TASKS", tmp_path)
    began = time.monotonic()
    threads.await_all()
    assert 0.09 < time.monotonic() - began < TIMEOUT_SECONDS


def test_behind_the_end_of_a_thread_the_others_are_found_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: IoThreads
) -> None:
    """Else no wait would be one any more, in a process where another context has ended."""
    monkeypatch.setattr(io_threads, "_TASKS", tmp_path)
    ended, pauses = held_up(tmp_path), []
    threads.await_all()
    monkeypatch.setattr(time, "sleep", pauses.append)
    os.truncate(ended / "schedstat", 0)
    threads.await_all()
    assert pauses == [io_threads._BLIND_SECONDS] and not threads._threads
    shutil.rmtree(ended)
    held_up(tmp_path, "8")
    pauses.clear()
    threads.await_all()
    assert pauses == [io_threads._LOOK_SECONDS] * io_threads._LOOKS_MAX


@pytest.mark.parametrize("is_there", [True, False])
def test_where_the_kernel_shows_no_thread_the_wait_is_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: IoThreads, is_there: bool
) -> None:
    monkeypatch.setattr(io_threads, "_TASKS", tmp_path if is_there else tmp_path / "none")
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    threads.await_all()
    assert pauses == [io_threads._BLIND_SECONDS]
