"""What everything stands on. Nothing here imports jax."""
