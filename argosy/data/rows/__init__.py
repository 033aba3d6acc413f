"""Rows that belong together: groups, prompts, pairs, answered prompts."""
