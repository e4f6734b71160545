"""Executors without the credentials of the store: a sentence that says so, and secrets are nowhere."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from danube_fast.clock import SystemClock
from danube_fast.history.stores.opening import open_store
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.plan import make_plan
from tests.history.rig import put_history
from tests.history.s3_servers import ACCESS_KEY, BUCKET, SECRET_KEY, moto_server, plain_client

_EXECUTE = """
import pickle, sys
import pyarrow as pa
from danube_fast.errors import DanubeError
from danube_fast.spark.scan import read_task

schema = pa.schema([("offset", pa.int64())])
try:
    for task in pickle.load(sys.stdin.buffer):
        print(sum(batch.num_rows for batch in read_task(task, ["offset"], schema)))
except DanubeError as error:
    print(type(error).__name__, error)
"""


def _executed(tasks: Any, environment: dict[str, str]) -> str:
    """What another process without this one's environment says when it reads the tasks."""
    done = subprocess.run(
        [sys.executable, "-c", _EXECUTE], input=pickle.dumps(tasks), capture_output=True, timeout=120,
        check=False, env=environment,
    )  # fmt: skip
    return (done.stdout + done.stderr).decode()


def test_credentials_that_are_missing_on_executors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }  # fmt: skip
    bare = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    bare |= {**nowhere, "PYTHONPATH": os.pathsep.join(sys.path)}
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    for name, value in {**nowhere, **keys}.items():
        monkeypatch.setenv(name, value)
    with moto_server() as endpoint:
        plain_client(endpoint).create_bucket(Bucket=BUCKET)
        url = f"s3://{BUCKET}/executors?endpoint_url={endpoint}&region=us-east-1&path_style=true"
        made = open_store(url, SystemClock(), tmp_path)
        put_history(made, 2, {6: "/default/flights"}, part_bytes=made.part_bytes_min)
        made.close()
        plan = make_plan(ReadOptions.parse({"store": url, "topic": "/default/flights"}))
        assert SECRET_KEY.encode() not in pickle.dumps(plan)
        total = sum(each.high - each.low for each in plan.ranges)
        counted = _executed(plan.tasks, {**bare, **keys}).split()
        assert sum(map(int, counted)) == total > 0
        said = _executed(plan.tasks, bare)
        assert said.startswith("PermissionDenied ") and "give credentials" in said
        assert SECRET_KEY not in said and ACCESS_KEY not in said
