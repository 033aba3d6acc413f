"""How a weight is rounded: a file for each method, and their settings."""
