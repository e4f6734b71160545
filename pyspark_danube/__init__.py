"""The door through which PySpark finds danube-fast as a data source.

PySpark looks for top-level packages named `pyspark_*` and takes their `DefaultSource` when a session asks for a format
that it does not know. Nothing else imports this one. It imports all of them, and where one fails finds none: so this
one is silent where PySpark is too old or pyarrow is missing.
"""

import contextlib

with contextlib.suppress(ImportError):
    from danube_fast.spark.source import DanubeSource as DefaultSource

__all__ = ["DefaultSource"]
