"""Training runs: settings, combinations of features, assembly, memory, hooks."""
