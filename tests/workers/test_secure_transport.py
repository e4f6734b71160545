"""What a secured process makes of its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from danube_fast.clock import SystemClock
from danube_fast.config import Settings
from danube_fast.net import zap
from danube_fast.net.local_rate_limit import LocalRateLimit
from danube_fast.security.server_keys import ServerKeys
from danube_fast.workers.process.secure_transport import SecureTransport


def test_a_local_user_has_twice_the_sessions_of_a_process_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients of a process that starts again are let in, each twice."""
    bursts: list[int] = []

    def limited(at_once: int) -> LocalRateLimit:
        bursts.append(at_once)
        return LocalRateLimit(at_once)

    monkeypatch.setattr(zap, "LocalRateLimit", limited)
    ServerKeys(tmp_path).open()
    with zmq.Context() as context:
        SecureTransport.make(
            Settings(auth="required", sessions_max=7), tmp_path, context, SystemClock()
        )
    assert bursts == [14]
