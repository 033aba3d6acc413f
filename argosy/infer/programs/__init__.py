"""Programs of an engine: compiled ahead of time, named across processes, kept on disk."""
