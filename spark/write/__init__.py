"""Writes of Spark: rows are staged as objects of packed frames, committed by one record, and published from there."""
