"""Adapters in the PEFT library's layout."""
