"""Admission of published frames: its kernel and the tables that it works on."""
