"""Algorithms of reinforcement learning, one a file."""
