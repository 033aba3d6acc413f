"""Reinforcement learning as a training run."""
