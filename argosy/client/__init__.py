"""Clients of a server: chat, batch files, benchmarks."""
