"""Folders in the Hub's layout."""
