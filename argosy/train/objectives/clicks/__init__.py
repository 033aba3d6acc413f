"""Objectives over clicks: the probability of a click, and the item that belongs to a user."""
