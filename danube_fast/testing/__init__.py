"""Doors for tests of programs that use danube-fast."""
