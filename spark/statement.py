"""SQL over topics: `select key, count(*) from '/default/flights' group by 1`.

    statement -- topics become views --> analysed once --> which columns it needs --> read with these alone

Spark tells a source in Python neither columns nor, safely, filters. So a statement is analysed twice: first over views
with all columns, to see what it uses, then over views that read just that. Each mention of a topic is a view of its
own, and filters choose what is read where no view is used twice (decision 35).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from danube_fast.errors import InvalidArgument
from danube_fast.spark.options import COLUMNS, HeldPartition, ReadOptions
from danube_fast.spark.plan import held_snapshot, limited_range, open_reading
from danube_fast.spark.session import FORMAT
from danube_fast.types import parse_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["statement", "with_views"]

_MENTION = re.compile(
    r"""\b(from|join)(\s+)(['"`])(/[^'"`]*)\3"""
    r"""|--[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`""",
    re.IGNORECASE | re.DOTALL,
)
"""Topics, and what may have the like in it and is left alone: comments, texts, quoted names."""
_VIEW = "danube_topic_{}"
_COUNTED = "offset"
"""What is read where a statement needs no column: counting it needs no frames."""
_names = itertools.count()


@contextlib.contextmanager
def statement(
    spark: SparkSession, text: str, options: Mapping[str, str] | None = None, *, once: bool = False
) -> Iterator[DataFrame]:
    """Make the data frame of a statement that names topics in quotes behind `from` and `join`. What it reads is flushed
    and held until the end of the block.

    `options`: of each read, such as `url`, `key_file`, `start` and `end`; `once`: the frame will serve one query, once, so that
    filters may choose what is read (decision 35). Raises InvalidArgument if the statement names no topic, what Spark
    raises for one that is wrong, and what the broker and the store raise.

        with statement(spark, "select count(*) from '/default/flights'") as counted:
            counted.show()
    """
    text, views = with_views(text)
    if not views:
        raise InvalidArgument(
            "the statement names no topic: write select ... from '/namespace/topic' ..., with the quotes"
        )
    given = dict(options or {})
    with _held(given, sorted(set(views.values()))) as held:
        try:
            yield _planned(spark, text, views, held, once=once)
        finally:
            for view in views:
                spark.catalog.dropTempView(view)


def _planned(
    spark: SparkSession, text: str, views: Mapping[str, str], held: Mapping[str, dict[str, str]],
    *, once: bool,
) -> DataFrame:  # fmt: skip
    """The frame of a statement over views that read what it needs. `held`: options by topic."""

    def make(more: Mapping[str, str]) -> DataFrame:
        for view, topic in views.items():
            _read(spark, {**held[topic], **more}).createOrReplaceTempView(view)
        return spark.sql(text)

    whole = make({})
    used = _used_columns(whole, len(views))
    if used is None:
        return whole
    narrow = {"columns": ",".join(used), **({"pushdown": "true"} if once else {})}
    try:
        return make(narrow)
    except Exception:  # it names columns that its result does not need
        return make({"pushdown": "true"} if once else {})


@contextlib.contextmanager
def _held(given: Mapping[str, str], topics: Sequence[str]) -> Iterator[dict[str, dict[str, str]]]:
    """Flush and hold topics for a while; the options that read each of them as it is now."""
    options = ReadOptions.parse({**given, "topic": ",".join(topics)})
    with contextlib.ExitStack() as at_end:
        is_alone = options.url is None and options.store is not None
        client = None if is_alone else at_end.enter_context(options.connect())
        snapshot = at_end.enter_context(held_snapshot(options, client))
        store = open_reading(snapshot.store)
        known: dict[str, list[HeldPartition]] = {topic: [] for topic in topics}
        for each in snapshot.ranges:
            of = limited_range(store, each, options)
            place = HeldPartition(
                of.topic, of.partition, of.partition_id, of.manifest.number, of.low, of.high
            )
            known[of.topic].append(place)
        yield {
            topic: {"topic": topic, "store": snapshot.store, "snapshot": json.dumps(places)}
            for topic, places in known.items()
        }


def with_views(text: str) -> tuple[str, dict[str, str]]:
    """Put a view in place of each topic; the statement, and topic by view. Raises InvalidArgument for what is no topic."""
    views: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        if match[4] is None:
            return match[0]
        view = _VIEW.format(next(_names))
        views[view] = str(parse_topic(match[4]))
        return f"{match[1]}{match[2]}{view}"

    return _MENTION.sub(named, text), views


def _read(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    return spark.read.format(FORMAT).options(**options).load()


def _used_columns(frame: Any, view_count: int) -> tuple[str, ...] | None:
    """Columns of rows that a statement needs of its topics; None: that cannot be told, or a view is used twice."""
    if not hasattr(type(frame), "_jdf") and "_jdf" not in vars(frame):
        return None  # Spark Connect shows no plan
    execution = frame._jdf.queryExecution()
    plan = execution.optimizedPlan()
    if "subquery" in plan.toString() or execution.analyzed().collectLeaves().size() != view_count:
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
