"""Run directories and their checkpoints, and the opening of any model that a MODEL argument names."""
