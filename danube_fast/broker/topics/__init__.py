"""Topics: which there are, what is set for them, which partitions they have."""
