"""Searches a mixed recipe: the number format of each matrix of a model, within a budget of bits per weight."""
