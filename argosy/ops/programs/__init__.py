"""Ahead-of-time compilation of programs, and a cache of compiled programs on disk."""
