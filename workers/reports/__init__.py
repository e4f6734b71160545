"""What workers tell the coordinator of themselves, and what it makes of that."""
