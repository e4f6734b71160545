"""What a worker keeps, and what may go."""
