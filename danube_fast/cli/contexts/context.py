"""`danube-fast context`: brokers under names, so that no command has to be told where and how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from danube_fast.cli.contexts.context_file import (
    FIELDS,
    NO_CONTEXT,
    BrokerContext,
    ContextFile,
    chosen_name,
    complete_contexts,
    values,
)
from danube_fast.cli.options import DEFAULT_URL, OutputForm, OutputOption, example, group
from danube_fast.cli.output import print_result, print_table

__all__ = ["app"]

app = group(
    "context",
    "Keep brokers, and how to come into them, under names.",
    "danube-fast context add prod --url danube://broker.example:6650 --server-key 'LmZ$...' --key-file ann.key",
    "danube-fast context use prod",
    "danube-fast --context prod topics list",
)
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Its name.", autocompletion=complete_contexts)
]


@app.command("ls", epilog=example("danube-fast context ls"))
def ls(output: OutputOption = OutputForm.TEXT) -> None:
    """List the contexts; the one in use is marked."""
    file, used = ContextFile.read(), chosen_name()
    rows = [
        {"context": name, "in_use": name == used, "url": file.get(name).url or DEFAULT_URL}
        for name in file.names
    ]
    print_table(output, rows, "no contexts; make one with: danube-fast context add")


@app.command(epilog=example("danube-fast context add prod --key-file ann.key --use"))
def add(
    name: NameArgument,
    url: Annotated[str | None, typer.Option(help="Where the broker listens.")] = None,
    server_key: Annotated[
        list[str] | None,
        typer.Option(help="Its public key; repeat it while the key is rotated."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with your key pair.")
    ] = None,
    sign_on: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where a token is exchanged, https://HOST:PORT."),
    ] = None,
    tls: Annotated[
        str | None,
        typer.Option(metavar="CA", help="File with a CA, or sha256: and a fingerprint."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with your API key or token.")
    ] = None,
    server_uid: Annotated[
        str | None,
        typer.Option(metavar="NUMBER", help="Local user that it runs as, if another one."),
    ] = None,
    use: Annotated[bool, typer.Option("--use", help="Use it from now on.")] = False,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Make a context, or change one: what is not given stays. Files are kept as paths, never what is in them."""
    given: dict[str, Any] = {
        "url": url, "server_key": server_key or None, "sign_on": sign_on, "tls": _tls(tls),
        "key_file": _absolute(key_file), "token_file": _absolute(token_file),
        "server_uid": server_uid,
    }  # fmt: skip
    with ContextFile.changing() as file:
        made = file.put(name, {field: value for field, value in given.items() if value is not None})
        if use:
            file.use(name)
    print_result(output, {"context": name, **_shown(made)}, f"context {name} in {file.path}")


@app.command(epilog=example("danube-fast context use prod", "danube-fast context use none"))
def use(name: NameArgument, output: OutputOption = OutputForm.TEXT) -> None:
    """Use a context from now on, or none."""
    with ContextFile.changing() as file:
        file.use(name)
    print_result(output, {"context": file.current}, f"in use: {file.current or NO_CONTEXT}")


@app.command(epilog=example("danube-fast context remove prod"))
def remove(name: NameArgument, output: OutputOption = OutputForm.TEXT) -> None:
    """Remove a context; the files that it names stay."""
    with ContextFile.changing() as file:
        file.remove(name)
    print_result(output, {"context": name}, f"removed {name}")


@app.command(epilog=example("danube-fast context show", "danube-fast context show prod"))
def show(
    name: Annotated[
        str,
        typer.Argument(metavar="[NAME]", help="Its name.", autocompletion=complete_contexts),
    ] = "",
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Show a context; without a name the values that commands take now, and where each is from."""
    if name:
        shown = _shown(ContextFile.read().get(name))
        print_result(output, {"context": name, **shown})
        return
    rows = [
        {"value": field, "is": value.text or (DEFAULT_URL if field == "url" else ""), "from": value.source}
        for field, value in values().items()
    ]  # fmt: skip
    used = chosen_name()
    if output is OutputForm.JSON:
        print_result(output, {"context": used, "values": rows})
        return
    print_table(output, rows, "")
    print_result(output, {"context": used}, f"context in use: {used or NO_CONTEXT}")


def _shown(context: BrokerContext) -> dict[str, Any]:
    return {field: getattr(context, field) for field in FIELDS}


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute()) if path.name else ""


def _tls(text: str | None) -> str | None:
    return text if not text or text.startswith("sha256:") else str(Path(text).absolute())
