"""The door through which PySpark finds danube-fast as a data source.

PySpark looks for top-level packages named `pyspark_*` and takes their `DefaultSource` when a session asks for a format
that it does not know. Nothing else imports this one.
"""

from danube_fast.spark.source import DanubeSource as DefaultSource

__all__ = ["DefaultSource"]
