"""From bytes to batches. Nothing here imports jax until a pipeline is built."""
