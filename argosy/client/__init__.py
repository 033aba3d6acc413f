"""Clients of a server: chat, batches, benchmarks."""
