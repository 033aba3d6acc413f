"""Reads and writes GGUF files."""
