"""Rewards of completions: reward functions, built-in graders and reward models."""
