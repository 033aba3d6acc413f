"""Objectives over sequences of a prompt and a completion that were compared or labeled; of each, only the completion counts."""
