"""The coordinator: topics and where they live, administration, growth, moves, the admin port."""
