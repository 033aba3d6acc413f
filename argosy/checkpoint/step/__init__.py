"""One checkpoint on disk."""
