"""Hooks between two steps: evaluation, checkpoints, samples, guards, and the comparison of processes."""
