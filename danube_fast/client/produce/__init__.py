"""From `send` to the acknowledgement."""
