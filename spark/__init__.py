"""The Spark side of danube-fast: a session, the data source `danube`, and the jobs of the command line.

The folder is packaged as `danube_fast.spark`; importing it does nothing.
"""
