"""The registry of administrative operations: how one is entered, what it stands on, how it is run.

The operations themselves are in `topics`, `subscriptions`, `policies` and so on;
`admin` brings them together.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from danube_fast.broker.answers import BrokerStatus, ClientPage
from danube_fast.broker.messages import Message
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import PartitionRecord, TopicRecord
from danube_fast.checks import in_our_words
from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, InvalidArgument, NotFound
from danube_fast.roles import Owner, Processes
from danube_fast.types import Permission

__all__ = ["OPERATIONS", "AdminContext", "Answer", "Operation", "ask_owners", "operation", "run"]

RESOURCE_CLUSTER = "cluster"


class Answer:
    """Where the outcome of one operation goes: exactly one call of `done` or `fail` counts."""

    def __init__(self, on_end: Callable[[Any, DanubeError | None], None]) -> None:
        self._on_end = on_end
        self._ended = False

    def done(self, value: Any = None) -> None:
        """Answer with a result."""
        self._end(value, None)

    def fail(self, error: DanubeError) -> None:
        """Answer with an error."""
        self._end(None, error)

    def _end(self, value: Any, error: DanubeError | None) -> None:
        if not self._ended:
            self._ended = True
            self._on_end(value, error)


class Rights(Protocol):
    """Answers whether a principal may do something."""

    def permits(self, principal: str, permission: Permission, resource: str) -> bool:
        """Whether it may."""
        ...


class SecurityRecords(Protocol):
    """The records of who may do what; see `danube_fast/security/records.py`."""

    @property
    def policy(self) -> Rights:
        """All of them."""
        ...

    @property
    def is_enforced(self) -> bool:
        """Whether security is on."""
        ...

    def put_role(self, name: str, permissions: list[Permission]) -> None:
        """Make or change a role. Raises InvalidArgument."""
        ...

    def put_principal(self, name: str, groups: list[str] | None, *, disabled: bool | None) -> None:
        """Make or change a principal; what is None stays. Raises InvalidArgument."""
        ...

    def put_credential(
        self, credential: str, principal: str, *, expires_seconds: int, label: str
    ) -> None:
        """Make or change a credential. Raises InvalidArgument, NotFound, FailedPrecondition."""
        ...

    def put_binding(self, binding: str, subject: str, role: str, scope: str) -> None:
        """Make or change a binding. Raises InvalidArgument, FailedPrecondition."""
        ...

    def remove_record(self, kind: str, name: str) -> None:
        """Remove a record, and with a principal what is its. Raises NotFound."""
        ...

    def describe(self, kind: str, after: str, limit: int) -> list[dict[str, Any]]:
        """List records of a kind behind a name. Raises InvalidArgument."""
        ...


class AdminContext(Protocol):
    """The state and the helpers of operations; the coordinator provides them."""

    topics: TopicDirectory
    clock: Clock

    @property
    def security(self) -> SecurityRecords:
        """The records of who may do what."""
        ...

    def ask(
        self,
        worker: int,
        message: Message,
        on_reply: Callable[[Any, DanubeError | None], None],
        timeout_ms: int = 5000,
    ) -> None:
        """Call a worker or the uploader (by process index) over its mailbox; `on_reply` comes once, later."""
        ...

    def process_of(self, log_id: int) -> int:
        """Process index of the worker that owns a log."""
        ...

    def owner_of(self, log_id: int) -> Owner:
        """Host and number of the worker that owns a log."""
        ...

    def place(self, record: TopicRecord, on_done: Callable[[DanubeError | None], None]) -> None:
        """Hand a topic's partitions to their workers; `on_done` when all have confirmed."""
        ...

    def grow(
        self,
        record: TopicRecord,
        count: int,
        on_done: Callable[[TopicRecord | None, DanubeError | None], None],
    ) -> None:
        """Give a topic more partitions, up to `count`. Raises InvalidArgument, FailedPrecondition,
        AlreadyExists before anything was changed."""
        ...

    def forget(self, partitions: list[PartitionRecord]) -> None:
        """Hand out these partitions no more: they are gone."""
        ...

    def move(
        self,
        partition: PartitionRecord,
        worker: int,
        on_done: Callable[[dict[str, Any] | None, DanubeError | None], None],
    ) -> None:
        """Move a partition to another worker (by index); `on_done` with what moved, or why it did not.
        Raises NotFound, FailedPrecondition, Unavailable."""
        ...

    def moving_to(self, partition_id: int) -> int | None:
        """Index of the worker that a partition is being moved to just now."""
        ...

    @property
    def processes(self) -> Processes:
        """The processes of this host."""
        ...

    def clients(self, after: int, limit: int) -> ClientPage:
        """Connections to the coordinator behind session number `after`."""
        ...

    def status(self) -> BrokerStatus:
        """Processes, logs, counters, data directory."""
        ...


