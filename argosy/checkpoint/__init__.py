"""Weights at rest: a run's own checkpoints, the Hub's folders, GGUF."""
