"""From a frame that arrived to its ack."""