RightsOf = Callable[[dict[str, Any]], list[tuple[Permission, str]]]
"""Makes of the arguments of an operation the rights that it needs beside its own."""


class Operation(msgspec.Struct, frozen=True):
    """One entry of the registry."""

    name: str
    permission: Permission
    resource: str
    """Name of the argument that names the resource; empty: the cluster."""
    documentation: str
    more_needed: RightsOf | None
    """What else its arguments need a right on."""
    arguments: type[msgspec.Struct]
    """Struct of the function's keyword arguments, with their types and defaults."""
    function: Callable[..., None]


OPERATIONS: dict[str, Operation] = {}
"""Name -> operation."""


def operation(
    permission: Permission, resource: str = "", more_needed: RightsOf | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function `f(context, answer, *, arguments...)` into the registry."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        types = typing.get_type_hints(function)
        fields: list[tuple[str, type] | tuple[str, type, Any]] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                kind = types[parameter.name]
                if parameter.default is parameter.empty:
                    fields.append((parameter.name, kind))
                else:
                    fields.append((parameter.name, kind, parameter.default))
        name = function.__name__
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        documentation = inspect.getdoc(function) or ""
        OPERATIONS[name] = Operation(
            name, permission, resource, documentation, more_needed, arguments, function
        )
        return function

    return enter


def run(
    context: AdminContext,
    authorize: Callable[[str, Permission, str], None],
    principal: str,
    name: str,
    arguments: dict[str, Any],
    answer: Answer,
) -> None:
    """Run an operation by name. Every outcome, refusals included, goes to `answer`."""
    try:
        operation = OPERATIONS.get(name)
        if operation is None:
            raise NotFound(f"no operation {name!r}; there are: {', '.join(sorted(OPERATIONS))}")
        try:
            checked = msgspec.convert(arguments, operation.arguments)
        except msgspec.ValidationError as error:
            raise InvalidArgument(in_our_words(error, name)) from None
        values = msgspec.structs.asdict(checked)
        authorize(principal, operation.permission, _resource(operation, values))
        if operation.more_needed is not None:
            for permission, other in operation.more_needed(values):
                authorize(principal, permission, other)
        operation.function(context, answer, **values)
    except DanubeError as error:
        answer.fail(error)


def _resource(operation: Operation, values: dict[str, Any]) -> str:
    """Return what an operation needs its permission on, as `authorize` names it."""
    if not operation.resource:
        return RESOURCE_CLUSTER
    value = str(values[operation.resource])
    return f"namespace:{value}" if operation.resource == "namespace" else value


def ask_owners(
    context: AdminContext,
    record: TopicRecord,
    partitions: list[PartitionRecord],
    question: Callable[[list[int]], Message],
    on_all: Callable[[list[Any], list[DanubeError]], None],
) -> None:
    """Ask every worker that owns some of `partitions` what `question` makes of their ids; call
    `on_all(values, errors)` once, at the end."""
    by_worker: dict[int, list[int]] = {}
    for partition in partitions:
        worker = context.process_of(partition.log_id)
        by_worker.setdefault(worker, []).append(partition.partition_id)
    values: list[Any] = []
    errors: list[DanubeError] = []

    def on_reply(value: Any, error: DanubeError | None) -> None:
        if error is None:
            values.append(value)
        else:
            errors.append(error)
        if len(values) + len(errors) == len(by_worker):
            on_all(values, errors)

    for worker, ids in by_worker.items():
        context.ask(worker, question(ids), on_reply)
