"""Workloads about security: what it costs honest clients, what strangers can do to them, and what answers tell."""
