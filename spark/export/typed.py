"""Typed columns: payloads that are JSON objects, read by a schema that the user gives.

    {"carrier": "string not null", "delay": "int32", "at": "timestamp"}

A field is absent or null, where its type does not say `not null`, or of exactly its type; else the row is rejected,
with the reason. Fields that the schema does not name are passed over.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from danube_fast.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TypedField", "TypedReader", "read_schema"]

NOT_NULL = " not null"
_INT_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_SAME = {
    "int": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "boolean": "bool",
}
_TYPES: dict[str, Any] = {
    "string": str,
    "bool": bool,
    "float32": float,
    "float64": float,
    "timestamp": Annotated[dt.datetime, msgspec.Meta(tz=True)],
    "date": dt.date,
    **{
        name: Annotated[int, msgspec.Meta(ge=-(1 << (bits - 1)), le=(1 << (bits - 1)) - 1)]
        for name, bits in _INT_BITS.items()
    },
}


class TypedField(msgspec.Struct, frozen=True):
    """One field of the payload, which becomes a column."""

    name: str
    type: str
    is_nullable: bool = True

    def arrow(self) -> pa.Field:
        """The column's field."""
        import pyarrow as pa

        if self.type == "timestamp":
            kind = pa.timestamp("us", tz="UTC")
        else:
            kind = getattr(pa, {"bool": "bool_", "date": "date32"}.get(self.type, self.type))()
        # always nullable: tables that take files of several runs compare schemas strictly
        return pa.field(self.name, kind)


def read_schema(path: Path) -> tuple[TypedField, ...]:
    """Read `--schema`. Raises InvalidArgument for what is no schema, or cannot be read."""
    example = '{"carrier": "string not null", "delay": "int32"}'
    try:
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except OSError as error:
        raise InvalidArgument(f"--schema {path} cannot be read ({error.strerror})") from None
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"{path} is no schema: {error}; write such as {example}") from None
    if not given:
        raise InvalidArgument(f"{path} has no fields; write such as {example}")
    fields = []
    lower: set[str] = set()
    for name, text in given.items():
        kind = " ".join(text.lower().split())
        base = kind.removesuffix(NOT_NULL)
        base = _SAME.get(base, base)
        if base not in _TYPES or not name or name.startswith("_"):
            raise InvalidArgument(
                f"{path}: {name!r} is {text!r}; a field has a name without '_' before it, and one of the types "
                f"{', '.join(_TYPES)}, with 'not null' behind it or not"
            )
        if name.lower() in lower:
            raise InvalidArgument(f"{path}: two fields are called {name!r}; Spark tells no case")
        lower.add(name.lower())
        fields.append(TypedField(name, base, not kind.endswith(NOT_NULL)))
    return tuple(fields)


class TypedReader:
    """Makes columns of payloads."""

    def __init__(self, fields: Sequence[TypedField]) -> None:
        self._fields = fields
        self._decode = _decoder(fields)

    def read(self, payloads: Sequence[bytes | None]) -> tuple[list[Any], list[int], list[str]]:
        """The columns of the rows that match, the indexes of those that do not, and the reason of each."""
        rows: list[Any] = []
        rejected: list[int] = []
        reasons: list[str] = []
        for index, payload in enumerate(payloads):
            try:
                if payload is None:
                    raise msgspec.ValidationError("there is no payload")
                rows.append(self._decode(payload))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                rejected.append(index)
                reasons.append(str(error))
        import pyarrow as pa

        arrays = [
            pa.array([getattr(row, f"f{place}") for row in rows], type=field.arrow().type)
            for place, field in enumerate(self._fields)
        ]
        return arrays, rejected, reasons


def _decoder(fields: Sequence[TypedField]) -> Callable[[bytes], Any]:
    members: list[tuple[Any, ...]] = []
    for place, field in enumerate(fields):
        kind = _TYPES[field.type]
        if field.is_nullable:
            members.append((f"f{place}", kind | None, None))
        else:
            members.append((f"f{place}", kind))
    row = msgspec.defstruct(
        "Row", members, kw_only=True, rename={f"f{i}": field.name for i, field in enumerate(fields)}
    )
    return msgspec.json.Decoder(row).decode
