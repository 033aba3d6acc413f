"""Where the checkpoints of a run are kept: a folder, or an object store."""
