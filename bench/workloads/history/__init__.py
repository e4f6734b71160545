"""Workloads about history: upload, publishing beside it, reads from the store and across the seam."""
