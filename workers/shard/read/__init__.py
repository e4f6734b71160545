"""Reads from a log: offsets of times and places, frames that were read."""
