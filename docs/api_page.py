"""Makes docs/api.md out of the docstrings of what an application imports."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import danube_fast
from danube_fast import errors, testing
from danube_fast.client import admin_client
from danube_fast.client.consume.batch import Batch
from danube_fast.client.values import arguments, message

__all__ = ["attribute_docs", "page", "prose"]

HEAD = """# What a program calls

Made from the docstrings by `./run docs --write`; `./run check` fails when it differs from them. All names are those of the module
`danube_fast` unless said. Times without a unit in their name are seconds, moments are nanoseconds since the epoch.
"""
TWINS = ("Client", "Producer", "Consumer", "Reader", "Subscriber")
"""Each has an asynchronous twin, `AsyncClient` and so on."""
MADE_BY_HAND = ("Message", "Broker")
"""Classes that an application constructs by itself."""
HIDDEN = ("drive", "open", "steps")
"""Between the parts of the client, though without an underscore."""
SIGNATURE_WIDTH = 100


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: paragraphs filled, what Markdown would take for emphasis escaped."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring or "")):
        if paragraph.startswith("    "):
            paragraphs.append(f"```python\n{textwrap.dedent(paragraph)}\n```")
            continue
        parts = " ".join(paragraph.split()).split("`")
        parts[::2] = [re.sub(r"([*<])", r"\\\1", part) for part in parts[::2]]
        paragraphs.append("`".join(parts))
    return "\n\n".join(paragraphs)


def attribute_docs(owner: Any) -> dict[str, str]:
    """The string that stands below each field of a class, or below each constant of a module."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    body = tree.body if inspect.ismodule(owner) else tree.body[0].body  # type: ignore[attr-defined]
    docs = {}
    for node, below in zip(body, [*body[1:], None], strict=True):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if not targets or not isinstance(targets[0], ast.Name):
            continue
        is_doc = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        docs[targets[0].id] = inspect.cleandoc(below.value.value) if is_doc else ""  # type: ignore[union-attr]
    return docs


