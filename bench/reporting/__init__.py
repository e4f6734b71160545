"""Tables, plots and pages of what was measured."""
