"""The parent of a broker's processes: the data directory, and how children are started and watched."""
