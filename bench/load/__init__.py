"""What makes load and compares what arrives: processes, roles, payloads, pace."""
