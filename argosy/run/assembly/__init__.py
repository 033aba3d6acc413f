"""The parts of a run, and the function that builds them from its settings."""
