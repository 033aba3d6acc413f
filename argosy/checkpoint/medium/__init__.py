"""The media that keep the checkpoints of a run: a folder or an object store."""
