"""Names in what commands print: the same everywhere, cut when they are long, and in the words of the documentation."""

from __future__ import annotations

import pytest

from danube_fast.checks import SHOWN_CHARACTERS_MAX, shown_name
from danube_fast.cli.failures import report
from danube_fast.cli.output import OutputForm, print_table, safe_text
from danube_fast.errors import InvalidArgument, NotFound
from danube_fast.security.records import Principal, check_record, no_user
from danube_fast.types import parse_topic

LONG = "n" * 100_000


def test_a_name_is_shown_the_same_way_everywhere() -> None:
    with pytest.raises(InvalidArgument, match=r"'.xfcn.xef' is not the name of a user"):
        check_record(Principal("ünï"))
    with pytest.raises(InvalidArgument, match=r"'/shop/.xfcn.xef' is not a topic name"):
        parse_topic("/shop/ünï")
    assert safe_text("ünï") == shown_name("ünï") == "'\\xfcn\\xef'"
    assert shown_name("a\x1b[2J") == "'a\\x1b[2J'" and shown_name("") == "''"
    assert isinstance(no_user("eve"), NotFound)
    assert str(no_user("")).startswith("there is no user ''; make it with")


def test_a_long_name_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(shown_name(LONG)) == SHOWN_CHARACTERS_MAX
    for check in (parse_topic, lambda name: check_record(Principal(name))):
        with pytest.raises(InvalidArgument) as found:
            check(LONG)
        assert len(str(found.value)) < 2 * SHOWN_CHARACTERS_MAX
    assert report(NotFound(f"topic /shop/t has no subscription '{LONG}'; make one"), as_json=False)
    told = capsys.readouterr().err
    assert len(told) < 500 and told.endswith("(100003 characters) make one\n")


def test_a_table_speaks_of_users_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(OutputForm.TEXT, [{"credential": "uid:1", "principal": "ann"}], "no keys")
    assert capsys.readouterr().out.split() == ["KEY", "USER", "uid:1", "ann"]
