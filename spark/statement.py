"""SQL over topics: `select key, count(*) from '/default/flights' group by 1`.

    statement -- topics become views --> analysed once --> which columns it needs --> read with these alone

Spark tells a source in Python neither columns nor, safely, filters. So a statement is analysed twice: first over views
with all columns, to see what it uses, then over views that read just that. Each mention of a topic is a view of its
own, and filters choose what is read where no view is used twice (decision 35).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from danube_fast.errors import InvalidArgument
from danube_fast.spark.options import COLUMNS
from danube_fast.spark.session import FORMAT
from danube_fast.types import parse_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["run_statement", "with_views"]

_MENTION = re.compile(r"""\b(from|join)(\s+)(['"`])(/[^'"`]*)\3""", re.IGNORECASE)
_VIEW = "danube_topic_{}"
_COUNTED = "offset"
"""What is read where a statement needs no column: counting it needs no frames."""
_names = itertools.count()


def run_statement(
    spark: SparkSession, text: str, options: Mapping[str, str] | None = None
) -> DataFrame:
    """Make the data frame of a statement that names topics in quotes behind `from` and `join`.

    `options`: of each read, such as `url`, `start` and `end`. Raises InvalidArgument if the statement names no topic,
    and what Spark raises for one that is wrong.

        run_statement(spark, "select count(*) from '/default/flights'").show()
    """
    text, views = with_views(text)
    if not views:
        raise InvalidArgument(
            "the statement names no topic: write select ... from '/namespace/topic' ..., with the quotes"
        )
    given = dict(options or {})
    for view, topic in views.items():
        _read(spark, given, topic).createOrReplaceTempView(view)
    try:
        used = _used_columns(spark.sql(text), len(views))
        if used is not None:
            for view, topic in views.items():
                narrow = {**given, "columns": ",".join(used), "pushdown": "true"}
                _read(spark, narrow, topic).createOrReplaceTempView(view)
        return spark.sql(text)
    finally:
        for view in views:
            spark.catalog.dropTempView(view)


def with_views(text: str) -> tuple[str, dict[str, str]]:
    """Put a view in place of each topic; the statement, and topic by view. Raises InvalidArgument for what is no topic."""
    views: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        view = _VIEW.format(next(_names))
        views[view] = str(parse_topic(match[4]))
        return f"{match[1]}{match[2]}{view}"

    return _MENTION.sub(named, text), views


def _read(spark: SparkSession, options: Mapping[str, str], topic: str) -> DataFrame:
    return spark.read.format(FORMAT).options(**options, topic=topic).load()


def _used_columns(frame: Any, view_count: int) -> tuple[str, ...] | None:
    """Columns of rows that a statement needs of its topics; None: that cannot be told, or a view is used twice."""
    plan = frame._jdf.queryExecution().optimizedPlan()
    if "subquery" in plan.toString():
        return None
    leaves = plan.collectLeaves()
    if leaves.size() != view_count:
        return None
    known = {
        str(attribute.exprId()): attribute.name()
        for leaf in map(leaves.apply, range(leaves.size()))
        for attribute in map(leaf.output().apply, range(leaf.output().size()))
    }
    used: set[str] = set()
    waiting = [plan]
    while waiting:
        node = waiting.pop()
        children = node.children()
        below = [children.apply(number) for number in range(children.size())]
        references = node.references().toSeq() if below else None
        if references is not None:
            used.update(
                str(references.apply(number).exprId()) for number in range(references.size())
            )
        waiting += below
    output = plan.output()
    used.update(str(output.apply(number).exprId()) for number in range(output.size()))
    names = {known[each] for each in used if each in known}
    return tuple(name for name in COLUMNS if name in names) or (_COUNTED,)
