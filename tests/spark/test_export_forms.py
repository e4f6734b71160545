"""Forms of an export and their options: what is written, and what is refused."""

from __future__ import annotations

import pytest

from danube_fast.errors import InvalidArgument
from danube_fast.spark.export.target import parse_target


@pytest.mark.parametrize(
    "to",
    [
        "iceberg:http://user:sekret@host:1#a.b",
        "iceberg:HTTPS://user:se/kret@host",
        "iceberg:http://sekret@host#a.b",
        "parquet:http://user:sekret@host/d",
        "s3://user:sekret@host/d",
    ],
)
def test_credentials_in_a_url_are_not_repeated(to: str) -> None:
    with pytest.raises(InvalidArgument, match=r"\.pyiceberg\.yaml") as found:
        parse_target(to)
    assert "kret" not in str(found.value) and "user" not in str(found.value)
    assert parse_target("parquet:file:///data/a@b").place == "/data/a@b"
