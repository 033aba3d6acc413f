"""The methods of rounding weights, one file for each, and their settings."""
