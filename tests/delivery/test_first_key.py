"""What `serve` says of the first administrator: the key file in its data directory, as long as it lets one in."""

from __future__ import annotations

from pathlib import Path

import pytest

from danube_fast.security.curve import new_key_pair, write_key_file
from tests.cli.test_security_recipes import Shell, serving
from tests.delivery.test_security import SecuredServer

LINE = "danube-fast serve --listen 127.0.0.1:0 --data-dir data --auth required --workers 1"


@pytest.mark.parametrize("what", ["junk", "another key"])
def test_a_file_that_lets_no_one_in_is_no_first_administrator(tmp_path: Path, what: str) -> None:
    server = SecuredServer(tmp_path / "data", tmp_path)
    first = server.data_dir / "bootstrap-admin.key"
    shell = Shell(tmp_path)
    with serving(shell, LINE) as text:
        assert f"first administrator: {first}" in text
    with server:
        server.make_ann()
        server.stop()
        assert not first.exists()
        if what == "junk":
            first.write_text("junk\n")
        else:
            write_key_file(first, new_key_pair())
        with serving(shell, LINE) as text:
            assert "first administrator" not in text
        assert first.exists(), "it is not the broker's to remove"
