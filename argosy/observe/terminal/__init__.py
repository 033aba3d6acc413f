"""Displays a run in the terminal or in a notebook."""
