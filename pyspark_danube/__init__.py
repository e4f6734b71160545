"""The door through which PySpark finds danube-fast as a data source.

PySpark looks for top-level packages named `pyspark_*` and imports them when a session asks for a
format it does not know. This package holds that name. The data source itself will live in
`danube_fast.spark` and be registered here; until then importing this package does nothing.
"""
