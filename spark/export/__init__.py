"""Exports: topics as files and tables, each message once, whatever is killed on the way.

The folder is packaged as `danube_fast.spark.export`; importing it does nothing.
"""
