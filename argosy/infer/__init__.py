"""Weights to tokens."""
