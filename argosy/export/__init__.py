"""A model as a file that runs without its code."""
