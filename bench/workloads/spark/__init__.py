"""Workloads in which Spark reads or writes topics. They need the extra `spark`."""
