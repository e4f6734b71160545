"""The Spark side of danube-fast: its data source and the export job will live here.

The folder is packaged as `danube_fast.spark`. It holds nothing yet and importing it does nothing.
"""
