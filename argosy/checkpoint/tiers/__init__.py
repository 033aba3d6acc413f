"""Checkpoints in two tiers."""
