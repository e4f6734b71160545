"""Administrative operations on the clients that are connected."""

from __future__ import annotations

from danube_fast.broker.admin.registry import AdminContext, Answer, operation
from danube_fast.broker.admin.visibility import Visibility
from danube_fast.broker.answers import ClientConnection, ClientPage, Clients
from danube_fast.broker.messages import ListClients
from danube_fast.errors import DanubeError, InvalidArgument
from danube_fast.roles import COORDINATOR
from danube_fast.types import Permission

__all__: list[str] = []

CLIENTS_LISTED_MAX = 1000


@operation(Permission.MANAGE_BROKER)
def list_clients(
    context: AdminContext, answer: Answer, *, after: str = "", limit: int = CLIENTS_LISTED_MAX
) -> None:
    """List connections, with the producers and consumers on each: the coordinator's, then each worker's.

    At most `limit` of them, those behind the place `after`; fewer if much is open on them. Answers
    {"clients": [...], "after": the place to go on from, empty at the end}. A client that uses several
    workers has a connection to each. What is open on topics that the caller may not look up, and on reply topics of
    others, is counted and not named. Unavailable while a worker is down.
    """
    process, number = _place(after)
    if limit < 1:
        raise InvalidArgument(f"limit {limit} shows nothing; ask for 1 or more")
    last = context.processes.serving[-1]
    most = min(limit, CLIENTS_LISTED_MAX)
    rows: list[ClientConnection] = []
    visibility = Visibility(context, answer.asker)

    def ask(process: int, number: int) -> None:
        def got(page: ClientPage, error: DanubeError | None) -> None:
            if error is not None:
                answer.fail(error)
                return
            for row in page.clients:
                row.process = context.processes.name(process)
                visibility.hide(row)
            rows.extend(page.clients)
            if page.more or len(rows) >= most:
                answer.done(Clients(clients=rows, after=f"{process}:{rows[-1].session}"))
            elif process < last:
                ask(process + 1, 0)
            else:
                answer.done(Clients(clients=rows, after=""))

        left = most - len(rows)
        if process == COORDINATOR:
            got(context.clients(number, left), None)
        else:
            context.ask(process, ListClients(number, left), got)

    ask(min(process, last), number)


def _place(after: str) -> tuple[int, int]:
    """Process and session of a place."""
    process, separator, number = after.partition(":")
    if not after:
        return COORDINATOR, 0
    if not (separator and process.isdecimal() and number.isdecimal()):
        raise InvalidArgument(f"{after!r} is no place in a list of clients; take it from an answer")
    return int(process), int(number)
