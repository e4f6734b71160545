"""The write-ahead log: see log.py for how it is used, layout.py for what stands on disk."""
