"""The registry of administrative operations: how one is entered, what it stands on, how it is run.

The operations themselves are in `topics`, `subscriptions`, `policies` and so on;
`admin` brings them together.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from danube_fast.broker.answers import BrokerStatus, ClientPage
from danube_fast.broker.messages import Message
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import PartitionRecord, TopicRecord
from danube_fast.checks import in_our_words
from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, InvalidArgument, NotFound, PermissionDenied
from danube_fast.roles import Owner, Processes
from danube_fast.types import CLUSTER, Permission
from danube_fast.undecided import Undecided
from danube_fast.visible import Visible

__all__ = [
    "OPERATIONS",
    "AdminContext",
    "Answer",
    "Asker",
    "Operation",
    "Steps",
    "ask_owners",
    "check",
    "operation",
    "resource_of",
    "run",
]

Steps = Iterator[None]
"""Long work in steps."""


class AskerRights(Protocol):
    """Decides what an asker may do: the part of `danube_fast/security/authorization.py` that is needed here."""

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return if it may. Raises PermissionDenied, Unavailable."""
        ...

    def visible_to(self, principal: str) -> Visible:
        """Return what lists show. Raises Unavailable."""
        ...


class Asker:
    """Principal that asks for an operation."""

    def __init__(self, principal: str = "", rights: AskerRights | None = None) -> None:
        """`rights`: None: the broker itself asks, which may do everything."""
        self.principal = str(principal)
        """Its name, for records and messages."""
        self._identity, self._rights = principal, rights

    def may(self, permission: Permission, resource: str) -> bool:
        """Whether the principal has that permission there. Raises Unavailable while that is not known."""
        if self._rights is not None:
            try:
                self._rights.authorize(self._identity, permission, resource)
            except PermissionDenied:
                return False
        return True

    def visible(self) -> Visible:
        """Return what lists show to the principal. Raises Unavailable, Undecided, whatever there is to show."""
        if self._rights is None:
            return Visible(lambda resource: True)
        return self._rights.visible_to(self._identity)


class Answer:
    """Where the outcome of one operation goes: exactly one call of `done` or `fail` counts."""

    def __init__(self, on_end: Callable[[Any, DanubeError | None], None]) -> None:
        self._on_end = on_end
        self._ended = False
        self.asker = Asker()
        self.is_wanted: Callable[[], bool] = lambda: True
        """Whether there is still one to be answered."""

    def done(self, value: Any = None) -> None:
        """Answer with a result."""
        self.end(value, None)

    def fail(self, error: DanubeError) -> None:
        """Answer with an error."""
        self.end(None, error)

    def end(self, value: Any, error: DanubeError | None) -> None:
        """Answer with an error if there is one, else with a result."""
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
    def rights(self) -> Rights:
        """Answers who may do what."""
        ...

    @property
    def is_enforced(self) -> bool:
        """Whether security is on."""
        ...

    def check(self, principal: str, permission: Permission, resource: str) -> dict[str, bool]:
        """Tell whether a principal may do that, and has a record. Raises InvalidArgument."""
        ...

    def put_role(self, name: str, permissions: list[Permission]) -> None:
        """Make or change a role. Raises InvalidArgument, FailedPrecondition."""
        ...

    def put_principal(
        self, name: str, groups: list[str] | None, *, disabled: bool | None,
        credentials: Sequence[str] = (), roles: Sequence[str] = (), scope: str = CLUSTER,
    ) -> dict[str, Any]:  # fmt: skip
        """Make or change a principal, with credentials and with roles within a scope; what is None stays. Return what it is
        now. Raises NotFound, InvalidArgument, FailedPrecondition."""
        ...

    def put_credential(
        self, credential: str, principal: str, *, expires_seconds: int | None, label: str | None
    ) -> dict[str, Any]:
        """Make or change a credential; what is None stays. Return what it is now. Raises InvalidArgument, NotFound,
        FailedPrecondition."""
        ...

    def add_api_key(
        self, key_id: str, name: str, *, salt: str, digest: str, expires_seconds: int, label: str
    ) -> None:
        """Add an API key of the principal `name`. Raises InvalidArgument, NotFound, AlreadyExists, FailedPrecondition."""
        ...

    def put_binding(self, binding: str, subject: str, role: str, scope: str) -> None:
        """Make or change a binding. Raises InvalidArgument, FailedPrecondition."""
        ...

    def remove_record(self, kind: str, name: str, *, force: bool = False) -> None:
        """Remove a record, and with a principal what is its; with `force` the last administrator's, too. Raises NotFound,
        FailedPrecondition."""
        ...

    def describe(self, kind: str, after: str, limit: int) -> list[dict[str, Any]]:
        """List records of a kind behind a name. Raises InvalidArgument."""
        ...

    def list_sign_ons(self, after: str, limit: int, principal: str, source: str) -> dict[str, Any]:
        """List sign-ons behind a public key: {"sign_ons", "after"}."""
        ...

    def end_sign_ons(self, holder: str) -> int:
        """End the sign-ons of a key, a principal or a source that were made so far; their number. Raises InvalidArgument,
        FailedPrecondition, and NotFound for a principal that is not known."""
        ...


