"""A secured broker whose audit log is read from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from danube_fast.security.audit import decode_record
from tests.delivery.test_security import SecuredServer
from tests.workers.broker import is_running, wait_until

__all__ = ["AuditedServer"]


class AuditedServer(SecuredServer):
    """A secured broker whose audit log is read from its file."""

    @property
    def log(self) -> Path:
        return self.data_dir / "audit" / "audit.jsonl"

    def records(self, **wanted: Any) -> list[dict[str, Any]]:
        """Records of the newest file with these values."""
        found = [decode_record(line) for line in self.log.read_bytes().splitlines()]
        maps = [msgspec.to_builtins(record) for record in found if record is not None]
        return [each for each in maps if wanted.items() <= each.items()]

    def kill_all(self) -> None:
        """SIGKILL; then nothing runs any more."""
        assert self.broker is not None
        children = self._children()
        self.broker.process.kill()
        self.broker.process.wait(60)
        wait_until("end of all", lambda: not any(map(is_running, children)))
        self._release()

    def wait_for(self, **wanted: Any) -> dict[str, Any]:
        """The first record with these values, which may come a moment later."""
        found = wait_until(f"a record of {wanted}", lambda: self.records(**wanted), 20)
        return dict(found[0])
