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
    fields_of,
    values,
)
from danube_fast.cli.contexts.open_client import access_of
from danube_fast.cli.options import DEFAULT_URL, OutputForm, OutputOption, YesOption, example, group
from danube_fast.cli.output import print_result, print_table, refuse_without_yes
from danube_fast.errors import InvalidArgument

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


@app.command("ls", hidden=True, epilog=example("danube-fast context ls"))
@app.command("list", epilog=example("danube-fast context list"))
def show_all(output: OutputOption = OutputForm.TEXT) -> None:
    """List the contexts; the one in use is marked."""
    file, used = ContextFile.read(), chosen_name()
    rows = [
        {"context": name, "in_use": name == used, "url": file.get(name).url or DEFAULT_URL}
        for name in file.names
    ]
    print_table(output, rows, "no contexts; make one with: danube-fast context add")


@app.command(
    epilog=example("danube-fast context add prod --server-key 'LmZ$...' --key-file ann.key --use")
)
def add(
    name: NameArgument,
    url: Annotated[str | None, typer.Option(help="Where the broker listens.")] = None,
    server_key: Annotated[
        list[str] | None,
        typer.Option(help="Its public key; 'NEW OLD' while the key is rotated."),
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
    """Make a context, or change one: what is not given stays, and '' takes a value out. Files are kept as paths, never
    what is in them."""
    keys = [each for text in server_key or () for each in text.replace(",", " ").split()]
    given: dict[str, Any] = {
        "url": url, "server_key": keys if server_key else None, "sign_on": sign_on, "tls": _tls(tls),
        "key_file": _absolute(key_file), "token_file": _absolute(token_file),
        "server_uid": server_uid,
    }  # fmt: skip
    with ContextFile.changing() as file:
        made = file.put(name, {field: value for field, value in given.items() if value is not None})
        _check_way_in(name, made)
        if use:
            file.use(name)
    print_result(output, {"context": name, **_shown(made)}, f"context {name} in {file.path}")


@app.command(epilog=example("danube-fast context use prod", "danube-fast context use none"))
def use(name: NameArgument, output: OutputOption = OutputForm.TEXT) -> None:
    """Use a context from now on, or none."""
    with ContextFile.changing() as file:
        file.use(name)
    print_result(output, {"context": file.current}, f"in use: {file.current or NO_CONTEXT}")


@app.command(epilog=example("danube-fast context delete prod --yes"))
def delete(
    name: NameArgument, yes: YesOption = False, output: OutputOption = OutputForm.TEXT
) -> None:
    """Delete a context; the files that it names stay."""
    ContextFile.read().get(name)
    refuse_without_yes(yes, f"deletes the context {name}, and none of the files that it names")
    remove(name, output)


@app.command(hidden=True, epilog=example("danube-fast context remove prod"))
def remove(name: NameArgument, output: OutputOption = OutputForm.TEXT) -> None:
    """Delete a context without a question."""
    with ContextFile.changing() as file:
        file.remove(name)
    print_result(output, {"context": name}, f"deleted {name}")


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


def _check_way_in(name: str, made: BrokerContext) -> None:
    """Raise InvalidArgument for a way in that no command would take, FailedPrecondition for a key file that is missing
    or not private."""
    try:
        access = access_of(fields_of(made), name)
    except InvalidArgument as error:
        if not (made.key_file and made.sign_on):
            raise
        raise InvalidArgument(
            f"{error}; an empty option takes out what the context has: --key-file ''"
        ) from None
    if access.key_file:
        from danube_fast.security.curve import read_key_file

        read_key_file(Path(access.key_file))


def _shown(context: BrokerContext) -> dict[str, Any]:
    return {field: getattr(context, field) for field in FIELDS}


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute()) if path.name else ""


def _tls(text: str | None) -> str | None:
    return text if not text or text.startswith("sha256:") else str(Path(text).absolute())