class KeyRotation(Protocol):
    """The server key of a secured broker, and its rotation."""

    def describe(self) -> dict[str, Any]:
        """Describe the keys, and which process has which. Raises FailedPrecondition."""
        ...

    def step(self, step: str, on_end: Callable[[Any, DanubeError | None], None]) -> None:
        """Take a step; `on_end` with the keys once the processes have the right one. Raises FailedPrecondition,
        InvalidArgument."""
        ...


class AuditRecords(Protocol):
    """The records of the audit log; see `danube_fast/security/audit.py`."""

    def read(
        self, cursor: str, *, since_seconds: int, principal: str, denied: bool
    ) -> dict[str, Any]:
        """Read a page: {"records", "after", "is_last"}. Raises InvalidArgument, Unavailable."""
        ...


class AdminContext(Protocol):
    """The state and the helpers of operations; the coordinator provides them."""

    topics: TopicDirectory
    clock: Clock

    @property
    def security(self) -> SecurityRecords:
        """The records of who may do what."""
        ...

    @property
    def server_key(self) -> KeyRotation:
        """The server key, and its rotation."""
        ...

    @property
    def audit(self) -> AuditRecords | None:
        """The audit log; None: there is none."""
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

    def in_slices(self, principal: str, steps: Steps) -> None:
        """Take steps for a principal, a slice of them in each turn, so that long ones do not stop the loop; the first at
        once. Raises ResourceExhausted."""
        ...

    def clients(self, after: int, limit: int) -> ClientPage:
        """Connections to the coordinator behind session number `after`."""
        ...

    def namespace_usage(self, namespace: str) -> tuple[int, int]:
        """Bytes that a namespace keeps, and handles that are open in it; zeros of what its quota does not bound."""
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
    permission_of: Callable[[dict[str, Any]], Permission] | None
    """Chooses another permission than `permission` by the arguments."""
    is_filtered: bool
    """The answer tells only of what the principal has the permission on; no right is needed to ask."""
    arguments: type[msgspec.Struct]
    """Struct of the function's keyword arguments, with their types and defaults."""
    function: Callable[..., None]


OPERATIONS: dict[str, Operation] = {}
"""Name -> operation."""


def operation(
    permission: Permission, resource: str = "", more_needed: RightsOf | None = None, *,
    permission_of: Callable[[dict[str, Any]], Permission] | None = None, is_filtered: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:  # fmt: skip
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
            name, permission, resource, documentation, more_needed, permission_of, is_filtered, arguments, function,
        )  # fmt: skip
        return function

    return enter


def run(
    context: AdminContext,
    rights: AskerRights,
    principal: str,
    name: str,
    arguments: dict[str, Any],
    answer: Answer,
) -> None:
    """Run an operation by name. Every outcome, refusals included, goes to `answer`. Raises Undecided."""
    try:
        operation, values = check(rights.authorize, principal, name, arguments)
        answer.asker = Asker(principal, rights)
        operation.function(context, answer, **values)
    except Undecided:
        raise
    except DanubeError as error:
        answer.fail(error)


def check(
    authorize: Callable[[str, Permission, str], None],
    principal: str,
    name: str,
    arguments: dict[str, Any],
) -> tuple[Operation, dict[str, Any]]:
    """Return an operation and its arguments, if the principal may run it. Raises NotFound, InvalidArgument,
    PermissionDenied, Unavailable."""
    operation = OPERATIONS.get(name)
    if operation is None:
        raise NotFound(f"no operation {name!r}; there are: {', '.join(sorted(OPERATIONS))}")
    try:
        checked = msgspec.convert(arguments, operation.arguments)
    except msgspec.ValidationError as error:
        raise InvalidArgument(in_our_words(error, name)) from None
    values = msgspec.structs.asdict(checked)
    if not operation.is_filtered:
        choose = operation.permission_of
        permission = operation.permission if choose is None else choose(values)
        authorize(principal, permission, resource_of(operation, values))
    if operation.more_needed is not None:
        for also, other in operation.more_needed(values):
            authorize(principal, also, other)
    return operation, values


def resource_of(operation: Operation, values: Mapping[str, Any]) -> str:
    """Name what an operation needs its permission on, as `authorize` does; empty for arguments that do not say."""
    if not operation.resource:
        return CLUSTER
    value = values.get(operation.resource)
    if not isinstance(value, str):
        return ""
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
