"""Reads, writes, merges and attaches adapters in the PEFT library's layout."""
