"""The door through which PySpark finds danube-fast as a data source.

PySpark imports all top-level packages named `pyspark_*`, and takes their `DefaultSource`, when a session asks for a
format that it does not know; where one of them fails it finds none. So importing this one does nothing, and it has no
such name where PySpark is too old or a package of the extra `spark` is missing.
"""

from typing import Any

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> Any:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from danube_fast.spark.source import DanubeSource
    except ImportError as error:
        raise AttributeError(f"the data source danube needs {error.name}") from error
    return DanubeSource