def signature(name: str, function: Callable[..., Any]) -> str:
    """Name, parameters and result; one parameter a line if it is long."""
    found = inspect.signature(function)
    parameters = _parameters(
        [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    )
    is_silent = found.return_annotation in (inspect.Signature.empty, "None")
    result = "" if is_silent else f" -> {found.return_annotation}"
    prefix = "async " if inspect.iscoroutinefunction(inspect.unwrap(function)) else ""
    line = f"{prefix}{name}({', '.join(parameters)}){result}"
    if len(line) <= SIGNATURE_WIDTH:
        return line
    return "\n".join([f"{prefix}{name}(", *(f"    {each}," for each in parameters), f"){result}"])


def _parameters(parameters: list[inspect.Parameter]) -> list[str]:
    """Parameters as they stand in the source, with the stars between them."""
    words, starred = [], False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not starred:
            words.append("*")
        starred |= each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        kind = "" if each.annotation is each.empty else f": {each.annotation}"
        default = "" if each.default is each.empty else f" = {each.default!r}"
        words.append(f"{stars}{each.name}{kind}{default}")
    return words


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, in the order of the source, those of its bases first."""
    seen: dict[str, Any] = {}
    for base in reversed(kind.__mro__[:-1]):
        if base.__module__.startswith("danube_fast"):
            seen |= {k: v for k, v in vars(base).items() if not k.startswith("_")}
    for name in HIDDEN:
        seen.pop(name, None)
    for name, member in seen.items():
        if isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member):
            yield name, member


def function_of(member: Any) -> Callable[..., Any]:
    """What is called."""
    return getattr(member, "__func__", member)  # type: ignore[no-any-return]


def method(owner: str, name: str, member: Any) -> str:
    """A method under a heading of its own."""
    code = signature(name, function_of(member))
    return f"### {owner}.{name}\n\n```python\n{code}\n```\n\n{prose(member.__doc__)}"


def class_section(name: str, kind: type) -> str:
    """A class with all that is public of it: constructor, properties, methods."""
    parts = [f"## {name}", prose(kind.__doc__)]
    if kind.__name__ in MADE_BY_HAND:
        made = kind.__init__  # type: ignore[misc]
        parts += [f"```python\n{signature(name, made)}\n```", prose(made.__doc__)]
    found = dict(members(kind))
    properties = {k: v for k, v in found.items() if isinstance(v, property)}
    parts.append("\n".join(f"- `{k}`: {prose(v.__doc__)}" for k, v in properties.items()))
    parts += [method(name, k, v) for k, v in found.items() if k not in properties]
    return "\n\n".join(part for part in parts if part)


def twin(name: str) -> str:
    """What the asynchronous twin has that is not the same with `await`."""
    own = dict(members(getattr(danube_fast, name)))
    others = dict(members(getattr(danube_fast, f"Async{name}")))
    missing = [f"`{each}`" for each in own if each not in others]
    words = f"`Async{name}` has the same with `await`"
    words += f", without {', '.join(missing)}." if missing else "."
    alone = [method(f"Async{name}", k, v) for k, v in others.items() if k not in own]
    return "\n\n".join([words, *alone])


def error_table() -> str:
    """The tree of errors, with the code on the wire."""
    rows = ["| error | code | when |", "|---|---|---|"]

    def add(kind: type[errors.DanubeError], depth: int) -> None:
        if kind.__name__ in danube_fast.__all__:
            indent = "&nbsp;&nbsp;" * depth
            rows.append(f"| {indent}`{kind.__name__}` | {kind.code} | {prose(kind.__doc__)} |")
        for child in kind.__subclasses__():
            add(child, depth + 1)

    add(errors.DanubeError, 0)
    return "\n".join(rows)


def argument_sections() -> Iterator[str]:
    """What options may be: the types of arguments.py."""
    docs = attribute_docs(arguments)
    rows = ["| type | values |", "|---|---|"]
    for name in arguments.__all__:
        value = getattr(arguments, name)
        if not inspect.isclass(value):
            text = prose(docs.get(name)) or ", ".join(f"`{x!r}`" for x in value.__args__)
            rows.append(f"| `{name}` | {text} |")
    yield "\n".join(rows)
    for name in arguments.__all__:
        value = getattr(arguments, name)
        if inspect.isclass(value):
            fields = attribute_docs(value)
            kinds = inspect.get_annotations(value)
            lines = [
                f"- `{field}`: `{getattr(kinds[field], '__forward_arg__', kinds[field])}`"
                + (f". {prose(fields[field])}" if fields[field] else "")
                for field in fields
            ]
            yield f"### {name}\n\n{prose(value.__doc__)}\n\n" + "\n".join(lines)


def page() -> str:
    """The whole page, before its lines are wrapped."""
    parts = [HEAD, "## Connecting"]
    for name in ("connect", "connect_async"):
        function = inspect.unwrap(getattr(danube_fast, name))
        parts.append(f"```python\n{signature(name, function)}\n```\n\n{prose(function.__doc__)}")
    for name in TWINS:
        parts += [class_section(name, getattr(danube_fast, name)), twin(name)]
        if name == "Client":
            admin = class_section("client.admin", admin_client.AdminClient)
    for kind in (message.Message, Batch, message.MessageId, message.Gap):
        parts.append(class_section(kind.__name__, kind))
        if hasattr(kind, "_fields"):
            docs = attribute_docs(kind)
            fields = (
                f"`{each}` ({docs[each].rstrip('.')})" if docs[each] else f"`{each}`"
                for each in kind._fields
            )
            parts[-1] = parts[-1].rstrip() + f"\n\nFields: {', '.join(fields)}."
    parts += [admin, "`AsyncClient.admin` has the same with `await`."]
    parts += ["## Types of arguments", *argument_sections()]
    parts += ["## Errors", prose(errors.DanubeError.__doc__), error_table()]
    parts.append(
        "## Tests\n\nOf `danube_fast.testing`; see [handlers.md](handlers.md#tests-with-a-real-broker)."
    )
    parts += [
        class_section(name, getattr(testing, name))
        for name in testing.__all__
        if inspect.isclass(getattr(testing, name))
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"
