"""Stored weights: a run's own checkpoints, Hub folders, GGUF files, PEFT adapters."""
