"""Signals, streams and memory of this process, and its child processes."""
