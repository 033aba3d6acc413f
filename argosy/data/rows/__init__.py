"""Rows of post-training data: groups of rows, prompts, pairs, prompts with answers, and labeled texts."""
