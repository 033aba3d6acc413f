"""Reads sources, tokenizes them and makes batches. Nothing here imports jax until a pipeline is built."""
