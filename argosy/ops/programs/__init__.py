"""Programs that are compiled ahead of time, named across processes, and kept on disk."""
