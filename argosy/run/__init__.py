"""One run: its settings, what combines with what, assembly, memory, hooks."""
