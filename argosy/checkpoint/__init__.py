"""A run at rest: its directory, its checkpoints, and whatever a MODEL argument names."""
