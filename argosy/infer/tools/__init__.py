"""Calls of tools, channels and grammars: what a completion may hold, and what it says."""
