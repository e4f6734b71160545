"""The processes of one broker by role, and who owns a log.

    process   0             1          2     ...   behind them
    role      coordinator   worker 0   worker 1    uploader, if there is a store for history; sign_on, if it has a port

A process is named by its index, everywhere inside; a worker by its number, which is what people see.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

__all__ = ["COORDINATOR", "Owner", "Processes", "Role"]

COORDINATOR = 0
"""Process index of the coordinator."""


class Role(enum.StrEnum):
    """The task of a process."""

    COORDINATOR = "coordinator"
    WORKER = "worker"
    UPLOADER = "uploader"
    SIGN_ON = "sign_on"


class Owner(NamedTuple):
    """The worker of a log: its host and its number there."""

    host_id: str
    worker: int


class Processes(msgspec.Struct, frozen=True):
    """The processes of one host, by index."""

    roles: tuple[Role, ...]

    @classmethod
    def with_workers(
        cls, count: int, *, uploader: bool = False, sign_on: bool = False
    ) -> Processes:
        """A coordinator and so many workers; with an `uploader` behind them, and the process of `sign_on`."""
        others = [Role.UPLOADER] * uploader + [Role.SIGN_ON] * sign_on
        return cls((Role.COORDINATOR, *[Role.WORKER] * count, *others))

    def __len__(self) -> int:
        return len(self.roles)

    @property
    def workers(self) -> list[int]:
        """Process indexes of the workers, by number."""
        return [process for process, role in enumerate(self.roles) if role is Role.WORKER]

    @property
    def uploader(self) -> int | None:
        """Process index of the uploader; None if there is none."""
        return self.roles.index(Role.UPLOADER) if Role.UPLOADER in self.roles else None

    @property
    def serving(self) -> list[int]:
        """Process indexes of those that a broker is not ready without: all but the uploader and sign-on."""
        needed = Role.COORDINATOR, Role.WORKER
        return [process for process, role in enumerate(self.roles) if role in needed]

    @property
    def starting(self) -> list[int]:
        """Process indexes of those that a start waits for, so that it is refused if one of them cannot be: all but the
        uploader, whose store may be away for a while."""
        return [process for process, role in enumerate(self.roles) if role is not Role.UPLOADER]

    def number(self, process: int) -> int:
        """The number of a process among those of its role."""
        return self.roles[:process].count(self.roles[process])

    def name(self, process: int) -> str:
        """coordinator, worker-0, worker-1, ..., uploader, sign_on"""
        role = self.roles[process]
        return f"{role.value}-{self.number(process)}" if role is Role.WORKER else role.value
