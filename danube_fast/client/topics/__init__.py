"""Which partitions a topic has, and where they are served."""
