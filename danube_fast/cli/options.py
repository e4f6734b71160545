"""Options that many commands share, spelt once."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from danube_fast.checks import check_seconds, parse_amount
from danube_fast.cli.contexts.context_file import value_of
from danube_fast.cli.names import complete_subscriptions, complete_topics
from danube_fast.client.link.url import DEFAULT_URL
from danube_fast.client.values.arguments import SubscriptionType, Transport
from danube_fast.errors import InvalidArgument

__all__ = [
    "DEFAULT_URL",
    "ConfigOption",
    "DataDirOption",
    "ExpiresOption",
    "OutputForm",
    "OutputOption",
    "PolicyArgument",
    "SubscriptionName",
    "TopicArgument",
    "TransportOption",
    "TypeOption",
    "UrlOption",
    "YesOption",
    "amount",
    "command",
    "example",
    "group",
    "policy_values",
    "seconds_of",
    "seconds_option",
]

F = TypeVar("F", bound=Callable[..., Any])


class OutputForm(enum.StrEnum):
    """Forms of output: text for people, JSON for programs."""

    TEXT = "text"
    JSON = "json"


UrlOption = Annotated[
    str,
    typer.Option(
        "--url", envvar="DANUBE_URL", metavar="URL", help="Where the broker listens.",
        callback=lambda url: url or value_of("url") or DEFAULT_URL,
        show_default=f"that of the context, or {DEFAULT_URL}",
    ),
]  # fmt: skip
TransportOption = Annotated[
    Transport,
    typer.Option(help="Shared memory or ZeroMQ; auto takes shared memory on the broker's host."),
]
TypeOption = Annotated[
    SubscriptionType,
    typer.Option("--type", help="How consumers of the subscription share messages."),
]
OutputOption = Annotated[OutputForm, typer.Option("--output", "-o", help="Form of the output.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar="DANUBE_CONFIG", metavar="FILE.toml", help="File with settings."
    ),
]
DataDirOption = Annotated[
    str | None, typer.Option("--data-dir", metavar="DIR", help="Directory of the broker's data.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would go.")]
TopicArgument = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="/namespace/topic", autocompletion=complete_topics),
]
SubscriptionName = Annotated[
    str,
    typer.Argument(metavar="SUBSCRIPTION", help="Its name.", autocompletion=complete_subscriptions),
]
PolicyArgument = Annotated[
    list[str],
    typer.Argument(metavar="NAME=VALUE...", help="What to set; `default` takes a value back."),
]


def policy_values(words: list[str]) -> dict[str, str]:
    """NAME=VALUE words as a dict. Exits with a usage error for anything else."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{word!r} is not NAME=VALUE, such as message_ttl_ms=60000")
        values[name] = value
    return values


def amount(name: str, text: str | None) -> int | None:
    """Return the value of an option in the unit of `name`: a number, or such as 10s. Raises InvalidArgument."""
    if text is None:
        return None
    value = parse_amount(name, text)
    if value is None or value < 0:
        raise InvalidArgument(
            f"--{name.replace('_', '-')} {text!r} is no duration; give milliseconds, or a number "
            "with its unit such as 10s"
        )
    return value


def seconds_option(what: str, least: float, most: float = math.inf, *, whole: bool = False) -> Any:
    """Make an option that takes seconds: a number, or such as 500ms, 10min, 2h or 30d; `what` is its help."""

    def parse(value: Any) -> float:
        """Raises a usage error."""
        try:
            seconds = seconds_of("it", str(value)) or 0.0
        except InvalidArgument:
            seconds = math.nan
        if not least <= seconds <= most or (whole and not seconds.is_integer()):
            limit = "" if most == math.inf else f" and at most {most:g} s"
            raise typer.BadParameter(
                f"{value!r} is no time here; give {'whole ' * whole}seconds, or such as 10min, 2h or 30d, at least "
                f"{least:g} s{limit}"
            )
        return int(seconds) if whole else seconds

    return typer.Option(parser=parse, metavar="TIME", help=what)


ExpiresOption = Annotated[
    int | None, seconds_option("It ends after so long, such as 30d; 0: never.", 0, whole=True)
]


def seconds_of(option: str, text: str | None) -> float | None:
    """Seconds that an option says: a number, or such as 500ms. Raises InvalidArgument."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        found = parse_amount("us", text)
        if found is None:
            raise InvalidArgument(
                f"{option} {text!r} is not a number of seconds; give one, or such as 500ms or 2min"
            ) from None
        seconds = found / 1e6
    if check_seconds(seconds, option) < 0:
        raise InvalidArgument(f"{option} {text!r} is too small: at least 0")
    return seconds


def command(*lines: str) -> Callable[[F], F]:
    """Mark a function as a command of `danube-fast` itself, with what a person would type."""

    def mark(function: F) -> F:
        function.epilog = example(*lines)  # type: ignore[attr-defined]
        return function

    return mark


def example(*lines: str) -> str:
    """Return the end of a command's help: what a person would type."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def group(name: str, help_text: str, *lines: str) -> typer.Typer:
    """Return a group of commands, to be filled. `lines`: what a person would type."""
    return typer.Typer(name=name, help=help_text, no_args_is_help=True, epilog=example(*lines))
