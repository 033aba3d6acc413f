"""Distillation as a training run."""
