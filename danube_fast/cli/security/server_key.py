"""`danube-fast security server-key`: the key by which clients know a secured broker, and its rotation."""

from __future__ import annotations

from typing import Any

from danube_fast.cli.broker import Ask, asking
from danube_fast.cli.options import OutputForm, group

__all__ = ["app"]

app = group(
    "server-key",
    "See and change the key by which clients know the broker.",
    "danube-fast security server-key prepare",
    "danube-fast security server-key activate",
    "danube-fast security server-key retire",
)
_NEXT = {
    "one_key": "",
    "prepared": "give clients both keys; when all have them: danube-fast security server-key activate",
    "activated": "when clients pin the first key only: danube-fast security server-key retire",
}


@asking(app, "danube-fast security server-key show")
def show(ask: Ask) -> None:
    """Show the public keys that clients pin, the newest first, and which process has which."""
    _show(ask, ask("describe_server_key"))


@asking(app, "danube-fast security server-key prepare")
def prepare(ask: Ask) -> None:
    """Make a second key; clients are given both before it is activated."""
    _show(ask, ask("rotate_server_key", step="prepare"))


@asking(app, "danube-fast security server-key activate")
def activate(ask: Ask) -> None:
    """Have each process listen with the second key, one after the other; clients come back by themselves."""
    _show(ask, ask("rotate_server_key", step="activate"))


@asking(app, "danube-fast security server-key retire")
def retire(ask: Ask) -> None:
    """End the key before: it is removed."""
    _show(ask, ask("rotate_server_key", step="retire"))


@asking(app, "danube-fast security server-key revert")
def revert(ask: Ask) -> None:
    """Undo activate, or prepare: the key before is in use again, or the second key is removed."""
    _show(ask, ask("rotate_server_key", step="revert"))


def _show(ask: Ask, found: dict[str, Any]) -> None:
    if ask.form is OutputForm.JSON:
        ask.show(found)
        return
    lines = [
        f"{key}  {'in use' if key == found['active'] else _other(found['stage'])}"
        for key in found["keys"]
    ]
    lines += [
        f"  {row['process']}: {_seen(row['key'], found['active'])}" for row in found["processes"]
    ]
    if _NEXT[found["stage"]]:
        lines.append(_NEXT[found["stage"]])
    ask.show(found, "\n".join(lines))


def _other(stage: str) -> str:
    return "prepared" if stage == "prepared" else "before"


def _seen(key: str, active: str) -> str:
    if not key:
        return "not known yet"
    return "listens with the key in use" if key == active else "changes its key still"
